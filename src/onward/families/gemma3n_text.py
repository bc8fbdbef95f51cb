"""Gemma 3n: several residual streams (each layer computes one), embeddings in each layer, shared keys and values,
and few active units in the first feed-forwards (Gemma Team 2025)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from onward.base.errors import UserError
from onward.config.decoder import DecoderConfig, Gated, RMSNorm, Rotary, Sandwich, SelfAttention, at
from onward.config.ranges import BelowOne, Size, SizeOrZero
from onward.families import HF, Row, activation, gemma2, linear, llama, only, require, with_defaults
from onward.families._layers import FULL, LOCAL, layer_types, windowed_layers
from onward.families._rope_by_type import UNREAD, rope_by_type, rotary_by_type
from onward.families.gemma4_text import INPUTS, MODEL_INPUTS
from onward.families.llama import shape

if TYPE_CHECKING:
    from torch import nn

ARCHITECTURES = {"gemma3n_text": "Gemma3nForCausalLM"}
SOURCE = "huggingface.co/google/gemma-3n-E4B"
BASE = "model."
IGNORED = r"\.self_attn\.(k|v)_(proj|norm)\."  # unused tensors of layers that share keys and values
PRESETS: dict[str, HF] = {
    "gemma-3n-e2b": {"num_hidden_layers": 30, "intermediate_size": 8192, "num_kv_shared_layers": 10},
    "gemma-3n-e4b": {},
}
ANCESTORS = {"gemma-3n": "gemma-3-4b"}
DEFAULTS = shape(2048, 16_384, 35, 8, 2) | {
    "vocab_size": 262_400,
    "head_dim": 256,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 512,
    "final_logit_softcapping": 30.0,
    "num_kv_shared_layers": 15,
}
BLOCK = {
    "streams": ("altup_num_inputs", 4),
    "active": ("altup_active_idx", 0),
    "rank": ("laurel_rank", 64),
    "d_input": ("hidden_size_per_layer_input", 256),
    "vocab_size": ("vocab_size_per_layer_input", 262_144),
}


@dataclass(frozen=True)
class AltUpBlock(Sandwich, kind="altup", internal=True):
    """A sandwich block on one of several residual streams, with a parallel low-rank map and an embedding of each
    token."""

    streams: Size = 4  # number of residual streams
    active: SizeOrZero = 0  # index of the stream that the layer computes
    rank: Size = 64  # rank of the map parallel to the attention
    d_input: Size = 256  # width of the embedding of a token for a layer
    vocab_size: Size = 262_144  # number of token ids that have such an embedding
    splits: bool = False  # whether the block is the first, which computes the streams from the embeddings
    merges: bool = False  # whether the block is the last, which returns the mean of the streams

    def build(self, config: DecoderConfig, layer: int) -> nn.Module:
        from onward.families._gemma3n import AltUpBlockModule, MergeModule, SplitModule
        from onward.model.build import build_branches

        sizes = self.streams, self.active, self.rank, self.d_input
        module = AltUpBlockModule(build_branches(config, layer), config, *sizes)
        if self.splits:
            module.split = SplitModule(config.d_model, self.streams)
        if self.merges:
            module.merge = MergeModule(config.d_model, self.streams)
        return module

    def layer_inputs(self, config: DecoderConfig) -> nn.Module:
        from onward.families._gemma3n import FoundInputsModule
        from onward.model.build import layer_norms

        return FoundInputsModule(self.vocab_size, self.d_input, layer_norms(config, 0), config)


@dataclass(frozen=True)
class SparseGated(Gated, kind="sparse_gated", internal=True):
    """A feed-forward with a gate in which only units far above the mean of the token's units are active."""

    sparsity: BelowOne = 0.95  # fraction of the units that are 0 if the units are normally distributed

    def build(self, config: DecoderConfig, layer: int) -> nn.Module:
        from onward.families._gemma3n import SparseFeedForwardModule

        return SparseFeedForwardModule(self, self.sparsity, config)


def config(hf: HF) -> DecoderConfig:
    only(hf, use_bidirectional_attention=False, altup_correct_scale=True)
    hf.get("altup_coef_clip")  # limits weights only in training
    given, widths = with_defaults(hf, DEFAULTS), hf.get("intermediate_size", DEFAULTS["intermediate_size"])
    first = widths[0] if isinstance(widths, list) else widths
    own = {**UNREAD, "hidden_act": given["hidden_activation"], "mlp_bias": False, "intermediate_size": first}
    c = llama.config(with_defaults(own, given))
    local = windowed_layers(given, [(layer + 1) % 5 != 0 for layer in range(c.n_layers)])
    old: dict[str, HF] = {
        LOCAL: {"rope_theta": hf.get("rope_local_base_freq", 10_000.0)},
        FULL: {"rope_theta": hf.get("rope_theta", 1e6), "rope_scaling": hf.get("rope_scaling")},
    }
    of, first_shared = rotary_by_type(given, old, context=c.context_length), c.n_layers - given["num_kv_shared_layers"]
    part = replace(require(c.attention, SelfAttention), scale=1.0, qk_norm="head")
    block = AltUpBlock(**{our: hf.get(*key) for our, key in BLOCK.items()})
    value_norm = RMSNorm(given.get("rms_norm_eps", 1e-6), weight=False)
    return replace(
        c,
        attention=tuple(
            replace(
                part,
                window=given["sliding_window"] * is_local,
                shares_kv=layer >= first_shared,
                value_norm=None if layer >= first_shared else value_norm,
            )
            for layer, is_local in enumerate(local)
        ),
        position=tuple(of[LOCAL if is_local else FULL] for is_local in local),
        mlp=feed_forwards(hf, c, widths if isinstance(widths, list) else [widths] * c.n_layers),
        block=tuple(replace(block, splits=i == 0, merges=i == c.n_layers - 1) for i in range(c.n_layers)),
        embed_scale=c.d_model**0.5,
        logit_softcap=given["final_logit_softcapping"],
    )


def feed_forwards(hf: HF, c: DecoderConfig, widths: list[int]) -> tuple[Gated, ...]:
    sparse = hf.get("activation_sparsity_pattern")
    if sparse is None:
        sparse = [0.95 if c.n_layers > 10 and layer < 10 else 0.0 for layer in range(c.n_layers)]
    if not isinstance(sparse, list) or not len(widths) == len(sparse) == c.n_layers:
        raise UserError(
            f"config.json has activation_sparsity_pattern {sparse} and intermediate_size {widths}: Onward reads "
            "one value of each per layer"
        )
    act = require(c.mlp, Gated).act
    return tuple(
        SparseGated(act=act, d_ff=width, sparsity=share) if share > 0 else Gated(act=act, d_ff=width)
        for width, share in zip(widths, sparse)
    )


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    block, layers = require(at(c.block, 0), AltUpBlock), range(c.n_layers)
    parts = [require(at(c.attention, layer), SelfAttention) for layer in layers]
    mlps = [require(at(c.mlp, layer), Gated) for layer in layers]
    kinds, missing = layer_types(c), {LOCAL: Rotary(), FULL: Rotary(theta=1e6)}
    return (
        {their: getattr(c, our) for our, (their, _) in llama.SIZES.items()}
        | kinds
        | {their: getattr(block, our) for our, (their, _) in BLOCK.items()}
        | {
            "rms_norm_eps": require(c.norm, RMSNorm).eps,
            "rope_parameters": rope_by_type(c, kinds["layer_types"], missing)["rope_parameters"],
            "intermediate_size": [mlp.width(c) for mlp in mlps],
            "activation_sparsity_pattern": [mlp.sparsity if isinstance(mlp, SparseGated) else 0.0 for mlp in mlps],
            "hidden_activation": activation(mlps[0]),
            "attention_bias": parts[0].bias,
            "num_kv_shared_layers": sum(part.shares_kv for part in parts),
            "final_logit_softcapping": c.logit_softcap,
        }
    )


OWN = INPUTS | {
    "altup.correction_coefs": "altup.correct",
    "altup.prediction_coefs": "altup.predict",
    "altup.modality_router": "altup.router",
    "altup.router_norm": "altup.router_norm",
    "laurel.linear_left": "low_rank.0",
    "laurel.linear_right": "low_rank.1",
    "laurel.post_laurel_norm": "low_rank_norm",
}


def names(c: DecoderConfig) -> Iterator[Row]:
    yield from gemma2.names(c)
    for their, our in MODEL_INPUTS.items():
        yield from linear(f"model.{their}", f"layer_inputs.{our}")
    for i in range(require(at(c.block, 0), AltUpBlock).streams - 1):
        yield f"model.altup_projections.{i}.weight", f"blocks.0.split.projections.{i}.weight"
        their = f"model.altup_unembed_projections.{i}.weight"
        yield their, f"blocks.{c.n_layers - 1}.merge.projections.{i}.weight"
    for i in range(c.n_layers):
        for theirs, ours in OWN.items():
            yield from linear(f"model.layers.{i}.{theirs}", f"blocks.{i}.{ours}")
        yield f"model.layers.{i}.altup.correct_output_scale", f"blocks.{i}.output_scale"
