"""Keyword arguments, for editors and type checkers. Written by `python -m support.keywords`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict

from onward.generation.options import GenerationOptions


class OptionKeywords(TypedDict, total=False):
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    no_repeat_ngram_size: int
    logit_bias: Mapping[int, float]
    suppress_tokens: Sequence[int]
    forced_tokens: Sequence[int]
    processors: Callable[..., Any] | Sequence[Callable[..., Any]]
    min_new_tokens: int
    stop: str | Sequence[str]
    include_stop: bool
    stop_token_ids: Sequence[int]
    stop_when: Callable[[str], bool] | None
    regex: str
    json_schema: str | Mapping[str, Any]
    grammar: str
    seed: int | None
    adapter: str | None
    logprobs: int | None


class BeamKeywords(TypedDict, total=False):
    beams: int
    groups: int
    diversity: float
    length_penalty: float
    early_stopping: bool | Literal["never"]


class BeamSearchKeywords(TypedDict, total=False):
    options: GenerationOptions
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    no_repeat_ngram_size: int
    logit_bias: Mapping[int, float]
    suppress_tokens: Sequence[int]
    forced_tokens: Sequence[int]
    processors: Callable[..., Any] | Sequence[Callable[..., Any]]
    min_new_tokens: int
    stop_token_ids: Sequence[int]
    n: int
    beams: int
    groups: int
    diversity: float
    length_penalty: float
    early_stopping: bool | Literal["never"]
