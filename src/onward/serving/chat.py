"""/v1/chat/completions: answers to conversations."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from onward.errors import UserError
from onward.serving.completions import MOST_LOGPROBS, truncated
from onward.serving.errors import ApiError
from onward.serving.fields import SamplingFields
from onward.serving.jobs import Job, Update, merged
from onward.serving.models import Served
from onward.serving.parts import Call, Part, ResponseFormat, Tool
from onward.serving.service import Service, service_of
from onward.serving.shapes import Whole, shown
from onward.serving.streams import DONE, event
from onward.serving.tools import Tools, ToolText, markers_of
from onward.serving.usage import of_chat, usage_of
from onward.text.chat import chat_of

router = APIRouter(tags=["OpenAI"])
ENDS = "add_generation_prompt", "continue_final_message"  # fields that say how the prompt ends


class ChatMessage(BaseModel):
    """A message of a conversation: its role and its content. Other fields, such as calls of tools, are kept."""

    model_config = ConfigDict(extra="allow")

    role: str = Field(description="system, developer, user, assistant or tool.")
    content: str | list[Part] | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: dict[str, Any] | None = None
    function_call: dict[str, Any] | None = None


class ChatFields(SamplingFields):
    """The fields of a request that describe a conversation's tools and the variables of its chat template."""

    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables for the chat template.")
    reasoning_effort: str | None = Field(None, description="A variable for the chat template.")


class ChatRequest(ChatFields):
    """The body of a request of /v1/chat/completions."""

    messages: list[ChatMessage]
    logprobs: bool | None = None
    top_logprobs: Annotated[Whole, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = Field(None, description="text, json_object or json_schema.")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = Field(None, description="The answer continues the last message.")
    return_token_ids: bool | None = None


@router.post("/v1/chat/completions", response_model=None)
async def chat_completions(body: ChatRequest, http: Request) -> Any:
    """Answer a conversation: return the reply as JSON or, if the request asks for a stream, as server-sent events."""
    service = service_of(http)
    served = service.model(body.model)
    if len(body.messages) > service.limits.max_messages:
        most = f"give at most {service.limits.max_messages}"
        raise ApiError(f"messages has {len(body.messages)} of them: {most}", param="messages")
    tools = Tools.of(body.tools, body.tool_choice, body.parallel_tool_calls)
    form = form_of(body.response_format, tools)
    messages = [message_of(message.model_dump(), number) for number, message in enumerate(body.messages)]
    ends = {name: value for name in ENDS if (value := getattr(body, name)) is not None}
    if body.top_logprobs and not body.logprobs:
        raise ApiError("top_logprobs is given without logprobs: set it to true", param="top_logprobs")
    num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    job = await begin(service, served, body, messages, tools, "chat", ends, logprobs=num_logprobs, **form)
    reply = Reply(body, served, job, tools)
    if body.stream:
        return service.stream(http, job, reply.events)
    return await service.respond(http, job, reply.as_json)


async def begin(
    service: Service,
    served: Served,
    body: ChatFields,
    messages: Sequence[Mapping[str, Any]],
    tools: Tools,
    label: str,
    ends: Mapping[str, bool] | None = None,
    **options: Any,
) -> Job:
    """Start the answer to a conversation; return its Job, whose text grows as the engine steps. `label` is its name in
    the log. `ends` are the arguments of `Chat.encode` that say how the prompt ends; `options` replace fields of
    GenerationOptions. By default an answer may fill the context."""
    variables = variables_of(body.chat_template_kwargs, tools, served)
    if body.reasoning_effort is not None:
        variables["reasoning_effort"] = body.reasoning_effort
    chat = await service.compute(chat_of, served.lm.text())
    try:
        tokens = await service.compute(lambda: chat.encode(messages, **ends or {}, **variables))
    except UserError as error:
        raise of_messages(error, "input" if label == "responses" else "messages") from None
    tokens = truncated(tokens, body, served)
    room = max(1, served.engine.length - len(tokens))
    stop = chat.stop + texts_of(body.stop)
    given = body.options(room, stop=stop, **options)
    return await service.submit(served, [tokens], given, label, body.edits)


def of_messages(error: UserError, field: str) -> ApiError:
    """Return the error of a request for an error of its conversation, which the request has in `field`. For the field
    messages, the message that the error names by its number is named by its index."""
    found = re.search(r"\bmessage (\d+)\b", str(error)) if field == "messages" else None
    place = f"messages[{int(found[1]) - 1}]" if found else field
    return ApiError(str(error).replace(found[0], place) if found else str(error), param=place)


def texts_of(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the field `stop` of a request, one text, several or None, as a tuple of texts."""
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def form_of(response_format: Mapping[str, Any] | None, tools: Tools) -> dict[str, Any]:
    """Return the constraint on the answer, a JSON schema from the tools or else from `response_format`, as fields of
    GenerationOptions, such as {"json_schema": schema}; {} for a free answer. Raises an ApiError for an unsupported
    response_format."""
    schema = tools.schema()
    if schema is not None:
        return {"json_schema": schema}
    match (response_format or {}).get("type", "text"):
        case "text":
            return {}
        case "json_object":
            given = (response_format or {}).get("schema") or {"type": "object"}
        case "json_schema":
            inner = (response_format or {}).get("json_schema")
            given = inner.get("schema") if isinstance(inner, Mapping) else None
        case other:
            raise ApiError(
                f"response_format has the type {shown(other)}: give text, json_object or json_schema",
                param="response_format",
            )
    if not isinstance(given, Mapping):
        raise ApiError("response_format has no schema: give json_schema.schema", param="response_format")
    return {"json_schema": given}


def message_of(message: Mapping[str, Any], number: int, field: str = "messages") -> dict[str, Any]:
    """Return a message of a request as chat templates expect it: its content as text, and the arguments of tool calls
    as dicts. Raises an ApiError, which names item `number` of the `field` that holds the message, for content other
    than text."""
    result = {name: value for name, value in message.items() if value is not None}
    content = message.get("content")
    if isinstance(content, list):
        for index, part in enumerate(content):
            if not isinstance(part.get("text"), str):
                place = f"{field}[{number}].content[{index}].text"
                raise ApiError(f"{place} is missing: give it", param=place)
        result["content"] = "".join(part["text"] for part in content)
    for name in "audio", "function_call":
        if message.get(name):
            place = f"{field}[{number}].{name}"
            raise ApiError(f"{place} is not supported by this server: use content and tool_calls", param=place)
    if isinstance(calls := message.get("tool_calls"), list):
        result["tool_calls"] = [with_table(call) for call in calls]
        result.setdefault("content", "")
    return result


def with_table(call: Any) -> Any:
    """Return a tool call of a message, in which the arguments are a JSON text, with this text parsed to a dict, as chat
    templates expect; unchanged if the text is not JSON."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def variables_of(given: Mapping[str, Any] | None, tools: Tools, served: Served) -> dict[str, Any]:
    """Return the variables for the chat template by name: those `given` in the request, and the tools. Raises an
    ApiError for a variable with the name of a field, and for tools if the template does not show tools to the model."""
    variables = dict(given or {})
    if clash := variables.keys() & {"messages", "tools", "add_generation_prompt", "continue_final_message"}:
        message = f"chat_template_kwargs holds {min(clash)}, which is a field of the request: give it there"
        raise ApiError(message, param="chat_template_kwargs")
    if tools.choice != "none":
        if "tools" not in template_of(served):
            raise ApiError(f"the chat template of {served.name} does not show tools to the model", param="tools")
        variables["tools"] = [{"type": "function", "function": function} for function in tools.functions]
    return variables


def template_of(served: Served) -> str:
    """Return the source of a model's chat template; "" if it has none."""
    templates = served.lm.text().templates
    return templates.get("default") or next(iter(templates.values()), "")


class Reply:
    """The reply to a request of /v1/chat/completions, made from the updates of its answers (the tokens and text that
    each step of the engine adds): one JSON object (`as_json`) or, for a stream, server-sent events (`events`)."""

    def __init__(self, body: ChatRequest, served: Served, job: Job, tools: Tools) -> None:
        self.body, self.served, self.job, self.tools = body, served, job, tools
        self.tokenizer = served.lm.text()
        self.head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": served.name}
        self.texts = [ToolText(tools, markers_of(template_of(served))) for _ in job.answers]
        self.num_calls = [0] * len(job.answers)

    def logprobs(self, update: Update) -> dict[str, Any] | None:
        """Return the log-probabilities of an update's tokens in the form of OpenAI's API; None if the request does not
        ask for them."""
        return of_chat(self.tokenizer, update.logprobs, self.body.top_logprobs or 0) if self.body.logprobs else None

    def finish_reason(self, update: Update) -> str | None:
        """Return why the answer of an update ended (stop, length, tool_calls, ...); None while it grows."""
        called = self.num_calls[update.index] and not self.tools.named
        return "tool_calls" if called and update.finish_reason == "stop" else update.finish_reason or None

    def as_json(self, updates: list[Update]) -> dict[str, Any]:
        """Return the whole reply as one JSON object; `updates` are all updates of its answers."""
        choices = []
        for index, text in enumerate(self.texts):
            update = merged([update for update in updates if update.index == index])
            parts = [text.push(update.text), text.finish()]
            content, calls = parts[0][0] + parts[1][0], [*parts[0][1], *parts[1][1]]
            self.num_calls[index] = len(calls)
            message: dict[str, Any] = {
                "role": "assistant",
                "content": content or (None if calls else ""),
                "refusal": None,
            }
            if calls:
                message["tool_calls"] = [call.record() for call in calls]
            choice = {"index": index, "message": message, "logprobs": self.logprobs(update)}
            choice["finish_reason"] = self.finish_reason(update)
            choices.append(choice | ({"token_ids": update.tokens} if self.body.return_token_ids else {}))
        return {**self.head, "object": "chat.completion", "choices": choices, "usage": usage_of(self.job)}

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> str:
        """Return the text of a server-sent event of this reply with `choices`, the new pieces of its answers in the
        form of OpenAI's API; `more` are further fields of the event."""
        return event({**self.head, "object": "chat.completion.chunk", "choices": choices, **more})

    async def events(self, batches: AsyncIterator[list[Update]]) -> AsyncIterator[str]:
        """Yield the reply as server-sent events while its answers grow; `batches` are the lists of their updates, each
        the tokens and text that one step of the engine adds."""
        for index in range(len(self.texts)):
            delta = {"role": "assistant", "content": ""}
            yield self.chunk([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])
        async for updates in batches:
            for choice in (choice for update in updates for choice in self.deltas(update)):
                yield self.chunk([choice])  # one by one: many clients read the first choice of an event only
        if self.body.include_usage:
            yield self.chunk([], usage=usage_of(self.job))
        yield DONE

    def deltas(self, update: Update) -> list[dict[str, Any]]:
        """Return an update as items of `choices` in events, each with the new text or tool calls; the last item of an
        answer has an empty delta and the finish reason."""
        text, index = self.texts[update.index], update.index
        content, calls = text.push(update.text)
        if update.finish_reason:
            rest, more = text.finish()
            content, calls = content + rest, calls + more
        delta: dict[str, Any] = {"content": content} if content else {}
        if calls:
            first = self.num_calls[index]
            delta["tool_calls"] = [{"index": first + i, **call.record()} for i, call in enumerate(calls)]
            self.num_calls[index] += len(calls)
        logprobs = self.logprobs(update)
        result = []
        if delta or (logprobs and logprobs["content"]):
            choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
            result.append(choice | ({"token_ids": update.tokens} if self.body.return_token_ids else {}))
        if update.finish_reason:
            reason = self.finish_reason(update)
            result.append({"index": index, "delta": {}, "logprobs": None, "finish_reason": reason})
        return result
