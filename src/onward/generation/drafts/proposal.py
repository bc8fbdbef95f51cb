"""Proposed tokens, and the interface of the drafts that propose them.

Shapes: K proposed tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torch import Tensor

from onward.generation.cache.manager import CacheManager
from onward.generation.request import Request


@dataclass(frozen=True)
class Proposal:
    """Proposed tokens, and the distributions (K, V) they were drawn from; None: each had probability 1."""

    tokens: list[int] = field(default_factory=list)
    distributions: Tensor | None = None


@runtime_checkable
class Draft(Protocol):
    """Proposes tokens that the model then verifies. A draft serves one engine at a time."""

    num_draft_tokens: int  # the most tokens it proposes
    manager: CacheManager | None  # of the draft's own cache, whose row i belongs to row i of the engine

    def start(self, rows: int, length: int, chunk: int, vocab_size: int) -> None:
        """Prepare for an engine: its rows, their length, the most tokens per call, and the size of the vocabulary."""

    def propose(self, requests: Sequence[Request], room: Sequence[int]) -> list[Proposal]:
        """At most `room` tokens for each request; request i is in row i."""
        ...
