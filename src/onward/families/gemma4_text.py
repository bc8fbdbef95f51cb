"""Gemma 4: Gemma 3 with wide heads and keys as values in global layers, and a factor per layer; small models have
embeddings in each layer and shared keys, and one model has experts beside the feed-forward (Gemma Team 2026)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from onward.base.errors import UserError
from onward.config.decoder import (
    DecoderConfig,
    Experts,
    Gated,
    RMSNorm,
    Rotary,
    Sandwich,
    SelfAttention,
    at,
)
from onward.config.ranges import Epsilon, SizeOrZero
from onward.config.routing import SoftmaxRouting
from onward.config.scaling import ProportionalScaling
from onward.families import HF, Row, activation, linear, llama, only, require, with_defaults
from onward.families._experts import FUSED_ROWS
from onward.families._layers import FULL, LOCAL, layer_types, windowed_layers
from onward.families._rope_by_type import UNREAD, rope_by_type, rotary_by_type
from onward.families.llama import shape

if TYPE_CHECKING:
    from torch import nn

ARCHITECTURES = {"gemma4_text": "Gemma4ForCausalLM", "gemma4_unified_text": "Gemma4UnifiedForCausalLM"}
SOURCE = "huggingface.co/google/gemma-4-E2B-it, huggingface.co/google/gemma-4-12B-it"
BASE = "model."
IGNORED = r"\.self_attn\.(k|v)_(proj|norm)\."  # unused tensors of layers that share keys and values
CAP = {"final_logit_softcapping": 30.0}
WIDE = {
    "max_position_embeddings": 262_144,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 1024,
    "attention_k_eq_v": True,
}
EXPERTS_26B = {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}
PRESETS: dict[str, HF] = {
    "gemma-4-e2b": CAP
    | shape(1536, 6144, 35, 8, 1)
    | {"num_kv_shared_layers": 20, "use_double_wide_mlp": True, "layer_types": ([LOCAL] * 4 + [FULL]) * 7},
    "gemma-4-e4b": CAP | shape(2560, 10_240, 42, 8, 2) | {"num_kv_shared_layers": 18},
    "gemma-4-26b-a4b": CAP | WIDE | shape(2816, 2112, 30, 16, 8) | {"num_global_key_value_heads": 2} | EXPERTS_26B,
    "gemma-4-31b": CAP | WIDE | shape(5376, 21_504, 60, 32, 16) | {"num_global_key_value_heads": 4},
}
ANCESTORS = {"gemma-4": "gemma-3-4b", "gemma-4-e": "gemma-3n-e4b"}
DEFAULTS = shape(2304, 9216, 30, 8, 4) | {
    "vocab_size": 262_144,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "sliding_window": 512,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262_144,
}
UNIFIED = {"max_position_embeddings": 262_144, "sliding_window": 1024, "hidden_size_per_layer_input": 0}
PROPORTIONAL = {"rope_type": "proportional", "partial_rotary_factor": 0.25}


@dataclass(frozen=True)
class Gemma4Block(Sandwich, kind="gemma4", internal=True):
    """A sandwich block whose output is multiplied by a stored scalar; with `d_input`, it also reads an embedding of
    each token for this layer."""

    d_input: SizeOrZero = 0  # width of the embedding of a token for a layer; 0: none
    vocab_size: SizeOrZero = 0  # number of token ids that have an embedding for a layer; 0: none

    def build(self, config: DecoderConfig, layer: int) -> nn.Module:
        from onward.families._gemma4 import Gemma4BlockModule, InputBlockModule
        from onward.model.build import build_branches

        branches = build_branches(config, layer)
        return InputBlockModule(*branches, self.d_input, config) if self.d_input else Gemma4BlockModule(*branches)

    def layer_inputs(self, config: DecoderConfig) -> nn.Module | None:
        from onward.families._gemma4 import LayerInputsModule
        from onward.model.build import layer_norms

        return (
            LayerInputsModule(self.vocab_size, self.d_input, layer_norms(config, 0), config) if self.d_input else None
        )


@dataclass(frozen=True)
class StreamRouting(SoftmaxRouting, kind="stream_softmax", internal=True):
    """A softmax router that normalizes the residual stream itself, with learned scales for its inputs and experts."""

    eps: Epsilon = 1e-6  # epsilon of the norm

    def build(self, width: int, experts: int, top_k: int) -> nn.Module:
        from onward.families._gemma4 import StreamRoutingModule

        return StreamRoutingModule(self, width, experts, top_k, self.eps)


@dataclass(frozen=True)
class StreamExperts(Experts, kind="stream_experts", internal=True):
    """Experts and a dense feed-forward that read the residual stream through their own norms."""

    def build(self, config: DecoderConfig, layer: int) -> nn.Module:
        from onward.families._gemma4 import StreamExpertsModule
        from onward.model.build import layer_norms
        from onward.model.further import build_router

        return StreamExpertsModule(self, config, build_router(self, config.d_model), layer_norms(config, layer))


def config(hf: HF) -> DecoderConfig:
    if hf.get("use_bidirectional_attention") == "all":
        only(hf, use_bidirectional_attention=None)
    unified = hf.get("model_type") == "gemma4_unified_text"
    if unified:
        only(hf, enable_moe_block=False, hidden_size_per_layer_input=0)
    given = with_defaults(hf, with_defaults(UNIFIED if unified else {}, DEFAULTS))
    own = {**UNREAD, "hidden_act": given["hidden_activation"], "mlp_bias": False}
    c = llama.config(with_defaults(own, given))
    layers, first_shared = range(c.n_layers), c.n_layers - given["num_kv_shared_layers"]
    local = windowed_layers(given, [(layer + 1) % 6 != 0 for layer in layers])
    local[-1] = False  # the last layer is always global
    default = None if hf.get("rope_parameters") else PROPORTIONAL
    old: dict[str, HF] = {LOCAL: {"rope_theta": 10_000.0}, FULL: {"rope_theta": 1e6, "rope_scaling": default}}
    of = rotary_by_type(given, old, context=c.context_length)
    width, vocab_size = given["hidden_size_per_layer_input"], given["vocab_size_per_layer_input"]
    return replace(
        c,
        attention=tuple(attention(given, c, layer, local[layer], layer >= first_shared) for layer in layers),
        position=tuple(of[LOCAL if is_local else FULL] for is_local in local),
        mlp=tuple(feed_forward(given, c, layer >= first_shared) for layer in layers),
        block=Gemma4Block(d_input=width, vocab_size=vocab_size if width else 0),
        embed_scale=c.d_model**0.5,
        logit_softcap=hf.get("final_logit_softcapping"),
    )


def attention(hf: HF, c: DecoderConfig, layer: int, is_local: bool, shares: bool) -> SelfAttention:
    same = hf.get("attention_k_eq_v", False) and not is_local
    sizes = {"head_dim": hf.get("global_head_dim", 512)}
    kv_heads = hf.get("num_global_key_value_heads")
    if same and kv_heads is not None:
        sizes["num_key_value_heads"] = kv_heads
    by_layer = hf.get("per_layer_config")
    by_layer = {layer: {} if is_local else sizes} if by_layer is None else {int(i): own for i, own in by_layer.items()}
    own = by_layer.get(layer, {})
    if odd := own.keys() - {"head_dim", "num_key_value_heads"}:
        raise UserError(
            f"config.json has per_layer_config with {min(odd)}: Onward reads only head_dim and num_key_value_heads"
        )
    return replace(
        require(c.attention, SelfAttention),
        window=hf["sliding_window"] if is_local else 0,
        d_head=own.get("head_dim", 0),
        n_kv_heads=own.get("num_key_value_heads", 0),
        scale=1.0,
        qk_norm="head",
        values_are_keys=same and not shares,
        value_norm=None if shares else RMSNorm(hf["rms_norm_eps"], weight=False),
        shares_kv=shares,
    )


def feed_forward(hf: HF, c: DecoderConfig, shares: bool) -> Gated | StreamExperts:
    plain = require(c.mlp, Gated)
    width = 2 * c.d_ff if shares and hf.get("use_double_wide_mlp", False) else c.d_ff
    if not hf.get("enable_moe_block", False):
        return replace(plain, d_ff=width)
    return StreamExperts(
        count=hf["num_experts"],
        top_k=hf["top_k_experts"],
        d_ff=hf["moe_intermediate_size"],
        d_shared=width,
        act=plain.act,
        router=StreamRouting(eps=hf["rms_norm_eps"]),
    )


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    block, layers = require(c.block, Gemma4Block), range(c.n_layers)
    parts = [require(at(c.attention, layer), SelfAttention) for layer in layers]
    mlps = [require(at(c.mlp, layer), Gated, StreamExperts) for layer in layers]
    widths = [mlp.d_shared if isinstance(mlp, StreamExperts) else mlp.width(c) for mlp in mlps]
    full, kinds = parts[-1], layer_types(c)
    missing = {LOCAL: Rotary(), FULL: Rotary(theta=1e6, scaling=ProportionalScaling())}
    digits = len(str(c.n_layers - 1))
    hf = {their: getattr(c, our) for our, (their, _) in llama.SIZES.items()} | {
        **kinds,
        "rms_norm_eps": require(c.norm, RMSNorm).eps,
        "rope_parameters": rope_by_type(c, kinds["layer_types"], missing)["rope_parameters"],
        "sliding_window": kinds.get("sliding_window") or DEFAULTS["sliding_window"],
        "hidden_activation": activation(mlps[0]),
        "attention_bias": full.bias,
        "attention_k_eq_v": any(part.values_are_keys for part in parts),
        "num_kv_shared_layers": sum(part.shares_kv for part in parts),
        "use_double_wide_mlp": len({*widths}) > 1,
        "global_head_dim": full.heads(c).d_head,
        "num_global_key_value_heads": full.heads(c).n_kv_heads,
        "per_layer_config": {
            f"{layer:0{digits}}": sizes(c, parts[layer]) for layer in layers if not parts[layer].window
        },
        "final_logit_softcapping": c.logit_softcap,
        "hidden_size_per_layer_input": block.d_input,
    }
    if block.d_input:
        hf["vocab_size_per_layer_input"] = block.vocab_size
    if isinstance(mlps[0], StreamExperts):
        sizes_of_experts = {"count": "num_experts", "top_k": "top_k_experts", "d_ff": "moe_intermediate_size"}
        hf |= {their: getattr(mlps[0], our) for our, their in sizes_of_experts.items()} | {"enable_moe_block": True}
    return hf


def sizes(c: DecoderConfig, part: SelfAttention) -> dict[str, int]:
    heads = part.heads(c)
    return {"head_dim": heads.d_head} | ({"num_key_value_heads": heads.n_kv_heads} if part.n_kv_heads else {})


NORMS = {"post_attention_layernorm": "attn_post_norm", "post_feedforward_layernorm": "mlp_post_norm"}
EXPERTS = {
    "pre_feedforward_layernorm": "mlp.shared_norm",
    "post_feedforward_layernorm_1": "mlp.shared_post_norm",
    "pre_feedforward_layernorm_2": "mlp.routed_norm",
    "post_feedforward_layernorm_2": "mlp.routed_post_norm",
    "mlp.gate_proj": "mlp.shared.gate",
    "mlp.up_proj": "mlp.shared.up",
    "mlp.down_proj": "mlp.shared.down",
    "router.proj": "mlp.router",
}
INPUTS = {
    "per_layer_input_gate": "input_gate",
    "per_layer_projection": "input_out",
    "post_per_layer_input_norm": "input_norm",
}
MODEL_INPUTS = {
    "embed_tokens_per_layer": "embed",
    "per_layer_model_projection": "project",
    "per_layer_projection_norm": "norm",
}


def names(c: DecoderConfig) -> Iterator[Row]:
    for their, our, *_ in llama.names(c):
        yield str(their).replace("post_attention_layernorm", "pre_feedforward_layernorm"), our
    for their, our in MODEL_INPUTS.items():
        yield from linear(f"model.{their}", f"layer_inputs.{our}")
    for i in range(c.n_layers):
        their, our = f"model.layers.{i}", f"blocks.{i}"
        for theirs, ours in (NORMS | INPUTS | (EXPERTS if isinstance(at(c.mlp, i), StreamExperts) else {})).items():
            yield from linear(f"{their}.{theirs}", f"{our}.{ours}")
        yield f"{their}.layer_scalar", f"{our}.factor"
        yield f"{their}.router.scale", f"{our}.mlp.router.scale"
        yield f"{their}.router.per_expert_scale", f"{our}.mlp.router.expert_scale"
        yield f"{their}.experts.gate_up_proj", [f"{our}.mlp.gate", f"{our}.mlp.up"], FUSED_ROWS
        yield f"{their}.experts.down_proj", f"{our}.mlp.down"
