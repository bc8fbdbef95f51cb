"""GLM-5: DeepSeek-V3.2 at other sizes, whose layers may share an indexer (Z.ai 2026)."""

from onward.config.decoder import DecoderConfig
from onward.families import HF, deepseek_v3, deepseek_v32, with_defaults
from onward.families.llama import shape

ARCHITECTURES = {"glm_moe_dsa": "GlmMoeDsaForCausalLM"}
BASE = "model."
IGNORED = deepseek_v32.IGNORED
PRESETS: dict[str, HF] = {}
ANCESTORS: dict[str, str] = {}
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
}
SHARED = "indexer_types", "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset", "indexer_rope_interleave"
names, to_hf = deepseek_v3.names, deepseek_v32.to_hf


def config(hf: HF) -> DecoderConfig:
    for key in SHARED:
        hf.get(key)  # which layers share the choice of tokens
    return deepseek_v32.up_to_index(hf, deepseek_v3.config(with_defaults(hf, DEFAULTS)))
