"""Descriptions of decoders, and differences between two of them.

The texts come from the code: a part is described by its class and the first sentence of its docstring, a field by its
name and its comment.
"""

import dataclasses
import inspect
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from onward.base import fields
from onward.base.fields import Part, text
from onward.config.decoder import Attention, AttentionOnly, DecoderConfig, at, each
from onward.planning.parameters import active_parameters, biases, cache_bytes_per_token, parameters, state_bytes

NEUTRAL = (0, 1, None, "none", "auto")  # defaults that add, scale, cap or share nothing, and need no mention
MOST = 4  # maximum number of distinct values of a field to list; layers with other values are counted
SPECIAL = re.compile(r"; (0|none): (.*)")  # the meaning of a special value, in a field's comment
LABELS = {
    "position": "positions",
    "attention": "attention",
    "mlp": "feed-forward",
    "norm": "norms",
    "block": "residual stream",
}


@dataclasses.dataclass(frozen=True)
class Fact:
    """One value of a decoder's configuration, such as the number of heads."""

    what: str  # name, such as d_model, position, position.theta or biases
    value: int | float | str  # if layers differ, each value and its number of layers, as text
    meaning: str
    silent: bool = False  # whether the fact can be left out of the text


@dataclasses.dataclass(frozen=True)
class ConfigChange:
    """A value that differs between two configurations; None for a configuration that does not have it."""

    what: str
    before: int | float | str | None
    after: int | float | str | None
    meaning: str


def describe(config: DecoderConfig) -> list[Fact]:
    """List the values of a decoder's configuration, without defaults that need no mention (`neutral`)."""
    return [fact for fact in facts(config) if not fact.silent]


def describe_parts(config: DecoderConfig) -> list[tuple[str, str]]:
    """Return (name, description) for the sizes of a decoder and for each kind of component, such as ("attention",
    "self, 8 heads of 64"). If layers differ, each description is followed by the number of its layers."""
    head = "the embeddings are the head's weights" if config.tied else "the head has its own weights"
    lines = [
        ("layers", f"{config.n_layers} of width {config.d_model:,}, context {config.context_length:,}"),
        ("vocabulary", f"{config.vocab_size:,} tokens; {head}"),
    ]
    layers = range(config.n_layers)
    for name, label in LABELS.items():
        texts = [at(getattr(config, name), layer).describe(config) for layer in layers]
        if name == "mlp":
            blocks = [at(config.block, layer) for layer in layers]
            texts = ["none" if isinstance(block, AttentionOnly) else text for block, text in zip(blocks, texts)]
        lines.append((label, str(over_layers(texts))))
    return lines


def differences(before: DecoderConfig, after: DecoderConfig) -> list[ConfigChange]:
    """List the values that differ between two decoders' configurations, `before` and `after`, sizes first."""
    old, new = ({fact.what: fact for fact in facts(config)} for config in (before, after))
    order = {what: i for i, what in enumerate(new)}
    changes = []
    for what in sorted({**old, **new}, key=lambda what: order[what.split(".")[0]]):
        both = [table.get(what) for table in (old, new)]
        a, b = (None if fact is None else fact.value for fact in both)
        mentioned = [fact for fact in both if fact and not fact.silent]
        if mentioned and a != b:
            changes.append(ConfigChange(what, a, b, mentioned[-1].meaning))
    return changes


def facts(config: DecoderConfig) -> Iterator[Fact]:
    """Yield all values of a configuration, sizes first; values whose names have no dot exist for every decoder."""
    count, active = parameters(config), active_parameters(config)
    yield Fact("parameters", count, "trainable parameters")
    yield Fact("active parameters", active, "parameters that one token uses", silent=active == count)
    first, last = cache_bytes_per_token(config), cache_bytes_per_token(config, length=config.context_length)
    yield Fact("key/value bytes per token", first, "in all layers, at 16 bits per element")
    states = state_bytes(config)
    yield Fact("state bytes per row", states, "in all recurrent layers, at any length; matrices at 32 bits", not states)
    yield Fact("key/value bytes, windows full", last, "of one more token, once windows are full", first == last)
    for field in dataclasses.fields(config):
        value, meaning = getattr(config, field.name), fields.docs(DecoderConfig)[field.name]
        if isinstance(value, Part | tuple):
            yield from facts_of_part(field.name, meaning, [at(value, layer) for layer in range(config.n_layers)])
        elif not field.name.endswith("bias"):
            silent = neutral(value, field) or (field.name == "d_embed" and value == config.d_model)
            silent |= field.name == "d_ff" and all(getattr(part, "d_ff", 0) for part in each(config.mlp))
            yield Fact(field.name, shown(value, meaning), SPECIAL.sub("", meaning), silent)
        if field.name == "n_kv_heads":
            yield Fact("grouping", grouping(config), "how heads share keys and values")
    has = biases(config)
    yield Fact("biases", has, "layers that add a learned bias vector to their output", silent=has == "none")


def facts_of_part(what: str, meaning: str, parts: Sequence[Any], silent: bool = False) -> Iterator[Fact]:
    """Yield the kind of a component and the values of its fields, given the parts of all layers; the values of a field
    are those of the layers whose part has the field. `facts` lists biases."""
    kinds = [titled(part) if isinstance(part, Part) else part for part in parts]
    yield Fact(what, over_layers(kinds, meaning), SPECIAL.sub("", meaning), silent)
    owned = [
        (part, field)
        for part in parts
        if isinstance(part, Part)
        for field in dataclasses.fields(part)  # type: ignore[arg-type]
        if field.init
    ]
    for name in dict.fromkeys(field.name for _, field in owned if not field.name.endswith("bias")):
        holders = [(part, field) for part, field in owned if field.name == name]
        values = [getattr(part, name) for part, _ in holders]
        silent = all(neutral(value, field) for value, (_, field) in zip(values, holders))
        meaning = fields.docs(type(holders[-1][0])).get(name, "")
        if any(isinstance(value, Part) for value in values):
            yield from facts_of_part(f"{what}.{name}", meaning, values, silent)
        else:
            yield Fact(f"{what}.{name}", over_layers(values, meaning), SPECIAL.sub("", meaning), silent)


def neutral(value: Any, field: dataclasses.Field[Any]) -> bool:
    return value == field.default and value in NEUTRAL


def grouping(config: DecoderConfig) -> str:
    return str(over_layers([sharing(at(config.attention, layer), config) for layer in range(config.n_layers)]))


def sharing(part: Attention, config: DecoderConfig) -> str:
    if "latent" in part.entries(config):
        return "latent: the keys and values of all heads are projections of one vector"
    if not part.entries(config):
        return "no keys and values: a state of fixed size" if part.states(config) else "no keys and values"
    heads = part.heads(config)
    shared = heads.n_heads // heads.n_kv_heads
    if shared == 1:
        return "multi-head: each head has its own keys and values"
    return f"{'multi' if heads.n_kv_heads == 1 else 'grouped'}-query: {shared} heads share keys and values"


def titled(part: Part) -> str:
    about = sentence(type(part))
    capital = about[:1].isupper() and not about[1:2].isupper()
    return f"{type(part).__name__}: {about[:1].lower() + about[1:] if capital else about}"


def sentence(documented: Any) -> str:
    """First sentence of the docstring of a class or module, without its full stop."""
    first = (inspect.getdoc(documented) or "").partition("\n\n")[0]
    return re.split(r"\.(?:\s+(?=[A-Z])|$)", " ".join(first.split()))[0]


def formula(part: Part) -> str:
    """First sentence of a part's docstring, such as a norm's formula, without names of models in parentheses."""
    return re.sub(r" \([^()]*\)$", "", sentence(type(part)))


def over_layers(values: Sequence[Any], meaning: str = "") -> int | float | str:
    """The value of all layers or, if they differ, each value and the number of its layers."""
    counts = Counter(shown(value, meaning) for value in values).most_common()
    if len(counts) == 1:
        return counts[0][0]
    listed = [f"{text(value)} ({count} of {len(values)} layers)" for value, count in counts[:MOST]]
    others = sum(count for _, count in counts[MOST:])
    return "; ".join(listed + [f"others ({others} of {len(values)} layers)"] * bool(others))


def shown(value: Any, meaning: str) -> int | float | str:
    """A value for display: for a special value, such as 0, the explanation in the field's comment."""
    special = SPECIAL.search(meaning)
    if special and value in ((None,) if special[1] == "none" else (0,)):
        return special[2]
    if isinstance(value, tuple):
        return f"{len(value)} from {text(value[0])} to {text(value[-1])}" if value else "none"
    return "none" if value is None else value
