"""Draft tokens that are proposed for speculative decoding, and the interface of the drafts that propose them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from onward.generation.cache.manager import CacheManager
from onward.generation.request import Request


@dataclass(frozen=True)
class Proposal:
    """The tokens that a draft proposes as the next ones of a request's answer."""

    tokens: list[int] = field(default_factory=list)


def is_ours(draft: object) -> bool:
    """Return whether a draft is one of Onward's own drafts, which never change the model."""
    return type(draft).__module__.startswith("onward.")


@runtime_checkable
class Draft(Protocol):
    """The interface of drafts for speculative decoding: a draft proposes tokens that the model then verifies. A draft
    serves one engine at a time."""

    num_draft_tokens: int  # maximum number of tokens per proposal
    manager: CacheManager | None  # manager of the draft's own cache, whose row i belongs to row i of the engine's cache

    def start(self, rows: int, length: int, chunk: int, vocab_size: int) -> None:
        """Prepare the draft for an engine with `rows` rows of `length` tokens, which processes at most `chunk` tokens
        of a row per call; `vocab_size` is that of the engine's model."""

    def propose(self, requests: Sequence[Request], room: Sequence[int]) -> list[Proposal]:
        """Return a proposal of at most room[i] tokens for requests[i], which occupies row i of the engine's cache."""
        ...
