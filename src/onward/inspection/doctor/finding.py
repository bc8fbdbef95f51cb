"""The types of a check and of its finding, and small helpers that checks share.

Shapes: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor
from torch.nn import functional as F

Status = Literal["ok", "failed", "noted", "not run", "not applicable"]
Outcome = tuple[Status, str] | tuple[Status, str, str]  # status, the measurement as a sentence, where it fails


@dataclass(frozen=True)
class Finding:
    """The result of one check on a model or a corpus, as text: its status, the measurement, and for a failure its
    location, its consequence and its remedy."""

    check: str
    status: Status
    what: str  # the measurement as a sentence, with its number
    where: str = ""  # the module or parameters that fail the check
    how: str = ""  # method of the measurement
    why: str = ""  # why a failure matters
    mend: str = ""  # what to change


@dataclass(frozen=True)
class Check:
    """A check: the facts it needs, how it measures, why a failure matters, its remedy, and the function that runs it on
    a Subject or Corpus."""

    needs: str
    how: str
    why: str
    mend: str
    run: Callable[[Any], Outcome]
    cheap: bool = False  # whether the check takes only a few forward passes, so that training can begin with it


def largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def verdict(good: bool, what: str, where: str = "") -> Outcome:
    return "ok" if good else "failed", what, "" if good else where


def cross_entropy(logits: Tensor, targets: Tensor, offset: int = 0) -> Tensor:
    """Mean cross-entropy of logits (B, T, V) at position i and targets (B, T) at i + `offset`."""
    count = logits.size(1) - abs(offset)
    z, y = logits[:, max(0, -offset) :][:, :count], targets[:, max(0, offset) :][:, :count]
    return F.cross_entropy(z.flatten(0, 1).float(), y.flatten())
