"""Reasoning before an answer, between two markers."""

from __future__ import annotations

from dataclasses import dataclass

from onward.serving.calls.markers import Markers
from onward.serving.calls.source import Event, Parser, Source


@dataclass(frozen=True)
class Block:
    begin: str
    end: str

    def read(self, source: Source, markers: Markers, opened: bool, rest: Parser[None]) -> Parser[None]:
        """Read a block, if the answer begins with one or the prompt has `opened` it, and then the rest."""
        begins = yield from source.skip(markers.text(self.begin))
        if begins or opened:
            yield Event("reasoning")
            yield from source.until([markers.text(self.end)], "reasoning")
            yield Event("content")
        yield from rest

    def grammar(self, markers: Markers, opened: bool) -> str:
        """Grammar rules: `reasoning` for a block or, if the prompt has `opened` it, for the rest of the block."""
        symbols, rules = markers.up_to(self.end, "thought")
        begin = "" if opened else markers.symbol(self.begin)
        return f"reasoning: {begin} {symbols} /\\n{{0,2}}/\n{rules}"


BLOCKS = {  # by name
    "think": Block("<think>", "</think>"),
    "mistral": Block("[THINK]", "[/THINK]"),
}
