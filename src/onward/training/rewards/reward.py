"""The base class of rewards, and the completions that rewards score."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from onward.base.arguments import Range, shown
from onward.base.errors import UserError
from onward.base.fields import Part, parse, part
from onward.base.suggestions import nearest

if TYPE_CHECKING:
    from onward.text.tokenizer import Tokenizer

Seconds = Annotated[float, Range(1e-3, 1e6)]
QUOTED_OR_FUNCTION = re.compile(r"""('[^']*'|"[^"]*")|([\w./~-]+\.py):(\w+)""")


@dataclass(frozen=True)
class Completion:
    """A completion of a prompt, with the fields of the record (a row of the data) that the prompt comes from."""

    prompt: str
    text: str  # text of the completion, without its end token
    answer: str = ""  # answer of the record; "": none
    columns: Mapping[str, Any] = field(default_factory=dict)  # other fields of the record, as JSON values
    prompt_tokens: Sequence[int] = ()
    tokens: Sequence[int] = ()  # tokens of the completion, including its end token
    turns: Sequence[str] = ()  # turns of the model and the environment, alternating; `text` is the model's last turn


Scorer = Callable[[Sequence[Completion]], Sequence[float]]


class Reward(Part):
    """The base class of rewards: a reward is a number for a completion; higher is better. A reward is a frozen
    dataclass; its fields are its options.

    A subclass with a kind (`class Mine(Reward, kind="mine")`) defines `score` for one completion or `scores` for all
    completions of a step; a subclass that loads a model or starts a process defines `open`. It is registered when its
    module is imported: `--import MODULE --reward mine`.
    """

    @classmethod
    def shorthand(cls, value: Any) -> Any:
        """Return the fields, as a dict, of a reward written in a short form: FILE.py:FUNCTION, alone or as a term of a
        sum, or the folder of a reward model. None for any other value. Raises a UserError for options after a colon."""
        if not isinstance(value, str) or value in cls.kinds:
            return None
        if value and Path(value).is_dir():
            return {"kind": "model", "folder": value}
        text = QUOTED_OR_FUNCTION.sub(lambda m: m[1] or f"function(file={m[2]!r}, name={m[3]!r})", value)
        kind, colon, _ = text.partition(":")
        if colon and kind.isidentifier():
            raise UserError(
                f"reward is {shown(value)}: options are in parentheses, such as length(characters=100); "
                f"{nearest(kind, cls.choices())}"
            )
        return parse(text, "reward") if text != value else None

    @property
    def needs(self) -> frozenset[str]:
        """The names of the fields that each record of the data must have for this reward, such as answer."""
        return frozenset()

    @property
    def label(self) -> str:
        """The name of the reward in the log; by default its kind."""
        return self.kind

    def open(self, tokenizer: Tokenizer | None = None, device: str = "auto") -> Scorer:
        """Load the models or start the processes that the reward needs, and return a function from a list of
        completions to the list of their scores. `tokenizer` is the tokenizer of the model in training; `device` is the
        device of a reward model. Raises a UserError if a model, file or server that the reward needs cannot be used."""
        return self.scores

    def scores(self, completions: Sequence[Completion]) -> Sequence[float]:
        """Return the score of each of the completions of a training step."""
        return [self.score(completion) for completion in completions]

    def score(self, completion: Completion) -> float:
        """Return the score of one completion."""
        raise NotImplementedError


def reward_of(text: str) -> Reward:
    """Return the reward that a text describes, such as `exact + 0.2 * length(characters=100)`, FILE.py:FUNCTION, or the
    folder of a reward model. Raises a UserError, which suggests the nearest kind, for other texts."""
    return part(Reward, text, "reward")


def finite(scores: Sequence[Any], completions: Sequence[Completion], name: str) -> list[float]:
    """Return the `scores` that the reward `name` gave to completions, as finite floats. Raises a UserError if the
    number of scores differs from the number of completions, or if a score is not a finite number."""
    if len(scores) != len(completions):
        raise UserError(
            f"the reward {name} returned {len(scores)} values for {len(completions)} completions: return one for each"
        )
    for score, completion in zip(scores, completions):
        try:
            right = math.isfinite(score)
        except (TypeError, ValueError):  # not a number, or a tensor with several elements
            right = False
        if not right:
            raise UserError(
                f"the reward {name} returned {shown(score)} for {completion.text!r:.60}: return a finite number"
            )
    return [float(score) for score in scores]


def column(completion: Completion, name: str, reward: str) -> Any:
    """Return the field `name` of a completion's record. Raises a UserError, which names the reward that needs it, if
    the record has no such field."""
    if name not in completion.columns:
        raise UserError(
            f"the record of the prompt {completion.prompt!r:.60} has no {name}, which the reward {reward} needs: add it"
        )
    return completion.columns[name]
