"""A.X K1: DeepSeek-V3 with norms after the experts (SKT 2026)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from onward.config.decoder import DecoderConfig, Experts, PreNorm, Sandwich, at
from onward.families import HF, Row, deepseek_v3, linear, with_defaults
from onward.families._experts import dense_or_sparse
from onward.families.llama import shape

if TYPE_CHECKING:
    from torch import nn

ARCHITECTURES = {"axk1": "AXK1ForCausalLM"}
SOURCE = "arXiv:2601.09200"
BASE = "model."
IGNORED = ""
PRESETS: dict[str, HF] = {"a.x-k1": {}}
ANCESTORS = {"a.x-k1": "deepseek-v3"}
DEFAULTS = shape(7168, 18_432, 61, 64, 64) | {
    "vocab_size": 163_840,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 192,
    "max_position_embeddings": 32_768,
    "first_k_dense_replace": 1,
}


@dataclass(frozen=True)
class PostNormedFeedForward(Sandwich, kind="post_normed_feed_forward", internal=True):
    """x + attn(norm(x)), then x + norm(mlp(norm(x)))."""

    def build(self, config: DecoderConfig, layer: int) -> nn.Module:
        from torch import nn

        from onward.model.blocks import SandwichModule
        from onward.model.build import build_branches

        block = SandwichModule(*build_branches(config, layer))
        block.attn_post_norm = nn.Identity()
        return block


def config(hf: HF) -> DecoderConfig:
    c = deepseek_v3.config(with_defaults(hf, DEFAULTS))
    sparse = [isinstance(at(c.mlp, layer), Experts) for layer in range(c.n_layers)]
    return replace(c, block=tuple(PostNormedFeedForward() if one else PreNorm() for one in sparse))


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    return deepseek_v3.to_hf(c) | dense_or_sparse(c)


def names(c: DecoderConfig) -> Iterator[Row]:
    yield from deepseek_v3.names(c)
    for i in range(c.n_layers):
        yield from linear(f"model.layers.{i}.post_mlp_layernorm", f"blocks.{i}.mlp_post_norm")
