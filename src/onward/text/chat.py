"""Conversations as tokens, by the chat template that came with a tokenizer. Does not import torch."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import tokenizers

from onward.base.errors import UserError
from onward.text.masked_string import GENERATED, TEMPLATE, MaskedString, codes_of, mask_of
from onward.text.media import refuse_media
from onward.text.messages import REASONING, Message, Messages, any_message, template_error
from onward.text.template import compiled
from onward.text.tokenizer import SURROGATE, UNKNOWN, Tokenizer

PLAIN = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ message.role | capitalize }}: {{ message.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
MARKS = {  # Unicode noncharacters that stand for a control token, by whether it strips white space (left, right)
    (False, False): "\ufdd0",
    (False, True): "\ufdd1",
    (True, False): "\ufdd2",
    (True, True): "\ufdd3",
}
Span = tuple[int, int, int]  # a token: its id, and where in the text it begins and ends
ASSISTANT = ("assistant", "model")  # roles of the assistant
SHOWN = 20  # characters of a text in an error message
TAUGHT = ("content", "tool_calls", *REASONING)  # fields of the assistant's messages that a model learns to write


class NoTemplate(UserWarning):
    """Warning that a model has no chat template, so that messages are rendered as `User: ...` and `Assistant: ...`."""


@dataclass(frozen=True)
class Conversation:
    """A conversation as a training example: token ids, whether each is trained, and the rendered text."""

    tokens: list[int]
    trained: list[bool]
    text: str


@dataclass(frozen=True)
class Turn:
    """An answer in a rendered text: the model writes the characters [start, end), including the control token that
    closes it."""

    text: MaskedString
    start: int
    end: int


class Chat:
    """Renders messages by a chat template and encodes them, as transformers' `apply_chat_template` does.

    Control tokens that the template writes become control tokens. Control tokens in text that a variable supplies, even
    in part, remain plain text, except tokens that the vocabulary contains as ordinary text, such as `</think>` in some.
    The usual roles count as text of the template, since some templates write `'<|' + role + '|>'`.

    Messages are given to the template in a common format, see `Messages`. The reasoning of a
    message is available under each of the names that templates use. Arguments of tool calls are tables. If the template
    does not write a message, it is tried with the content None instead of an empty one, and with the role system
    instead of developer; a message or a tool call that the template still does not write is a UserError.

    A tokenizer without a template gets a plain one, and a NoTemplate warning: `User: ...`, then `Assistant:` and the
    answer, which ends before the next `User:`. The attribute `stop` holds the texts that then end an answer; it is
    empty with a template. `source` is the Jinja source of the template.
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
        self.source = SURROGATE.sub(UNKNOWN, source)
        try:
            self.template = compiled(self.source)
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

    def text(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> MaskedString:
        """The rendered messages, with the beginning of an answer if `add_generation_prompt`."""
        return Messages(self.template, self.tokenizer.names, messages, variables).render(add_generation_prompt)

    def encode(
        self,
        messages: str | Sequence[Message],
        /,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> list[int]:
        """Token ids of messages, or of one user message given as text. With `continue_final_message` they end with the
        text of the last message, so that the model continues it. `variables` are those of the template."""
        return self.ids(self.prompt(messages, add_generation_prompt, continue_final_message, **variables))

    def prompt(
        self,
        messages: str | Sequence[Message],
        /,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> MaskedString:
        """The text whose token ids `encode` returns."""
        given = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        talk = Messages(self.template, self.tokenizer.names, given, variables)
        text = talk.render(add_generation_prompt and not continue_final_message)
        if continue_final_message:
            text = text[: talk.end_of(text, len(given) - 1, "content")]
            if not text:
                raise UserError(
                    "Cannot continue the last message, because the chat template writes no text of it: give it a text"
                )
        return text

    def ids(self, text: MaskedString) -> list[int]:
        """Token ids of a text that `prompt` has rendered."""
        if self.tokenizer.media:
            refuse_media(self.tokenizer.media, text)
        return [i for i, _, _ in self.tokens(text)]

    def conversations(
        self, messages: Sequence[Message], given: int = 0, trained: Sequence[bool] | None = None, **variables: Any
    ) -> list[Conversation]:
        """A conversation as training examples, usually a single one.

        The assistant's messages after the first `given`, or those for which `trained` is True, are trained. In a
        trained message, these tokens are trained: all that follow the beginning of an answer, as the template writes
        it, up to and including the control token that ends it; in a template with `{% generation %}`, only the text in
        these blocks and that token. A message that the template writes differently once others follow, for example
        without its reasoning, becomes an example that ends with it."""
        talk = Messages(self.template, self.tokenizer.names, messages, variables)
        talk.render(False)
        result, turns = list[Conversation](), list[Turn]()
        for i, message in enumerate(talk.messages):
            if i < given or message["role"] not in ASSISTANT or (trained and not trained[i]) or not taught(message):
                continue
            new = self.turn(talk, i)
            kept = [turn for turn in turns if turn.text[: turn.end] == new.text[: turn.end]]
            if own := [turn for turn in turns if turn not in kept]:
                result.append(self.example(own))
            turns = [*kept, new]
        if not turns:
            raise UserError("Cannot train on this conversation, because it has no answer to train: add one")
        return [*result, self.example(turns)]

    def turn(self, talk: Messages, index: int) -> Turn:
        """The answer that is the message with this index, in the text of the messages up to it."""
        messages = talk.messages[: index + 1]
        text = talk.rendered(messages, False)
        for name in TAUGHT:
            if messages[index].get(name):
                talk.check_field(text, messages, index, name)
        talk.check_content(text, messages, index)
        start = self.start(talk, text, index)
        closing = [end for _, _, end in self.controls(text) if end > start and not text[end:].strip()]
        if closing:
            return Turn(text, start, closing[-1])
        # some templates end an answer with the token that begins the next message
        written = len(text.rstrip())
        follow = [any_message("tool")] if messages[index].get("tool_calls") else []
        for other in [*talk.messages[index + 1 : index + 2], *follow, any_message("user")]:
            try:
                longer = talk.rendered([*messages, other], False)
            except UserError:
                continue
            next_at, end = next(((at, end) for _, at, end in self.controls(longer) if at >= written), (0, 0))
            if longer[:written] == text[:written] and end and not longer[written:next_at].strip():
                return Turn(longer[:end], start, end)
        after = max(talk.end_of(text, index, name) for name in messages[index])
        closing = [end for _, at, end in self.controls(text) if at >= after > start]  # more text may follow
        if closing:
            return Turn(text, start, closing[-1])
        raise UserError(
            "the chat template never closes the assistant's turn with a control token: name another template"
        )

    def start(self, talk: Messages, text: MaskedString, index: int) -> int:
        """Where in a rendered text the model begins to write the message with this index."""
        if index == 0:  # some templates require a user message before an answer's beginning
            asked = [any_message("user")]
            beginning = talk.rendered(asked, True)[len(talk.rendered(asked, False)) :]
            return text.find(beginning) + len(beginning) if beginning in text else 0
        before = talk.rendered(talk.messages[:index], True)
        same = shared_length(before, text)
        if same < len(before):  # a finished answer begins differently, for example without an open <think>
            if same < shared_length(before, talk.rendered(talk.messages[:index], False)):
                raise UserError(
                    f"Cannot train message {index + 1}, because the chat template writes the earlier "
                    "messages differently if this one follows: name another template"
                )
            same = next((at for _, at, end in self.controls(text) if at < same < end), same)
            other = text[same : same + SHOWN]
            if other.strip() and mask_of(other)[0] in codes_of(TEMPLATE):
                raise UserError(
                    f"Cannot train on this answer, because the chat template begins it with {before[same:]!r:.99} in "
                    f"the generation prompt, but with {other!r} in a finished conversation: name another template"
                )
        return same

    def example(self, turns: Sequence[Turn]) -> Conversation:
        """The training example of several turns; the rendered text of the last turn contains all of them."""
        text = turns[-1].text
        own, trained, blocks = self.controls(text), list[bool](), in_block(text)
        closing = {(start, end) for _, start, end in own if any(end == turn.end for turn in turns)}
        tokens = self.cut_tokens(text, [turn.start for turn in turns])
        for _, start, end in tokens:
            inside = any(turn.start <= start and end <= turn.end and start < end for turn in turns)
            trained.append(inside and (not blocks or in_block(text[start:end]) or (start, end) in closing))
        return Conversation([i for i, _, _ in tokens], trained, str.__getitem__(text, slice(None)))

    def tokens(self, text: MaskedString) -> list[Span]:
        """(token id, start, end) of each token. The text of a control token becomes this token only if the template
        wrote all of its characters."""
        own = self.controls(text)
        encoded = self.inner.encode(text, add_special_tokens=False)
        if self.spans(text, encoded) == own:
            return [(i, start, end) for i, (start, end) in zip(encoded.ids, encoded.offsets)]
        # marks stand for the control tokens of the template; all others are encoded as plain text
        pieces, marked, position = list[str](), list[int | str](), 0
        begins, ends = list[int](), list[int]()  # start and end in the text of each character of `joined`
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

    def cut_tokens(self, text: MaskedString, starts: Sequence[int]) -> list[Span]:
        """Like `tokens`, but cut at each of `starts`, where the model begins to write: the text before it is encoded by
        itself."""
        tokens = self.tokens(text)
        for start in starts:
            before = self.tokens(text[:start])
            if tokens[: len(before)] == before:
                continue
            control = next((at for _, at, _ in self.controls(text) if at >= start), len(text))
            own = self.tokenizer.encode_inside(text[start:control])
            rest = [(i, a + control, b + control) for i, a, b in self.tokens(text[control:])]
            tokens = [*before, *((i, start, control) for i in own), *rest]
        return tokens

    def controls(self, text: MaskedString) -> list[Span]:
        """(token id, start, end) of each control token that the template wrote."""
        runs = re.finditer(f"[{codes_of(TEMPLATE)}]+", mask_of(text))
        pieces = [(run.start(), text[slice(*run.span())]) for run in runs]
        encoded = [(at, piece, self.inner.encode(piece, add_special_tokens=False)) for at, piece in pieces]
        return [(i, a + at, b + at) for at, piece, one in encoded for i, a, b in self.spans(piece, one)]

    def spell(self, text: str) -> list[int]:
        """Token ids of a text without control tokens; if its encoding has one, the text is encoded in halves."""
        ids = self.tokenizer.encode(text, special=False)
        if not any(i in self.marks and i != self.tokenizer.unknown_id for i in ids):
            return ids
        return self.spell(text[: len(text) // 2]) + self.spell(text[len(text) // 2 :]) if len(text) > 1 else []

    def spans(self, text: str, encoding: tokenizers.Encoding) -> list[Span]:
        """(token id, start, end) of each control token of an encoding, without white space that it has absorbed. The
        unknown token counts only if the text spells its name."""
        result = []
        for i, (start, end) in zip(encoding.ids, encoding.offsets):
            start, end = trimmed(text, start, end) if i in self.marks else (start, end)
            unknown = i == self.tokenizer.unknown_id and text[start:end] != self.inner.id_to_token(i)
            if i in self.marks and not unknown:
                result.append((i, start, end))
        return result


def in_block(text: MaskedString) -> bool:
    """Whether a `{% generation %}` block holds any character of the text."""
    return any(ord(code) & GENERATED for code in {*mask_of(text)})


def taught(message: Message) -> bool:
    """Whether a message contains text or calls that a model can learn to write."""
    content = message.get("content")
    return bool(content.strip() if isinstance(content, str) else content) or any(message.get(n) for n in TAUGHT[1:])


def shared_length(one: str, other: str) -> int:
    """Length of the common prefix."""
    pairs = enumerate(zip(str.__iter__(one), str.__iter__(other)))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def trimmed(text: str, start: int, end: int) -> tuple[int, int]:
    """The part [start, end) of a text without white space at both ends."""
    piece = text[start:end]
    return start + len(piece) - len(piece.lstrip()), end - len(piece) + len(piece.rstrip())


@lru_cache(maxsize=2)
def chat_of(tokenizer: Tokenizer) -> Chat:
    """The Chat of a tokenizer, which renders and encodes messages; those of the last two tokenizers are cached."""
    return Chat(tokenizer)
