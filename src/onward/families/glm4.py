"""GLM-4-0414 and Z1: GLM-4-9B with norms after the branches as well (Z.ai 2025)."""

from collections.abc import Iterator
from dataclasses import replace

from onward.config.decoder import DecoderConfig, Sandwich
from onward.families import HF, Row, glm, linear
from onward.families.llama import shape

ARCHITECTURES = {"glm4": "Glm4ForCausalLM"}
SOURCE = "huggingface.co/THUDM/GLM-4-9B-0414"
BASE = "model."
IGNORED = ""
BOTH = {"max_position_embeddings": 32_768, "rms_norm_eps": 1e-5}
PRESETS: dict[str, HF] = {
    "glm-4-9b-0414": BOTH,
    "glm-4-32b-0414": BOTH | shape(6144, 23_040, 61, 48, 2) | {"attention_bias": False},
}
ANCESTORS = {"glm-4-9b-0414": "glm-4-9b", "glm-4-32b-0414": "glm-4-9b-0414"}
to_hf = glm.to_hf


def config(hf: HF) -> DecoderConfig:
    return replace(glm.config(hf), block=Sandwich())


def names(c: DecoderConfig) -> Iterator[Row]:
    yield from glm.names(c)
    for i in range(c.n_layers):
        yield from linear(f"model.layers.{i}.post_self_attn_layernorm", f"blocks.{i}.attn_post_norm")
        yield from linear(f"model.layers.{i}.post_mlp_layernorm", f"blocks.{i}.mlp_post_norm")
