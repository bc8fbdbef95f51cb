"""HyperCLOVA X: Granite's multipliers, with norms on the outputs of the branches as well (Naver 2025)."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from onward.config.decoder import DecoderConfig, PreNorm, Sandwich, SelfAttention
from onward.families import HF, Row, granite, linear, llama, require, with_defaults

ARCHITECTURES = {"hyperclovax": "HyperCLOVAXForCausalLM"}
SOURCE = "arXiv:2506.22403, huggingface.co/naver-hyperclovax/HyperCLOVAX-SEED-Think-14B"
BASE = "model."
IGNORED = ""
PRESETS: dict[str, HF] = {}
ANCESTORS: dict[str, str] = {}


def config(hf: HF) -> DecoderConfig:
    c = granite.config(with_defaults({"logits_scaling": 1.0, "attention_multiplier": 1.0}, hf))
    scale, block = hf.get("attention_multiplier"), Sandwich if hf.get("use_post_norm", True) else PreNorm
    return replace(
        c,
        attention=replace(
            require(c.attention, SelfAttention), scale=None if scale in (None, c.d_head**-0.5) else scale
        ),
        block=block(residual_scale=hf.get("residual_multiplier", 1.0)),
        logit_scale=hf.get("logits_scaling", 1.0),
    )


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    block = require(c.block, Sandwich, PreNorm)
    return granite.to_hf(replace(c, block=PreNorm(residual_scale=block.residual_scale))) | {
        "logits_scaling": c.logit_scale,
        "use_post_norm": isinstance(block, Sandwich),
    }


def names(c: DecoderConfig) -> Iterator[Row]:
    yield from llama.names(c)
    for i in range(c.n_layers):
        for their, our in ("post_norm1", "attn_post_norm"), ("post_norm2", "mlp_post_norm"):
            yield from linear(f"model.layers.{i}.{their}", f"blocks.{i}.{our}")
