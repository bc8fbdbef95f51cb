"""/v1/responses: answers to conversations, text and tools, in the form of OpenAI's Responses API. Nothing is stored."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field

from onward.serving.chat import ChatFields, begin, form_of, message_of, template_of
from onward.serving.completions import MOST_LOGPROBS
from onward.serving.errors import ApiError, body_of
from onward.serving.jobs import Job, Update, merged
from onward.serving.models import Served
from onward.serving.parts import Item, Reasoning, Text
from onward.serving.service import service_of
from onward.serving.shapes import Whole, shown
from onward.serving.streams import event
from onward.serving.tools import ToolCall, Tools, ToolText, markers_of
from onward.serving.usage import of_chat, usage_of

router = APIRouter(tags=["OpenAI"])
LOGPROBS = "message.output_text.logprobs"  # in the field include


class ResponsesRequest(ChatFields):
    """The body of a request of /v1/responses."""

    input: str | list[Item]
    instructions: str | None = Field(None, description="The system message.")
    max_output_tokens: Whole | None = None
    text: Text | None = Field(None, description="format: text, json_object or json_schema.")
    reasoning: Reasoning | None = Field(None, description="effort: a variable for the chat template.")
    include: list[str] | None = Field(None, description=f"{LOGPROBS}: the log-probabilities of tokens.")
    top_logprobs: Annotated[Whole, Field(ge=0, le=MOST_LOGPROBS)] | None = None

    @property
    def num_logprobs(self) -> int | None:
        """The number of alternatives per token whose log-probabilities are returned; None: no log-probabilities. Raises
        an ApiError if top_logprobs is given and `include` does not ask for log-probabilities."""
        if LOGPROBS in (self.include or ()):
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise ApiError(f"top_logprobs is given, and include lacks {LOGPROBS}: add it", param="top_logprobs")
        return None


@router.post("/v1/responses", response_model=None)
async def responses(body: ResponsesRequest, http: Request) -> Any:
    """Answer a conversation: return a list of items, a message or calls of tools, as JSON or, if the request asks for a
    stream, as server-sent events."""
    service = service_of(http)
    served = service.model(body.model)
    if body.n not in (None, 1):
        raise ApiError(f"n is {body.n}: a response has one answer, so leave it out", param="n")
    if isinstance(body.input, list) and len(body.input) > service.limits.max_messages:
        raise ApiError(f"input has {len(body.input)} items: give at most {service.limits.max_messages}", param="input")
    tools = Tools.of(body.tools, body.tool_choice, body.parallel_tool_calls)
    if body.reasoning and body.reasoning.get("effort") is not None:
        body.reasoning_effort = str(body.reasoning["effort"])
    form = form_of(response_format_of(body.text), tools)
    job = await begin(service, served, body, messages_of(body), tools, "responses", logprobs=body.num_logprobs, **form)
    reply = Reply(body, served, job, tools)
    if body.stream:
        return service.stream(http, job, reply.events)
    return await service.respond(http, job, reply.as_json)


def response_format_of(text: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the format in the field `text` as the response_format of chat completions, which nests its schema; None if
    no format is given."""
    form = (text or {}).get("format")
    if isinstance(form, Mapping) and form.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": form}
    return dict(form) if isinstance(form, Mapping) else None


def messages_of(body: ResponsesRequest) -> list[dict[str, Any]]:
    """Return the instructions and items of a request as messages for the chat template, {"role", "content"}. Raises an
    ApiError for an item of an unknown type."""
    messages: list[dict[str, Any]] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    for number, item in enumerate(body.input):
        match item.get("type", "message"):
            case "message" if isinstance(item.get("role"), str):
                messages.append(message_of({"role": item["role"], "content": item.get("content")}, number, "input"))
            case "function_call":
                function = {"name": item.get("name"), "arguments": item.get("arguments")}
                call = {"id": item.get("call_id"), "type": "function", "function": function}
                messages.append(message_of({"role": "assistant", "content": "", "tool_calls": [call]}, number, "input"))
            case "function_call_output":
                answer = {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}
                messages.append(message_of(answer, number, "input"))
            case "reasoning":
                pass  # what a model thought in an earlier turn is not shown to it again
            case kind:
                place = f"input[{number}]"
                raise ApiError(f"{place} has the type {shown(kind)}: give messages and calls", param=place)
    return messages


class Reply:
    """The reply to a request of /v1/responses, made from the updates of its answer: one JSON object (`as_json`) or, for
    a stream, server-sent events (`events`). `items` are the output so far: a message, then tool calls. `logprobs` are
    those of the message's tokens, of which the last event has the first `num_sent`."""

    def __init__(self, body: ResponsesRequest, served: Served, job: Job, tools: Tools) -> None:
        self.body, self.served, self.job, self.tools = body, served, job, tools
        self.id, self.created = f"resp_{secrets.token_hex(12)}", int(time.time())
        self.text = ToolText(tools, markers_of(template_of(served)))
        self.content, self.message_id = "", f"msg_{secrets.token_hex(12)}"
        self.items: list[dict[str, Any]] = []
        self.logprobs, self.num_sent = list[dict[str, Any]](), 0
        self.number = -1  # of the last event

    def response(self, status: str, finish_reason: str = "") -> dict[str, Any]:
        """Return the whole response so far as a JSON object with this `status`, such as in_progress; the
        `finish_reason` "length" makes it incomplete, "" is for an answer that still grows."""
        body, cut = self.body, finish_reason == "length"
        result: dict[str, Any] = {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": "incomplete" if cut else status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self.served.name,
            "output": self.items,
            "parallel_tool_calls": self.tools.parallel,
            "previous_response_id": None,
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "metadata": {},
            "usage": None,
        }
        if status == "completed":
            usage = usage_of(self.job)
            result["usage"] = {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            }
        return result

    def message(self, status: str) -> dict[str, Any]:
        """Return the message of the reply as an output item of the Responses API, with this status."""
        parts = [self.part()] if status == "completed" else []
        return {"id": self.message_id, "type": "message", "status": status, "role": "assistant", "content": parts}

    def part(self) -> dict[str, Any]:
        """Return the text of the message as a content part, the JSON object of the Responses API for a piece of a
        message."""
        return {"type": "output_text", "text": self.content, "annotations": [], "logprobs": [*self.logprobs]}

    def add_logprobs(self, update: Update) -> None:
        """Add the log-probabilities of an update's tokens to those of the message, if the request asks for them."""
        if (top := self.body.num_logprobs) is not None:
            self.logprobs += of_chat(self.served.lm.text(), update.logprobs, top)["content"]

    def as_json(self, updates: list[Update]) -> dict[str, Any]:
        """Return the whole reply as one JSON object; `updates` are all updates of its answer."""
        update = merged(updates)
        self.add_logprobs(update)
        first, rest = self.text.push(update.text), self.text.finish()
        self.content, calls = first[0] + rest[0], [*first[1], *rest[1]]
        if self.content or not calls:
            self.items.append(self.message("completed"))
        self.items += [item_of(call) for call in calls]
        return self.response("completed", update.finish_reason)

    def event(self, kind: str, **fields: Any) -> str:
        """Return the text of the next server-sent event: its type `kind`, its number and these fields."""
        self.number += 1
        return event({"type": kind, "sequence_number": self.number, **fields}, kind)

    async def events(self, batches: AsyncIterator[list[Update]]) -> AsyncIterator[str]:
        """Yield the reply as server-sent events; `batches` are the updates of its answer as it grows. An answer that
        fails ends with the event response.failed."""
        yield self.event("response.created", response=self.response("in_progress"))
        yield self.event("response.in_progress", response=self.response("in_progress"))
        reason = ""
        try:
            async for updates in batches:
                self.add_logprobs(updates[0])
                content, calls = self.text.push(updates[0].text)
                if reason := updates[0].finish_reason:
                    rest, more = self.text.finish()
                    content, calls = content + rest, calls + more
                for piece in self.grown(content):
                    yield piece
                for piece in self.called(calls):
                    yield piece
        except Exception as error:
            _, body = body_of(error, self.body.model_dump(exclude_unset=True))
            failed = self.response("failed") | {"error": {"code": "server_error", "message": body["error"]["message"]}}
            yield self.event("response.failed", response=failed)
            return
        if not self.items:
            for piece in self.opened():
                yield piece
        for piece in self.closed():
            yield piece
        kind = "response.incomplete" if reason == "length" else "response.completed"
        yield self.event(kind, response=self.response("completed", reason))

    @property
    def is_open(self) -> bool:
        """Whether the message of the reply has begun and not ended."""
        return bool(self.items) and self.items[-1]["type"] == "message" and self.items[-1]["status"] == "in_progress"

    def opened(self) -> list[str]:
        """Begin a message in the output of the reply; return the server-sent events that announce it."""
        self.content, self.message_id = "", f"msg_{secrets.token_hex(12)}"
        self.logprobs, self.num_sent = self.logprobs[self.num_sent :], 0
        self.items.append(self.message("in_progress"))
        index = len(self.items) - 1
        where = {"item_id": self.message_id, "output_index": index, "content_index": 0}
        return [
            self.event("response.output_item.added", output_index=index, item=self.items[-1]),
            self.event("response.content_part.added", **where, part=self.part() | {"logprobs": []}),
        ]

    def grown(self, content: str) -> list[str]:
        """Add `content`, new text, to the message of the reply, which is begun if necessary; return the server-sent
        events."""
        if not content:
            return []
        events = [] if self.is_open else self.opened()
        where = {"item_id": self.message_id, "output_index": len(self.items) - 1, "content_index": 0}
        self.content += content
        new, self.num_sent = self.logprobs[self.num_sent :], len(self.logprobs)
        return [*events, self.event("response.output_text.delta", **where, delta=content, logprobs=new)]

    def closed(self) -> list[str]:
        """End the message of the reply, if it is open; return the server-sent events."""
        if not self.is_open:
            return []
        index = len(self.items) - 1
        where = {"item_id": self.message_id, "output_index": index, "content_index": 0}
        self.items[-1] = self.message("completed")
        return [
            self.event("response.output_text.done", **where, text=self.content, logprobs=self.logprobs),
            self.event("response.content_part.done", **where, part=self.part()),
            self.event("response.output_item.done", output_index=index, item=self.items[-1]),
        ]

    def called(self, calls: Sequence[ToolCall]) -> list[str]:
        """Add complete tool calls to the output of the reply; return the server-sent events."""
        events = self.closed() if calls else []
        for call in calls:
            item, index = item_of(call), len(self.items)
            self.items.append(item)
            where = {"item_id": item["id"], "output_index": index}
            begun = item | {"arguments": "", "status": "in_progress"}
            events += [
                self.event("response.output_item.added", output_index=index, item=begun),
                self.event("response.function_call_arguments.delta", **where, delta=call.arguments),
                self.event("response.function_call_arguments.done", **where, arguments=call.arguments, name=call.name),
                self.event("response.output_item.done", output_index=index, item=item),
            ]
        return events


def item_of(call: ToolCall) -> dict[str, Any]:
    """Return a tool call as an output item of the Responses API."""
    return {
        "id": f"fc_{call.id.removeprefix('call_')}",
        "type": "function_call",
        "status": "completed",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
    }
