"""/v1/chat/completions: answers to conversations."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from onward.base.errors import UserError
from onward.generation.options import FORMS as CONSTRAINTS
from onward.generation.schemas import prepared
from onward.serving.calls.forms import HARMONY, Forms, call_form_of, reasoning_form_of
from onward.serving.calls.markers import Markers
from onward.serving.calls.source import Event
from onward.serving.calls.splitter import AnswerCheck, AnswerSplitter
from onward.serving.completions import MOST_LOGPROBS, truncated
from onward.serving.errors import ApiError
from onward.serving.fields import FORM_CHARACTERS, AnswerFields
from onward.serving.jobs import Job, Update, merged
from onward.serving.models import Served
from onward.serving.prompt_size import check_size, size_of
from onward.serving.request_objects import Call, ContentPart, ResponseFormat, Tool
from onward.serving.service import SHORT, Service, account_of, log_note, service_of
from onward.serving.shapes import Whole, shown
from onward.serving.streams import Streamed, event
from onward.serving.tools import Tools
from onward.serving.usage import of_chat, usage_of
from onward.text.chat import Chat, chat_of

router = APIRouter(tags=["OpenAI"])
ENDS = "add_generation_prompt", "continue_final_message"  # fields that determine the end of the prompt


class ChatMessage(BaseModel):
    """A message of a conversation: its role and its content. Other fields, such as calls of tools, are kept."""

    model_config = ConfigDict(extra="allow")

    role: str = Field(description="system, developer, user, assistant or tool.")
    content: str | list[ContentPart] | None = None
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


class ChatFields(AnswerFields):
    """The fields of a request that describe a conversation's tools and the variables of its chat template."""

    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables for the chat template.")
    reasoning_effort: str | None = Field(None, description="A variable for the chat template.")
    include_reasoning: bool | None = Field(None, description="false: leave the reasoning out of the reply.")
    reasoning_format: Literal["auto", "none", "deepseek"] | None = Field(
        None, description="none: leave the reasoning in the content, as the model writes it."
    )


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
        raise ApiError(f"Cannot answer a conversation of {len(body.messages)} messages: {most}", param="messages")
    tools = Tools.of(body.tools, body.tool_choice, body.parallel_tool_calls)
    schema = schema_of(body.response_format)
    messages = [message_of(message.model_dump(), number) for number, message in enumerate(body.messages)]
    ends = {name: value for name in ENDS if (value := getattr(body, name)) is not None}
    if body.top_logprobs and not body.logprobs:
        raise ApiError("Cannot give top_logprobs without logprobs: set logprobs to true", param="top_logprobs")
    num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    job, forms = await begin(http, served, body, messages, tools, "chat", schema, ends, num_logprobs)
    reply = ChatReply(body, served, job, tools, forms)
    if body.stream:
        return service.stream(http, job, reply)
    return await service.respond(job, reply.as_json)


async def begin(
    http: Request,
    served: Served,
    body: ChatFields,
    messages: Sequence[Mapping[str, Any]],
    tools: Tools,
    label: str,
    schema: Mapping[str, Any] | None = None,
    ends: Mapping[str, bool] | None = None,
    logprobs: int | None = None,
) -> tuple[Job, Forms]:
    """Start the answer to a conversation, which by default may fill the context; return its job, and the Forms that
    read it. `label` names the endpoint in the view of the engine, `schema` is that of an answer without calls, `ends`
    are arguments of `Chat.encode`."""
    service = service_of(http)
    variables = variables_of(body.chat_template_kwargs, tools, served)
    effort, place = body.reasoning_effort, "chat_template_kwargs.reasoning_effort"
    if effort is not None and variables.setdefault("reasoning_effort", effort) != effort:
        raise ApiError(f"reasoning_effort and {place} are both given and differ: leave one out", param=place)
    chat, source = await service.compute(chat_of, served.lm.text()), "input" if label == "responses" else "messages"
    tokens = await encoded(service, chat, messages, source, served, body.truncate_prompt_tokens, ends or {}, variables)
    tokens = truncated(tokens, body, served)
    continued = messages[-1].get("content") if (ends or {}).get("continue_final_message") else ""
    forms = forms_of(served, tools, body.reasoning_format).after(tokens, str(continued or ""))
    field = "text.format.schema" if label == "responses" else "response_format.json_schema.schema"
    wanted = None if schema is None or tools.required else await service.compute(prepared, schema, field)
    forms, form = await service.compute(forms.constrained, tools.required, wanted)
    if form:
        check_form(form, body, "tool_choice" if tools.required else field.partition(".")[0])
    check = AnswerCheck(forms, tokens, wanted) if "grammar" in form else None
    for note in check.notes if check else ():
        log_note(note)
    room = max(1, served.engine.length - len(tokens))
    stop = chat.stop + texts_of(body.stop)
    given = body.options(room, room, stop=stop, logprobs=logprobs, **form)
    claims = check.claims if check and check.notes else None
    return await service.submit(account_of(http), served, [tokens], given, label, body.edits, claims), forms


async def encoded(
    service: Service,
    chat: Chat,
    messages: Sequence[Mapping[str, Any]],
    source: str,
    served: Served,
    truncate: int | None,
    ends: Mapping[str, bool],
    variables: Mapping[str, Any],
) -> list[int]:
    """The token ids of a conversation; errors name the field of the request, `source`."""
    size = size_of([message.get("content") or "" for message in messages])
    check_size(size, served, source, truncate)
    try:
        slow = size if size > SHORT else 0  # a template may take long
        text = await service.compute(lambda: chat.prompt(messages, **ends, **variables), size=slow)
        check_size(len(text), served, source, truncate)
        return await service.compute(chat.ids, text, size=len(text))
    except ApiError:
        raise
    except UserError as error:
        raise of_messages(error, source) from None


def forms_of(served: Served, tools: Tools, reasoning_format: str | None) -> Forms:
    """The formats that the server's options choose, or else those of the model's chat template."""
    template = template_of(served)
    calls = call_form_of(template) if served.tool_parser == "auto" else served.tool_parser
    reasoning = reasoning_form_of(template) if served.reasoning_parser == "auto" else served.reasoning_parser
    if reasoning == HARMONY:
        calls = HARMONY  # this format includes calls
    if reasoning_format == "none":
        reasoning = "none"
    return Forms(calls, reasoning, Markers(served.lm.text()), tools.callable, tools.parallel and not tools.named)


def check_form(form: Mapping[str, Any], body: ChatFields, field: str) -> None:
    """Raise an ApiError if the grammar of a constraint is too long, or if the request has another constraint."""
    if other := next((name for name in (*CONSTRAINTS, "structured_outputs") if getattr(body, name)), None):
        raise ApiError(f"Cannot combine {field} and {other}, which both constrain the answer: choose one", param=other)
    if len(form.get("grammar", "")) > FORM_CHARACTERS:
        raise ApiError(
            f"Cannot constrain the answer to schemas of more than {FORM_CHARACTERS:,} characters together: give fewer "
            "or shorter tools",
            param=field,
        )


def of_messages(error: UserError, field: str) -> ApiError:
    """Turn an error into an ApiError about `field`; if it names one of `messages` by number, the index replaces the
    number."""
    found = re.search(r"\bmessage (\d+)\b", str(error)) if field == "messages" else None
    place = f"messages[{int(found[1]) - 1}]" if found else field
    return ApiError(str(error).replace(found[0], place) if found else str(error), param=place)


def texts_of(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def schema_of(response_format: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The JSON schema in the field `response_format`; None for a free answer."""
    match (response_format or {}).get("type", "text"):
        case "text":
            return None
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
    return given


def message_of(message: Mapping[str, Any], number: int, field: str = "messages") -> dict[str, Any]:
    """A message for the chat template, its content as text; errors name item `number` of `field`."""
    result = {name: value for name, value in message.items() if value is not None}
    content = message.get("content")
    if isinstance(content, list):
        for index, part in enumerate(content):
            if not isinstance(part.get("text"), str):
                place = f"{field}[{number}].content[{index}].text"
                raise ApiError(f"{place} is missing: give a text", param=place)
        result["content"] = "".join(part["text"] for part in content)
    for name in "audio", "function_call":
        if message.get(name):
            place = f"{field}[{number}].{name}"
            raise ApiError(f"{place} is not supported by this server: use content and tool_calls", param=place)
    return result


def variables_of(given: Mapping[str, Any] | None, tools: Tools, served: Served) -> dict[str, Any]:
    """Variables for the chat template: those given in the request, and the tools."""
    variables = dict(given or {})
    if clash := variables.keys() & {"messages", "tools", "add_generation_prompt", "continue_final_message"}:
        message = (
            f"Cannot set {min(clash)} in chat_template_kwargs, because it is a field of the request: set that field"
        )
        raise ApiError(message, param="chat_template_kwargs")
    if tools.choice != "none":
        if "tools" not in template_of(served):
            raise ApiError(
                f"Cannot offer tools, because the chat template of {served.name} does not show them to the "
                "model: leave them out",
                param="tools",
            )
        variables["tools"] = [{"type": "function", "function": function.given} for function in tools.functions]
    return variables


def template_of(served: Served) -> str:
    templates = served.lm.text().templates
    return templates.get("default") or next(iter(templates.values()), "")


class ChatReply(Streamed):
    """The reply to a request, one JSON object or server-sent events, from the updates of its answers."""

    def __init__(self, body: ChatRequest, served: Served, job: Job, tools: Tools, forms: Forms) -> None:
        self.body, self.served, self.job, self.tools = body, served, job, tools
        self.tokenizer = served.lm.text()
        self.head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": served.name}
        self.splitters = [AnswerSplitter(forms, request.prompt) for request in job.answers]
        self.num_calls = [0] * len(job.answers)

    def logprobs(self, update: Update) -> dict[str, Any] | None:
        return of_chat(self.tokenizer, update.logprobs, self.body.top_logprobs or 0) if self.body.logprobs else None

    def finish_reason(self, update: Update) -> str | None:
        """Why the answer of an update ended; None while it grows."""
        called = self.num_calls[update.index] and not self.tools.named
        return "tool_calls" if called and update.finish_reason == "stop" else update.finish_reason or None

    def usage(self) -> dict[str, Any]:
        return usage_of(self.job, sum(splitter.num_reasoning for splitter in self.splitters))

    def as_json(self, updates: list[Update]) -> dict[str, Any]:
        choices = []
        for index in range(len(self.splitters)):
            update = merged([update for update in updates if update.index == index])
            choice = {"index": index, "message": whole(self.deltas(update)), "logprobs": self.logprobs(update)}
            choice["finish_reason"] = self.finish_reason(update)
            choices.append(choice | ({"token_ids": update.tokens} if self.body.return_token_ids else {}))
        return {**self.head, "object": "chat.completion", "choices": choices, "usage": self.usage()}

    def chunk(self, choices: list[dict[str, Any]], with_usage: bool) -> bytes:
        usage = {"usage": self.usage()} if with_usage else {}
        return event({**self.head, "object": "chat.completion.chunk", "choices": choices, **usage})

    def beginning(self) -> Iterator[bytes]:
        for index in range(len(self.splitters)):
            delta = {"role": "assistant", "content": ""}
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            yield self.chunk([choice], self.body.continuous_usage)

    def growth(self, update: Update) -> Iterator[bytes]:
        for choice in self.choices(update):
            # one by one: many clients read only the first choice of an event
            yield self.chunk([choice], self.body.continuous_usage)

    def ending(self) -> Iterator[bytes]:
        if self.body.include_usage:
            yield self.chunk([], with_usage=True)
        yield from super().ending()

    def choices(self, update: Update) -> list[dict[str, Any]]:
        """The update as items of `choices`: the first has the tokens and log-probabilities, and the last item of an
        answer has the finish reason and an empty delta."""
        logprobs = self.logprobs(update)
        items: list[tuple[dict[str, Any], str | None]] = [(delta, None) for delta in self.deltas(update)]
        if reason := self.finish_reason(update):
            items.append(({}, reason))
        elif not items and update.tokens and (logprobs or self.body.return_token_ids):
            items = [({}, None)]  # tokens whose text is held back
        result: list[dict[str, Any]] = []
        for number, (delta, reason) in enumerate(items):
            first = number == 0
            choice = {"index": update.index, "delta": delta, "logprobs": logprobs if first else None}
            choice["finish_reason"] = reason
            result.append(choice | ({"token_ids": update.tokens} if self.body.return_token_ids and first else {}))
        return result

    def deltas(self, update: Update) -> list[dict[str, Any]]:
        pieces = (self.delta(update.index, event) for event in self.splitters[update.index].push(update))
        return [piece for piece in pieces if piece]

    def delta(self, index: int, event: Event) -> dict[str, Any]:
        """A piece of the answer's message; {} for an event that adds nothing."""
        match event.kind:
            case "content":
                return {"content": event.text}
            case "reasoning" if self.body.include_reasoning is not False:
                return {"reasoning_content": event.text}
            case "call":
                self.num_calls[index] += 1
                function = {"name": event.text, "arguments": ""}
                call = {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
                return {"tool_calls": [{"index": self.num_calls[index] - 1, **call}]}
            case "arguments":
                return {"tool_calls": [{"index": self.num_calls[index] - 1, "function": {"arguments": event.text}}]}
        return {}


def whole(deltas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": "", "refusal": None}
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        for name, value in delta.items():
            if name != "tool_calls":
                message[name] = message.get(name, "") + value
                continue
            for call in value:
                if "id" in call:
                    calls.append({key: inner for key, inner in call.items() if key != "index"})
                else:
                    calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    if calls:
        message |= {"content": message["content"] or None, "tool_calls": calls}
    return message
