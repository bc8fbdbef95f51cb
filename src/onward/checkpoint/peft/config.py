"""The keys of adapter_config.json, as PEFT's LoraConfig defines them: each is read, ignored because it has no effect
here, or refused by name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from onward.base.arguments import Range, check, field_types
from onward.base.errors import UserError
from onward.config.ranges import Rate, Size, SizeOrZero

Alpha = Annotated[float, Range(1e-9, 1e15)]
WITHOUT_EFFECT = re.compile(  # keys that do not affect the output, or that repeat the tensors' names
    "peft_type|task_type|inference_mode|base_model_name_or_path|revision|auto_mapping|peft_version|runtime_config|"
    "fan_in_fan_out|target_modules|exclude_modules|modules_to_save|layers_to_transform|layers_pattern|"
    "ensure_weight_tying|loftq_config|eva_config|corda_config|lora_ga_config|megatron_core|qalora_group_size"
)
PLAIN = True, False, None, "gaussian", "eva", "orthogonal", "mica"  # initializations that leave the base as it is
CHANGED_BASE = "pissa", "olora"  # initializations that subtract a product computed from the base


@dataclass(frozen=True)
class LoraConfig:
    """The keys of PEFT's adapter_config.json that Onward reads, with PEFT's defaults."""

    r: Size = 8
    lora_alpha: Alpha = 8.0
    lora_dropout: Rate = 0.0
    use_rslora: bool = False
    use_dora: bool = False
    init_lora_weights: bool | str | None = True
    rank_pattern: Mapping[str, Size] | None = field(default_factory=dict)
    alpha_pattern: Mapping[str, Alpha] | None = field(default_factory=dict)
    target_parameters: tuple[str, ...] | None = ()
    bias: Literal["none", "lora_only", "all"] = "none"  # the tensor names contain the same information
    trainable_token_indices: tuple[SizeOrZero, ...] | Mapping[str, Sequence[SizeOrZero]] | None = None

    def rank_of(self, name: str) -> int:
        return next((rank for key, rank in (self.rank_pattern or {}).items() if matches(key, name)), self.r)

    def alpha_of(self, name: str) -> float:
        return next((alpha for key, alpha in (self.alpha_pattern or {}).items() if matches(key, name)), self.lora_alpha)


def lora_config(values: Mapping[str, Any], path: Path) -> LoraConfig:
    if values.get("peft_type") != "LORA":
        raise UserError(f"Cannot read {path.parent}, a {values.get('peft_type')} adapter: Onward reads only LORA")
    known = field_types(LoraConfig)
    for key, value in values.items():
        if key not in known and not WITHOUT_EFFECT.fullmatch(key) and value not in (None, False, "none", "", [], {}):
            raise UserError(
                f"{path} has {key} {value!r:.60}, which Onward does not support: merge the adapter with PEFT"
            )
    config = LoraConfig(**check(known, {key: values[key] for key in known if key in values}, f"{path}: "))
    for key in *(config.rank_pattern or ()), *(config.alpha_pattern or ()):
        try:
            re.compile(key)
        except re.error as error:
            raise UserError(f"{path} has the pattern {key!r}, which is not a regular expression: {error}") from None
    if config.init_lora_weights not in (*PLAIN, *CHANGED_BASE):
        raise UserError(
            f"{path} has init_lora_weights {config.init_lora_weights!r}, with which PEFT changes the base "
            "irreproducibly: save the adapter with path_initial_model_for_weight_conversion, or merge it"
        )
    return config


def matches(pattern: str, name: str) -> bool:
    """Whether a regular expression of adapter_config.json matches a dotted name or its last components."""
    return re.fullmatch(rf"(.*\.)?({pattern})", name) is not None
