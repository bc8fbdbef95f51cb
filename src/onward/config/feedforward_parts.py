"""The choices of `DecoderConfig.mlp`. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from onward.base.errors import UserError
from onward.config.part_types import ConfigFields, FeedForward, OwnMethod
from onward.config.ranges import Size, SizeOrZero
from onward.config.routing import Routing, SoftmaxRouting

ActivationName = Literal["relu", "relu2", "gelu", "gelu_tanh", "silu"]


@dataclass(frozen=True)
class Plain(FeedForward, kind="plain"):
    """down(act(up(x))). The feed-forward of the original Transformer: `up` projects from d_model to d_ff, `act` is the
    activation function, `down` projects back."""

    act: ActivationName = "gelu"  # the activation function
    bias: bool = False  # whether both projections have biases
    d_ff: SizeOrZero = 0  # width inside; 0: the config's d_ff

    sizes: ClassVar[tuple[str, ...]] = ("d_ff",)

    def describe(self, config: ConfigFields) -> str:
        return self.in_words(f"width {self.width(config):,}", self.act, shown=("d_ff", "act"))


@dataclass(frozen=True)
class XIELU(FeedForward, kind="xielu"):
    """down(xielu(up(x))) (Huang and Schlag 2024). A feed-forward without a gate whose activation function, xIELU, has
    two learned numbers in each layer."""

    bias: bool = False  # whether both projections have biases
    d_ff: SizeOrZero = 0  # width inside; 0: the config's d_ff

    sizes: ClassVar[tuple[str, ...]] = ("d_ff",)

    def describe(self, config: ConfigFields) -> str:
        return self.in_words(f"width {self.width(config):,}", shown=("d_ff",))


@dataclass(frozen=True)
class Gated(FeedForward, kind="gated"):
    """down(act(gate(x)) * up(x)) (GLU variants, Shazeer 2020); SwiGLU with silu. A feed-forward whose projections
    `gate` and `up` go from d_model to d_ff, and `down` back.

    `combine(act, gate, up)` of a part of your own returns the input of the down projection, from the activation
    function `act` and the outputs of the gate and up projections; without it, act(gate) * up.
    """

    combine: ClassVar[OwnMethod] = None

    act: ActivationName = "silu"  # the activation function
    bias: bool = False  # whether the three projections have biases
    d_ff: SizeOrZero = 0  # width inside; 0: the config's d_ff

    sizes: ClassVar[tuple[str, ...]] = ("d_ff",)

    def describe(self, config: ConfigFields) -> str:
        return self.in_words(f"width {self.width(config):,}", self.act, shown=("d_ff", "act"))


@dataclass(frozen=True)
class Experts(FeedForward, kind="experts"):
    """Mixture of experts: each token uses a few of many feed-forwards, which are gated as in SwiGLU (Mixtral,
    DeepSeek-MoE) or not (Nemotron 3).

    `combine(act, gate, up)` of a part of your own returns the input of an expert's down projection, from the activation
    function `act` and the outputs of the gate and up projections; without it, act(gate) * up. Without a gate, the
    method is `combine(act, up)`, and the default act(up).
    """

    combine: ClassVar[OwnMethod] = None

    count: Size = 8  # number of experts
    top_k: Size = 2  # number of experts per token
    d_ff: SizeOrZero = 0  # width inside one expert; 0: the config's d_ff
    router: Routing = SoftmaxRouting()  # how a token's experts are selected
    d_shared: SizeOrZero = 0  # width of a shared feed-forward, which every token also uses; 0: no shared feed-forward
    shared_gate: bool = False  # multiply the output of the shared feed-forward by a learned gate per token (Qwen2-MoE)
    act: ActivationName = "silu"  # the activation function
    bias: bool = False  # whether the projections of each expert have biases
    gated: bool = True  # whether experts, the shared one too, have a gate; without: down(act(up(x)))
    d_latent: SizeOrZero = 0  # width of the experts' inputs and outputs, projected from and to d_model; 0: d_model
    backend: Literal["auto", "loop", "grouped"] = "auto"  # one matmul per expert, or grouped matmuls; auto: the fastest

    sizes: ClassVar[tuple[str, ...]] = ("d_ff",)

    def describe(self, config: ConfigFields) -> str:
        sizes = [f"{self.count} of width {self.width(config):,}, {self.top_k} per token"]
        sizes += [f"a shared expert of width {self.d_shared:,}"] * (self.d_shared > 0)
        sizes += [f"on {self.d_latent:,} numbers of a token"] * (self.d_latent > 0) + ["no gate"] * (not self.gated)
        shown = "count", "d_ff", "top_k", "d_shared", "act", "gated", "d_latent"
        return self.in_words(*sizes, self.act, shown=shown)

    def check(self, config: ConfigFields) -> None:
        where = f"mlp.{self.kind}"
        if self.top_k > self.count:
            raise UserError(f"{where}.top_k is {self.top_k}: it must be at most count ({self.count})")
        if self.shared_gate and not self.gated:
            raise UserError(f"{where}.shared_gate needs gated experts: leave it out, or set gated=true")
        r = self.router
        if not 1 <= r.top_k_groups <= r.n_groups or self.count % r.n_groups:
            raise UserError(
                f"{where}.router selects {r.top_k_groups} of {r.n_groups} groups of {self.count} experts: count must "
                "be a multiple of n_groups, and top_k_groups between 1 and n_groups"
            )
        if self.top_k > self.count // r.n_groups * r.top_k_groups:
            raise UserError(f"{where}.top_k is {self.top_k}, more than the experts in the selected groups: lower it")
