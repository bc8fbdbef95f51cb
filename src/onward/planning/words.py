"""Decoders in words: what a configuration says, and what changed between two of them.

The words are the code's own: a part is called by its class and the first sentence of its docstring, a field by its
name and the comment behind it.
"""

import dataclasses
import inspect
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from onward import fields
from onward.fields import Part
from onward.model.config import DecoderConfig, at
from onward.planning.parameters import active_parameters, biases, cache_bytes_per_token, parameters

UNSAID = (0, 1, None, "none", "auto")  # defaults that go without saying: nothing is added, scaled, capped or shared
MOST = 4  # so many different values of a field over the layers are told one by one
SPECIAL = re.compile(r"; (0|none): (.*)")  # what a value stands for, in a field's comment


@dataclasses.dataclass(frozen=True)
class Fact:
    """One thing that a configuration says."""

    what: str  # a size, a slot, or a field of the part in it: d_model, position, position.theta
    value: int | float | str  # where layers differ, text that tells how many have which
    meaning: str
    silent: bool = False  # whether it goes without saying


@dataclasses.dataclass(frozen=True)
class Change:
    """One thing that two configurations say differently; None where one of them does not speak of it."""

    what: str
    before: int | float | str | None
    after: int | float | str | None
    meaning: str


def describe(config: DecoderConfig) -> list[Fact]:
    """What there is to say of a decoder."""
    return [fact for fact in facts(config) if not fact.silent]


def differences(before: DecoderConfig, after: DecoderConfig) -> list[Change]:
    """What changed from one decoder to the other."""
    old, new = ({fact.what: fact for fact in facts(config)} for config in (before, after))
    order = {what: place for place, what in enumerate(new)}
    changes = []
    for what in sorted({**old, **new}, key=lambda what: order[what.split(".")[0]]):
        there = [table.get(what) for table in (old, new)]
        a, b = (None if fact is None else fact.value for fact in there)
        said = [fact for fact in there if fact and not fact.silent]
        if said and a != b:
            changes.append(Change(what, a, b, said[-1].meaning))
    return changes


def facts(config: DecoderConfig) -> Iterator[Fact]:
    """All that a configuration says, sizes first; what has no dot in its name is said of every configuration."""
    count, active = parameters(config), active_parameters(config)
    yield Fact("parameters", count, "trained numbers")
    yield Fact("active parameters", active, "those that one token uses", silent=active == count)
    first, last = cache_bytes_per_token(config), cache_bytes_per_token(config, length=config.context_length)
    yield Fact("key/value bytes per token", first, "in all layers, at 16 bits a number")
    yield Fact("key/value bytes, windows full", last, "where a new token takes an old one's place", first == last)
    for field in dataclasses.fields(config):
        value, meaning = getattr(config, field.name), fields.docs(DecoderConfig)[field.name]
        if isinstance(value, Part | tuple):
            yield from of_slot(field.name, meaning, [at(value, layer) for layer in range(config.n_layers)])
        elif not field.name.endswith("bias"):
            silent = unsaid(value, field) or (field.name == "d_embed" and value == config.d_model)
            yield Fact(field.name, say(value, meaning), SPECIAL.sub("", meaning), silent)
        if field.name == "n_kv_heads":
            yield Fact("grouping", grouping(config), "what heads share")
    has = biases(config)
    yield Fact("biases", has, "what has a trained vector added", silent=has == "none")


def of_slot(what: str, meaning: str, parts: Sequence[Part | None], silent: bool = False) -> Iterator[Fact]:
    """What the parts of a slot are, layer by layer, and what their fields are; biases are told all together."""
    yield Fact(what, spread([part and called(part) for part in parts], meaning), SPECIAL.sub("", meaning), silent)
    owned = [(part, field) for part in parts if part is not None for field in dataclasses.fields(part) if field.init]  # type: ignore[arg-type]
    for name in dict.fromkeys(field.name for _, field in owned if not field.name.endswith("bias")):
        holders = [(part, field) for part, field in owned if field.name == name]
        values = [getattr(part, name) for part, _ in holders]
        silent = all(unsaid(value, field) for value, (_, field) in zip(values, holders))
        meaning = fields.docs(type(holders[-1][0])).get(name, "")
        if any(isinstance(value, Part) for value in values):
            yield from of_slot(f"{what}.{name}", meaning, values, silent)
        else:
            yield Fact(f"{what}.{name}", spread(values, meaning), SPECIAL.sub("", meaning), silent)


def unsaid(value: Any, field: dataclasses.Field[Any]) -> bool:
    return value == field.default and value in UNSAID


def grouping(config: DecoderConfig) -> str:
    """What the heads of the first layer share."""
    heads = [shape for shape in at(config.attention, 0).entries(config).values() if len(shape) > 1]
    if not heads:
        return "latent: all heads make their keys and values from one vector"
    shared = config.n_heads // config.n_kv_heads
    if shared == 1:
        return "multi-head: each head has its own keys and values"
    return f"{'multi' if config.n_kv_heads == 1 else 'grouped'}-query: {shared} heads share keys and values"


def called(part: Part) -> str:
    """A part in words: its class, and the first sentence about it."""
    about = sentence(type(part))
    capital = about[:1].isupper() and not about[1:2].isupper()
    return f"{type(part).__name__}: {about[:1].lower() + about[1:] if capital else about}"


def sentence(documented: Any) -> str:
    """The first sentence of a docstring, without its full stop."""
    first = (inspect.getdoc(documented) or "").partition("\n\n")[0]
    return re.split(r"\.(?:\s+(?=[A-Z])|$)", " ".join(first.split()))[0]


def spread(values: Sequence[Any], meaning: str) -> int | float | str:
    """The values of some layers: the one that all have, or how many have which."""
    counts = Counter(say(value, meaning) for value in values).most_common()
    if len(counts) == 1:
        return counts[0][0]
    told = [f"{text(value)} ({count} of {len(values)} layers)" for value, count in counts[:MOST]]
    others = sum(count for _, count in counts[MOST:])
    return "; ".join(told + [f"others ({others} of {len(values)} layers)"] * bool(others))


def say(value: Any, meaning: str) -> int | float | str:
    """A value of a field: what its comment says that it stands for, else a number as it is, else text."""
    special = SPECIAL.search(meaning)
    if special and value in ((None,) if special[1] == "none" else (0,)):
        return special[2]
    if isinstance(value, tuple):
        return f"{len(value)} from {text(value[0])} to {text(value[-1])}" if value else "none"
    return "none" if value is None else value


def text(value: int | float | str | None) -> str:
    """A value as it is printed."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return f"{int(value):,}" if value == int(value) else f"{value:.6g}"
    return value or ""
