"""Conversations as tokens, by the chat template that came with a tokenizer. Does not import torch."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import tokenizers
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from onward.errors import UserError
from onward.text.tokenizer import SURROGATE, UNKNOWN, Tokenizer

Message = Mapping[str, Any]  # {"role": "user", "content": "Hello"}, and other keys that a template reads

PLAIN = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ message.role | capitalize }}: {{ message.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
MARK = "\ufdd0"  # a noncharacter of Unicode, which no text contains


class NoTemplate(UserWarning):
    """A model has no chat template."""


class Chat:
    """Turns messages into tokens as transformers' `apply_chat_template` does.

    Control tokens that the template writes become control tokens. Control tokens written in a message remain plain
    text, except tokens that the vocabulary holds as ordinary text, such as `</think>` in some. Tokenizers that mark the
    beginnings of words may add a space around control tokens.

    A tokenizer without a template gets a plain one, and a NoTemplate warning: `User: ...`, then `Assistant:` and the
    answer, which ends before the next `User:`. `stop` are the texts that end an answer.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.stop: tuple[str, ...] = ()
        source = tokenizer.templates.get("default") or next(iter(tokenizer.templates.values()), None)
        if source is None:
            warnings.warn(
                NoTemplate("this model has no chat template: messages become User: and Assistant:"),
                stacklevel=1,
            )
            source, self.stop = PLAIN, ("\nUser:",)
        try:
            self.template = environment().from_string(source)
        except Exception as error:
            raise template_error(error) from None
        names = sorted((tokenizer.piece(i) for i in tokenizer.special), key=len, reverse=True)
        self.marks = {name: f"{MARK}{i}{MARK}" for i, name in enumerate([MARK, *names])}  # of control tokens
        self.marked = re.compile("|".join(map(re.escape, self.marks)))
        self.inner = tokenizers.Tokenizer.from_str(tokenizer.inner.to_str())
        self.inner.encode_special_tokens = False
        added = [tokenizers.AddedToken(mark, special=True, normalized=False) for mark in self.marks.values()]
        self.inner.add_tokens(added)
        self.typed = {self.inner.token_to_id(mark) or 0: name for name, mark in self.marks.items()}

    def encode(
        self, messages: str | Sequence[Message], /, add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """The token ids of messages, or of one message of the user; `variables` are those of the template."""
        given = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        if not isinstance(given, Sequence):
            raise UserError(f"messages are {given!r}: give a text or a list of messages")
        if not given:
            raise UserError("there are no messages: give at least one")
        for message in given:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise UserError(f"a message is {message!r}: write it as {{'role': 'user', 'content': 'text'}}")
        said = [{name: value for name, value in message.items() if value is not None} for message in given]
        values = {"tools": None, "documents": None} | variables | {"messages": said}
        values = self.tokenizer.names | self.mark(values) | {"add_generation_prompt": add_generation_prompt}
        try:
            text = self.template.render(values)
        except Exception as error:  # a template may raise anything
            raise template_error(error) from None
        found, plain = self.inner.encode(text, add_special_tokens=False).ids, self.tokenizer.encode
        return [j for i in found for j in (plain(self.typed[i], special=False) if i in self.typed else [i])]

    def mark(self, value: Any) -> Any:
        """A copy of a plain value in which marks replace the control tokens in texts."""
        if isinstance(value, str):
            return self.marked.sub(lambda found: self.marks[found[0]], SURROGATE.sub(UNKNOWN, value))
        if isinstance(value, Mapping):
            return {str(name): self.mark(inner) for name, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(inner) for inner in value]
        if value is None or isinstance(value, bool | int | float):
            return value
        raise UserError(f"a message holds {type(value).__name__}: only texts, numbers, lists and tables can be used")


@lru_cache(maxsize=2)
def chat_of(tokenizer: Tokenizer) -> Chat:
    """The Chat of a tokenizer, cached."""
    return Chat(tokenizer)


class Generation(Extension):
    """Ignores `{% generation %}`, which marks the text of the assistant for training."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def environment() -> ImmutableSandboxedEnvironment:
    """The sandbox of templates, with the functions that transformers provides."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **how: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **how)

    def strftime_now(form: str) -> str:
        return datetime.now().strftime(form)

    result = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    result.filters["tojson"] = tojson
    result.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    return result


def template_error(error: Exception) -> UserError:
    """The UserError for an exception of a template."""
    line = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
    said = " ".join(str(error).split()) or type(error).__name__
    return UserError(f"the chat template cannot be used for this{line}: {said}")
