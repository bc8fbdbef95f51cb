"""Examples for fine-tuning: records become token sequences, and some of their tokens are trained.

An example is one or more sequences that belong together, such as a preferred and a rejected answer. On disk a table of
examples is one .safetensors file.

Shapes: N tokens of all sequences, S sequences, M examples of S / M sequences each.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from onward.arguments import shown
from onward.data.tokens import Tokens
from onward.errors import UserError
from onward.files import atomic_write
from onward.text.chat import Chat, Message
from onward.text.tokenizer import Tokenizer

TooLong = Literal["error", "cut", "drop"]
SHOWN = 300  # characters of a text in a message
NO_TEMPLATE = "the model has no chat template for messages: name one, such as --template chatml"


@dataclass(frozen=True)
class TokenSequence:
    """Token ids, and whether each token is trained, that is, a target of the loss; `text` is the text rendered by a
    chat template, "" without one."""

    tokens: Sequence[int]
    trained: Sequence[bool]
    text: str = ""
    unread: int = 0  # number of final tokens that the model never reads, such as an answer that a reward uses

    def until_trained(self) -> Sequence[int]:
        """Return the tokens up to the last trained token, after which a reward model or a classifier gives its
        output."""
        return self.tokens[: len(self.trained) - [*reversed(self.trained)].index(True)]


@dataclass(frozen=True)
class Example:
    """An example for fine-tuning: sequences that belong together, such as a chosen and a rejected answer; its numbers
    (such as a margin); the location of its record, for messages; and the other fields of the record as JSON."""

    sequences: Sequence[TokenSequence]
    place: str
    numbers: Mapping[str, float] = field(default_factory=dict)
    columns: str = ""  # JSON object with the fields for rewards; "": no fields


class Encoder:
    """Makes token sequences of texts and messages for fine-tuning, with the tokens to train on; `labels` are the
    classes of a classifier's examples."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.chat = Chat(tokenizer) if tokenizer.templates else None
        self.end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
        self.labels: tuple[str, ...] = ()  # the classes of `classified`, which are known after its first table

    def document(self, text: str) -> TokenSequence:
        """Return a text between the beginning-of-text token and the end token; all tokens are trained."""
        check_text(text, "text")
        tokens = self.tokenizer.begin(self.tokenizer.encode(text, special=False)) + self.end
        return TokenSequence(tokens, [True] * len(tokens))

    def texts(self, *texts: str) -> TokenSequence:
        """Return one sequence of all `texts`, such as a text and a second text to compare, each followed by the end
        token or, in a vocabulary without one, by a line break; all tokens are trained."""
        tokens = self.tokenizer.begin([])
        for i, text in enumerate(texts):
            check_text(text, "text or pair")
            begins = self.end or i == 0  # a text after an end token begins anew, a text after a line break goes on
            tokens = tokens + (
                self.tokenizer.encode(text, special=False) if begins else self.tokenizer.encode_inside(text)
            )
            tokens = tokens + (self.end or self.tokenizer.encode_inside("\n"))
        return TokenSequence(tokens, [True] * len(tokens))

    def answer(
        self, prompt: str | Sequence[Message], completion: str | Sequence[Message], tools: Any = None
    ) -> TokenSequence:
        """Return a prompt and its completion as one sequence, of which only the completion is trained. Both are texts,
        or both lists of messages; a completion that is a text ends with the end token. `tools` are JSON schemas for the
        chat template. Raises a UserError for other types."""
        if isinstance(prompt, str) and isinstance(completion, str):
            before = self.tokenizer.encode(prompt) or self.tokenizer.begin([])  # as for generation
            after = self.tokenizer.continuation(prompt, completion) + self.end
            return TokenSequence(before + after, [False] * len(before) + [True] * len(after))
        if not isinstance(prompt, list | tuple) or not isinstance(completion, list | tuple):
            types = " and ".join(type(value).__name__ for value in (prompt, completion))
            raise UserError(f"prompt and answer are {types}: give both as texts, or both as lists of messages")
        return self.conversation([*prompt, *completion], len(prompt), tools)

    def prompt(self, prompt: str | Sequence[Message], tools: Any = None) -> list[int]:
        """Return the tokens of a prompt, a text or messages, encoded as for generation, where the model is to answer;
        `tools` are JSON schemas for the chat template. Raises a UserError for messages if there is no chat template,
        and for a value that is neither text nor messages."""
        if isinstance(prompt, str):
            check_text(prompt, "prompt")
            return self.tokenizer.encode(prompt)
        if not isinstance(prompt, list | tuple):
            raise UserError(f"prompt is {shown(prompt)}: give a text, or a list of messages")
        if self.chat is None:
            raise UserError(NO_TEMPLATE)
        check_roles(prompt)
        check_tools(self.tokenizer, tools)
        return self.chat.encode(prompt, tools=tools or None)

    def conversation(self, messages: Sequence[Message], given: int = 0, tools: Any = None) -> TokenSequence:
        """Return the messages of a conversation as one sequence, of which the assistant's messages after the first
        `given` messages are trained; `tools` are JSON schemas for the chat template. Raises a UserError if no token is
        trained."""
        if self.chat is None:
            raise UserError(NO_TEMPLATE)
        check_roles(messages)
        check_tools(self.tokenizer, tools)
        tokens, trained, text = self.chat.conversation(messages, given, tools=tools or None)
        if not any(trained):
            raise UserError(f"no token is trained, since the assistant says nothing in {text[:SHOWN]!r}")
        return TokenSequence(tokens, trained, text)


def check_tools(tokenizer: Tokenizer, tools: Any) -> None:
    """Raise a UserError if tools, a list of JSON schemas, are malformed or not written by the chat template."""
    if not tools:
        return
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools):
        raise UserError(f"tools are {shown(tools)}: give a list of JSON schemas, as the chat template reads them")
    if not any("tools" in template for template in tokenizer.templates.values()):
        raise UserError("it has tools, and the chat template does not write them: name another, or remove the field")


def check_text(text: str, name: str) -> None:
    """Raise a UserError if `text` is empty or not a string; `name` names it in the message, such as "prompt"."""
    if not isinstance(text, str):
        raise UserError(f"{name} is {shown(text)}: give a text")
    if not text:
        raise UserError(f"the {name} is empty: give it words, or remove the example")


def check_roles(messages: Any) -> None:
    """Raise a UserError unless user and assistant messages alternate; system messages may come first, and tool messages
    between others."""
    if not isinstance(messages, list | tuple) or not all(isinstance(m, Mapping) and "role" in m for m in messages):
        raise UserError("messages are not a list of {'role': ..., 'content': ...}: write them so")
    for i, message in enumerate(messages, 1):
        content = message.get("content")
        if not isinstance(content, str) and (content is not None or not message.get("tool_calls")):
            raise UserError(f"message {i} has the content {shown(content)}: give a text, or remove the record")
    roles = [message["role"] for message in messages]
    for i, (before, role) in enumerate(zip(["", *roles], roles)):
        wrong = role in ("system", "developer") and before not in ("", "system", "developer")
        wrong |= role == before and role in ("user", "assistant", "model")
        wrong |= role in ("assistant", "model") and before in ("", "system", "developer")
        if wrong:
            raise UserError(
                f"message {i + 1} is of role {role!r} after {before or 'nothing'!r}: system comes first, and user and "
                "assistant take turns"
            )


@dataclass(frozen=True)
class Examples:
    """A table of M examples for fine-tuning in memory: the tokens of all their sequences in one array, and the index at
    which each sequence ends."""

    tokens: np.ndarray  # (N,), token ids
    trained: np.ndarray  # (N,), whether each token is trained
    ends: np.ndarray  # (S,), the index after each sequence's last token
    per_example: int = 1  # number of sequences per example
    numbers: Mapping[str, np.ndarray] = field(default_factory=dict)  # numbers of each example, (M,) each
    columns: Sequence[str] = ()  # one per example, see Example.columns; () if no example has any

    def __len__(self) -> int:
        return len(self.ends) // self.per_example

    @property
    def starts(self) -> np.ndarray:
        """The index in `tokens` of each sequence's first token, (S,)."""
        return np.concatenate([[0], self.ends[:-1]]).astype(np.int64)

    @property
    def lengths(self) -> np.ndarray:
        """The number of tokens of each example, over all its sequences, (M,)."""
        return (self.ends - self.starts).reshape(-1, self.per_example).sum(1)

    def all_tokens(self) -> Tokens:
        """Return the token ids of all sequences as `Tokens`; each sequence is a document."""
        return Tokens.of(self.tokens, self.ends)

    def sequence(self, number: int) -> TokenSequence:
        """Return the sequence with the number `number`, an index into the sequences of all examples, which are numbered
        consecutively."""
        where = slice(int(self.starts[number]), int(self.ends[number]))
        return TokenSequence(self.tokens[where].tolist(), self.trained[where].tolist())

    def select(self, chosen: np.ndarray) -> "Examples":
        """Return a table of the examples with the numbers `chosen`, an integer array, in this order; a number may occur
        more than once."""
        sequences = (chosen[:, None] * self.per_example + np.arange(self.per_example)).ravel()
        starts, ends = self.starts[sequences], self.ends[sequences]
        index = np.concatenate([np.arange(a, b) for a, b in zip(starts, ends)] or [np.empty(0, np.int64)])
        numbers = {name: values[chosen] for name, values in self.numbers.items()}
        columns = [self.columns[i] for i in chosen.tolist()] if self.columns else ()
        new = np.cumsum(ends - starts)
        return Examples(self.tokens[index], self.trained[index], new, self.per_example, numbers, columns)

    def save(self, path: Path) -> None:
        """Write the table of examples to a .safetensors file."""
        arrays = {f"number/{name}": values for name, values in self.numbers.items()}
        arrays |= {"tokens": self.tokens, "trained": self.trained, "ends": self.ends}
        if self.columns:
            texts = [text.encode() for text in self.columns]
            arrays["columns"] = np.frombuffer(b"".join(texts), np.uint8)
            arrays["column_ends"] = np.cumsum([len(text) for text in texts])
        arrays = {name: np.ascontiguousarray(values) for name, values in arrays.items()}  # which the library assumes
        with atomic_write(path) as new:
            save_file(arrays, new, {"per_example": str(self.per_example)})

    @classmethod
    def load(cls, path: Path) -> "Examples":
        """Read the table of examples that `save` wrote. Raises a UserError if the file is damaged."""
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


@dataclass(frozen=True)
class Left:
    """The number of examples that were longer than allowed and so were cut or dropped, and the length of the longest
    example, in tokens."""

    count: int = 0
    longest: int = 0


def tabulated(examples: Iterable[Example], length: int, too_long: TooLong) -> tuple[Examples, Left]:
    """Collect examples in a table, in which no sequence has more than `length` tokens that the model reads. Returns the
    table, and the number of longer examples.

    For a longer sequence, `too_long` "cut" keeps its first tokens, "drop" leaves out the example, and "error" raises a
    UserError. An example whose trained tokens are all cut is left out too; an example without trained tokens is a
    UserError. Numbers, such as a margin, that some examples lack are 0 there.
    """
    tokens, trained, ends = list[np.ndarray](), list[np.ndarray](), [0]
    numbers: dict[str, list[float]] = {}
    columns: list[str] = []
    per_example, count, longest, total = 0, 0, 0, 0
    place = ""
    for example in examples:
        total += 1
        most = max(len(sequence.tokens) - sequence.unread for sequence in example.sequences)
        if most > longest:
            longest, place = most, example.place
        rows = [cut(sequence, length) for sequence in example.sequences]
        learns = all(any(mask[1:]) for _, mask in rows)
        count += most > length
        if most > length and (too_long == "drop" or not learns):
            continue
        if not learns:
            raise UserError(f"{example.place}: it has no token that is trained after another one: make it longer")
        per_example = len(rows)
        for ids, mask in rows:
            tokens.append(np.array(ids, np.uint32))
            trained.append(np.array(mask, bool))
            ends.append(ends[-1] + len(ids))
        columns.append(example.columns)
        before = (len(ends) - 1) // per_example - 1
        for name, value in example.numbers.items():
            column = numbers.setdefault(name, [])
            column += [0.0] * (before - len(column)) + [value]
    if count and too_long == "error":
        raise UserError(
            f"{count:,} of {total:,} examples are longer than {length:,} tokens, {place} with {longest:,} the longest: "
            "--too-long drop leaves them out, --too-long cut keeps their first tokens, and --length allows more"
        )
    if not per_example:
        raise UserError("there is no example to train on" + (", as all are too long" if count else ""))
    size = (len(ends) - 1) // per_example
    arrays = {name: np.array(values + [0.0] * (size - len(values))) for name, values in numbers.items()}
    flat = np.concatenate(tokens), np.concatenate(trained), np.array(ends[1:])
    return Examples(*flat, per_example, arrays, columns if any(columns) else ()), Left(count, longest)


def cut(sequence: TokenSequence, length: int) -> tuple[Sequence[int], Sequence[bool]]:
    """Shorten a sequence to its first `length` tokens that the model reads, followed by all of its final tokens that
    only a reward uses. Returns (token ids, whether each is trained)."""
    read = len(sequence.tokens) - sequence.unread
    tokens, trained = ([*x[: min(read, length)], *x[read:]] for x in (sequence.tokens, sequence.trained))
    return tokens, trained  # type: ignore[return-value]


def held_out(count: int, share: float) -> np.ndarray:
    """Select the fraction `share` of `count` examples for validation, evenly spread: (count,) bool, True for the
    selected."""
    steps = np.floor(np.arange(count + 1) * share)
    return steps[1:] > steps[:-1]
