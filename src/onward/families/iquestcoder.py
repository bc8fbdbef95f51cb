"""IQuest-Coder: Llama at 40B, for code (IQuest 2026)."""

from onward.config.decoder import DecoderConfig
from onward.families import HF, llama, only, with_defaults
from onward.families.llama import shape

ARCHITECTURES = {"iquestcoder": "LlamaForCausalLM"}
SOURCE = "arXiv:2603.16733"
BASE = "model."
IGNORED = ""
PRESETS: dict[str, HF] = {}
ANCESTORS: dict[str, str] = {}
DEFAULTS = shape(5120, 27_648, 80, 40, 8) | {
    "vocab_size": 76_800,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
}
names = llama.names
to_hf = llama.to_hf


def config(hf: HF) -> DecoderConfig:
    only(hf, clip_qkv=None, use_sliding_window=False)
    return llama.config(with_defaults(hf, DEFAULTS))
