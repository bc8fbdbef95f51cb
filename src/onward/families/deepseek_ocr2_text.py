"""DeepSeek-OCR 2's text decoder: the experts of DeepSeek-V2 with Llama's attention (DeepSeek-AI 2026)."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from onward.base.errors import UserError
from onward.base.fields import nearest
from onward.config.decoder import DecoderConfig, Gated, SelfAttention
from onward.config.routing import SoftmaxRouting
from onward.families import HF, Row, llama, only, require, with_defaults
from onward.families._experts import dense_or_sparse, mixture, mixture_keys, mixture_names
from onward.families.deepseek_v2 import METHODS

ARCHITECTURES = {"deepseek_ocr2_text": "DeepseekOcr2ForCausalLM"}
SOURCE = "arXiv:2601.20552"
BASE = "model."
IGNORED = ""
PRESETS: dict[str, HF] = {}
ANCESTORS: dict[str, str] = {}
DEFAULTS = {
    "vocab_size": 102_400,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.0,
    "moe_intermediate_size": 1407,
}


def config(hf: HF) -> DecoderConfig:
    only(hf, mlp_bias=False, norm_topk_prob=False)
    given = with_defaults(hf, DEFAULTS)
    c = llama.config(with_defaults({"head_dim": None}, given))
    only(hf, head_dim=hf.get("head_dim") and c.d_head)  # transformers always uses hidden_size / num_attention_heads
    if (method := hf.get("topk_method", METHODS[0])) not in METHODS:
        raise UserError(f"config.json has topk_method {method!r}: {nearest(str(method), METHODS)}")
    groups = (hf.get("n_group"), hf.get("topk_group")) if method == METHODS[1] else (1, 1)
    router = SoftmaxRouting(False, given["routed_scaling_factor"], *groups)
    return replace(c, mlp=mixture(given, router, require(c.mlp, Gated), c.n_layers))


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    keys = llama.keys(c) | mixture_keys(c) | dense_or_sparse(c)
    bias = require(c.attention, SelfAttention).bias
    return keys | {"attention_bias": bias, "topk_method": METHODS[keys["n_group"] > 1]}


def names(c: DecoderConfig) -> Iterator[Row]:
    yield from llama.names(c)
    yield from mixture_names(c)
