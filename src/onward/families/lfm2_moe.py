"""LFM2 with experts: sigmoid routing, after some dense layers (Liquid AI 2025)."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from onward.config.decoder import DecoderConfig, Experts, Gated, at
from onward.config.routing import SigmoidRouting
from onward.families import HF, Row, lfm2, linear, with_defaults
from onward.families._experts import experts, mixture, mixture_keys
from onward.families._layers import FULL
from onward.families.llama import shape

ARCHITECTURES = {"lfm2_moe": "Lfm2MoeForCausalLM"}
SOURCE = "arXiv:2511.23404"
BASE = "model."
IGNORED = ""
RELEASED = {
    "num_hidden_layers": 24,
    "layer_types": [FULL if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)],
}
PRESETS: dict[str, HF] = {"lfm2-8b-a1b": RELEASED}
ANCESTORS = {"lfm2-8b-a1b": "lfm2-1.2b"}
DEFAULTS = lfm2.DEFAULTS | shape(2048, 7168, 32, 32, 8) | {"moe_intermediate_size": 1792, "num_experts_per_tok": 4}
ROUTER = "norm_topk_prob", "routed_scaling_factor", "use_expert_bias"


def config(hf: HF) -> DecoderConfig:
    given = with_defaults(hf, DEFAULTS)
    c = lfm2.decoder(hf, given)
    renormalize, scale, bias = (hf.get(key, default) for key, default in zip(ROUTER, (True, 1.0, True)))
    router = SigmoidRouting(renormalize, scale, min_sum=1e-6, selection_bias=bias)
    counts = {"n_routed_experts": hf.get("num_local_experts", hf.get("num_experts", 32)), "n_shared_experts": 0}
    first = {"first_k_dense_replace": hf.get("num_dense_layers", 2)}
    return replace(c, mlp=mixture(with_defaults(counts | first, given), router, Gated(), c.n_layers))


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    own_names = {"num_experts": "n_routed_experts", "num_dense_layers": "first_k_dense_replace"}
    keys = mixture_keys(c, own_names, shared=False)
    many = next((part for i in range(c.n_layers) if isinstance(part := at(c.mlp, i), Experts)), Experts())
    own = {key: keys[key] for key in ("num_experts", "num_dense_layers", "num_experts_per_tok", *ROUTER[:2])}
    own |= {"moe_intermediate_size": many.d_ff or c.d_ff, "use_expert_bias": many.router.selection_bias}
    return lfm2.keys(c) | own


def names(c: DecoderConfig) -> Iterator[Row]:
    yield from lfm2.names(c)
    for i in range(c.n_layers):
        if isinstance(part := at(c.mlp, i), Experts):
            their, our = f"model.layers.{i}.feed_forward", f"blocks.{i}.mlp"
            yield from linear(f"{their}.gate", f"{our}.router")
            yield f"{their}.expert_bias", f"{our}.router.routing_bias"
            yield from experts(f"{their}.experts", our, part.count, ("w1", "w3", "w2"))
