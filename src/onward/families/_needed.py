"""Which tensors of a published model its text decoder needs, by their names alone. Does not import torch."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Iterable

from onward.base.errors import UserError
from onward.families import read
from onward.families._interface import HF
from onward.families._wrappers import TextPart, text_part

THINKER = "thinker."  # prefix of the part that generates text, in models with another part that generates speech
NESTED = re.compile(r"(?:model\.)*(?:language_model|text_model|language|llm)\.(?:model\.)*|(?=lm_head\.)")
BESIDE = re.compile(r"(?:model\.)?(?=(?:embed_tokens|layers|norm|lm_head)\.)")  # beside other modules such as `visual`
LAYER = re.compile(r"(?:encoder\.)?(?:layers|blocks)\.(\d+)\.")  # transformers uses other names in some models


def text_names(part: TextPart, names: Collection[str]) -> dict[str, str]:
    """Map the names of the text decoder's tensors to the names in its family, without the base prefix."""
    own = {name: name.removeprefix(THINKER) for name in names if name.startswith(THINKER)} or {n: n for n in names}
    layout = NESTED if any(match.end() for match in map(NESTED.match, own.values()) if match) else BESIDE
    result = {}
    for name, short in own.items():
        if (match := layout.match(short)) and ".lora_" not in short and (new := renumbered(short[match.end() :], part)):
            result[name] = new
    return result


def renumbered(name: str, part: TextPart) -> str | None:
    """Return the name with its layer renumbered without the skipped layers; None for a tensor of a skipped layer."""
    number = int(match[1]) if (match := LAYER.match(name)) else -1
    if number in part.skipped:
        return None
    return LAYER.sub(f"layers.{number - sum(skipped < number for skipped in part.skipped)}.", name, count=1)


def prediction_layers(names: Iterable[str], n_layers: int) -> list[str]:
    """Return the tensors of layers for multi-token prediction. Published models name these layers mtp, or number them
    from `n_layers` on, after the model's own layers, and give them a projection named eh_proj. Without it, the layers
    are the model's own, and its config.json gives too few layers."""
    found = {name: match[1] for name in names if (match := re.search(r"(?:^|\.)(?:layers\.(\d+)|mtp\w*)\.", name))}
    numbers = {int(number) for number in found.values() if number}
    joins = any(re.search(rf"layers\.{n_layers}\.eh_proj\.", name) for name in found)
    following = {n_layers + i for i in range(len(numbers))} if joins else set()
    return [name for name, number in found.items() if not number or int(number) in following]


def needed(hf: HF, names: Collection[str]) -> set[str]:
    """Return the names of the tensors that a model's text decoder needs: without the encoders of images or sound and
    the layers for multi-token prediction. Returns all names if Onward cannot read the config.json."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            part = text_part(hf)
            kind, config = read(part.keys if part else hf)
    except UserError:
        return {*names}
    own = text_names(part, names) if part else {name: name for name in names}
    left = {*prediction_layers(own.values(), config.n_layers)}
    ignored = re.compile(kind.IGNORED or r"(?!)")
    return {name for name, short in own.items() if short not in left and not ignored.search(short)}
