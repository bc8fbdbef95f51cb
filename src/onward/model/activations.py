"""Declarations of activations: the `activations()` of a module class lists the names of its activations and where they
are.

`tracing/` walks the modules of a decoder and reads these declarations, so that an activation of your own module is
traced and edited like one of ours. A name is relative to the module; "" is the module itself.

    def activations(self) -> Declarations:
        return {"gate": Activation(Output("gate"), ("B", "T", self.width)), "norm": Child("norm")}

Shapes hold the letters B (batch), T (tokens in this call), S (keys), D (d_model) and numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

Shape = tuple[str | int, ...]


@dataclass(frozen=True)
class Where:
    """The place of an activation in its module."""


@dataclass(frozen=True)
class Output(Where):
    """The output of a submodule; "": of the module itself. `heads` > 0 splits its last dimension into heads. `flat`: it
    is (B * T, ...)."""

    of: str = ""
    heads: int = 0
    flat: bool = False


@dataclass(frozen=True)
class Input(Output):
    """The input of a submodule, as `Output`."""


@dataclass(frozen=True)
class Mid(Where):
    """The residual stream between attention and feed-forward. `reader` is the submodule that reads it; `sum_at` is the
    submodule whose input is its sum with the output of the feed-forward ("": the sum is the output of the block)."""

    reader: str
    sum_at: str


@dataclass(frozen=True)
class Steps(Where):
    """Steps inside a module that are intercepted together; each is declared under a name of its own."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the steps."""
        raise NotImplementedError


@dataclass(frozen=True)
class NormScale(Steps):
    """The number by which a norm with an `eps` divides each vector; `centered`: after its mean is subtracted."""

    centered: bool

    @property
    def names(self) -> tuple[str, ...]:
        return ("scale",)


@dataclass(frozen=True)
class ContextVectors(Steps):
    """Vectors that an attention passes to its AttentionContext. `rotated` names the vectors that it rotates, in the
    order of the calls; `cached` names the vectors that it writes to the cache, by cache entry."""

    rotated: tuple[str, ...]
    cached: Mapping[str, str]

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.rotated, *self.cached.values())


@dataclass(frozen=True)
class Queries(Steps):
    """The queries that a submodule `Attend` receives."""

    attend: str = "attend"

    @property
    def names(self) -> tuple[str, ...]:
        return ("q_rotated",)


@dataclass(frozen=True)
class Scores(Steps):
    """Scores before and after the mask, and attention weights, of a submodule of class `Attend`."""

    attend: str = "attend"

    @property
    def names(self) -> tuple[str, ...]:
        return ("scores", "masked_scores", "weights")


@dataclass(frozen=True)
class Latents(Steps):
    """The latents of a LatentAttentionModule, and the keys and values computed from them."""

    @property
    def names(self) -> tuple[str, ...]:
        return "latent", "rotary", "k", "v", "q_rotated", "k_rotated"


@dataclass(frozen=True)
class ExpertSteps(Steps):
    """The router's scores and choices in an ExpertsModule, and the units and outputs of the chosen experts."""

    @property
    def names(self) -> tuple[str, ...]:
        return "router.scores", "router.choices", "shares", "post", "experts"


@dataclass(frozen=True)
class Activation:
    """An activation of a module."""

    where: Where
    shape: Shape
    axis: int | None = None  # of its heads, units or experts, one of which a number after the name selects
    count: int = 0  # of these, where the axis does not have all of them
    editable: bool = True
    rotary: bool = False  # whether it exists only in layers with rotary positions


@dataclass(frozen=True)
class Child:
    """The activations of a submodule, under its name."""

    of: str
    leading: tuple[int, ...] = ()  # dimensions of its vectors between T and the last
    flat: bool = False  # whether its vectors are (B * T, ...)
    rotary: bool = True  # whether its layer has rotary positions
    default: Callable[[nn.Module], Declarations] = lambda _: {}  # the activations of a submodule without declarations


Declarations = dict[str, Activation | Child]


def declared(module: nn.Module, child: Child) -> Declarations:
    """Return the declarations of a submodule, in the shapes that they have inside its parent."""
    method = getattr(type(module), "activations", child.default)
    own = {name: placed(one, child) for name, one in method(module).items()}
    return {name: one for name, one in own.items() if child.rotary or not one.rotary or isinstance(one, Child)}


def placed(one: Activation | Child, child: Child) -> Activation | Child:
    """Return one declaration of a submodule, in the shape that it has inside its parent."""
    if isinstance(one, Child):
        return replace(one, flat=one.flat or child.flat, rotary=one.rotary and child.rotary)
    where = replace(one.where, flat=True) if child.flat and isinstance(one.where, Output) else one.where
    return replace(one, where=where, shape=(*one.shape[:2], *child.leading, *one.shape[2:]))


def output(width: str | int, module: nn.Module) -> Declarations:
    """Return the output of a module, unless it is the identity."""
    return {} if isinstance(module, nn.Identity) else {"": Activation(Output(), ("B", "T", width))}


NORM = partial(output, "D")  # of a norm of the residual stream without declarations


def norm(width: int, *, centered: bool) -> Declarations:
    """Return the activations of a norm: its output, and the number by which it divides."""
    scale = Activation(NormScale(centered), ("B", "T", 1), editable=False)
    return {"": Activation(Output(), ("B", "T", width)), "scale": scale}


def block(module: nn.Module, mid: tuple[str, str] | None = None) -> Declarations:
    """Return the activations of a block with submodules `attn`, `mlp` and norms (names that end with `norm`); also of a
    block without declarations."""
    stream = "B", "T", "D"
    names: Declarations = {"in": Activation(Input(), stream)}
    for name, _ in module.named_children():
        if name.endswith("norm"):
            names[name] = Child(name, default=NORM)
        elif name in ("attn", "mlp"):
            names |= {name: Child(name), f"{name}.out": Activation(Output(name), stream)}
        if name == "attn" and mid:
            names["mid"] = Activation(Mid(*mid), stream)
    return {**names, "out": Activation(Output(), stream)}


def attention(n_heads: int, d_value: int) -> Declarations:
    """Return the activations of an attention with a submodule `attend`, of the class `Attend`, and an output projection
    `out`: scores, weights, and the output of each head."""
    scores, shape = Scores(), ("B", n_heads, "T", "S")
    steps: Declarations = {name: Activation(scores, shape, 1) for name in ("scores", "masked_scores", "weights")}
    return steps | {"heads": Activation(Input("out", heads=n_heads), ("B", "T", n_heads, d_value), 2)}
