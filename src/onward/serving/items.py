"""The output items of a response, text, reasoning and calls, in the format of OpenAI's Responses API."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

from onward.serving.calls.source import Event

OutputChange = tuple[str, dict[str, Any]]  # an event of the stream: (type, fields)
TEXTS = {  # per kind of event: type of the item, prefix of its id, type of its part
    "content": ("message", "msg", "output_text"),
    "reasoning": ("reasoning", "rs", "reasoning_text"),
}


class OutputItems:
    """The output items of a response so far; `logprobs` belong to the tokens of the next piece of a message."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self.logprobs: list[dict[str, Any]] = []

    @property
    def is_open(self) -> bool:
        return bool(self.items) and self.items[-1]["status"] == "in_progress"

    def add(self, event: Event) -> Iterator[OutputChange]:
        if event.kind == "end":
            yield from self.close("completed")
        elif event.kind == "call":
            yield from self.leave()
            ends = {"call_id": f"call_{secrets.token_hex(12)}", "name": event.text, "arguments": ""}
            yield from self.open("function_call", "fc", ends)
        elif event.kind == "arguments":
            self.items[-1]["arguments"] += event.text
            yield "response.function_call_arguments.delta", {**self.place(), "delta": event.text}
            self.logprobs.clear()
        else:
            yield from self.add_text(event)

    def add_text(self, event: Event) -> Iterator[OutputChange]:
        """Add text of a message or of reasoning, in a new item if necessary."""
        kind, prefix, part_kind = TEXTS[event.kind]
        if not self.is_open or self.items[-1]["type"] != kind:
            yield from self.leave()
            yield from self.open(kind, prefix, {"role": "assistant"} if kind == "message" else {"summary": []})
            part: dict[str, Any] = {"type": part_kind, "text": ""}
            part |= {"annotations": [], "logprobs": []} if kind == "message" else {}
            yield "response.content_part.added", {**self.place(), "content_index": 0, "part": part}
            self.items[-1]["content"] = [part]
        (part,) = self.items[-1]["content"]
        part["text"] += event.text
        fields = {**self.place(), "content_index": 0, "delta": event.text}
        if kind == "message":
            fields["logprobs"] = [*self.logprobs]
            part["logprobs"] += self.logprobs
        self.logprobs.clear()
        if event.text:
            yield f"response.{part_kind}.delta", fields

    def open(self, kind: str, prefix: str, fields: dict[str, Any]) -> Iterator[OutputChange]:
        item = {"id": f"{prefix}_{secrets.token_hex(12)}", "type": kind, "status": "in_progress", **fields}
        self.items.append(item if kind == "function_call" else item | {"content": []})
        yield "response.output_item.added", {"output_index": len(self.items) - 1, "item": self.items[-1]}

    def leave(self) -> Iterator[OutputChange]:
        """End the last item, since another follows; a call whose arguments did not end is incomplete."""
        called = self.is_open and self.items[-1]["type"] == "function_call"
        yield from self.close("incomplete" if called else "completed")

    def close(self, status: str) -> Iterator[OutputChange]:
        if not self.is_open:
            return
        item = self.items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield "response.function_call_arguments.done", {**self.place(), **done}
        else:
            (part,) = item["content"]
            fields = {"text": part["text"]} | ({"logprobs": part["logprobs"]} if "logprobs" in part else {})
            yield f"response.{part['type']}.done", {**self.place(), "content_index": 0, **fields}
            yield "response.content_part.done", {**self.place(), "content_index": 0, "part": part}
        yield "response.output_item.done", {"output_index": len(self.items) - 1, "item": item}

    def finish(self, status: str) -> Iterator[OutputChange]:
        """End the output; an answer without text or calls is an empty message."""
        if not self.items:
            yield from self.add_text(Event("content"))
        if self.is_open and self.items[-1]["type"] == "message":
            self.items[-1]["content"][0]["logprobs"] += self.logprobs
        yield from self.close(status) if status == "incomplete" else self.leave()

    def place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
