"""The base class of environments, and the encoding of replies for the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from onward.base.arguments import Range
from onward.base.errors import UserError
from onward.base.fields import Part
from onward.training.rewards.reward import Completion

if TYPE_CHECKING:
    from onward.text.tokenizer import Tokenizer

Replier = Callable[[Sequence[Completion]], Sequence[str | None]]


class Environment(Part):
    """The base class of environments, for reinforcement learning with several turns. A model writes a turn, which ends
    with an end token; the environment replies; the model continues, until there is no reply. The loss ignores the
    tokens of replies.

    A subclass with a kind (`class Mine(Talk, kind="mine")`) defines `reply`.
    """

    @classmethod
    def shorthand(cls, value: Any) -> Mapping[str, Any] | None:
        """Return the fields, as a dict, of an environment that is written as FILE.py:FUNCTION; None for other
        values."""
        file, colon, name = value.rpartition(":") if isinstance(value, str) else ("", "", "")
        return {"kind": "function", "file": file, "name": name} if colon and file.endswith(".py") else None

    def open(self) -> Replier:
        """Start the process of the environment, if it has one, and return the function that replies to a list of
        unfinished completions: for each completion it returns the text that follows its turns, or None if the
        completion has ended."""
        return lambda completions: [self.reply(completion) for completion in completions]

    def reply(self, completion: Completion) -> str | None:
        """Return the reply to a completion, whose `turns` are the texts of the model and of the environment so far,
        alternating; None if the completion has ended."""
        raise NotImplementedError


@dataclass(frozen=True)
class Talk(Environment, kind=""):
    """The base class of environments with two options: the maximum number of turns in a completion, and the role of
    replies in the chat template."""

    turns: Annotated[int, Range(1, 1000)] = 4  # maximum number of model turns in a completion
    role: str = ""  # role of a reply in the chat template, such as tool; default: the reply is inserted as plain text


def reply_tokens(tokenizer: Tokenizer, role: str, reply: str) -> list[int]:
    """Return the tokens of an environment's reply, which follow the end token of the model's turn: the text `reply` or,
    with a `role`, a message of this role in the chat template and the beginning of the model's next turn. Raises a
    UserError if a role is given and there is no chat template."""
    if not role:
        return tokenizer.encode_inside(reply)
    if not tokenizer.templates:
        raise UserError(f"environment.role is {role!r}, which needs a chat template: give one, or leave out the role")
    from onward.text.chat import Chat

    chat = Chat(tokenizer)
    talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    trained = chat.conversations(talk)[-1].trained
    turn_end = len(trained) - trained[::-1].index(True)
    return chat.encode([*talk, {"role": role, "content": reply}])[turn_end:]
