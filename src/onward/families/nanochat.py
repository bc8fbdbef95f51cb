"""nanochat: norms without weights, on embeddings too, relu ** 2, and rotations by negative angles (Karpathy 2025)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from onward.config.decoder import DecoderConfig, Gated, Plain, RMSNorm, SelfAttention
from onward.families import HF, Row, llama, require, with_defaults
from onward.families.llama import shape

if TYPE_CHECKING:
    from torch import Tensor

ARCHITECTURES = {"nanochat": "NanoChatForCausalLM"}
SOURCE = "github.com/karpathy/nanochat"
BASE = "model."
IGNORED = ""
PRESETS: dict[str, HF] = {
    "nanochat-d20": shape(1280, 5120, 20, 10, 10) | {"vocab_size": 65_536},
    "nanochat-d32": shape(2048, 8192, 32, 16, 16) | {"vocab_size": 65_536},
}
ANCESTORS = {"nanochat": "llama-2-7b"}
DEFAULTS = shape(768, 8192, 12, 6, 6) | {"num_key_value_heads": None, "vocab_size": 50_304, "hidden_act": "relu2"}


def config(hf: HF) -> DecoderConfig:
    given = with_defaults(hf, DEFAULTS)
    c = llama.config(given)
    norm = RMSNorm(eps=hf.get("rms_norm_eps", 1e-6), weight=False)
    return replace(
        c,
        attention=replace(require(c.attention, SelfAttention), qk_norm="head"),
        mlp=Plain(act=require(c.mlp, Gated).act),
        norm=norm,
        embed_norm=norm,
        logit_softcap=hf.get("final_logit_softcapping", 15.0),
    )


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    return llama.keys(c) | {
        "attention_bias": require(c.attention, SelfAttention).bias,
        "final_logit_softcapping": c.logit_softcap,
    }


def names(c: DecoderConfig) -> Iterator[Row]:
    def turned(t: Tensor) -> Tensor:
        """Swap the halves of each head in the rows of queries or keys, which reverses the direction of rotation."""
        return t.unflatten(0, (-1, c.d_head)).roll(c.d_head // 2, 1).flatten(0, 1)

    for their, our, *_ in llama.names(c):
        their = str(their).replace("mlp.up_proj", "mlp.fc1").replace("mlp.down_proj", "mlp.fc2")
        rotated = str(our).rpartition(".")[0].endswith(("attn.q", "attn.k"))
        yield (their, our, (turned, turned)) if rotated else (their, our)
