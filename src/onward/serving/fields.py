"""The fields of requests that all generating routes share, under the names of OpenAI, vLLM and llama.cpp.

A field that is unknown is ignored and named once in the log. A field whose meaning the server knows but lacks is
refused.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from onward.generation.options import GenerationOptions
from onward.serving.edits import Edits
from onward.serving.errors import ApiError

LOG = logging.getLogger("onward.serving")
SAME = (  # fields of GenerationOptions under their own names
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "frequency_penalty"),
    *("presence_penalty", "no_repeat_ngram_size", "logit_bias", "suppress_tokens", "forced_tokens", "stop", "seed"),
    *("stop_token_ids", "n", "regex", "json_schema", "min_new_tokens", "max_new_tokens"),
)
OTHER_NAMES = {  # a field of GenerationOptions by the name that another server gives it
    "repeat_penalty": "repetition_penalty",
    "min_tokens": "min_new_tokens",
    "n_predict": "max_new_tokens",
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "max_output_tokens": "max_new_tokens",
}
HARMLESS = {  # fields that change no answer
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "request_id", "priority"),
    *("cache_prompt", "verbosity", "prompt_cache_retention", "include_reasoning", "include", "truncation"),
}
REFUSED = {  # fields whose meaning the server lacks, and the values that change nothing
    "suffix": (None, ""),
    "best_of": (None, 1),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1, 1.0),
    "include_stop_str_in_output": (None, False),
    "skip_special_tokens": (None, True),
    "spaces_between_special_tokens": (None, True),
    "bad_words": (None, []),
    "logits_processors": (None, []),
    "prompt_logprobs": (None,),
    "mirostat": (None, 0),
    "dynatemp_range": (None, 0, 0.0),
    "dry_multiplier": (None, 0, 0.0),
    "xtc_probability": (None, 0, 0.0),
    "tfs_z": (None, 1, 1.0),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
    "functions": (None, []),
    "function_call": (None, "none"),
    "documents": (None, []),
    "chat_template": (None,),
    "allowed_token_ids": (None,),
    "image_data": (None, []),
    "samplers": (None,),
    "lora": (None, []),
    "previous_response_id": (None,),
    "conversation": (None,),
    "background": (None, False),
    "max_tool_calls": (None,),
    "logits_bias": (None,),
}
WORKABLE_STOPS = 64  # stop texts of a request
SCHEMA_CHARACTERS = 100_000  # of a regular expression, grammar or schema, as JSON
unknown_fields: set[str] = set()  # those that the log has named


class Structured(BaseModel):
    """A form of the answer, in the field structured_outputs of vLLM: one of JSON schema, regular expression, list of
    texts or grammar."""

    json_schema: dict[str, Any] | bool | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class StreamOptions(BaseModel):
    """The options of a stream: whether its last event holds the numbers of tokens."""

    include_usage: bool = False


class SamplingFields(BaseModel):
    """The fields that say how answers are sampled, and their number, length, end and form."""

    model_config = ConfigDict(extra="allow")

    model: str | None = Field(None, description="A name that /v1/models lists; by default the first.")
    temperature: float | None = Field(None, description="By default 1; 0: the likeliest token.")
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = Field(None, description="Also as repeat_penalty.")
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    logit_bias: dict[str, float] | None = Field(None, description="Added to the logits of token ids.")
    suppress_tokens: list[int] | None = None
    forced_tokens: list[int] | None = None
    stop: str | list[str] | None = Field(None, description="Texts that end an answer and are not part of it.")
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = Field(None, description="Never generate a stop token.")
    seed: int | None = Field(None, description="Equal seeds give equal answers.")
    n: int | None = Field(None, description="Answers for each prompt.")
    max_tokens: int | None = Field(None, description="Also as max_completion_tokens, max_new_tokens, n_predict.")
    max_completion_tokens: int | None = None
    max_new_tokens: int | None = None
    n_predict: int | None = None
    min_tokens: int | None = Field(None, description="The fewest tokens of an answer. Also as min_new_tokens.")
    min_new_tokens: int | None = None
    repeat_penalty: float | None = None
    regex: str | None = None
    json_schema: dict[str, Any] | None = None
    structured_outputs: Structured | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    edits: Edits | None = Field(None, description="Heads and layers to switch off for this request.")
    truncate_prompt_tokens: int | None = Field(None, description="Keep this many tokens at the end of the prompt.")

    def given(self) -> dict[str, Any]:
        """Return the fields of GenerationOptions that are given. Raises an ApiError for fields that contradict each
        other or are refused, and for a number of stop texts beyond the limit."""
        check_others(self.model_extra or {})
        values = {name: value for name in SAME if (value := getattr(self, name)) is not None}
        for name, own in OTHER_NAMES.items():
            if (value := getattr(self, name, None)) is not None and values.setdefault(own, value) != value:
                raise ApiError(f"{name} and {own} are both given and differ: leave one out", param=name)
        if values.get("max_new_tokens") == -1:  # llama.cpp: no limit
            del values["max_new_tokens"]
        if isinstance(values.get("stop"), list) and len(values["stop"]) > WORKABLE_STOPS:
            raise ApiError(f"stop has {len(values['stop'])} texts: give at most {WORKABLE_STOPS}", param="stop")
        if self.structured_outputs is not None:
            form = form_of(self.structured_outputs)
            if both := {"regex", "json_schema", "grammar"} & values.keys() & form.keys():
                raise ApiError(f"{min(both)} and structured_outputs are both given: choose one", param=min(both))
            values |= form
        for name in "regex", "json_schema":
            if len(json.dumps(values.get(name, ""))) > SCHEMA_CHARACTERS:
                raise ApiError(f"{name} has more than {SCHEMA_CHARACTERS:,} characters: shorten it", param=name)
        return values

    def options(self, limit: int | None, **changes: Any) -> GenerationOptions:
        """Return the options of the request. `limit` is the most tokens of an answer if the request gives none;
        `changes` replace fields."""
        values = {"temperature": 1.0, "max_new_tokens": limit} | self.given() | changes
        if "stop" in values:
            values["stop"] = (values["stop"],) if isinstance(values["stop"], str) else tuple(values["stop"])
        for name in "stop_token_ids", "suppress_tokens", "forced_tokens":
            values[name] = tuple(values.get(name, ()))
        options = GenerationOptions(**values)
        if self.ignore_eos:
            return GenerationOptions(**{**values, "min_new_tokens": options.max_new_tokens or 0})
        return options

    @property
    def include_usage(self) -> bool:
        """Whether the last event of a stream holds the numbers of tokens."""
        return bool(self.stream_options and self.stream_options.include_usage)


def check_others(extra: Mapping[str, Any]) -> None:
    """Raise an ApiError for a field of a request that the server cannot honor; log fields that it does not know, once
    each."""
    for name, value in extra.items():
        if name in REFUSED and value not in REFUSED[name]:
            raise ApiError(f"{name} is not supported by this server: leave it out", param=name)
    unknown = {*extra} - {*REFUSED} - HARMLESS - unknown_fields
    if unknown and len(unknown_fields) < 1000:
        unknown_fields.update(unknown)
        LOG.warning("unknown fields are ignored: %s", ", ".join(sorted(repr(name)[:100] for name in unknown)))


def form_of(form: Structured) -> dict[str, Any]:
    """Return the form of an answer as fields of GenerationOptions, such as a regular expression. Raises an ApiError
    unless exactly one form is given."""
    kinds = [name for name in ("json_schema", "regex", "choice", "grammar", "json_object") if getattr(form, name)]
    if len(kinds) != 1:
        raise ApiError(
            "structured_outputs takes one of json, regex, choice, grammar and json_object", param="structured_outputs"
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
    """Return a regular expression that matches any of the texts."""
    return "|".join(f"({re.escape(text)})" for text in texts)
