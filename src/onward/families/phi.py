"""Phi 1, 1.5 and 2: GPT-J with biases throughout, trained on textbooks (Gunasekar et al. 2023)."""

from collections.abc import Iterator
from typing import Any

from onward.config.decoder import DecoderConfig, LayerNorm, Plain, Rotary, SelfAttention, SharedNorm
from onward.families import ACTIVATIONS, HF, Row, activation, linear, llama, require, sizes, with_defaults
from onward.families._rope import rope, rotary
from onward.families.llama import shape

ARCHITECTURES = {"phi": "PhiForCausalLM"}
SOURCE = "arXiv:2306.11644, arXiv:2309.05463"
BASE = "model."
IGNORED = ""
PRESETS: dict[str, HF] = {
    "phi-1": {},
    "phi-1.5": {},
    "phi-2": shape(2560, 10_240, 32, 32, 32) | {"partial_rotary_factor": 0.4, "resid_pdrop": 0.1},
}
ANCESTORS = {"phi-1": "gpt-j-6b", "phi-1.5": "phi-1", "phi-2": "phi-1.5"}
SIZES = llama.SIZES | {"dropout": ("resid_pdrop", 0.0)}
DEFAULTS = {"vocab_size": 51_200, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24}
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn.q",
    "self_attn.k_proj": "attn.k",
    "self_attn.v_proj": "attn.v",
    "self_attn.q_layernorm": "attn.q_norm",
    "self_attn.k_layernorm": "attn.k_norm",
    "self_attn.dense": "attn.out",
    "mlp.fc1": "mlp.up",
    "mlp.fc2": "mlp.down",
}


def config(hf: HF) -> DecoderConfig:
    act: Any = hf.get("hidden_act", "gelu_new")
    return DecoderConfig(
        **sizes(with_defaults(hf, DEFAULTS), SIZES),
        position=rotary(hf, context=hf.get("max_position_embeddings", 2048), fraction=0.5),
        attention=SelfAttention(qk_norm="head" if hf.get("qk_layernorm") else "none", bias=True, out_bias=True),
        mlp=Plain(act=ACTIVATIONS.get(act, act), bias=True),
        norm=LayerNorm(eps=hf.get("layer_norm_eps", 1e-5)),
        block=SharedNorm(),
        head_bias=True,
    )


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    position, qk_norm = require(c.position, Rotary), require(c.attention, SelfAttention).qk_norm
    return {their: getattr(c, our) for our, (their, _) in SIZES.items()} | {
        **rope(position),
        "partial_rotary_factor": position.fraction,
        "embd_pdrop": c.dropout,
        "attention_dropout": c.dropout,
        # transformers' norms fit only these sizes
        "qk_layernorm": qk_norm == "head" and c.n_heads * c.d_head == c.d_model,
        "hidden_act": activation(c.mlp),
        "layer_norm_eps": require(c.norm, LayerNorm).eps,
    }


def names(c: DecoderConfig) -> Iterator[Row]:
    yield "model.embed_tokens.weight", "embed.weight"
    yield from linear("model.final_layernorm", "norm")
    yield from linear("lm_head", "head")
    for i in range(c.n_layers):
        for their, our in LAYER.items():
            yield from linear(f"model.layers.{i}.{their}", f"blocks.{i}.{our}")
