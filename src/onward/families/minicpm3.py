"""MiniCPM3: latent attention in a dense model, with scaled embeddings, branches and logits (OpenBMB 2024)."""

import math
from dataclasses import replace
from typing import Any

from onward.config.decoder import DecoderConfig, Gated, PreNorm
from onward.families import HF, deepseek_v3, require, with_defaults, youtu
from onward.families.llama import shape

ARCHITECTURES = {"minicpm3": "MiniCPM3ForCausalLM"}
SOURCE = "huggingface.co/openbmb/MiniCPM3-4B"
BASE = "model."
IGNORED = ""
PRESETS: dict[str, HF] = {}
ANCESTORS: dict[str, str] = {}
DEFAULTS = shape(2560, 6400, 62, 40, 40) | {
    "vocab_size": 73_448,
    "kv_lora_rank": 256,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_interleave": False,
    "scale_emb": 12,
    "scale_depth": 1.4,
    "dim_model_base": 256,
}
names = deepseek_v3.names


def config(hf: HF) -> DecoderConfig:
    given = with_defaults(hf, DEFAULTS)
    width, layers, base, depth = (
        given[key] for key in ("hidden_size", "num_hidden_layers", "dim_model_base", "scale_depth")
    )
    own = {"first_k_dense_replace": layers, "v_head_dim": hf.get("v_head_dim") or width // given["num_attention_heads"]}
    c = deepseek_v3.config(with_defaults(own, given))
    return replace(
        c,
        mlp=replace(require(c.mlp, Gated), bias=hf.get("mlp_bias", False)),
        block=PreNorm(residual_scale=1.0 if depth is None else depth / math.sqrt(layers)),
        embed_scale=given["scale_emb"],
        logit_scale=1.0 if base is None else base / width,
    )


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    scale = require(c.block, PreNorm).residual_scale
    return youtu.to_hf(c) | {
        "mlp_bias": require(c.mlp, Gated).bias,
        "scale_emb": c.embed_scale,
        "scale_depth": None if scale == 1.0 else round(scale * math.sqrt(c.n_layers), 12),
        "dim_model_base": round(c.logit_scale * c.d_model),
    }
