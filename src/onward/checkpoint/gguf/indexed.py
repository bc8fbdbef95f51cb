"""Latent attention with indexers in GGUF: DeepSeek V3.2 and GLM-5. See architectures.py.

llama.cpp multiplies the queries and keys of an indexer with a Hadamard matrix, which leaves their products the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from onward.checkpoint.gguf.architecture import Parts
from onward.checkpoint.gguf.keys import Keys
from onward.checkpoint.gguf.latent import (
    LatentArchitecture,
    latent_attention,
    latent_keys,
    latent_layer,
    latent_parts,
    yarn_weight,
)
from onward.checkpoint.gguf.sparse import SIGMOID
from onward.config.attention_options import Indexer, SharedIndexer
from onward.config.decoder import DecoderConfig, LatentAttention, at
from onward.families import Fix, Row, interleaved, linear

SHARING = 1 << 20  # context length of GLM-5.2, the first model with layers that share an indexer's choice
INDEXER = {"top_k": "top_k", "n_heads": "head_count", "d_head": "key_length"}  # our field -> their key


@dataclass(frozen=True)
class IndexedArchitecture(LatentArchitecture):
    """Latent attention whose layers may have an indexer."""

    paired_indexer: bool = False  # in the indexer too, rotary positions pair element 2 i with 2 i + 1

    def projections(self, c: DecoderConfig, layer: int) -> Iterator[Row]:
        yield from super().projections(c, layer)
        part = at(c.attention, layer)
        if not isinstance(part, LatentAttention) or not isinstance(part.indexer, Indexer):
            return
        their, our = f"blk.{layer}.indexer", f"blocks.{layer}.attn.indexer"
        fix: tuple[Fix, ...] = (interleaved(part.indexer.d_head, part.d_rope),) if self.paired_indexer else ()
        yield from linear(f"{their}.attn_q_b", f"{our}.q", *fix)
        yield from linear(f"{their}.attn_k", f"{our}.k", *fix)
        yield from linear(f"{their}.k_norm", f"{our}.k_norm", *fix)
        yield from linear(f"{their}.proj", f"{our}.weights")


def indexed_attention(keys: Keys) -> LatentAttention:
    indexer = Indexer(**{our: keys.number(f"attention.indexer.{their}") for our, their in INDEXER.items()})
    width = max(64, 1 << (int(indexer.d_head) - 1).bit_length())  # of llama.cpp's Hadamard matrix
    part = latent_attention(keys, keys.number("attention.q_lora_rank"), keys.number("attention.value_length_mla"))
    return replace(part, indexer=replace(indexer, d_head=width))


def indexed_keys(c: DecoderConfig) -> dict[str, Any]:
    indexer = getattr(at(c.attention, 0), "indexer", None)
    if not isinstance(indexer, Indexer):
        return {}
    own = {f"attention.indexer.{their}": getattr(indexer, our) for our, their in INDEXER.items()}
    return latent_keys(c) | own


def deepseek32(keys: Keys, sizes: Parts) -> Parts:
    gating = keys.number("expert_gating_func")
    return latent_parts(keys, sizes, indexed_attention(keys), yarn_weight(keys), 1.0, gating)


def deepseek32_keys(c: DecoderConfig) -> dict[str, Any]:
    return {"expert_gating_func": SIGMOID} | indexed_keys(c)  # llama.cpp requires this key even without experts


def glm_dsa(keys: Keys, sizes: Parts) -> Parts:
    layers, key = sizes["n_layers"], "attention.indexer.types"
    own = [layer < 3 or layer % 4 == 2 for layer in range(layers)]  # as published
    if keys.get(key) is not None:
        own = keys.by_layer(key, layers)
    elif sizes["context_length"] < SHARING:
        own = [True] * layers
    # llama.cpp reads no weight of YaRN's magnitude here
    parts = latent_parts(keys, sizes, indexed_attention(keys), 0.0, 1.0, SIGMOID)
    full = parts["attention"]
    shared = replace(full, indexer=SharedIndexer())
    return parts | {"attention": tuple(full if one else shared for one in own)}


def glm_dsa_keys(c: DecoderConfig) -> dict[str, Any]:
    parts = (at(c.attention, layer) for layer in range(c.n_layers))
    return indexed_keys(c) | {
        "attention.indexer.types": [isinstance(getattr(part, "indexer", None), Indexer) for part in parts]
    }


ALL = (
    IndexedArchitecture("deepseek32", ("deepseek_v32",), deepseek32, deepseek32_keys, layer=latent_layer),
    IndexedArchitecture("glm-dsa", ("glm_moe_dsa",), glm_dsa, glm_dsa_keys, layer=latent_layer, paired_indexer=True),
)
