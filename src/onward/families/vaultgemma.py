"""VaultGemma: Gemma 2 with norms before the branches only, trained with differential privacy (Google 2025)."""

from collections.abc import Iterator
from dataclasses import replace

from onward.config.decoder import DecoderConfig, PreNorm
from onward.families import HF, Row, gemma2, llama
from onward.families.llama import shape

ARCHITECTURES = {"vaultgemma": "VaultGemmaForCausalLM"}
SOURCE = "arXiv:2510.15001"
BASE = "model."
IGNORED = ""
PRESETS: dict[str, HF] = {
    "vaultgemma-1b": shape(1152, 6912, 26, 4, 4) | {"max_position_embeddings": 1024, "sliding_window": 512}
}
ANCESTORS = {"vaultgemma": "gemma-2-2b"}
to_hf = gemma2.to_hf


def config(hf: HF) -> DecoderConfig:
    return replace(gemma2.config(hf), block=PreNorm())


def names(c: DecoderConfig) -> Iterator[Row]:
    for their, our, *_ in llama.names(c):
        yield str(their).replace("post_attention_layernorm", "pre_feedforward_layernorm"), our
