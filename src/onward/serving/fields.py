"""The fields of requests that all generating routes share, under the names of OpenAI, vLLM and llama.cpp.

A field that is unknown is ignored and named once in the log. A field that the server knows but does not support is
refused, and so is a field of another route, unless its value has no effect.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator
from starlette.exceptions import HTTPException

from onward.base.arguments import Either, Limited, Several, Table, Type, field_types
from onward.base.errors import UserError
from onward.base.fields import docs
from onward.generation.options import FORMS, GenerationOptions
from onward.generation.sampling import Sampling
from onward.serving.edits import Edits
from onward.serving.errors import ApiError
from onward.serving.names import OTHER_NAMES
from onward.serving.shapes import Real, Whole, declared, holds_fields, unknown

LOG = logging.getLogger("onward.serving")
APART = {"include_stop", "adapter", "logprobs"}  # options that routes set from other fields
HARMLESS = {  # fields that change no answer, or that only another, refused field makes use of
    *("user", "metadata", "store", "service_tier", "safety_identifier", "request_id", "session_id", "priority"),
    *("cache_prompt", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "n_cache_reuse", "id_slot"),
    *("include_reasoning", "verbosity", "stream_interval", "backend_sampling", "n_keep", "n_discard"),
    *("speculative.n_max", "speculative.n_min", "speculative.p_min", "speculative.type", "speculative.ngram_size_n"),
    *("speculative.ngram_size_m", "speculative.ngram_min_hits", "xtc_threshold", "dynatemp_exponent"),
    *("adaptive_decay", "mirostat_tau", "mirostat_eta", "dry_base", "dry_allowed_length", "dry_penalty_last_n"),
    *("dry_sequence_breakers", "reasoning_control", "reasoning_budget_message", "prediction"),
    *("spaces_between_special_tokens", "tool_choice", "parallel_tool_calls"),
}
REFUSED = {  # fields that are not supported, unless they are null, false, 0 or empty
    *("suffix", "use_beam_search", "bad_words", "logits_processors", "allowed_token_ids", "samplers", "mirostat"),
    *("dynatemp_range", "dry_multiplier", "xtc_probability", "n_probs", "post_sampling_probs", "t_max_predict_ms"),
    *("lora", "documents", "chat_template", "chat_format", "chat_parser", "generation_prompt", "preserved_tokens"),
    *("grammar_lazy", "grammar_triggers", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("functions", "max_tool_calls", "web_search_options", "audio", "image", "image_data"),
    *("previous_response_id", "conversation", "background", "background_options", "context_management", "prompt"),
    *("previous_input_messages", "enable_response_messages", "moderation", "access_programs", "echo", "top_logprobs"),
    *("reasoning_budget_start_tag", "reasoning_budget_end_tag", "reasoning_budget_end_tags", "response_fields"),
    *("return_tokens", "return_progress", "return_token_offsets", "return_tokens_as_token_ids", "return_prompt_text"),
    *("timings_per_token", "n_indent", "add_special_tokens", "logprob_token_ids", "repetition_detection"),
    *("prompt_embeds", "cache_salt", "watermarking", "vllm_xargs", "kv_transfer_params", "ec_transfer_params"),
    *("routed_experts_prompt_start", "return_mm_kwargs", "mm_payload", "mm_processor_kwargs", "media_io_kwargs"),
    *("load_inplace", "is_3d_lora_weight", "lora_int_id", "min_keep"),
}
NEUTRAL: dict[str, Any] = {  # likewise, unless they are null or have this value
    "best_of": 1,
    "length_penalty": 1,
    "tfs_z": 1,
    "top_n_sigma": -1,
    "adaptive_target": -1,
    "repeat_last_n": -1,
    "reasoning_budget_tokens": -1,
    "skip_special_tokens": True,
    "parse_tool_calls": True,
    "modalities": ["text"],
    "function_call": "none",
    "reasoning_format": "auto",
    "response_format": {"type": "text"},
    "truncation_side": "left",
    "truncation": "disabled",
    "prompt_logprobs": None,
    "thinking_token_budget": None,
    "parse_special": None,
}
INSTEAD = {  # the supported field with the meaning of a refused one
    **{f"guided_{form}": f"structured_outputs.{form}" for form in ("json", "regex", "choice", "grammar")},
    "response_format": "structured_outputs",
    "n_probs": "logprobs",
    "top_logprobs": "logprobs",
    "functions": "tools",
    "function_call": "tool_choice",
    "prompt_logprobs": "echo with logprobs",
}
MOST_ITEMS = 16_384  # maximum items of a list of objects, such as messages or tools, and of a list or table of options
WORKABLE_STOPS = 64  # largest number of stop texts of a request
FORM_CHARACTERS = 100_000  # maximum characters of a regular expression, grammar or schema, as JSON
unknown_fields: set[str] = set()  # names of fields that were already logged


class Structured(BaseModel):
    """A constraint on the format of the answer, as vLLM's field structured_outputs: exactly one of these fields."""

    model_config = ConfigDict(extra="allow")

    json_schema: dict[str, Any] | bool | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class StreamOptions(BaseModel):
    """The options of a stream: which of its events hold the token counts."""

    model_config = ConfigDict(extra="allow")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(None, description="With include_usage: usage in every event.")
    include_obfuscation: bool | None = Field(None, description="true is refused: the server adds no padding.")


class Body(BaseModel):
    """The body of a request: the model, and further fields."""

    model_config = ConfigDict(extra="allow")

    model: str | None = Field(None, description="A name that /v1/models lists; by default the first.")

    @model_validator(mode="before")
    @classmethod
    def log_nested(cls, value: Any) -> Any:
        if isinstance(value, Mapping):
            nested = [(name, kind) for name, kind in nesting(cls).items() if name in value]
            for name, _ in nested:
                if isinstance(value[name], list) and len(value[name]) > MOST_ITEMS:
                    raise HTTPException(413, f"{name} has {len(value[name]):,} items: give at most {MOST_ITEMS:,}")
            log_unknown(path for name, kind in nested for path in unknown(kind, value[name], name))
        return value


@cache
def nesting(cls: type[Body]) -> dict[str, Any]:
    """The types of the fields of a request that hold fields themselves, by name."""
    return {name: kind for name, (kind, _) in (declared(cls) or {}).items() if holds_fields(kind)}


def json_type(kind: Type) -> Any:
    """The type of JSON values that pydantic accepts for a type of the options. The options check their ranges
    themselves."""
    match kind:
        case Limited() | Either():
            return json_type(kind.args[0])
        case Table():
            table: Any = dict[str, json_type(kind.args[1])]  # type: ignore[misc]  # a type that is made here
            return Annotated[table, Field(max_length=MOST_ITEMS)]
        case Several():
            return Annotated[list[json_type(kind.args[0])], Field(max_length=MOST_ITEMS)]  # type: ignore[misc]
    return {int: Whole, float: Real}.get(kind.annotation, kind.annotation)


OPTIONS = {name: kind for name, kind in field_types(GenerationOptions).items() if not kind.only_in_python}
SERVED = [name for name in OPTIONS if name not in APART]


def with_options(base: type[Body], names: Iterable[str]) -> type[Body]:
    """A body with options of generation under their own names, as GenerationOptions documents them."""
    texts = docs(GenerationOptions)
    types: Any = {name: (json_type(OPTIONS[name]) | None, Field(None, description=texts[name])) for name in names}
    return create_model("OptionFields", __base__=base, **types)


if TYPE_CHECKING:
    SamplingOptions = Body
else:
    SamplingOptions = with_options(Body, [name for name in SERVED if name in field_types(Sampling)])


class SamplingFields(SamplingOptions):
    """The fields that define how logits become the distribution of the next token."""

    temperature: Real | None = Field(None, description="By default 1; 0: the likeliest token.")
    top_p: Real | None = Field(None, description="By default 1: all tokens.")
    repeat_penalty: Real | None = Field(None, description="Also as repetition_penalty.")

    def given(self) -> dict[str, Any]:
        """The fields that the request sets and GenerationOptions has, by their names there."""
        check_others(self)
        values, sources = dict[str, Any](), dict[str, str]()
        for name, own in [*zip(SERVED, SERVED), *OTHER_NAMES.items()]:
            if (value := getattr(self, name, None)) is None or name not in type(self).model_fields:
                continue
            if own in values and values[own] != value:
                raise ApiError(f"{sources[own]} and {name} are both given and differ: leave one out", param=name)
            values[own], sources[own] = value, sources.get(own, name)
        for name in "top_k", "seed":
            if values.get(name) == -1:  # no limit, a random seed
                del values[name]
        if values.get("top_p") == 0:  # top_p 0 leaves only the likeliest token
            del values["top_p"]
            values["temperature"] = 0
        return values


if TYPE_CHECKING:
    AnswerOptions = SamplingFields
else:
    AnswerOptions = with_options(SamplingFields, [name for name in SERVED if name not in field_types(Sampling)])


class AnswerFields(AnswerOptions):
    """The fields that define how answers are sampled, and their number, length, end and format."""

    stop: str | list[str] | None = Field(None, description="Texts that end an answer and are not part of it.")
    include_stop_str_in_output: bool | None = Field(None, description="The stop text is part of the answer.")
    ignore_eos: bool | None = Field(None, description="Never generate a stop token.")
    n: Whole | None = Field(None, description="Answers for each prompt. Also as n_cmpl.")
    n_cmpl: Whole | None = None
    max_tokens: Whole | None = Field(
        None, description="-1: as many as fit. Also as max_completion_tokens, max_new_tokens, n_predict."
    )
    max_completion_tokens: Whole | None = None
    n_predict: Whole | None = None
    min_tokens: Whole | None = Field(None, description="Minimum number of tokens of an answer. Also as min_new_tokens.")
    json_schema: dict[str, Any] | None = None
    structured_outputs: Structured | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    edits: Edits | None = Field(None, description="Heads and layers to switch off for this request.")
    truncate_prompt_tokens: Whole | None = Field(None, description="Keep this many tokens at the end of the prompt.")

    def given(self) -> dict[str, Any]:
        values = super().given()
        if isinstance(values.get("stop"), list) and len(values["stop"]) > WORKABLE_STOPS:
            raise ApiError(f"stop has {len(values['stop'])} texts: give at most {WORKABLE_STOPS}", param="stop")
        if self.stream_options and self.stream_options.include_obfuscation:
            place = "stream_options.include_obfuscation"
            raise ApiError(f"{place} is not supported by this server: leave it out", param=place)
        if self.structured_outputs is not None:
            form = form_of(self.structured_outputs)
            if both := {"regex", "json_schema", "grammar"} & values.keys() & form.keys():
                raise ApiError(f"{min(both)} and structured_outputs are both given: choose one", param=min(both))
            values |= form
        return values

    def options(self, limit: int, room: int, **changes: Any) -> GenerationOptions:
        """The request as GenerationOptions. `limit` is the largest number of tokens of an answer if the request sets
        none, `room` if it sets -1, as many as fit; `changes` replace fields."""
        values = {"temperature": 1.0, "max_new_tokens": limit} | self.given() | changes
        if values["max_new_tokens"] == -1:
            values["max_new_tokens"] = room
        for name in FORMS:
            if len(json.dumps(values.get(name, ""))) > FORM_CHARACTERS:
                raise UserError(f"{name} has more than {FORM_CHARACTERS:,} characters: shorten it")
        options = GenerationOptions(**values)
        if self.ignore_eos:
            return GenerationOptions(**{**values, "min_new_tokens": options.max_new_tokens or 0})
        return options

    @property
    def include_usage(self) -> bool:
        """Whether the last event of a stream holds the token counts, as the request asks."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every event of a stream holds the token counts so far."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


def check_others(body: Body) -> None:
    """Refuse fields of a body that its class does not declare and that the server or its route cannot honor; log fields
    that the server does not know, once each."""
    extra = body.model_extra or {}
    for name, value in extra.items():
        if (name in REFUSED and value) or (name in NEUTRAL and value not in (None, NEUTRAL[name])):
            instead = f"use {INSTEAD[name]}" if name in INSTEAD else "leave it out"
            raise ApiError(f"{name} is not supported by this server: {instead}", param=name)
        if value and name in routed() - HARMLESS - NEUTRAL.keys():
            raise ApiError(f"{name} is not a field of this route: leave it out", param=name)
    log_unknown({*extra} - REFUSED - {*NEUTRAL} - HARMLESS - routed())


@cache  # all routes are imported before the first request
def routed() -> frozenset[str]:
    """The names of all routes' fields."""
    classes = [Body]
    for cls in classes:  # the list grows in the loop
        classes.extend(cls.__subclasses__())
    return frozenset(name for cls in classes for name in declared(cls) or ())


def log_unknown(paths: Iterable[str]) -> None:
    new = {*paths} - unknown_fields
    if new and len(unknown_fields) < 1000:
        unknown_fields.update(new)
        LOG.warning("unknown fields are ignored: %s", ", ".join(sorted(repr(path)[:100] for path in new)))


def form_of(form: Structured) -> dict[str, Any]:
    """The constraint of structured_outputs as fields of GenerationOptions."""
    kinds = [name for name in ("json_schema", "regex", "choice", "grammar", "json_object") if getattr(form, name)]
    if len(kinds) != 1:
        raise ApiError(
            "structured_outputs takes one of json, regex, choice, grammar and json_object: give exactly one",
            param="structured_outputs",
        )
    if form.choice:
        return {"regex": any_of(form.choice)}
    if form.regex:
        return {"regex": form.regex}
    if form.grammar:
        return {"grammar": form.grammar}
    if form.json_object:
        return {"json_schema": {"type": "object"}}
    schema = form.json_schema
    return {"json_schema": schema if isinstance(schema, dict | str) else {}}


def any_of(texts: Iterable[str]) -> str:
    return "|".join(f"({re.escape(text)})" for text in texts)
