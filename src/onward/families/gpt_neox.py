"""GPT-NeoX (Black et al. 2022) and Pythia (Biderman et al. 2023): GPT-J with two norms per block and attention
biases."""

from collections.abc import Iterator
from typing import Any

from onward.config.decoder import DecoderConfig, LayerNorm, Parallel, Plain, PreNorm, Rotary, SelfAttention
from onward.families import ACTIVATIONS, HF, Row, activation, linear, require, sizes
from onward.families._rope import rope, rotary
from onward.families.bloom import fused_by_group

ARCHITECTURES = {"gpt_neox": "GPTNeoXForCausalLM"}
SOURCE = "arXiv:2204.06745, arXiv:2304.01373"
BASE = "gpt_neox."
IGNORED = r"\.attention\.(masked_)?bias$"
PRESETS: dict[str, HF] = {"gpt-neox-20b": {"hidden_act": "gelu_fast"}} | {
    f"pythia-{name}": {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
    }
    for name, vocabulary, width, layers, heads in (
        ("14m", 50_304, 128, 6, 4),
        ("31m", 50_304, 256, 6, 8),
        ("70m", 50_304, 512, 6, 8),
        ("160m", 50_304, 768, 12, 12),
        ("410m", 50_304, 1024, 24, 16),
        ("1b", 50_304, 2048, 16, 8),
        ("1.4b", 50_304, 2048, 24, 16),
        ("2.8b", 50_304, 2560, 32, 32),
        ("6.9b", 50_432, 4096, 32, 32),
        ("12b", 50_688, 5120, 36, 40),
    )
}
ANCESTORS = {"gpt-neox": "gpt-j-6b", "pythia": "gpt-neox-20b"}
SIZES = {
    "vocab_size": ("vocab_size", 50_432),
    "d_model": ("hidden_size", 6144),
    "n_layers": ("num_hidden_layers", 44),
    "n_heads": ("num_attention_heads", 64),
    "d_ff": ("intermediate_size", 24_576),
    "context_length": ("max_position_embeddings", 2048),
    "tied": ("tie_word_embeddings", False),
    "dropout": ("hidden_dropout", 0.0),
}
LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "mlp_norm",
    "attention.dense": "attn.out",
    "mlp.dense_h_to_4h": "mlp.up",
    "mlp.dense_4h_to_h": "mlp.down",
}


def config(hf: HF) -> DecoderConfig:
    act: Any = hf.get("hidden_act", "gelu")
    context, bias = hf.get("max_position_embeddings", 2048), hf.get("attention_bias", True)
    theta, fraction = hf.get("rotary_emb_base", 10_000.0), hf.get("rotary_pct", 0.25)
    return DecoderConfig(
        **sizes(hf, SIZES),
        position=rotary(hf, context=context, theta=theta, fraction=fraction),
        attention=SelfAttention(bias=bias, out_bias=bias),
        mlp=Plain(act=ACTIVATIONS.get(act, act), bias=True),
        norm=LayerNorm(eps=hf.get("layer_norm_eps", 1e-5)),
        block=Parallel() if hf.get("use_parallel_residual", True) else PreNorm(),
    )


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    position = require(c.position, Rotary)
    return {their: getattr(c, our) for our, (their, _) in SIZES.items()} | {
        **rope(position),
        "rotary_emb_base": position.theta,
        "rotary_pct": position.fraction,
        "attention_dropout": c.dropout,
        "attention_bias": require(c.attention, SelfAttention).bias,
        "hidden_act": activation(c.mlp),
        "layer_norm_eps": require(c.norm, LayerNorm).eps,
        "use_parallel_residual": c.block == Parallel(),
    }


def names(c: DecoderConfig) -> Iterator[Row]:
    by_head = fused_by_group(c)
    yield "gpt_neox.embed_in.weight", "embed.weight"
    yield from linear("gpt_neox.final_layer_norm", "norm")
    yield "embed_out.weight", "head.weight"
    for i in range(c.n_layers):
        their, our = f"gpt_neox.layers.{i}", f"blocks.{i}"
        yield from linear(f"{their}.attention.query_key_value", [f"{our}.attn.{n}" for n in "qkv"], by_head)
        for part, ours in LAYER.items():
            yield from linear(f"{their}.{part}", f"{our}.{ours}")
