"""GPT-Neo (Black et al. 2021): an open GPT-3 with unscaled attention scores and without biases of q, k and v."""

from collections.abc import Iterator
from typing import Any

from onward.base.errors import UserError
from onward.config.decoder import DecoderConfig, LayerNorm, Learned, Plain, SelfAttention, at
from onward.families import ACTIVATIONS, HF, Row, activation, linear, require, sizes

ARCHITECTURES = {"gpt_neo": "GPTNeoForCausalLM"}
SOURCE = "github.com/EleutherAI/gpt-neo"
BASE = "transformer."
IGNORED = r"\.attention\.(masked_)?bias$"


def alternating(layers: int) -> dict[str, Any]:
    return {"num_layers": layers, "attention_types": [[["global", "local"], layers // 2]]}


PRESETS: dict[str, HF] = {
    "gpt-neo-125m": alternating(12) | {"hidden_size": 768, "num_heads": 12},
    "gpt-neo-1.3b": {},
    "gpt-neo-2.7b": alternating(32) | {"hidden_size": 2560, "num_heads": 20},
}
ANCESTORS = {"gpt-neo-125m": "gpt3-125m", "gpt-neo-1.3b": "gpt3-1.3b", "gpt-neo-2.7b": "gpt3-2.7b"}
SIZES = {
    "vocab_size": ("vocab_size", 50_257),
    "d_model": ("hidden_size", 2048),
    "n_layers": ("num_layers", 24),
    "n_heads": ("num_heads", 16),
    "d_ff": ("intermediate_size", None),
    "context_length": ("max_position_embeddings", 2048),
    "tied": ("tie_word_embeddings", True),
    "dropout": ("resid_dropout", 0.0),
}
LAYER = {
    "ln_1": "attn_norm",
    "ln_2": "mlp_norm",
    "attn.attention.q_proj": "attn.q",
    "attn.attention.k_proj": "attn.k",
    "attn.attention.v_proj": "attn.v",
    "attn.attention.out_proj": "attn.out",
    "mlp.c_fc": "mlp.up",
    "mlp.c_proj": "mlp.down",
}


def config(hf: HF) -> DecoderConfig:
    act: Any = hf.get("activation_function", "gelu_new")
    windows, layers = {"global": 0, "local": hf.get("window_size", 256)}, hf.get("num_layers", 24)
    types = hf.get("attention_types") or [[["global", "local"], 12]]
    expanded = [kind for pattern, times in types for kind in pattern * min(times, layers + 1)]
    kinds = hf.get("attention_layers") or expanded
    if len(kinds) != layers or not {*kinds} <= {*windows}:
        raise UserError(
            f"config.json describes the layers {kinds[: layers + 1]}: give global or local for each of the "
            f"{layers} layers"
        )
    return DecoderConfig(
        **sizes(hf, SIZES),
        position=Learned(),
        attention=tuple(SelfAttention(window=windows[kind], scale=1.0, out_bias=True) for kind in kinds),
        mlp=Plain(act=ACTIVATIONS.get(act, act), bias=True),
        norm=LayerNorm(eps=hf.get("layer_norm_epsilon", 1e-5)),
    )


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    windows = [at(c.attention, layer).window for layer in range(c.n_layers)]
    kinds = ["local" if window else "global" for window in windows]
    return {their: getattr(c, our) for our, (their, _) in SIZES.items()} | {
        "attention_types": [[kinds, 1]],
        "attention_layers": kinds,
        "window_size": max(windows),
        "embed_dropout": c.dropout,
        "attention_dropout": c.dropout,
        "activation_function": activation(c.mlp),
        "layer_norm_epsilon": require(c.norm, LayerNorm).eps,
    }


def names(c: DecoderConfig) -> Iterator[Row]:
    yield "transformer.wte.weight", "embed.weight"
    yield "transformer.wpe.weight", "position.weight"
    yield "lm_head.weight", "head.weight"
    yield from linear("transformer.ln_f", "norm")
    for i in range(c.n_layers):
        for their, our in LAYER.items():
            yield from linear(f"transformer.h.{i}.{their}", f"blocks.{i}.{our}")
