"""Ministral: Mistral with windows in some layers only (Mistral AI 2024)."""

from typing import Any

from onward.config.decoder import DecoderConfig
from onward.families import HF, llama, mistral
from onward.families._layers import layer_types

ARCHITECTURES = {"ministral": "MinistralForCausalLM"}
SOURCE = "huggingface.co/mistralai/Ministral-8B-Instruct-2410"
BASE = "model."
IGNORED = ""
PRESETS: dict[str, HF] = {}
ANCESTORS: dict[str, str] = {}
config, names = mistral.config, llama.names


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    return llama.keys(c) | layer_types(c)
