"""Preference methods, batches of answers for them, and a trained model to compare with its base."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import onward
from onward import Decoder, Method
from onward.base import fields
from onward.data import Encoder, ExampleBatch, Record
from onward.data.packing import batch_of
from onward.data.tables import tabulated

from support.finetuning import method as method_of
from support.finetuning import pairs, tokenizer


def example_batch(method: str) -> ExampleBatch:
    """A batch of pairs or of judged answers, two examples per row."""
    records = [Record(row, f"line {i}") for i, row in enumerate(pairs(4))]
    table, _ = tabulated(method_of(method).examples(Encoder(tokenizer()), records), 96, "error")
    return batch_of(table, [[i, i + 1] for i in range(0, len(table), 2)], by_example=True)


def changed(base: Path, amount: float = 0.1) -> Decoder:
    """The base model with random changes to all weights, in place of training."""
    model = onward.load(base).model
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * amount)
    return model.train()


def of(notation: str, **changes: Any) -> Any:
    """The method with this notation, with beta 0.3 in each loss that has a beta."""
    made: Any = fields.part(Method, notation, "method")
    terms = tuple((weight, with_beta(one)) for weight, one in getattr(made, "terms", ()))
    return replace(made, terms=terms) if terms else replace(with_beta(made), **changes)


def with_beta(method: Any) -> Any:
    return replace(method, beta=0.3) if hasattr(method, "beta") else method
