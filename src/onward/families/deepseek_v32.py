"""DeepSeek-V3.2: V3 with an indexer, which chooses the `index_topk` tokens that each token attends to (DeepSeek-AI
2025, "DeepSeek Sparse Attention")."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from onward.config.attention_options import Indexer
from onward.config.decoder import DecoderConfig, LatentAttention, at
from onward.families import HF, Fix, Row, deepseek_v3, linear, only, require, sizes, with_defaults
from onward.families._prediction import NUMBERED

ARCHITECTURES = {"deepseek_v32": "DeepseekV32ForCausalLM"}
SOURCE = "arXiv:2512.02556"
BASE = "model."
IGNORED = ""
PREDICTION = NUMBERED
PRESETS: dict[str, HF] = {"deepseek-v3.2": deepseek_v3.RELEASED}
ANCESTORS = {"deepseek-v3.2": "deepseek-v3"}
DEFAULTS = {"max_position_embeddings": 163_840}
INDEXER = {"top_k": ("index_topk", 2048), "n_heads": ("index_n_heads", 64), "d_head": ("index_head_dim", 128)}


def config(hf: HF) -> DecoderConfig:
    c = deepseek_v3.config(with_defaults(hf, DEFAULTS))
    only(hf, rope_interleave=True, layer_types=["indexed_attention"] * c.n_layers)
    return replace(c, attention=replace(require(c.attention, LatentAttention), indexer=Indexer(**sizes(hf, INDEXER))))


def plain(c: DecoderConfig) -> DecoderConfig:
    """The decoder without its indexers, a DeepSeek-V3."""
    return replace(c, attention=replace(require(at(c.attention, 0), LatentAttention), indexer=None))


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    indexer = require(require(c.attention, LatentAttention).indexer, Indexer)
    keys = deepseek_v3.to_hf(plain(c)) | {their: getattr(indexer, our) for our, (their, _) in INDEXER.items()}
    return {key: value for key, value in keys.items() if key != "rope_interleave"}


def names(c: DecoderConfig, *fix: Fix) -> Iterator[Row]:
    yield from deepseek_v3.names(plain(c))
    for i in range(c.n_layers):
        their, our = f"model.layers.{i}.self_attn.indexer", f"blocks.{i}.attn.indexer"
        yield from linear(f"{their}.wq_b", f"{our}.q", *fix)
        yield from linear(f"{their}.wk", f"{our}.k", *fix)
        yield from linear(f"{their}.k_norm", f"{our}.k_norm", *fix)
        yield from linear(f"{their}.weights_proj", f"{our}.weights")
