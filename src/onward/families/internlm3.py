"""InternLM 3: Llama with other keys for its biases (Shanghai AI Laboratory 2025)."""

from dataclasses import replace

from onward.config.decoder import DecoderConfig, Gated, SelfAttention
from onward.families import HF, llama, renamed, require, with_defaults
from onward.families.llama import shape

ARCHITECTURES = {"internlm3": "LlamaForCausalLM"}
SOURCE = "huggingface.co/internlm/internlm3-8b-instruct"
BASE = "model."
IGNORED = ""
PRESETS: dict[str, HF] = {"internlm3-8b": {"rope_theta": 5e7, "rope_scaling": {"rope_type": "dynamic", "factor": 6.0}}}
ANCESTORS = {"internlm3": "llama-3-8b"}
DEFAULTS = shape(4096, 10_240, 48, 32, 2) | {
    "vocab_size": 128_512,
    "head_dim": 128,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-5,
}
names = llama.names
to_hf = llama.to_hf


def config(hf: HF) -> DecoderConfig:
    given = renamed(hf, {"qkv_bias": "attention_bias", "bias": "mlp_bias"})
    c = llama.config(with_defaults(given, DEFAULTS))
    return replace(c, attention=replace(require(c.attention, SelfAttention), out_bias=require(c.mlp, Gated).bias))
