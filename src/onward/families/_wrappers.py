"""Models that also take images or audio: the config.json of their text decoder. Does not import torch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onward.families._interface import HF
from onward.families._unread import UNREAD

TEXT_TABLES = "text_config", "llm_config", "language_config"  # the last two are the names in remote code
QWEN2_VL = {
    "vocab_size": 152_064,
    "hidden_size": 8192,
    "intermediate_size": 29_568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_window_layers": 80,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}
QWEN3_VL = {"max_position_embeddings": 128_000, "rope_theta": 500_000.0}
GLM_4V = {"max_position_embeddings": 32_768, "rms_norm_eps": 1e-5, "head_dim": None, "partial_rotary_factor": 1.0}
LLAMA_3 = {"num_key_value_heads": 8, "intermediate_size": 14_336, "rms_norm_eps": 1e-5}
# model_type of text_config -> (model_type of the family, defaults that differ)
TEXT_TYPES: dict[str, tuple[str, HF]] = {
    "qwen2_vl_text": ("qwen2", QWEN2_VL),
    "qwen2_5_vl_text": ("qwen2", QWEN2_VL),
    "qwen2_5_omni_text": (
        "qwen2",
        {
            "vocab_size": 152_064,
            "hidden_size": 3584,
            "intermediate_size": 18_944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "rope_theta": 1e6,
        },
    ),
    "qwen3_vl_text": ("qwen3", QWEN3_VL),
    "qwen3_vl_moe_text": (
        "qwen3_moe",
        {
            **QWEN3_VL,
            "intermediate_size": 5632,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "head_dim": 128,
            "moe_intermediate_size": 1408,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "norm_topk_prob": True,
        },
    ),
    "qwen3_omni_moe_text": (
        "qwen3_moe",
        {
            "vocab_size": 3584,
            "intermediate_size": 18_944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "rope_theta": 1e6,
            "norm_topk_prob": True,
        },
    ),
    "glm4v_text": ("glm4", GLM_4V),
    "glm_ocr_text": (
        "glm4",
        {
            **GLM_4V,
            "attention_bias": False,
            "max_position_embeddings": 131_072,
            "vocab_size": 59_392,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
        },
    ),
    "glm4v_moe_text": ("glm4_moe", {"vocab_size": 151_424, "max_position_embeddings": 65_536, "attention_bias": True}),
    "mllama_text_model": (
        "llama",
        {
            **LLAMA_3,
            "vocab_size": 128_256,
            "num_hidden_layers": 40,
            "max_position_embeddings": 131_072,
            "rope_theta": 500_000.0,
            "cross_attention_layers": range(3, 40, 5),
        },
    ),
    "emu3_text_model": (
        "llama",
        {
            **LLAMA_3,
            "vocab_size": 184_622,
            "max_position_embeddings": 9216,
            "rope_theta": 1e6,
            "attention_dropout": 0.1,
        },
    ),
    "granite4_vision_text": ("granite", {}),
    "granite_docling_text": (
        "granite",
        {
            "vocab_size": 133_800,
            "hidden_size": 1024,
            "intermediate_size": 2048,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32_768,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "embedding_multiplier": 12.0,
            "logits_scaling": 4.0,
            "residual_multiplier": 0.263,
            "attention_multiplier": 0.015625,
        },
    ),
    "paddleocr_vl_text": (
        "llama",  # rotary pairs i and i + rope_dim / 2, unlike ERNIE
        {
            "vocab_size": 103_424,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 18,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "tie_word_embeddings": True,
        },
    ),
    "hunyuan_vl_text": ("hunyuan_v1_dense", {"tie_word_embeddings": True}),
    "phi4_multimodal": (
        "phi3",
        {"vocab_size": 200_064, "num_key_value_heads": 8, "max_position_embeddings": 131_072},
    ),
    "phi4mm": ("phi3", {"vocab_size": 200_064, "num_key_value_heads": 8, "max_position_embeddings": 131_072}),
}
FLAT = {  # models whose config.json has the text decoder's keys at the top level, without a text_config
    "qwen2_vl": "qwen2_vl_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "phi4_multimodal": "phi4_multimodal",
    "phi4mm": "phi4mm",
    "phi3_v": "phi3",
    "hunyuan_vl": "hunyuan_vl_text",
}
TOKENS = re.compile(r"(\w*_)?token_(id|index)")
INHERITED = "dtype", "torch_dtype", "quantization_config", "transformers_version"
MROPE = "mrope_section", "mrope_interleaved", "xdrope_section"
TURNS = {"mrope": "default", "xdrope": "dynamic"}  # kinds of positions with coordinates -> equivalent kinds for text


@dataclass(frozen=True)
class TextPart:
    """The text decoder of a model that also takes images or audio."""

    kind: str  # model_type of the text decoder
    keys: dict[str, Any]  # its config.json, under the model_type of the family that computes it; tie_word_embeddings is
    # missing if the config.json does not state it, or contradicts itself
    skipped: tuple[int, ...]  # indices of layers that have no effect without an image


def text_part(hf: HF) -> TextPart | None:
    """The text decoder in the config.json of a model that also takes images or audio; None for other models. Its keys
    are in `text_config` or, in older files, next to the keys of the encoders.

    In text, all three coordinates of a position (time, height, width) are equal, so the rotary positions are the usual
    ones. Keys that divide the frequencies between the coordinates are therefore left out (mrope; Wang et al. 2024)."""
    outer = {**hf, **part} if isinstance(part := hf.get("thinker_config"), Mapping) else hf
    name = str(outer.get("model_type"))
    table = next((found for key in TEXT_TABLES if isinstance(found := outer.get(key), Mapping)), None)
    if name in UNREAD or (table is None and name not in FLAT):
        return None
    if table is None:
        table = {key: value for key, value in outer.items() if "rope_" in key or not isinstance(value, Mapping)}
        table |= {"model_type": FLAT[name]}
    kind = str(table.get("model_type") or f"{name}_text")
    family, defaults = TEXT_TYPES.get(kind, (kind, {}))
    keys = {**defaults, **{key: outer[key] for key in INHERITED if key in outer}, **table, "model_type": family}
    keys |= {key.replace("_index", "_id"): value for key, value in outer.items() if TOKENS.fullmatch(key)}
    tied = {one["tie_word_embeddings"] for one in (outer, table) if one.get("tie_word_embeddings") is not None}
    keys.pop("tie_word_embeddings", None)
    if len(tied) == 1:
        keys["tie_word_embeddings"] = tied.pop()
    for key in "rope_scaling", "rope_parameters":
        if isinstance(rope := keys.get(key), Mapping):
            keys[key] = of_text(rope)
    skipped = tuple(keys.pop("cross_attention_layers", ()))
    if skipped:
        keys["num_hidden_layers"] -= len(skipped)
    return TextPart(kind, keys, skipped)


def of_text(rope: Mapping[str, Any]) -> dict[str, Any] | None:
    """The keys of rotary positions with coordinates, as they are for text; None for usual positions."""
    kept = {
        name: TURNS.get(value, value) if isinstance(value, str) else value
        for name, value in rope.items()
        if name not in MROPE
    }
    return kept if any(value != "default" for value in kept.values()) else None
