"""GLM-5: DeepSeek-V3.2 at other sizes, whose layers may share an indexer (Z.ai 2026)."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from onward.base.errors import UserError
from onward.config.attention_options import Indexer, SharedIndexer
from onward.config.decoder import DecoderConfig, LatentAttention, at
from onward.families import HF, Row, deepseek_v32, interleaved, only, require, with_defaults
from onward.families._prediction import NUMBERED
from onward.families.llama import shape

ARCHITECTURES = {"glm_moe_dsa": "GlmMoeDsaForCausalLM"}
SOURCE = "arXiv:2602.15763"
BASE = "model."
IGNORED = ""
PREDICTION = NUMBERED
PRESETS: dict[str, HF] = {"glm-5": {"rope_theta": 1e6}}
ANCESTORS = {"glm-5": "deepseek-v3.2"}
DEFAULTS = shape(6144, 12_288, 78, 64, 64) | {
    "vocab_size": 154_880,
    "moe_intermediate_size": 2048,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "max_position_embeddings": 202_752,
    "rms_norm_eps": 1e-5,
    "index_n_heads": 32,
}
KINDS = {"F": "full", "S": "shared"}


def config(hf: HF) -> DecoderConfig:
    only(hf, indexer_rope_interleave=True)
    c = deepseek_v32.config(with_defaults(hf, DEFAULTS))
    part = require(c.attention, LatentAttention)
    parts = {"full": part, "shared": replace(part, indexer=SharedIndexer())}
    return replace(c, attention=tuple(parts[kind] for kind in indexer_types(hf, c.n_layers)))


def indexer_types(hf: HF, n_layers: int) -> list[str]:
    """Return "full" for each layer with its own indexer, and "shared" for each layer that uses the selection of an
    earlier layer."""
    pattern, every, skipped = (hf.get(f"index_{key}") for key in ("topk_pattern", "topk_freq", "skip_topk_offset"))
    skipped = 2 if skipped is None else skipped
    types = ["shared" if max(i - skipped + 1, 0) % max(every or 1, 1) else "full" for i in range(n_layers)]
    if pattern is not None:
        types = [KINDS.get(kind, kind) for kind in pattern]
    types = hf.get("indexer_types") or types
    if len(types) != n_layers or not {*types} <= {*KINDS.values()}:
        raise UserError(f"config.json has indexer_types {types}: Onward reads full and shared, one for each layer")
    return types


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    parts = [require(at(c.attention, i), LatentAttention) for i in range(c.n_layers)]
    types = ["full" if isinstance(part.indexer, Indexer) else "shared" for part in parts]
    return deepseek_v32.to_hf(replace(c, attention=parts[0])) | {"indexer_types": types}


def names(c: DecoderConfig) -> Iterator[Row]:
    part = require(at(c.attention, 0), LatentAttention)
    yield from deepseek_v32.names(c, interleaved(require(part.indexer, Indexer).d_head, part.d_rope))
