"""The choices of `DecoderConfig.attention`. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from onward.base.errors import UserError
from onward.config.part_types import Attention, ConfigFields
from onward.config.ranges import Epsilon, Factor, Size, SizeOrZero


@dataclass(frozen=True)
class SelfAttention(Attention, kind="self"):
    """Softmax attention: multi-head, grouped-query or multi-query, depending on n_kv_heads."""

    window: SizeOrZero = 0  # number of tokens that a token attends to, itself included; 0: all
    scale: Factor | None = None  # multiplies the scores; none: d_head ** -0.5
    attn_softcap: Factor | None = None  # scores s become cap * tanh(s / cap) (Gemma 2)
    sinks: bool = False  # add a learned score per head to the softmax, with no value (GPT-OSS)
    qk_norm: Literal["none", "head", "heads", "width"] = "none"  # q/k norm: shared by heads, one per head, full width
    clip: Factor | None = None  # clamp queries, keys and values to -clip ... clip (MPT)
    bias: bool = False  # whether the q, k and v projections have biases
    out_bias: bool = False  # whether the output projection has a bias
    out: bool = True  # whether the layer has an output projection

    def entries(self, config: ConfigFields) -> dict[str, tuple[int, ...]]:
        return dict.fromkeys(("k", "v"), (config.n_kv_heads, config.d_head))

    def describe(self, config: ConfigFields) -> str:
        shared = [f"{config.n_kv_heads} for keys and values"] * (config.n_kv_heads != config.n_heads)
        return self.in_words(f"{config.n_heads} heads of {config.d_head}", *shared)

    def check(self, config: ConfigFields) -> None:
        if not self.out and (heads := config.n_heads * config.d_head) != config.d_model:
            raise UserError(
                f"attention.self.out cannot be false, because the heads together are {heads} wide and d_model is "
                f"{config.d_model}: keep the projection, or set d_head to d_model / n_heads"
            )


@dataclass(frozen=True)
class LatentAttention(Attention, kind="latent"):
    """Keys and values are projections of one latent vector per token; the cache keeps this vector and a rotary key
    shared by all heads (multi-head latent attention, DeepSeek-V2, DeepSeek-AI 2024, section 2.1)."""

    d_latent: Size = 512  # width of the latent of keys and values
    d_query_latent: SizeOrZero = 0  # width of the latent of queries; 0: queries are projected from x
    d_nope: Size = 128  # elements of each query and key that are not rotated
    d_rope: Size = 64  # rotated elements of each query and key; all heads share the rotated elements of the key
    d_value: Size = 128  # width of each head's value
    scale: Factor | None = None  # multiplies the scores; none: (d_nope + d_rope) ** -0.5
    bias: bool = False  # whether the projections to the latents and the output projection have biases
    norm_eps: Epsilon = 1e-6  # epsilon of the norms of the latents

    def entries(self, config: ConfigFields) -> dict[str, tuple[int, ...]]:
        return {"latent": (1, self.d_latent), "rotary": (1, self.d_rope)}  # keys of one head, shared by all

    def describe(self, config: ConfigFields) -> str:
        heads = f"{config.n_heads} heads of {self.d_nope} + {self.d_rope}"
        return self.in_words(heads, f"latents of {self.d_latent}", shown=("d_latent", "d_nope", "d_rope"))

    def rope_width(self, config: ConfigFields) -> int:
        return self.d_rope

    def key_flops(self, config: ConfigFields, decoding: bool = False) -> int:
        if decoding:  # latents serve as keys and values
            return 2 * config.n_heads * (2 * self.d_latent + self.d_rope)
        return 2 * config.n_heads * (self.d_nope + self.d_rope + self.d_value)
