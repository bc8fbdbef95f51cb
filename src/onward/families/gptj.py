"""GPT-J (Wang and Komatsuzaki 2021): GPT-3 with rotary positions, a parallel block, no windows, no attention biases."""

from collections.abc import Iterator
from typing import Any

from onward.config.decoder import DecoderConfig, LayerNorm, Plain, Rotary, SharedNorm
from onward.families import ACTIVATIONS, HF, Row, activation, gpt2, interleaved, linear, only, require, sizes

ARCHITECTURES = {"gptj": "GPTJForCausalLM"}
SOURCE = "github.com/kingoflolz/mesh-transformer-jax"
BASE = gpt2.BASE
IGNORED = gpt2.IGNORED
PRESETS: dict[str, HF] = {"gpt-j-6b": {}}
ANCESTORS = {"gpt-j": "gpt3-6.7b"}
SIZES = {
    "vocab_size": ("vocab_size", 50_400),
    "d_model": ("n_embd", 4096),
    "n_layers": ("n_layer", 28),
    "n_heads": ("n_head", 16),
    "d_ff": ("n_inner", None),
    "context_length": ("n_positions", 2048),
    "tied": ("tie_word_embeddings", False),
    "dropout": ("resid_pdrop", 0.0),
}


def config(hf: HF) -> DecoderConfig:
    only(hf, rotary=True, scale_attn_weights=True)
    act: Any = hf.get("activation_function", "gelu_new")
    shape = sizes(hf, SIZES)
    return DecoderConfig(
        **shape,
        position=Rotary(fraction=hf.get("rotary_dim", 64) / (shape["d_model"] // shape["n_heads"])),
        mlp=Plain(act=ACTIVATIONS.get(act, act), bias=True),
        norm=LayerNorm(eps=hf.get("layer_norm_epsilon", 1e-5)),
        block=SharedNorm(),
        head_bias=True,
    )


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    return {their: getattr(c, our) for our, (their, _) in SIZES.items()} | {
        "rotary_dim": require(c.position, Rotary).rope_dim(c.d_head),
        "embd_pdrop": c.dropout,
        "attn_pdrop": c.dropout,
        "activation_function": activation(c.mlp),
        "layer_norm_epsilon": require(c.norm, LayerNorm).eps,
    }


def names(c: DecoderConfig) -> Iterator[Row]:
    reorder = interleaved(c.d_head, require(c.position, Rotary).rope_dim(c.d_head))
    yield "transformer.wte.weight", "embed.weight"
    yield from linear("transformer.ln_f", "norm")
    yield from linear("lm_head", "head")
    for i in range(c.n_layers):
        their, our = f"transformer.h.{i}", f"blocks.{i}"
        yield from linear(f"{their}.ln_1", f"{our}.attn_norm")
        yield from linear(f"{their}.attn.q_proj", f"{our}.attn.q", reorder)
        yield from linear(f"{their}.attn.k_proj", f"{our}.attn.k", reorder)
        yield from linear(f"{their}.attn.v_proj", f"{our}.attn.v")
        yield from linear(f"{their}.attn.out_proj", f"{our}.attn.out")
        yield from linear(f"{their}.mlp.fc_in", f"{our}.mlp.up")
        yield from linear(f"{their}.mlp.fc_out", f"{our}.mlp.down")
