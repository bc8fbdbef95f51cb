"""Names of activations: patterns, and numbers that select a head, unit or expert."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from onward.base.arguments import checked
from onward.base.errors import UserError
from onward.model.decoder import Decoder
from onward.tracing.hooks import Traceable
from onward.tracing.sites import activations

NEAREST = 4  # maximum number of names in a message


@checked
def activation_names(model: Decoder) -> dict[str, str]:
    """Return the names of all activations of a model that `trace` and `edit` accept, with their shapes:
    `{"blocks.0.attn.weights": "(B, 4, T, S)", ...}`.

    B is the number of sequences, T the number of tokens of a call, S the number of keys that the queries attend to.
    """
    return {name: str(activation) for name, activation in activations(model).items()}


def full_name(name: str) -> str:
    """`blocks.3` is short for `blocks.3.out`."""
    return f"{name}.out" if re.fullmatch(r"blocks\.[\d*]+", name) else name


def unknown(pattern: str, known: Iterable[str]) -> UserError:
    near = difflib.get_close_matches(full_name(pattern), [*known], n=NEAREST, cutoff=0)
    return UserError(f"{pattern!r} is not an activation of this model: the nearest are {', '.join(near)}")


def resolve(known: Mapping[str, Traceable], patterns: Iterable[str]) -> dict[str, set[int | None]]:
    """Match `patterns`, names given to `trace` or `edit`, with the `known` activations. Returns {name: selected numbers
    of heads, units or experts} for each matching activation; None among the numbers stands for the whole activation.

    `*` in a pattern matches any characters. Raises a UserError that lists the names nearest to an unknown one.
    """
    matched: dict[str, set[int | None]] = {}
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise UserError(f"Cannot use {pattern!r} as the name of an activation: give each name as its own string")
        index: int | None = None
        names = [name for name in known if fnmatchcase(name, full_name(pattern))]
        base, _, last = pattern.rpartition(".")
        if not names and last.isdecimal():
            index = int(last)
            names = [name for name in known if fnmatchcase(name, base) and known[name].parts]
            if few := next((name for name in names if index >= known[name].parts), None):
                raise UserError(f"Cannot find {pattern!r}: {few} has only 0 to {known[few].parts - 1}")
        if not names:
            raise unknown(pattern, known)
        for name in names:
            matched.setdefault(name, set()).add(index)
    return matched
