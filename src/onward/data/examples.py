"""Examples for fine-tuning: records become token sequences, and some of their tokens are trained.

An example is one or more sequences that belong together, such as a preferred and a rejected answer. On disk a table of
examples is one .safetensors file.

Shapes: N tokens of all sequences, S sequences, M examples of S / M sequences each.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from onward.base.arguments import shown
from onward.base.errors import UserError
from onward.base.files import atomic_write
from onward.data.messages import trained_messages
from onward.data.tokens import Tokens
from onward.data.unread import WEIGHTS, texts_in
from onward.text.chat import Chat, Message
from onward.text.tokenizer import Tokenizer

Variables = Mapping[str, Any]  # variables of a chat template, such as tools
NONE: Variables = MappingProxyType({})
SPOKEN = "tool_calls", "reasoning_content", "reasoning", "thinking"  # fields that a message may have instead of content
NO_TEMPLATE = "the model has no chat template for messages: name one, such as --template plain"


@dataclass(frozen=True)
class TokenSequence:
    """Token ids and whether each is trained; `text` is the text rendered by a chat template, if any."""

    tokens: Sequence[int]
    trained: Sequence[bool]
    text: str = ""
    unread: int = 0  # number of final tokens that the model never reads, such as an answer that a reward uses

    def until_trained(self) -> Sequence[int]:
        """Tokens up to the last trained one, where reward models and classifiers give their output."""
        # this token ends the turn: text that the chat template writes after it is not scored
        return self.tokens[: len(self.trained) - [*reversed(self.trained)].index(True)]


@dataclass(frozen=True)
class Example:
    """Sequences that belong together, such as a chosen and a rejected answer, with their numbers (such as a margin)."""

    sequences: Sequence[TokenSequence]
    place: str
    numbers: Mapping[str, float] = field(default_factory=dict)
    columns: str = ""  # JSON object with the fields that rewards read; "": no fields
    source: str = ""  # the source as the user named it: a file, a folder, a glob or a dataset


class Encoder:
    """Encodes texts and messages as token sequences, and marks the tokens to train on."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.chat = Chat(tokenizer) if tokenizer.templates else None
        self.end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
        self.labels: tuple[str, ...] = ()  # classes of a classifier, set by `forms.classified`

    def document(self, text: str) -> TokenSequence:
        """The text between the beginning-of-text and end tokens of the tokenizer, if any; all tokens are trained."""
        check_text(text, "text")
        tokens = self.tokenizer.begin(self.tokenizer.encode(text, special=False)) + self.end
        return TokenSequence(tokens, [True] * len(tokens))

    def texts(self, *texts: str) -> TokenSequence:
        """One sequence of all texts, each followed by the end token or, in a vocabulary without an end token, by a line
        break; all tokens are trained."""
        tokens = self.tokenizer.begin([])
        for i, text in enumerate(texts):
            check_text(text, "text or pair")
            begins = self.end or i == 0  # after a line break, a text continues the previous text
            tokens = tokens + (
                self.tokenizer.encode(text, special=False) if begins else self.tokenizer.encode_inside(text)
            )
            tokens = tokens + (self.end or self.tokenizer.encode_inside("\n"))
        return TokenSequence(tokens, [True] * len(tokens))

    def answers(
        self, prompt: str | Sequence[Message], completion: str | Sequence[Message], variables: Variables = NONE
    ) -> list[TokenSequence]:
        """A prompt and its completion (both texts, or both messages); only the completion is trained. The result may be
        several sequences, as in `conversations`."""
        if isinstance(prompt, str) and isinstance(completion, str):
            check_no_variables(variables)
            before = self.tokenizer.encode(prompt) or self.tokenizer.begin([])  # the same tokens as for generation
            after = self.tokenizer.continuation(prompt, completion) + self.end
            return [TokenSequence(before + after, [False] * len(before) + [True] * len(after))]
        if not isinstance(prompt, list | tuple) or not isinstance(completion, list | tuple):
            types = " and ".join(type(value).__name__ for value in (prompt, completion))
            raise UserError(f"prompt and answer are {types}: give both as texts, or both as lists of messages")
        return self.conversations([*prompt, *completion], len(prompt), variables)

    def answer(
        self, prompt: str | Sequence[Message], completion: str | Sequence[Message], variables: Variables = NONE
    ) -> TokenSequence:
        return only(self.answers(prompt, completion, variables))

    def prompt(self, prompt: str | Sequence[Message], variables: Variables = NONE) -> list[int]:
        """Tokens of a prompt, a text or messages, encoded as for generation."""
        if isinstance(prompt, str):
            check_text(prompt, "prompt")
            check_no_variables(variables)
            return self.tokenizer.encode(prompt)
        if not isinstance(prompt, list | tuple):
            raise UserError(f"prompt is {shown(prompt)}: give a text, or a list of messages")
        chat = self.chat_for(prompt, variables)
        return chat.encode(prompt, **variables)

    def conversations(
        self, messages: Sequence[Message], given: int = 0, variables: Variables = NONE
    ) -> list[TokenSequence]:
        """The messages as sequences; the assistant's messages after the first `given` messages are trained, unless
        their `weight` is 0. There are several sequences if the template writes an earlier turn differently once other
        turns follow. `variables` are those of the chat template, such as `tools`."""
        chat = self.chat_for(messages, variables)
        trained = trained_messages(messages, given)
        made = chat.conversations(messages, given, trained, **variables)
        return [TokenSequence(one.tokens, one.trained, one.text) for one in made]

    def conversation(self, messages: Sequence[Message], given: int = 0, variables: Variables = NONE) -> TokenSequence:
        return only(self.conversations(messages, given, variables))

    def chat_for(self, messages: Any, variables: Variables) -> Chat:
        if self.chat is None:
            raise UserError(NO_TEMPLATE)
        check_messages(messages, self.chat.source)
        check_variables(variables, self.chat.source)
        return self.chat


def only(sequences: Sequence[TokenSequence]) -> TokenSequence:
    if len(sequences) > 1:
        raise UserError(
            f"the conversation becomes {len(sequences)} examples, because the chat template writes an answer "
            "differently once other turns follow: train one answer, and give the rest as the prompt"
        )
    return sequences[0]


def check_variables(variables: Variables, source: str) -> None:
    """Raise a UserError for malformed tools, and for variables with text that the template's `source` does not use."""
    tools = variables.get("tools")
    if tools and (not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools)):
        raise UserError(f"tools are {shown(tools)}: give a list of JSON schemas, as the chat template reads them")
    if tools and not occurs("tools", source):
        raise UserError(
            "cannot use its tools, because the chat template does not write them: name another template, such as "
            "--template hermes, or leave them out with --ignore tools"
        )
    for name, value in variables.items():
        if any(texts_in([value])) and not occurs(name, source):
            raise UserError(
                f"cannot use {name} of chat_template_kwargs, because the chat template has no such variable: name "
                "another template, or leave the column out with --ignore chat_template_kwargs"
            )


def check_no_variables(variables: Variables) -> None:
    for name, value in variables.items():
        if name == "tools" or any(texts_in([value])):
            column = name if name == "tools" else "chat_template_kwargs"
            raise UserError(
                f"cannot use its {column}, because its prompt is a text, without a chat template: write the prompt as "
                f"a list of messages, or leave the column out with --ignore {column}"
            )


def occurs(name: str, source: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\b", source) is not None


def check_text(text: str, name: str) -> None:
    """Raise a UserError unless `text` is a text that is not empty; `name` names it in the message, such as "prompt"."""
    if not isinstance(text, str):
        raise UserError(f"{name} is {shown(text)}: give a text")
    if not text:
        raise UserError(f"the {name} is empty: add text, or remove the example")


def check_messages(messages: Any, source: str) -> None:
    """Raise a UserError for messages without text, and for text in fields that the template's `source` does not use."""
    if not isinstance(messages, list | tuple) or not all(
        isinstance(m, Mapping) and isinstance(m.get("role"), str) for m in messages
    ):
        raise UserError("messages are not a list of {'role': ..., 'content': ...}: write them in this form")
    for i, message in enumerate(messages, 1):
        content = message.get("content")
        if not isinstance(content, str) and (content is not None or not any(message.get(name) for name in SPOKEN)):
            raise UserError(f"message {i} has the content {shown(content)}: give a text, or remove the record")
        for name, value in message.items():
            if name not in ("role", "content", *SPOKEN, *WEIGHTS) and not occurs(name, source):
                for path, text in texts_in(value, name):
                    raise UserError(
                        f"message {i} has {shown(text)} in {path}, which the chat template does not write: name "
                        "another template, or remove the field"
                    )


@dataclass(frozen=True)
class Examples:
    """A table of M examples: the tokens of all their sequences in one array."""

    tokens: np.ndarray  # (N,), token ids
    trained: np.ndarray  # (N,), whether each token is trained
    ends: np.ndarray  # (S,), the index after each sequence's last token
    per_example: int = 1  # number of sequences per example
    numbers: Mapping[str, np.ndarray] = field(default_factory=dict)  # numbers of each example, (M,) each
    columns: Sequence[str] = ()  # `Example.columns` of each example; () if all are empty

    def __len__(self) -> int:
        return len(self.ends) // self.per_example

    @property
    def starts(self) -> np.ndarray:
        return np.concatenate([[0], self.ends[:-1]]).astype(np.int64)

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each example, over all its sequences, (M,)."""
        return (self.ends - self.starts).reshape(-1, self.per_example).sum(1)

    def all_tokens(self) -> Tokens:
        """All sequences as `Tokens`, each a document."""
        return Tokens.of(self.tokens, self.ends)

    def sequence(self, number: int) -> TokenSequence:
        where = slice(int(self.starts[number]), int(self.ends[number]))
        return TokenSequence(self.tokens[where].tolist(), self.trained[where].tolist())

    def select(self, chosen: np.ndarray) -> "Examples":
        """The examples with these numbers, in this order; a number may occur more than once."""
        sequences = (chosen[:, None] * self.per_example + np.arange(self.per_example)).ravel()
        starts, ends = self.starts[sequences], self.ends[sequences]
        index = np.concatenate([np.arange(a, b) for a, b in zip(starts, ends)] or [np.empty(0, np.int64)])
        numbers = {name: values[chosen] for name, values in self.numbers.items()}
        columns = [self.columns[i] for i in chosen.tolist()] if self.columns else ()
        new = np.cumsum(ends - starts)
        return Examples(self.tokens[index], self.trained[index], new, self.per_example, numbers, columns)

    def save(self, path: Path) -> None:
        arrays = {f"number/{name}": values for name, values in self.numbers.items()}
        arrays |= {"tokens": self.tokens, "trained": self.trained, "ends": self.ends}
        if self.columns:
            texts = [text.encode() for text in self.columns]
            arrays["columns"] = np.frombuffer(b"".join(texts), np.uint8)
            arrays["column_ends"] = np.cumsum([len(text) for text in texts])
        # the library requires contiguous arrays
        arrays = {name: np.ascontiguousarray(values) for name, values in arrays.items()}
        with atomic_write(path) as new:
            save_file(arrays, new, {"per_example": str(self.per_example)})

    @classmethod
    def load(cls, path: Path) -> "Examples":
        try:
            with safe_open(path, framework="np") as file:
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                count = int((file.metadata() or {})["per_example"])
            numbers = {n.removeprefix("number/"): v for n, v in arrays.items() if n.startswith("number/")}
            columns = list[str]()
            if "columns" in arrays:
                joined_columns, ends = arrays["columns"].tobytes(), arrays["column_ends"].tolist()
                columns = [joined_columns[start:end].decode() for start, end in zip([0, *ends], ends)]
            return cls(arrays["tokens"], arrays["trained"], arrays["ends"], count, numbers, columns)
        except (OSError, KeyError, ValueError, SafetensorError) as error:
            raise UserError(f"{path} cannot be read as examples ({error}): start another run") from None
