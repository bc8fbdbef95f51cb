"""Declarations of activations. A declaration is an entry of the dict that a module's method `activations()` returns:
the name of an activation, its shape, and where hooks reach it.

`tracing/` walks the modules of a decoder and reads these declarations, so that activations of your own modules are
traced and edited like those of Onward's modules. A name is relative to the module; "" is the module itself.

    def activations(self) -> Declarations:
        return {"gate": Activation(Output("gate"), ("B", "T", self.width)), "norm": Child("norm")}

Shapes hold the letters B (batch), T (tokens in this call), S (keys), D (d_model) and numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

ActivationShape = tuple[str | int, ...]


@dataclass(frozen=True)
class Where:
    """Base class of the locations at which hooks reach an activation of a module for tracing, such as the output of a
    submodule."""


@dataclass(frozen=True)
class Output(Where):
    """The location of an activation that is the output of the submodule with the attribute path `of`; "" is the module
    itself. `heads` > 0 splits the last dimension into that many heads, 0 leaves it. `flat`: the output is (B * T, ...),
    not (B, T, ...)."""

    of: str = ""
    heads: int = 0
    flat: bool = False


@dataclass(frozen=True)
class Input(Output):
    """The location of an activation that is the input of the submodule `of`; the fields have the same meaning as in
    `Output`."""


@dataclass(frozen=True)
class Mid(Where):
    """The location of the residual stream between the attention and the feed-forward of a block. `reader` is the name
    of the submodule whose input is this stream, `sum_at` the name of the submodule whose input is the stream plus the
    output of the feed-forward ("": this sum is the block's output). `kept` multiplies the stream in this sum."""

    reader: str
    sum_at: str
    kept: float = 1.0


@dataclass(frozen=True)
class Steps(Where):
    """Base class of the locations of several intermediate results of a module's forward pass, which one set of hooks
    intercepts together for tracing. Each result is declared as an Activation under its own name."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the intermediate results at this location, in the fixed order in which the hooks of this class
        use them."""
        raise NotImplementedError


@dataclass(frozen=True)
class NormScale(Steps):
    """The location of the number by which a norm divides each vector, such as its root mean square; `centered`: the
    norm subtracts the mean of the vector first."""

    centered: bool

    @property
    def names(self) -> tuple[str, ...]:
        return ("scale",)


@dataclass(frozen=True)
class ContextVectors(Steps):
    """The location of the vectors that an attention module passes to the methods of its AttentionContext, such as
    queries, keys and values. `rotated` has the activation names of the vectors passed to `rotate`, one per call in
    order; `cached` maps the keywords passed to `update` (the entries of the KV cache) to activation names."""

    rotated: tuple[str, ...]
    cached: Mapping[str, str]

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.rotated, *self.cached.values())


@dataclass(frozen=True)
class Queries(Steps):
    """The location of the queries that an attention module passes to its submodule `attend`, of class `Attend` (the
    softmax attention)."""

    attend: str = "attend"

    @property
    def names(self) -> tuple[str, ...]:
        return ("q_rotated",)


@dataclass(frozen=True)
class Scores(Steps):
    """The location of the attention scores before and after the mask, and of the attention weights, in the submodule
    `attend` of class `Attend`."""

    attend: str = "attend"

    @property
    def names(self) -> tuple[str, ...]:
        return ("scores", "masked_scores", "weights")


@dataclass(frozen=True)
class Latents(Steps):
    """The location of the latents of a LatentAttentionModule, from which keys and values are computed, and of its
    queries, keys and values."""

    @property
    def names(self) -> tuple[str, ...]:
        return "latent", "rotary", "k", "v", "q_rotated", "k_rotated"


@dataclass(frozen=True)
class ExpertSteps(Steps):
    """The location of the router's scores, choices and routing weights in an ExpertsModule, and of the hidden units and
    outputs of the chosen experts."""

    @property
    def names(self) -> tuple[str, ...]:
        return "router.scores", "router.choices", "shares", "post", "experts"


@dataclass(frozen=True)
class Activation:
    """The declaration of one activation of a module, which makes it available for tracing and editing by name: the
    location at which hooks reach it, and its shape."""

    where: Where
    shape: ActivationShape
    axis: int | None = None  # axis of heads, units or experts; a number after the name selects one of them
    count: int = 0  # number of heads, units or experts, if it differs from the size of the axis
    editable: bool = True
    rotary: bool = False  # whether the activation exists only in layers with rotary positions


@dataclass(frozen=True)
class Child:
    """The declaration of a submodule, whose own activations can then be traced and edited under the submodule's
    name."""

    of: str
    leading: tuple[int, ...] = ()  # additional dimensions between T and the last one
    flat: bool = False  # whether the vectors are (B * T, ...)
    rotary: bool = True  # whether the layer has rotary positions
    default: Callable[[nn.Module], Declarations] = lambda _: {}  # for a submodule without declarations


Declarations = dict[str, Activation | Child]


def declared(module: nn.Module, child: Child) -> Declarations:
    """Return the declared activations of a submodule, `module`, by name, with the shapes that they have inside its
    parent, which declares it as `child` and may add dimensions in front of their vectors. The declarations come from
    the method `activations` of the submodule or, if it has none, from the function `child.default`; rotary activations
    are left out unless `child.rotary`."""
    method = getattr(type(module), "activations", child.default)
    own = {name: placed(one, child) for name, one in method(module).items()}
    return {name: one for name, one in own.items() if child.rotary or not one.rotary or isinstance(one, Child)}


def placed(one: Activation | Child, child: Child) -> Activation | Child:
    """Return a declaration made by a submodule, `one`, changed to the shape and layout that the activation has inside
    the submodule's parent, which declares the submodule as `child`."""
    if isinstance(one, Child):
        return replace(one, flat=one.flat or child.flat, rotary=one.rotary and child.rotary)
    where = replace(one.where, flat=True) if child.flat and isinstance(one.where, Output) else one.where
    return replace(one, where=where, shape=(*one.shape[:2], *child.leading, *one.shape[2:]))


def output(width: str | int, module: nn.Module) -> Declarations:
    """Declare the output (B, T, width) of a module as an activation named ""; declare nothing for an `nn.Identity`."""
    return {} if isinstance(module, nn.Identity) else {"": Activation(Output(), ("B", "T", width))}


NORM = partial(output, "D")  # default for a norm of the residual stream


def norm(width: int, *, centered: bool) -> Declarations:
    """Declare the activations of a norm over vectors of size `width`: its output, and the number by which it divides
    each vector. `centered`: the norm subtracts the mean first, as LayerNorm does."""
    scale = Activation(NormScale(centered), ("B", "T", 1), editable=False)
    return {"": Activation(Output(), ("B", "T", width)), "scale": scale}


def block(module: nn.Module, mid: tuple[str, str] | None = None, kept: float = 1.0) -> Declarations:
    """Declare the activations of a block: its input and output, and those of its submodules `attn`, `mlp` and norms
    (names that end with `norm`). `mid` and `kept` hold the fields of `Mid`, the location of the residual stream between
    attention and feed-forward; `mid` is None for a block without it. Also used for blocks that declare no activations
    themselves."""
    stream = "B", "T", "D"
    names: Declarations = {"in": Activation(Input(), stream)}
    for name, _ in module.named_children():
        if name.endswith("norm"):
            names[name] = Child(name, default=NORM)
        elif name in ("attn", "mlp"):
            names |= {name: Child(name), f"{name}.out": Activation(Output(name), stream)}
        if name == "attn" and mid:
            names["mid"] = Activation(Mid(*mid, kept), stream)
    return {**names, "out": Activation(Output(), stream)}


def attention(n_heads: int, d_value: int) -> Declarations:
    """Declare the activations of an attention module: scores and weights, and the output of each head, for `n_heads`
    heads and values of width `d_value`. The module has a submodule `attend` of class `Attend` and an output projection
    `out`."""
    scores, shape = Scores(), ("B", n_heads, "T", "S")
    steps: Declarations = {name: Activation(scores, shape, 1) for name in ("scores", "masked_scores", "weights")}
    return steps | {"heads": Activation(Input("out", heads=n_heads), ("B", "T", n_heads, d_value), 2)}
