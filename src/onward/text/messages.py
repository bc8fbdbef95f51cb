"""Messages as a chat template takes them, and the text that it makes of them. Does not import torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jinja2

from onward.base.arguments import shown
from onward.base.errors import UserError
from onward.text.masked_string import FIELDS, OTHER, TEMPLATE, MaskedString, codes_of, mask_of, sourced
from onward.text.template import render
from onward.text.tokenizer import SURROGATE, UNKNOWN

Message = Mapping[str, Any]  # {"role": "user", "content": "Hello"}, and other keys that a template reads

# the names of these roles count as text of the template, not of the message
ROLES = ("system", "developer", "user", "assistant", "model", "tool", "function", "observation")
REASONING = ("reasoning_content", "reasoning", "thinking")  # names of a message's reasoning in templates
TEXTS = ("text", "input_text", "output_text")  # types of content parts that are text


class Messages:
    """The messages of a conversation, and other `variables`, as a chat template takes them; `names` are control tokens
    by name, such as bos_token. Each text in a field of a message has its own source (see MaskedString), so that the
    rendered text shows which fields the template wrote, and where.

    `messages` differ from `given`: the reasoning of a message has each of the names that templates use, text parts of a
    content are joined, a missing content is empty, JSON arguments of tool calls are parsed, and fields that are None
    are left out."""

    def __init__(
        self,
        template: jinja2.Template,
        names: Mapping[str, str],
        given: Sequence[Message],
        variables: Mapping[str, Any],
    ) -> None:
        check_messages(given)
        self.template = template
        self.sources: dict[tuple[int, str], int] = {}  # message and field of each text
        try:
            self.values = {name: sourced(token, TEMPLATE) for name, token in names.items()}
            self.values |= marked({"tools": None, "documents": None} | dict(variables), OTHER)
            self.messages = [self.taken(i, message) for i, message in enumerate(given)]
        except RecursionError:
            raise UserError("the messages contain themselves or nest too deep: give plain lists and dicts") from None

    def taken(self, index: int, message: Message) -> dict[str, Any]:
        result = dict[str, Any]()
        for name, value in normalized(message, index).items():
            key = index, REASONING[0] if name in REASONING else name
            result[name] = marked(value, self.sources.setdefault(key, FIELDS + len(self.sources)))
        if result["role"] in ROLES:
            result["role"] = sourced(result["role"], TEMPLATE)
        return result

    def render(self, add_generation_prompt: bool) -> MaskedString:
        """Render the first variant of the messages (see `readings`) for which the template writes every message and
        tool call, and set `messages` to this variant. If there is none, raise the error of the first variant."""
        first: UserError | None = None
        for messages in [*self.readings()]:
            self.messages = messages
            try:
                text = self.rendered(self.messages, add_generation_prompt)
                for index in range(len(self.messages)):
                    self.check_message(text, self.messages, index, add_generation_prompt)
                return text
            except UserError as error:
                first = first or error
        assert first is not None
        raise first

    def readings(self) -> Iterator[list[dict[str, Any]]]:
        """The messages as they are; then, where that makes a difference, with the content None instead of an empty one,
        with the role system instead of developer, and with both."""
        bare = [message | {"content": message["content"] or None} for message in self.messages]
        system = {"role": sourced("system", TEMPLATE)}
        for change in {}, system:
            for messages in (self.messages, bare) if bare != self.messages else (self.messages,):
                changed = [one | change if one["role"] == "developer" else one for one in messages]
                if not change or changed != messages:
                    yield changed

    def rendered(self, messages: Sequence[Message], add_generation_prompt: bool) -> MaskedString:
        values = {**self.values, "messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            text = render(self.template, values)
        except Exception as error:  # a template may raise anything
            raise template_error(error) from None
        return MaskedString(SURROGATE.sub(UNKNOWN, text), mask_of(text))

    def check_message(
        self, text: MaskedString, messages: Sequence[Message], index: int, add_generation_prompt: bool
    ) -> None:
        """Raise a UserError if the message, or its tool calls, left no trace in `text`."""
        message = messages[index]
        changed = {"role": message["role"], "content": f"x{message.get('content') or ''}"}
        if not self.wrote(text, messages, index, message, changed, add_generation_prompt):
            raise UserError(
                f"message {index + 1} has no effect, because the chat template does not write messages of the role "
                f"{str(message['role'])!r:.100} there: use another role, or another template"
            )
        if message.get("tool_calls"):
            self.check_field(text, messages, index, "tool_calls", add_generation_prompt)

    def check_field(
        self,
        text: MaskedString,
        messages: Sequence[Message],
        index: int,
        name: str,
        add_generation_prompt: bool = False,
    ) -> None:
        """Raise a UserError if the field `name` of the message left no trace in `text`."""
        names = REASONING if name in REASONING else (name,)
        without = {key: value for key, value in messages[index].items() if key not in names}
        if not self.wrote(text, messages, index, names, without, add_generation_prompt):
            way = "name another, such as --template hermes" if name == "tool_calls" else "name another template"
            raise UserError(
                f"message {index + 1} has {name}, which the chat template does not write: {way}, or remove the field"
            )

    def wrote(
        self,
        text: MaskedString,
        messages: Sequence[Message],
        index: int,
        names: Sequence[str] | Message,
        changed: Message,
        add_generation_prompt: bool,
    ) -> bool:
        """Whether one of the fields `names` of a message is in `text`, or `text` changes with `changed` in place of the
        message."""
        if any(self.end_of(text, index, name) for name in names):
            return True
        others = [*messages[:index], changed, *messages[index + 1 :]]
        try:
            return str.__ne__(text, self.rendered(others, add_generation_prompt))
        except UserError:  # the template needs the message as it is
            return True

    def end_of(self, text: MaskedString, index: int, name: str) -> int:
        """Position after the last character of a message's field in a rendered text; 0 if there is none."""
        codes = codes_of(self.sources.get((index, name), -1)) if (index, name) in self.sources else ""
        return max((mask_of(text).rfind(code) + 1 for code in codes), default=0)

    def check_content(self, text: MaskedString, messages: Sequence[Message], index: int) -> None:
        """Raise a UserError if the template wrote only a part of the content, as some templates leave out reasoning."""
        content = messages[index].get("content") or ""
        codes = codes_of(self.sources.get((index, "content"), -1)) if content else ""
        kept = "".join(c for c, code in zip(str.__iter__(text), mask_of(text)) if code in codes)
        if "".join(kept.split()) in ("", "".join(content.split())):
            return
        shorter = {**messages[index], "content": marked(kept, self.sources[index, "content"])}
        if not self.wrote(text, messages, index, (), shorter, False):
            raise UserError(
                f"message {index + 1} has {content!r:.200}, of which the chat template writes only {kept!r:.100}: name "
                "another template, or change the message"
            )


def any_message(role: str) -> dict[str, Any]:
    """A message that shows the text that the template writes around messages."""
    return {"role": sourced(role, TEMPLATE), "content": "?"}


def check_messages(messages: Any) -> None:
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise UserError(f"messages are {messages!r}: give a text or a list of messages")
    if not messages:
        raise UserError("there are no messages: give at least one")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise UserError(f"a message is {message!r}: write it as {{'role': 'user', 'content': 'text'}}")


def normalized(message: Message, index: int) -> dict[str, Any]:
    """A message with a content and without fields that are None: its reasoning has each name in REASONING, text parts
    are joined, and JSON arguments of tool calls are parsed."""
    result = {"content": ""} | {str(name): value for name, value in message.items() if value is not None}
    reasoning = next((result[name] for name in REASONING if result.get(name)), None)
    if reasoning is not None:
        result |= dict.fromkeys(REASONING, reasoning)
    if isinstance(parts := result.get("content"), list | tuple):
        for part in parts:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            if kind not in TEXTS or not isinstance(part.get("text"), str):
                raise UserError(f"message {index + 1} has content of the type {shown(kind)}: give text only")
        result["content"] = "".join(part["text"] for part in parts)
    if isinstance(calls := result.get("tool_calls"), list | tuple):
        result["tool_calls"] = [with_table(call) for call in calls]
    return result


def with_table(call: Any) -> Any:
    """A tool call with its JSON arguments parsed; unchanged if it is not a table or its arguments are not JSON."""
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": with_table(call["function"])}
    arguments = call.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "null")
        except (ValueError, RecursionError):
            return call
    return {**call, "arguments": {} if arguments is None else arguments}


def marked(value: Any, source: int) -> Any:
    """A deep copy of nested lists and dicts in which each string has this source."""
    if isinstance(value, str):
        return sourced(value, source)
    if isinstance(value, Mapping):
        return {str(name): marked(inner, source) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [marked(inner, source) for inner in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    raise UserError(f"a message holds {type(value).__name__}: use only texts, numbers, booleans, None, lists and dicts")


def template_error(error: Exception) -> UserError:
    line = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
    reason = " ".join(str(error).split()) or type(error).__name__
    return UserError(f"the chat template cannot be used for these messages{line}: {reason}")
