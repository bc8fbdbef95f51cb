"""Cosmos 3 Edge's text decoder: AFM with other tensor names in its attention (NVIDIA 2026)."""

from collections.abc import Iterator

from onward.config.decoder import DecoderConfig
from onward.families import HF, Row, arcee, with_defaults
from onward.families.llama import shape

ARCHITECTURES = {"cosmos3_edge_text": "Cosmos3EdgeForCausalLM"}
SOURCE = "huggingface.co/nvidia/Cosmos3-Edge"
BASE = "model."
IGNORED = r"moe_gen|^(model\.)?(action_|time_embedder|proj_)|self_attn\.(add_|to_add|norm_added|k_norm_und)"
PRESETS: dict[str, HF] = {}
ANCESTORS: dict[str, str] = {}
DEFAULTS = shape(2048, 9216, 28, 16, 8) | {
    "vocab_size": 131_072,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rope_theta": 1e8,
}
NAMES = {"q_proj": "to_q", "k_proj": "to_k", "v_proj": "to_v", "o_proj": "to_out"}
to_hf = arcee.to_hf


def config(hf: HF) -> DecoderConfig:
    return arcee.config(with_defaults(hf, DEFAULTS))


def names(c: DecoderConfig) -> Iterator[Row]:
    for their, our, *_ in arcee.names(c):
        start, _, name = str(their).partition("self_attn.")
        module, _, leaf = name.partition(".")
        yield (f"{start}self_attn.{NAMES[module]}.{leaf}" if module in NAMES else str(their)), our
