"""The choices of `DecoderConfig.attention`. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

from onward.base.errors import UserError
from onward.config.attention_options import OutputGate, QueryScale
from onward.config.part_types import Attention, ConfigFields, HeadSizes, Norm
from onward.config.ranges import Factor, SizeOrZero


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
    n_heads: SizeOrZero = 0  # number of query heads; 0: the config's n_heads
    n_kv_heads: SizeOrZero = 0  # number of key/value heads; 0: the config's n_kv_heads
    d_head: SizeOrZero = 0  # width of a query and a key; 0: the config's d_head
    d_value: SizeOrZero = 0  # width of a value; 0: that of a key
    value_scale: Factor = 1.0  # multiplies the values (MiMo-V2)
    value_norm: Norm | None = None  # the norm of each value; none: no norm
    values_are_keys: bool = False  # the values are the keys before norm and rotation (Gemma 4)
    shares_kv: bool = False  # use keys and values of the nearest earlier layer with the same window (Gemma 3n)
    qk_norm_part: Norm | None = None  # the norm of queries and keys; none: that of the block
    norm_rotated: bool = False  # normalize queries and keys after their rotation (Hunyuan)
    chunked: bool = False  # attend only to tokens of the same chunk of `window` positions (Llama 4)
    gate: OutputGate | None = None  # multiplies the outputs of the heads; none: no gate
    query_scale: QueryScale | None = None  # multiplies the queries, by their position; none: no factor

    sizes: ClassVar[tuple[str, ...]] = ("n_heads", "n_kv_heads", "d_head")

    def without_repeated_sizes(self, config: ConfigFields) -> Self:
        heads = self.heads(config)
        part = replace(self, d_value=0) if self.d_value and heads.d_value == heads.d_head else self
        return super(SelfAttention, part).without_repeated_sizes(config)

    def heads(self, config: ConfigFields) -> HeadSizes:
        d_head = self.d_head or config.d_head
        return HeadSizes(
            self.n_heads or config.n_heads, self.n_kv_heads or config.n_kv_heads, d_head, self.d_value or d_head
        )

    def entries(self, config: ConfigFields) -> dict[str, tuple[int, ...]]:
        heads = self.heads(config)
        if self.shares_kv:
            return {}
        return {"k": (heads.n_kv_heads, heads.d_head), "v": (heads.n_kv_heads, heads.d_value)}

    def describe(self, config: ConfigFields) -> str:
        heads = self.heads(config)
        sizes = [f"{heads.n_heads} heads of {heads.d_head}"]
        sizes += [f"values of {heads.d_value}"] * (heads.d_value != heads.d_head)
        sizes += [f"{heads.n_kv_heads} for keys and values"] * (heads.n_kv_heads != heads.n_heads)
        return self.in_words(*sizes, shown=(*self.sizes, "d_value"))

    def check(self, config: ConfigFields) -> None:
        heads = self.heads(config)
        if heads.n_heads % heads.n_kv_heads:
            raise UserError(
                f"attention.self has {heads.n_heads} heads (n_heads) and {heads.n_kv_heads} for keys and values "
                "(n_kv_heads): n_heads must be a multiple of n_kv_heads"
            )
        steps = {
            "norm_rotated": self.norm_rotated,
            "values_are_keys": self.values_are_keys,
            "shares_kv": self.shares_kv,
        }
        several = [name for name, used in steps.items() if used]
        if several and (len(several) > 1 or self.qk_norm not in ("none", "head")):
            raise UserError(
                f"attention.self cannot combine {' with '.join(several)}"
                f"{f' with qk_norm {self.qk_norm}' if len(several) == 1 else ''}: leave one of them out"
            )
        if self.chunked and not self.window:
            raise UserError("attention.self.chunked needs a window, the number of positions of a chunk: give window")
        if self.values_are_keys and heads.d_value != heads.d_head:
            raise UserError("attention.self.values_are_keys needs values as wide as keys: leave d_value out")
        if not self.out and (width := heads.n_heads * heads.d_value) != config.d_model:
            raise UserError(
                f"attention.self.out cannot be false, because the heads together are {width} wide and d_model is "
                f"{config.d_model}: keep the projection, or set d_head to d_model / n_heads"
            )
