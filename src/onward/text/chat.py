"""Conversations as tokens, by the chat template that came with a tokenizer. Does not import torch."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import jinja2
import tokenizers

from onward.errors import UserError
from onward.text.masked_string import FROM_TEMPLATE, TRAINED, MaskedString, from_template, mask_of, trained
from onward.text.template import environment, render
from onward.text.tokenizer import SURROGATE, UNKNOWN, Tokenizer

Message = Mapping[str, Any]  # {"role": "user", "content": "Hello"}, and other keys that a template reads

PLAIN = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ message.role | capitalize }}: {{ message.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
ROLES = ("system", "developer", "user", "assistant", "model", "tool", "function", "observation")  # of a template's text
MARKS = {  # Unicode noncharacters that stand for a control token, by whether it strips white space (left, right)
    (False, False): "\ufdd0",
    (False, True): "\ufdd1",
    (True, False): "\ufdd2",
    (True, True): "\ufdd3",
}
Span = tuple[int, int, int]  # a token: its id, and where in the text it begins and ends
ASSISTANT = ("assistant", "model")  # roles of the assistant


class NoTemplate(UserWarning):
    """Warning that a model has no chat template, so that messages are rendered as `User: ...` and `Assistant: ...`."""


class Chat:
    """Renders messages by a chat template and encodes them, as transformers' `apply_chat_template` does.

    Control tokens that the template writes become control tokens. Control tokens in text that a variable supplies, even
    in part, remain plain text, except tokens that the vocabulary contains as ordinary text, such as `</think>` in some.
    The usual roles count as text of the template, since some templates write `'<|' + role + '|>'`.

    A tokenizer without a template gets a plain one, and a NoTemplate warning: `User: ...`, then `Assistant:` and the
    answer, which ends before the next `User:`. The attribute `stop` holds the texts that then end an answer; it is
    empty with a template.
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
            self.template = environment().from_string(SURROGATE.sub(UNKNOWN, source))
        except Exception as error:
            raise template_error(error) from None
        self.inner = tokenizers.Tokenizer.from_str(tokenizer.inner.to_str())
        self.inner.encode_special_tokens = False
        added = self.inner.get_added_tokens_decoder()
        self.marks = {i: MARKS[token.lstrip, token.rstrip] for i, token in added.items() if token.special}
        self.plain = tokenizers.Tokenizer.from_str(tokenizer.inner.to_str())
        self.plain.encode_special_tokens = True
        self.plain.add_tokens(
            [
                tokenizers.AddedToken(mark, lstrip=lstrip, rstrip=rstrip, normalized=False)
                for (lstrip, rstrip), mark in MARKS.items()
            ]
        )
        self.mark_ids = {self.plain.token_to_id(mark) for mark in MARKS.values()}

    def encode(
        self,
        messages: str | Sequence[Message],
        /,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> list[int]:
        """Return the token ids of messages, or of one user message given as text. With `add_generation_prompt` the
        beginning of the assistant's answer follows; with `continue_final_message` the tokens end with the text of the
        last message instead, so that the model continues it. `variables` are passed to the template. Raises a UserError
        as `text` does, and if the last message cannot be continued."""
        given = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        if not continue_final_message:
            return [i for i, _, _ in self.tokens(self.text(given, add_generation_prompt, variables))]
        text = self.text(given, False, variables)
        last = given[-1].get("content")
        content = last.strip() if isinstance(last, str) else ""
        if not content or content not in text:
            raise UserError("the last message has no text that the template writes: it cannot be continued")
        return [i for i, _, _ in self.tokens(text[: text.rindex(content) + len(content)])]

    def conversation(
        self, messages: Sequence[Message], given: int = 0, **variables: Any
    ) -> tuple[list[int], list[bool], str]:
        """Return a conversation as a training example: (token ids, for each token whether it is trained on, the text
        rendered by the template).

        The assistant's messages after the first `given` messages are trained on, each with the control token that ends
        it; the first `given` messages are context. Raises a UserError if no control token ends the assistant's
        messages.
        """
        text = self.text([*messages[:given], *map(trained_message, messages[given:])], False, variables)
        ids, mask = list[int](), list[bool]()
        waiting = closed = False  # in the assistant's turn; after its end, in a block that the template marks
        for i, start, end in self.tokens(text):
            bits = mask_of(text)[start:end]
            of_template, marked = all(bit & FROM_TEMPLATE for bit in bits), any(bit & TRAINED for bit in bits)
            if waiting and not marked and not of_template:
                break
            closed = closed and marked and of_template
            ids.append(i)
            mask.append(waiting or (marked and not closed))
            waiting, closed = mask[-1] and i not in self.marks, closed or (mask[-1] and i in self.marks)
        if waiting:
            raise UserError("the chat template never closes the assistant's turn with a control token: use another")
        return ids, mask, str.__getitem__(text, slice(None))

    def text(self, given: Sequence[Message], add_generation_prompt: bool, variables: Mapping[str, Any]) -> MaskedString:
        """Render the messages `given` by the template, with further `variables` of the template, followed by the
        beginning of an answer if `add_generation_prompt`. The result marks the characters that the template wrote.
        Raises a UserError for malformed messages and for errors of the template."""
        if not isinstance(given, Sequence):
            raise UserError(f"messages are {given!r}: give a text or a list of messages")
        if not given:
            raise UserError("there are no messages: give at least one")
        for message in given:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise UserError(f"a message is {message!r}: write it as {{'role': 'user', 'content': 'text'}}")
        messages = [{name: value for name, value in message.items() if value is not None} for message in given]
        try:
            values = plain_copy({"tools": None, "documents": None} | dict(variables) | {"messages": messages})
        except RecursionError:
            raise UserError("the messages contain themselves or nest too deep: give plain lists and tables") from None
        for message in values["messages"]:
            if message["role"] in ROLES:
                message["role"] = from_template(message["role"])
        names = {name: from_template(token) for name, token in self.tokenizer.names.items()}
        try:
            text = render(self.template, names | values | {"add_generation_prompt": add_generation_prompt})
        except Exception as error:  # a template may raise anything
            raise template_error(error) from None
        return MaskedString(SURROGATE.sub(UNKNOWN, text), mask_of(text))

    def tokens(self, text: MaskedString) -> list[Span]:
        """Encode a rendered text: return (token id, start, end) for each token, where start and end are its positions
        in the text. Only control tokens whose characters were all written by the template become control tokens."""
        runs = [
            (run.start(), self.inner.encode(text[slice(*run.span())], add_special_tokens=False))
            for run in re.finditer(b"[\1\3]+", mask_of(text))
        ]
        own = [(i, a + start, b + start) for start, run in runs for i, a, b in self.spans(text[start:], run)]
        encoded = self.inner.encode(text, add_special_tokens=False)
        if self.spans(text, encoded) == own:
            return [(i, start, end) for i, (start, end) in zip(encoded.ids, encoded.offsets)]
        # marks stand for the control tokens of the template; all others are encoded as plain text
        pieces, marked, position = list[str](), list[int | str](), 0
        begins, ends = list[int](), list[int]()  # of each character of `joined` in the text
        for i, start, end in [*own, (-1, len(text), len(text))]:
            piece = str.__getitem__(text, slice(position, start))
            marked += [character for character in piece if character in MARKS.values()]
            pieces.append(piece)
            begins += range(position, start)
            ends += range(position + 1, start + 1)
            if i >= 0:
                marked.append(i)
                pieces.append(self.marks[i])
                begins.append(start)
                ends.append(end)
            position = end
        joined, waiting, result = "".join(pieces), iter(marked), list[Span]()
        encoding = self.plain.encode(joined, add_special_tokens=False)
        controls = {(a, b) for _, a, b in self.spans(joined, encoding)}
        for i, (start, end) in zip(encoding.ids, encoding.offsets):
            if i in self.mark_ids:
                mark = next(waiting)
                ids = self.spell(mark) if isinstance(mark, str) else [mark]
            else:
                ids = self.spell(joined[start:end]) if trimmed(joined, start, end) in controls else [i]
            place = (begins[start], ends[end - 1]) if end > start else (0, 0)
            result += [(one, *place) for one in ids]
        return result

    def spell(self, text: str) -> list[int]:
        """Return the token ids of a text encoded without any control tokens: if its encoding contains a control token,
        the text is encoded in two halves."""
        ids = self.tokenizer.encode(text, special=False)
        if not any(i in self.marks and i != self.tokenizer.unknown_id for i in ids):
            return ids
        return self.spell(text[: len(text) // 2]) + self.spell(text[len(text) // 2 :]) if len(text) > 1 else []

    def spans(self, text: str, encoding: tokenizers.Encoding) -> list[Span]:
        """Return (token id, start, end) for each control token in `encoding`, the encoding of a text; start and end are
        positions in the text, without white space that the token has absorbed. The unknown token counts only if the
        text spells its name."""
        result = []
        for i, (start, end) in zip(encoding.ids, encoding.offsets):
            start, end = trimmed(text, start, end) if i in self.marks else (start, end)
            unknown = i == self.tokenizer.unknown_id and text[start:end] != self.inner.id_to_token(i)
            if i in self.marks and not unknown:
                result.append((i, start, end))
        return result


def trained_message(message: Message) -> Message:
    """Return a message of the assistant in which all texts but the role are marked as text to train on (MaskedString);
    any other message unchanged."""
    if not isinstance(message, Mapping) or message.get("role") not in ASSISTANT:
        return message
    return {name: value if name == "role" else with_texts(value, trained) for name, value in message.items()}


def with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return a copy of a value, such as nested lists and dicts, in which each text is replaced by `change(text)`."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {name: with_texts(inner, change) for name, inner in value.items()}
    return [with_texts(inner, change) for inner in value] if isinstance(value, list | tuple) else value


def trimmed(text: str, start: int, end: int) -> tuple[int, int]:
    """Return (start, end), the part of a text between the positions `start` and `end`, narrowed to exclude white space
    at both ends."""
    piece = text[start:end]
    return start + len(piece) - len(piece.lstrip()), end - len(piece) + len(piece.rstrip())


def plain_copy(value: Any) -> Any:
    """Return a deep copy of a value that consists of strings, numbers, booleans, None, lists and dicts. Raises a
    UserError if it contains any other value."""
    if isinstance(value, Mapping):
        return {str(name): plain_copy(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain_copy(inner) for inner in value]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise UserError(f"a message holds {type(value).__name__}: only texts, numbers, lists and tables can be used")


@lru_cache(maxsize=2)
def chat_of(tokenizer: Tokenizer) -> Chat:
    """Return the Chat of a tokenizer, which renders and encodes messages; those of the last two tokenizers are
    cached."""
    return Chat(tokenizer)


def template_error(error: Exception) -> UserError:
    """Return the UserError for an exception that a chat template raised, with the exception's message."""
    line = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
    reason = " ".join(str(error).split()) or type(error).__name__
    return UserError(f"the chat template cannot be used for this{line}: {reason}")
