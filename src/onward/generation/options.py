"""The options of a request for generation. Does not import torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any, get_type_hints

from onward.base.arguments import Range, Type, check, field_types, named, shown, types_of
from onward.base.errors import UserError
from onward.base.suggestions import nearest
from onward.config.ranges import SizeOrZero
from onward.generation.sampling import Sampling
from onward.text.tokenizer import SURROGATE

MAX_ANSWERS = 10_000  # maximum number of answers for each prompt
FORMS = "regex", "json_schema", "grammar"  # options that constrain the text of an answer; at most one is given
StopCondition = Callable[[str], bool]  # the text of an answer so far -> whether the answer ends there


@named
@dataclass(frozen=True)
class GenerationOptions(Sampling):
    """Options of generation: sampling, and the length, end, format and number of answers."""

    max_new_tokens: SizeOrZero | None = None  # maximum number of tokens in an answer; default: 256, or as many as fit
    min_new_tokens: SizeOrZero = 0  # minimum number of new tokens before a stop token can be generated
    stop: tuple[str, ...] = ()  # strings that end the answer; without include_stop, they are not part of it
    include_stop: bool = False  # include the stop string in the answer
    stop_token_ids: tuple[SizeOrZero, ...] = ()  # token ids that end the answer, in addition to the model's own
    stop_when: StopCondition | None = None  # function of the text, called after each token; True ends the answer
    regex: str = ""  # regular expression that the answer must match
    json_schema: str = ""  # JSON schema that the answer must conform to
    grammar: str = ""  # grammar that the answer must conform to, in GBNF or llguidance's variant of Lark's syntax
    n: Annotated[int, Range(1, MAX_ANSWERS)] = 1  # number of answers for each prompt
    seed: int | None = None  # random seed; the same seed produces the same text; default: a random seed
    adapter: str | None = None  # name of an adapter of the model, or "" for the base model; default: the adapter in use
    logprobs: SizeOrZero | None = None  # report each token's log-probability and this many alternatives; default: none

    def __post_init__(self) -> None:
        schema: Any = self.json_schema
        if isinstance(schema, Mapping):
            object.__setattr__(self, "json_schema", schema_text(schema))
        if callable(self.stop):
            raise UserError("Cannot use a function as stop: pass it as stop_when, and give stop only texts")
        super().__post_init__()
        if len(forms := [name for name in FORMS if getattr(self, name)]) > 1:
            raise UserError(f"{forms[0]} and {forms[1]} are both given: choose one")
        for name in FORMS:
            if SURROGATE.search(getattr(self, name)):
                raise UserError(f"{name} holds half a character, which UTF-8 cannot encode: leave it out")
        if not all(self.stop):
            raise UserError("stop has an empty text: remove it")


def schema_text(schema: Mapping[str, Any]) -> str:
    try:
        return json.dumps(schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"json_schema is not JSON: {error}") from None


def split(
    keywords: Mapping[str, Any], own: type, default: GenerationOptions
) -> tuple[GenerationOptions, dict[str, Any]]:
    """Split keyword arguments into GenerationOptions and the arguments that the TypedDict `own` declares. Given fields
    override those of the argument `options` or, without it, of `default`. None counts as not given."""
    base = keywords.get("options", default)
    if not isinstance(base, GenerationOptions):
        raise UserError(f"options is {shown(base)}: it takes GenerationOptions")
    given = {name: value for name, value in keywords.items() if value is not None and name != "options"}
    known = field_types(GenerationOptions)
    for name in given:
        if name not in known and name not in own.__annotations__:
            raise UserError(f"{name} is not an option of this method: {nearest(name, {*known, *own.__annotations__})}")
    changes = {name: value for name, value in given.items() if name in known}
    rest = {name: value for name, value in given.items() if name not in known}
    return replace(base, **changes) if changes else base, check(keyword_types(own), rest)


@cache
def keyword_types(own: type) -> dict[str, Type]:
    return types_of(get_type_hints(own, include_extras=True))
