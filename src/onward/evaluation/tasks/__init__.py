"""The tasks of evaluations. Every file in this folder is imported automatically."""

from importlib import import_module
from pkgutil import iter_modules

from onward.evaluation.tasks.task import Question, ScoredTask, Task, TextTask, tasks_of

for module in iter_modules(__path__):
    import_module(f"{__name__}.{module.name}")

__all__ = ["Question", "ScoredTask", "Task", "TextTask", "tasks_of"]
