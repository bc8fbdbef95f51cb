"""/v1/responses: answers to conversations, in the format of OpenAI's Responses API. Nothing is stored."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field

from onward.serving.calls.forms import Forms
from onward.serving.calls.splitter import AnswerSplitter
from onward.serving.chat import ChatFields, begin, message_of, schema_of
from onward.serving.completions import MOST_LOGPROBS
from onward.serving.errors import ApiError
from onward.serving.items import OutputItems
from onward.serving.jobs import Job, Update, by_token
from onward.serving.models import Served
from onward.serving.request_objects import InputItem, Reasoning, TextField
from onward.serving.service import service_of
from onward.serving.shapes import Whole, shown
from onward.serving.streams import Streamed, event
from onward.serving.tools import Tools
from onward.serving.usage import of_chat, usage_of

router = APIRouter(tags=["OpenAI"])
LOGPROBS = "message.output_text.logprobs"  # an item of the field `include`


class ResponsesRequest(ChatFields):
    """The body of a request of /v1/responses."""

    input: str | list[InputItem]
    instructions: str | None = Field(None, description="The system message.")
    max_output_tokens: Whole | None = None
    text: TextField | None = Field(None, description="format: text, json_object or json_schema.")
    reasoning: Reasoning | None = Field(None, description="effort: a variable for the chat template.")
    include: list[str] | None = Field(None, description=f"{LOGPROBS}: the log-probabilities of tokens.")
    top_logprobs: Annotated[Whole, Field(ge=0, le=MOST_LOGPROBS)] | None = None

    @property
    def num_logprobs(self) -> int | None:
        """Number of alternatives per token whose log-probabilities are returned; None: no log-probabilities."""
        if LOGPROBS in (self.include or ()):
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise ApiError(
                f"Cannot return top_logprobs, because include lacks {LOGPROBS}: add it", param="top_logprobs"
            )
        return None


@router.post("/v1/responses", response_model=None)
async def responses(body: ResponsesRequest, http: Request) -> Any:
    """Answer a conversation: return a list of items, such as a message or calls of tools, as JSON or, if the request
    asks for a stream, as server-sent events."""
    service = service_of(http)
    served = service.model(body.model)
    for name in "n", "n_cmpl":
        if (count := getattr(body, name)) not in (None, 1):
            raise ApiError(f"Cannot return {count} answers, because a response has one: leave {name} out", param=name)
    if isinstance(body.input, list) and len(body.input) > service.limits.max_messages:
        raise ApiError(f"input has {len(body.input)} items: give at most {service.limits.max_messages}", param="input")
    tools = Tools.of(body.tools, body.tool_choice, body.parallel_tool_calls)
    effort = (body.reasoning or {}).get("effort")
    if effort is not None and body.reasoning_effort not in (None, effort):
        raise ApiError(
            "reasoning.effort and reasoning_effort are both given and differ: leave one out", param="reasoning"
        )
    body.reasoning_effort = body.reasoning_effort if effort is None else effort
    schema, messages = schema_of(response_format_of(body.text)), messages_of(body)
    job, forms = await begin(http, served, body, messages, tools, "responses", schema, logprobs=body.num_logprobs)
    reply = ResponseReply(body, served, job, tools, forms)
    if body.stream:
        return service.stream(http, job, reply)
    return await service.respond(job, reply.as_json)


def response_format_of(text: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The format in `text` as the response_format of chat completions, which nests its schema."""
    form = (text or {}).get("format")
    if isinstance(form, Mapping) and form.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": form}
    return dict(form) if isinstance(form, Mapping) else None


def messages_of(body: ResponsesRequest) -> list[dict[str, Any]]:
    """Instructions and items as messages; successive items of the assistant (reasoning, text, calls) become one
    message."""
    messages: list[dict[str, Any]] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    turn: dict[str, Any] = {}  # the message of the assistant that the next item may continue
    for number, item in enumerate(body.input):
        message = message_of(message_from(item, number), number, "input")
        if message["role"] != "assistant":
            turn = {}
        elif not turn or (turn.get("content") and "tool_calls" not in turn and "tool_calls" not in message):
            turn = message  # a text or reasoning after a text begins another message
        else:
            join(turn, message)
            continue
        messages.append(message)
    return messages


def message_from(item: Mapping[str, Any], number: int) -> dict[str, Any]:
    match item.get("type", "message"):
        case "message" if isinstance(item.get("role"), str):
            return {"role": item["role"], "content": item.get("content")}
        case "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            return {"role": "assistant", "content": "", "tool_calls": [call]}
        case "function_call_output":
            return {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}
        case "reasoning":
            parts = item.get("content") or item.get("summary") or []
            texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
            text = parts if isinstance(parts, str) else "".join(text for text in texts if isinstance(text, str))
            return {"role": "assistant", "content": "", "reasoning_content": text}
        case kind:
            place = f"input[{number}]"
            raise ApiError(f"{place} has the type {shown(kind)}: give messages and calls", param=place)


def join(message: dict[str, Any], more: Mapping[str, Any]) -> None:
    for name in more.keys() - {"role"}:
        message[name] = message[name] + more[name] if message.get(name) else more[name]


class ResponseReply(Streamed):
    """The reply to a request, one JSON object or server-sent events, from the updates of its answer."""

    def __init__(self, body: ResponsesRequest, served: Served, job: Job, tools: Tools, forms: Forms) -> None:
        self.body, self.served, self.job, self.tools = body, served, job, tools
        self.id, self.created = f"resp_{secrets.token_hex(12)}", int(time.time())
        (request,) = job.answers
        self.splitter, self.output = AnswerSplitter(forms, request.prompt), OutputItems()
        self.number, self.reason = -1, ""  # number of the last event, and reason why the answer ended

    def response(self, status: str, finish_reason: str = "") -> dict[str, Any]:
        """The response so far; the `finish_reason` "length" makes it incomplete."""
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
            "output": self.output.items,
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
            usage = usage_of(self.job, self.splitter.num_reasoning)
            result["usage"] = {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": usage["completion_tokens_details"],
                "total_tokens": usage["total_tokens"],
            }
        return result

    def changes(self, update: Update) -> Iterator[tuple[str, dict[str, Any]]]:
        """Add an update to the output; yield events (type, fields)."""
        for part in [update] if self.body.num_logprobs is None else by_token(update):
            if (top := self.body.num_logprobs) is not None:
                self.output.logprobs += of_chat(self.served.lm.text(), part.logprobs, top)["content"]
            for piece in self.splitter.push(part):
                if piece.kind != "reasoning" or self.body.include_reasoning is not False:
                    yield from self.output.add(piece)
            if self.splitter.apart:  # these tokens belong to no message
                self.output.logprobs.clear()
        if update.finish_reason:
            yield from self.output.finish("incomplete" if update.finish_reason == "length" else "completed")

    def as_json(self, updates: list[Update]) -> dict[str, Any]:
        for update in updates:
            for _ in self.changes(update):
                pass
        return self.response("completed", updates[-1].finish_reason)

    def event(self, kind: str, **fields: Any) -> bytes:
        self.number += 1
        return event({"type": kind, "sequence_number": self.number, **fields}, kind)

    def beginning(self) -> Iterator[bytes]:
        yield self.event("response.created", response=self.response("in_progress"))
        yield self.event("response.in_progress", response=self.response("in_progress"))

    def growth(self, update: Update) -> Iterator[bytes]:
        for kind, fields in self.changes(update):
            yield self.event(kind, **fields)
        self.reason = update.finish_reason

    def ending(self) -> Iterator[bytes]:
        kind = "response.incomplete" if self.reason == "length" else "response.completed"
        yield self.event(kind, response=self.response("completed", self.reason))

    def failure(self, error: Mapping[str, Any]) -> Iterator[bytes]:
        failed = self.response("failed") | {"error": {"code": "server_error", "message": error["error"]["message"]}}
        yield self.event("response.failed", response=failed)
