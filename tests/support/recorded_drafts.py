"""A record of what a draft that reads hidden states proposes."""

from collections.abc import Sequence

from onward import Request
from onward.generation import Proposal
from onward.generation.drafts.hidden_draft import HiddenDraft


class Recorded(HiddenDraft):
    """A draft that records each context with the proposal after it."""

    compile_after: int | None = None

    def start(self, rows: int, length: int, chunk: int, vocab_size: int) -> None:
        super().start(rows, length, chunk, vocab_size)
        self.runner.compile_after = self.compile_after
        self.noted: list[tuple[list[int], list[int]]] = []

    def propose(self, requests: Sequence[Request], room: Sequence[int]) -> list[Proposal]:
        found = super().propose(requests, room)
        self.noted += [(r.context, proposal.tokens) for r, proposal in zip(requests, found)]
        return found
