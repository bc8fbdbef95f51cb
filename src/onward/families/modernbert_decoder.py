"""Ettin's decoders: ModernBERT with causal attention, windows in two of three layers and a head with an additional
layer (Weller et al. 2025)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from onward.config.decoder import DecoderConfig, Gated, LayerNorm, PreNorm, Rotary, SelfAttention, at
from onward.config.feedforward_parts import ActivationName
from onward.config.part_types import Norm
from onward.config.ranges import Epsilon
from onward.families import ACTIVATIONS, HF, THEIRS, Row, activation, linear, only, require, sizes
from onward.families._layers import FULL, LOCAL, layer_types, windowed_layers
from onward.families._rope_by_type import rope_by_type, rotary_by_type

if TYPE_CHECKING:
    from torch import nn

ARCHITECTURES = {"modernbert-decoder": "ModernBertDecoderForCausalLM"}
SOURCE = "arXiv:2507.11412"
BASE = "model."
IGNORED = ""
SIZES = {
    "vocab_size": ("vocab_size", 50_368),
    "d_model": ("hidden_size", 768),
    "n_layers": ("num_hidden_layers", 22),
    "n_heads": ("num_attention_heads", 12),
    "d_ff": ("intermediate_size", 1152),
    "context_length": ("max_position_embeddings", 8192),
    "tied": ("tie_word_embeddings", True),
    "dropout": ("attention_dropout", 0.0),
}


def size(width: int, layers: int, heads: int, d_ff: int) -> HF:
    given = {"d_model": width, "n_layers": layers, "n_heads": heads, "d_ff": d_ff}
    return {SIZES[our][0]: value for our, value in given.items()}


PRESETS: dict[str, HF] = {
    "ettin-17m": size(256, 7, 4, 384),
    "ettin-32m": size(384, 10, 6, 576),
    "ettin-68m": size(512, 19, 8, 768),
    "ettin-150m": size(768, 22, 12, 1152),
    "ettin-400m": size(1024, 28, 16, 2624),
    "ettin-1b": size(1792, 28, 28, 3840),
}
ANCESTORS = {"ettin": "gpt2"}


@dataclass(frozen=True)
class OpenBlock(PreNorm, kind="open", internal=True):
    """A pre-norm block whose attention reads the residual stream without a norm, because the embeddings are
    normalized."""

    def build(self, config: DecoderConfig, layer: int) -> nn.Module:
        from torch import nn

        from onward.model.build import build_branches
        from onward.model.layers import PreNormModule

        module = PreNormModule(*build_branches(config, layer))
        module.attn_norm = nn.Identity()
        return module


@dataclass(frozen=True)
class HeadNorm(Norm, kind="head_norm", internal=True):
    """norm(act(dense(norm(x)))) before the head, with LayerNorms."""

    eps: Epsilon = 1e-5  # epsilon of both norms
    norm_bias: bool = False  # whether the norms have biases
    bias: bool = False  # whether the projection has a bias
    act: ActivationName = "gelu"  # the activation function

    def build(self, config: DecoderConfig, layer: int, width: int) -> nn.Module:
        from onward.families._modernbert import HeadNormModule
        from onward.kernels.operations import ACTIVATIONS as FUNCTIONS

        return HeadNormModule(config.d_model, self.eps, self.norm_bias, self.bias, FUNCTIONS[self.act])


def config(hf: HF) -> DecoderConfig:
    act, last_act = (hf.get(key, "gelu") for key in ("hidden_activation", "classifier_activation"))
    c, every = sizes(hf, SIZES), hf.get("global_attn_every_n_layers", 3)
    bias, norm_bias, eps = hf.get("attention_bias", False), hf.get("norm_bias", False), hf.get("norm_eps", 1e-5)
    local = windowed_layers(hf, [layer % every != 0 for layer in range(c["n_layers"])])
    old: dict[str, HF] = {
        kind: {"rope_theta": hf.get(key, theta), "rope_scaling": hf.get("rope_scaling")}
        for kind, key, theta in ((FULL, "global_rope_theta", 160_000.0), (LOCAL, "local_rope_theta", 10_000.0))
    }
    of = rotary_by_type(hf, old, context=c["context_length"])
    full, norm = SelfAttention(bias=bias, out_bias=bias), LayerNorm(eps=eps, bias=norm_bias)
    near = replace(full, window=(hf.get("local_attention", 128) or 0) // 2)
    only(hf, sliding_window=near.window)  # transformers writes this key, but computes the value itself
    return DecoderConfig(
        **c,
        position=tuple(of[LOCAL if is_local else FULL] for is_local in local),
        attention=tuple(near if is_local else full for is_local in local),
        mlp=Gated(act=ACTIVATIONS.get(act, act), bias=hf.get("mlp_bias", False)),
        norm=norm,
        block=(OpenBlock(), *[PreNorm()] * (c["n_layers"] - 1)),
        embed_norm=norm,
        final_norm=HeadNorm(eps, norm_bias, hf.get("classifier_bias", False), ACTIVATIONS.get(last_act, last_act)),
        head_bias=hf.get("decoder_bias", True),
    )


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    kinds, norm, head = layer_types(c), require(c.norm, LayerNorm), require(c.final_norm, HeadNorm)
    mlp = require(c.mlp, Gated)
    missing = {LOCAL: Rotary(), FULL: Rotary(theta=160_000.0)}
    return {their: getattr(c, our) for our, (their, _) in SIZES.items()} | {
        "layer_types": kinds["layer_types"],
        "local_attention": 2 * kinds.get("sliding_window", 64),
        "rope_parameters": rope_by_type(c, kinds["layer_types"], missing)["rope_parameters"],
        "hidden_activation": activation(mlp),
        "mlp_bias": mlp.bias,
        "attention_bias": require(at(c.attention, 0), SelfAttention).bias,
        "norm_eps": norm.eps,
        "norm_bias": norm.bias,
        "classifier_bias": head.bias,
        "classifier_activation": THEIRS[head.act],
        "decoder_bias": c.head_bias,
        "pad_token_id": min(50_283, c.vocab_size - 1),  # transformers requires an id within the vocabulary
    }


LAYER = {
    "attn_norm": "attn_norm",
    "mlp_norm": "mlp_norm",
    "attn.q_proj": "attn.q",
    "attn.k_proj": "attn.k",
    "attn.v_proj": "attn.v",
    "attn.Wo": "attn.out",
    "mlp.Wo": "mlp.down",
}


def names(c: DecoderConfig) -> Iterator[Row]:
    yield "model.embeddings.tok_embeddings.weight", "embed.weight"
    yield from linear("model.embeddings.norm", "embed_norm")
    yield from linear("model.final_norm", "norm.first")
    yield from linear("lm_head.dense", "norm.dense")
    yield from linear("lm_head.norm", "norm.last")
    yield from linear("decoder", "head")
    for i in range(c.n_layers):
        for their, our in LAYER.items():
            yield from linear(f"model.layers.{i}.{their}", f"blocks.{i}.{our}")
        yield from linear(f"model.layers.{i}.mlp.Wi", [f"blocks.{i}.mlp.gate", f"blocks.{i}.mlp.up"])
