"""The tasks that a run is scored on at each validation."""

from onward.base.errors import UserError
from onward.evaluation.tasks import ScoredTask, Task, tasks_of
from onward.evaluation.tasks.task import with_text
from onward.text.tokenizer import Tokenizer
from onward.training.config import RunConfig
from onward.training.inputs.texts import Inputs


def validation_tasks(config: RunConfig, inputs: Inputs, tokenizer: Tokenizer) -> list[Task]:
    """Return the tasks of the option `evaluate_tasks`, whose scores a run measures at each validation. A task without a
    file of questions takes its questions from the validation text in `inputs`.

    Raises a UserError for a run without validations, and for a task that is unknown, has no questions, or asks for
    written answers instead of choices.
    """
    if not config.evaluate_tasks:
        return []
    if config.validation == "none":
        raise UserError(
            "Cannot evaluate tasks at each validation, because there is no validation text: give --validation"
        )
    tasks = with_text(tasks_of(config.evaluate_tasks), inputs.validation_text(tokenizer))
    for task in tasks:
        if not isinstance(task, ScoredTask) and not task.questions(1)[0].choices:
            raise UserError(
                f"Cannot evaluate {task.label} during a run, because it has no choices: evaluate it after the run"
            )
    return tasks
