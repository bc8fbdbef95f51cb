"""Falcon-H1: attention and Mamba-2 side by side in each layer, with factors from muP (TII 2025)."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from onward.base.errors import UserError
from onward.config.decoder import AttentionAndMamba2, DecoderConfig, Gated, Mamba2, RMSNorm, SelfAttention
from onward.config.ranges import Factor
from onward.families import HF, Row, llama, only, require, with_defaults
from onward.families._recurrent import check_steps, mamba2_keys, mamba2_names
from onward.families.llama import shape

if TYPE_CHECKING:
    from torch import Tensor

ARCHITECTURES = {"falcon_h1": "FalconH1ForCausalLM"}
SOURCE = "arXiv:2507.22448"
BASE = "model."
IGNORED = ""
SSM = [2**-1.5, 0.25, 2**-2.5, 0.5, 2**-1.5]  # factors of the five parts of Mamba-2's input projection
RELEASED = {
    "rope_theta": 1e11,
    "mamba_norm_before_gate": False,
    "mamba_rms_norm": True,
    "embedding_multiplier": 2**2.5,
    "ssm_multipliers": SSM,
}
PRESETS: dict[str, HF] = {
    "falcon-h1-0.5b": RELEASED
    | shape(1024, 2048, 36, 8, 2)
    | {"vocab_size": 32_784, "head_dim": 64, "max_position_embeddings": 16_384}
    | {"mamba_d_ssm": 1536, "mamba_n_heads": 24, "mamba_d_state": 128, "mamba_rms_norm": False}
    | {"key_multiplier": 0.390625, "attention_out_multiplier": 0.9375, "lm_head_multiplier": 0.0390625}
    | {"ssm_in_multiplier": 1.25, "ssm_out_multiplier": 2**-0.5 / 3, "ssm_multipliers": [*SSM[:2], SSM[0], *SSM[3:]]}
    | {"mlp_multipliers": [0.625 * 2**0.5, 0.5859375]},
    "falcon-h1-1.5b-deep": RELEASED
    | shape(1280, 3072, 66, 6, 2)
    | {"vocab_size": 65_537, "head_dim": 128, "max_position_embeddings": 131_072}
    | {"mamba_d_ssm": 1536, "mamba_n_heads": 24}
    | {"key_multiplier": 2**-2.5, "attention_out_multiplier": 0.5, "lm_head_multiplier": 0.03125}
    | {"ssm_out_multiplier": 2**-0.5 / 3, "mlp_multipliers": [2**-0.5, 0.3125]},
    "falcon-h1-7b": RELEASED
    | shape(3072, 12_288, 44, 12, 2)
    | {"vocab_size": 130_049, "head_dim": 128, "max_position_embeddings": 262_144}
    | {"mamba_d_ssm": 3072, "mamba_n_heads": 24}
    | {"key_multiplier": 2**-2.5 * 12.5 / 72, "attention_out_multiplier": 5 / 48, "lm_head_multiplier": 5 / 384}
    | {"ssm_in_multiplier": 5 / 12, "ssm_out_multiplier": 2**-0.5 / 6}
    | {"mlp_multipliers": [2**-0.5 * 5 / 12, 0.03125 * 25 / 24]},
    "falcon-h1-34b": RELEASED
    | shape(5120, 21_504, 72, 20, 4)
    | {"vocab_size": 261_120, "head_dim": 128, "max_position_embeddings": 262_144}
    | {"mamba_d_ssm": 4096, "mamba_n_heads": 32, "mamba_n_groups": 2}
    | {"key_multiplier": 2**-6.5, "attention_out_multiplier": 0.0375, "lm_head_multiplier": 2**-7}
    | {"ssm_in_multiplier": 0.25, "ssm_out_multiplier": 2**-3.5}
    | {"mlp_multipliers": [2**-2.5, 0.0625 / 5.6]},
}
ANCESTORS = {"falcon-h1": "llama-3-8b"}
DEFAULTS = shape(4096, 14_336, 32, 32, 8) | {
    "vocab_size": 128_000,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "mamba_d_ssm": 1024,
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
}


@dataclass(frozen=True)
class ScaledGated(Gated, kind="scaled_gated", internal=True):
    """Gated feed-forward of Falcon-H1: scale * down(act(gate_scale * gate(x)) * up(x))."""

    gate_scale: Factor = 1.0  # multiplies the output of the gate projection
    scale: Factor = 1.0  # multiplies the output

    def combine(self, act: Callable[["Tensor"], "Tensor"], gate: "Tensor", up: "Tensor") -> "Tensor":
        return act(gate * self.gate_scale) * up * self.scale


def config(hf: HF) -> DecoderConfig:
    only(hf, attention_bias=False, mlp_bias=False, mamba_proj_bias=False, projectors_bias=False)
    check_steps(hf)
    hf.get("mamba_expand")  # mamba_d_ssm overrides it
    given = with_defaults(hf, DEFAULTS)
    c = llama.config(given)
    into, key, out, ssm_in, ssm_out, embed, head = (
        hf.get(f"{name}_multiplier", 1.0)
        for name in ("attention_in", "key", "attention_out", "ssm_in", "ssm_out", "embedding", "lm_head")
    )
    factor, values = key * into**2, into * out
    gate, down = hf.get("mlp_multipliers") or (1.0, 1.0)
    return replace(
        c,
        attention=AttentionAndMamba2(
            SelfAttention(scale=None if factor == 1.0 else factor * c.d_head**-0.5, value_scale=values),
            mamba2(hf, given, ssm_in, require(c.norm, RMSNorm).eps),
            ssm_out,
        ),
        mlp=ScaledGated(require(c.mlp, Gated).act, gate_scale=gate, scale=down),
        embed_scale=embed,
        logit_scale=head,
    )


def mamba2(hf: HF, given: HF, scale: float, eps: float) -> Mamba2:
    heads, channels, width = (given[f"mamba_{name}"] for name in ("n_heads", "d_ssm", "d_head"))
    channels = channels or hf.get("mamba_expand", 2) * given["hidden_size"]
    width = channels // heads if width == "auto" else width
    if heads * width != channels:
        raise UserError(
            f"config.json has mamba_n_heads {heads} and mamba_d_head {width}: their product must be {channels}, "
            f"mamba_d_ssm {hf.get('mamba_d_ssm')} or mamba_expand {hf.get('mamba_expand', 2)} times hidden_size"
        )
    scales = tuple(scale * one for one in hf.get("ssm_multipliers") or (1.0,) * 5)
    norm: Any = "before_gate" if hf.get("mamba_norm_before_gate", True) else "after_gate"
    return Mamba2(
        n_heads=heads,
        d_head=width,
        n_groups=given["mamba_n_groups"],
        d_state=given["mamba_d_state"],
        d_conv=given["mamba_d_conv"],
        conv_bias=hf.get("mamba_conv_bias", True),
        norm=norm if hf.get("mamba_rms_norm", False) else "none",
        norm_eps=eps,
        scales=() if scales == (1.0,) * 5 else scales,
    )


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    both, mlp = require(c.attention, AttentionAndMamba2), require(c.mlp, Gated)
    attention, mamba = both.attention, both.mamba
    factor = 1.0 if attention.scale is None else attention.scale / c.d_head**-0.5
    # choose the factor that reads back as the same scale
    near = (factor, math.nextafter(factor, 0), math.nextafter(factor, math.inf))
    key = next((one for one in near if one * c.d_head**-0.5 == attention.scale), factor)
    return (
        llama.keys(replace(c, attention=attention))
        | {
            "embedding_multiplier": c.embed_scale,
            "lm_head_multiplier": c.logit_scale,
            "key_multiplier": key,
            "attention_out_multiplier": attention.value_scale,
            "ssm_out_multiplier": both.mamba_scale,
            "ssm_multipliers": [*(mamba.scales or (1.0,) * 5)],
            "mlp_multipliers": [getattr(mlp, "gate_scale", 1.0), getattr(mlp, "scale", 1.0)],
        }
        | mamba2_keys(replace(c, attention=mamba))
        | {
            "mamba_d_ssm": mamba.count(c) * mamba.d_head,
            "mamba_rms_norm": mamba.norm != "none",
            "mamba_norm_before_gate": mamba.norm != "after_gate",
        }
    )


def names(c: DecoderConfig) -> Iterator[Row]:
    for their, *ours in llama.names(c):
        name = str(their).replace(".post_attention_layernorm", ".pre_ff_layernorm").replace(".mlp.", ".feed_forward.")
        name = name.replace("model.norm.", "model.final_layernorm.")
        yield name, str(ours[0]).replace(".attn.", ".attn.attention."), *ours[1:]  # type: ignore[misc]
    for i in range(c.n_layers):
        yield from mamba2_names(f"model.layers.{i}.mamba", f"blocks.{i}.attn.mamba")
