"""Tasks, scores, and tests of whether two scores differ."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from onward.evaluation.in_context import alternatives, shots_of
    from onward.evaluation.score import logprobs
    from onward.evaluation.significance import bootstrap, holm, mcnemar, paired_difference
    from onward.evaluation.tasks.task import Question, ScoredTask, TextTask
else:
    from onward.base.public import lazily

    __getattr__, __dir__ = lazily(__name__)

__all__ = [
    "Question",
    "ScoredTask",
    "TextTask",
    "alternatives",
    "bootstrap",
    "holm",
    "logprobs",
    "mcnemar",
    "paired_difference",
    "shots_of",
]
