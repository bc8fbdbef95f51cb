"""Scores of tasks during training."""

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from onward.evaluation.benchmark import TaskResult, run_task
from onward.evaluation.tasks import Task
from onward.model.decoder import Decoder
from onward.text.tokenizer import Tokenizer


def task_results(tasks: Sequence[Task], model: Decoder, tokenizer: Tokenizer, limit: int) -> list[TaskResult]:
    """Return the results of a model on multiple-choice tasks, with up to `limit` questions each; used at each
    validation.

    Draws no random numbers and compiles nothing: blocks that torch.compile has compiled for training run uncompiled
    here, so that training continues with the same kernels.
    """
    with torch.compiler.set_stance("force_eager"):
        return [run_task(task, model, tokenizer, no_engine, limit=limit) for task in tasks]


def no_engine(*_: Any) -> NoReturn:
    raise AssertionError
