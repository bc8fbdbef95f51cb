"""The options of generation as keyword arguments, which editors complete and type checkers verify."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypedDict, get_type_hints

from onward.base.arguments import check, shown, types_of
from onward.base.errors import UserError
from onward.base.fields import hints, nearest
from onward.generation.options import GenerationOptions
from onward.generation.sampling import SamplingKeywords
from onward.generation.search.beam import EarlyStopping


class SearchKeywords(SamplingKeywords, total=False):
    """The keyword arguments that `LanguageModel.beam_search` and `LanguageModel.contrastive_search` share; see
    GenerationOptions for their meanings."""

    options: GenerationOptions
    min_new_tokens: int
    stop_token_ids: Sequence[int]


class BeamKeywords(TypedDict, total=False):
    """The keyword arguments of `LanguageModel.beam_search` that are not fields of GenerationOptions; see
    `generation.search.beam.beam_search` for their meanings."""

    beams: int
    groups: int
    diversity: float
    length_penalty: float
    early_stopping: EarlyStopping


class BeamSearchKeywords(SearchKeywords, BeamKeywords, total=False):
    """The keyword arguments of `LanguageModel.beam_search`."""

    n: int


class ContrastiveKeywords(TypedDict, total=False):
    """The keyword arguments of `LanguageModel.contrastive_search` that are not fields of GenerationOptions; see
    `generation.search.contrastive.contrastive_search` for their meanings."""

    alpha: float
    k: int


class ContrastiveSearchKeywords(SearchKeywords, ContrastiveKeywords, total=False):
    """The keyword arguments of `LanguageModel.contrastive_search`."""


def split(
    keywords: Mapping[str, Any], own: type, default: GenerationOptions
) -> tuple[GenerationOptions, dict[str, Any]]:
    """Split keyword arguments of a search into GenerationOptions and the other arguments, which the TypedDict `own`
    declares; return both.

    The fields of GenerationOptions replace those of the keyword argument `options`, or else of `default`. A value of
    None counts as not given. Raises a UserError for an unknown keyword.
    """
    base = keywords.get("options", default)
    if not isinstance(base, GenerationOptions):
        raise UserError(f"options is {shown(base)}: it takes GenerationOptions")
    given = {name: value for name, value in keywords.items() if value is not None and name != "options"}
    known = hints(GenerationOptions)
    for name in given:
        if name not in known and name not in own.__annotations__:
            raise UserError(f"{name} is not an option of this method: {nearest(name, {*known, *own.__annotations__})}")
    changes = {name: value for name, value in given.items() if name in known}
    rest = {name: value for name, value in given.items() if name not in known}
    return replace(base, **changes) if changes else base, check(
        types_of(get_type_hints(own, include_extras=True)), rest
    )
