"""FlexOlmo: OLMo 2 with experts trained separately, each on its own data (Shi et al. 2025)."""

from collections.abc import Iterator
from dataclasses import replace

from onward.config.decoder import BranchNorm, DecoderConfig
from onward.families import HF, Row, olmo2, olmoe, with_defaults

ARCHITECTURES = {"flex_olmo": "FlexOlmoForCausalLM"}
SOURCE = "arXiv:2507.07024"
BASE = "model."
IGNORED = ""
PRESETS: dict[str, HF] = {"flexolmo-7x7b": {}}
ANCESTORS = {"flexolmo": "olmo-2-7b"}
DEFAULTS = {
    "vocab_size": 100_352,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500_000.0,
    "num_experts": 7,
    "num_experts_per_tok": 5,
}
to_hf = olmoe.to_hf


def config(hf: HF) -> DecoderConfig:
    return replace(olmoe.config(with_defaults(hf, DEFAULTS)), block=BranchNorm())


def names(c: DecoderConfig) -> Iterator[Row]:
    experts = {str(row[1]): row for row in olmoe.names(c)}
    yield from (experts | {str(row[1]): row for row in olmo2.names(c)}).values()
