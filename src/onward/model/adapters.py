"""Low-rank adapters of weights (LoRA, Hu et al. 2021): W + scaling B A, with W frozen.

They are added to a finished model from outside: a layer keeps its class, its names and its `forward`, and a forward
hook adds the low-rank product to its output. Stacks of experts, whose weights are not layers, ask `adapted` for their
weight. Shapes: B rows, T tokens, I inputs, O outputs, R rank, X experts, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from threading import local
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onward.base.errors import UserError
from onward.base.suggestions import nearest
from onward.kernels.operations import linear
from onward.kernels.recorded import unrecorded


class Choice(NamedTuple):
    """The LoRA adapters that apply in a call of a model.

    Either `name` is the adapter of all rows ("": the base alone), or rows use different ones: `groups` maps each
    adapter to its rows (n,); the other rows use the base alone. `rows` has the adapter of each row; it may be empty if
    all rows use the same.

    While a decoding step is recorded, `numbers` (B,) has the index in `in_use` of each row's adapter, if the adapters
    differ. The compiled step reads the numbers in every run.
    """

    name: str
    rows: tuple[str, ...] = ()
    groups: Mapping[str, Tensor] | None = None
    numbers: Tensor | None = None

    @property
    def in_use(self) -> tuple[str, ...]:
        """The names of the adapters that rows use, in ascending order; "" is the base alone."""
        return (self.name,) if self.groups is None else tuple(sorted({*self.rows}))

    def write_to(self, numbers: Tensor) -> None:
        index = {name: number for number, name in enumerate(self.in_use)}
        numbers.copy_(torch.tensor([index[name] for name in self.rows]))


class Selection:
    """Which LoRA adapters apply in the calls of a model. All adapted layers of a model share one Selection.

    `name` is the adapter of all calls outside of `use` ("": the base alone). An adapter may be on top of another, which
    is then applied before it: `below` maps the name of the upper adapter to the name of the lower one.
    """

    def __init__(self) -> None:
        self.name = ""
        self.below: dict[str, str] = {}

    @property
    def current(self) -> Choice:
        """The Choice in the current thread or asyncio task."""
        choices = TRACED.choices if torch.compiler.is_compiling() else CHOICES.get()
        return choices.get(self) or Choice(self.name)

    def chain(self, name: str) -> list[str]:
        """Return the names of the adapters that apply if `name` is selected, in the order in which they apply: first
        the adapter on top of which `name` was trained, if any, then `name`."""
        return [*([self.below[name]] if name in self.below else []), name]

    def use(self, names: str | Sequence[str]) -> AbstractContextManager[None]:
        """Apply LoRA adapters inside the `with` block, in this thread or asyncio task: `names` is one adapter for all
        rows, or a list with the adapter of each row of the batch; "" is the base model without an adapter."""
        if isinstance(names, str):
            return self.choose(Choice(names))
        different = {*names}
        if len(different) == 1:
            return self.choose(Choice(different.pop(), tuple(names)))
        rows = {name: [row for row, one in enumerate(names) if one == name] for name in sorted(different - {""})}
        groups = {name: torch.tensor(row) for name, row in rows.items()}
        return self.choose(Choice(self.current.name, tuple(names), groups))

    def read_from(self, numbers: Tensor) -> AbstractContextManager[None]:
        """Let layers read the adapter of each row from `numbers` (B,) inside the `with` block, if rows use different
        adapters."""
        return self.choose(self.current._replace(numbers=numbers))

    def check_rows(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Raise a UserError if the number of rows of the inputs (B, T, ...) is not that of the chosen adapters; a
        forward pre-hook."""
        rows, batch = self.current.rows, len(inputs[0])
        if rows and len(rows) != batch:
            names = f"a list of {len(rows)} adapter name{'s' * (len(rows) > 1)}"
            raise UserError(f"Cannot use {names} for a batch of size {batch}: name the adapter of each row")

    @contextmanager
    def choose(self, choice: Choice) -> Iterator[None]:
        before = CHOICES.get()
        CHOICES.set({**before, self: choice})
        show_to_compiled_code()
        try:
            yield
        finally:
            CHOICES.set(before)  # a token would be refused by the context in which a generator ends
            show_to_compiled_code()


CHOICES: ContextVar[Mapping[Selection, Choice]] = ContextVar("choices", default={})  # noqa: B039


class Traced(local):
    """The value of CHOICES in each thread, for code compiled by torch.compile, which cannot read context variables."""

    choices: Mapping[Selection, Choice] = {}


TRACED = Traced()


def show_to_compiled_code() -> None:
    """Let code that torch.compile has compiled use the current adapters of this thread or asyncio task."""
    TRACED.choices = CHOICES.get()


DOT = "\u2024"  # replaces a dot in the name of a module


class Adapter(nn.Module):
    """A LoRA adapter: the trained low-rank change scaling B A of a weight (O, I), or of each weight of a stack
    (X, O, I), where A is (..., R, I) and B (..., O, R).

    For an embedding (V, D) the inputs are the V tokens: A is (R, V) and B (D, R). With DoRA (Liu et al. 2024) the rows
    of W + scaling B A are scaled to the learned `magnitude` (O,), by a norm that counts as a constant in the backward
    pass. Parameters are kept in at least fp32.

    If A and B are initialized from a part of the weight, their initial values are kept as `start_a` and `start_b`: the
    change is scaling (B A - start_b start_a), which is 0 at first.
    """

    start_a: Tensor | None
    start_b: Tensor | None

    def __init__(
        self, weight: Tensor, rank: int, scaling: float, *, dropout: float = 0.0, rslora: bool = False, dora: bool
    ) -> None:
        """Create an adapter that changes nothing yet (B is 0), initialized as in PEFT. `weight` gives the shape and,
        with DoRA, the norms; `rslora` only records that files store the scaling of rsLoRA. If the weight is on the meta
        device, the adapter is created on torch's default device."""
        super().__init__()
        dtype = torch.promote_types(weight.dtype, torch.float32)
        *stack, outputs, inputs = weight.shape
        self.scaling, self.rslora = scaling, rslora
        self.dropout = nn.Dropout(dropout)
        device = None if weight.is_meta else weight.device
        self.a = nn.Parameter(torch.empty(*stack, rank, inputs, dtype=dtype, device=device))
        self.b = nn.Parameter(torch.zeros(*stack, outputs, rank, dtype=dtype, device=device))
        nn.init.uniform_(self.a, -1 / math.sqrt(inputs), 1 / math.sqrt(inputs))  # kaiming_uniform with a = sqrt(5)
        self.magnitude = nn.Parameter(weight.detach().to(dtype).norm(dim=1)) if dora else None
        self.norms: tuple[object, Tensor] | None = None
        self.register_buffer("start_a", None)
        self.register_buffer("start_b", None)

    def begin(self, a: Tensor, b: Tensor) -> None:
        """Initialize A and B with `a` (..., R, I) and `b` (..., O, R), whose product is a part of the weight. Their
        product is subtracted from the adapter's change, which is therefore 0 at first."""
        self.a.data.copy_(a)
        self.b.data.copy_(b)
        self.start_a, self.start_b = self.a.detach().clone(), self.b.detach().clone()

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return A (..., R, I) and B (..., O, R) of the change scaling B A; R is twice the rank if the initial values
        of A and B are subtracted."""
        if self.start_a is None or self.start_b is None:
            return self.a, self.b
        return torch.cat([self.a, self.start_a], -2), torch.cat([self.b, -self.start_b], -1)

    def change(self) -> Tensor:
        """Return the change scaling B A that the adapter adds to the weight, (..., O, I), before any scaling of rows by
        DoRA."""
        a, b = self.factors()
        return self.scaling * (b @ a)

    def merged(self, weight: Tensor) -> Tensor:
        """Return the merged weight, computed in at least fp32 and rounded once."""
        exact = weight.to(self.a.dtype) + self.change()
        if self.magnitude is not None:
            exact = exact * (self.magnitude / exact.detach().norm(dim=1))[:, None]
        return exact.to(weight.dtype)

    def row_norms(self, layer: nn.Module) -> Tensor:
        """Return the norms (O,) of the rows of the layer's weight with the change added, by which DoRA divides. They
        have no gradient and, in eval mode, are cached until the weight, A or B changes."""
        version = [] if self.training else [version_of(t) for t in (*layer.parameters(), *layer.buffers())]
        if self.norms is None or self.norms[0] != version or self.training:
            with torch.inference_mode(False), torch.no_grad(), unrecorded():
                weight: Any = layer.weight  # a quantized layer dequantizes its weight here
                weight = weight.mT if isinstance(layer, nn.Embedding) else weight
                self.norms = version, (weight.to(self.a.dtype) + self.change()).norm(dim=1)
        return self.norms[1]

    def forward(self, layer: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """Return the output of a layer with this adapter, given the layer's input x (..., I), or token ids (...) for an
        embedding, and its output y without the adapter."""
        if isinstance(layer, nn.Embedding):
            sum_ = y + self.scaling * F.linear(F.embedding(x, self.a.T), self.b)
            scale = 1.0 if self.magnitude is None else self.magnitude / self.row_norms(layer)
            return (scale * sum_).to(y.dtype)
        dropped, (a, b) = self.dropout(x), self.factors()
        low = self.scaling * linear(linear(dropped.to(a.dtype), a), b)
        if self.magnitude is None:
            return (y + low).to(y.dtype)
        scale, own = self.magnitude / self.row_norms(layer), cast(nn.Linear, layer)
        if dropped is not x:
            base = F.linear(dropped, own.weight)
        else:
            base = y if own.bias is None else y - own.bias
        return (y + (scale - 1) * base + scale * low).to(y.dtype)


def version_of(tensor: Tensor) -> tuple[object, ...]:
    """Return values that differ after a tensor has changed, except through `data` or NumPy. Inference tensors, which do
    not count their changes, always seem to have changed."""
    return id(tensor), object() if tensor.is_inference() else tensor._version, tensor.dtype, tensor.device


class TokenRows(nn.Module):
    """Trained rows (N, D) of an embedding, which replace those of the tokens `ids` (N,), in ascending order. An output
    head that shares its weight with the embedding also shares the rows."""

    ids: Tensor

    def __init__(self, ids: Tensor, rows: nn.Parameter) -> None:
        super().__init__()
        self.register_buffer("ids", ids)
        self.rows = rows

    def merged(self, weight: Tensor) -> Tensor:
        return weight.index_copy(0, self.ids, self.rows.to(weight))

    def forward(self, layer: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        if not isinstance(layer, nn.Embedding):
            return y.index_copy(-1, self.ids, F.linear(x, self.rows.to(x.dtype)).to(y.dtype))
        indices = torch.searchsorted(self.ids, x.contiguous()).clamp(max=len(self.ids) - 1)
        is_trained = (self.ids[indices] == x)[..., None]
        return torch.where(is_trained, self.rows[indices].to(y.dtype), y)


class WeightAdapters(nn.ModuleDict):
    """The LoRA adapters of one weight by name, and the model's Selection, which decides which of them applies. Adapters
    are named after folders; these names may contain dots, unlike names of modules."""

    def __init__(self, selection: Selection) -> None:
        super().__init__()
        self.selection = selection

    def __setitem__(self, name: str, adapter: nn.Module) -> None:
        self._modules[name.replace(".", DOT)] = adapter  # add_module rejects names of methods, such as half

    def __getitem__(self, name: str) -> Adapter | TokenRows:
        return cast(Adapter | TokenRows, super().__getitem__(name.replace(".", DOT)))

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name.replace(".", DOT))

    def __contains__(self, name: str) -> bool:
        return super().__contains__(name.replace(".", DOT))

    def __iter__(self) -> Iterator[str]:
        return (name.replace(DOT, ".") for name in super().__iter__())

    def hook(self, layer: nn.Module, inputs: tuple[Any, ...], y: Tensor) -> Tensor:
        """Return the output of a linear layer or an embedding with the selected adapters applied. This is a forward
        hook, called with the layer, its inputs and its output y without adapters."""
        [x], chosen = inputs, self.selection.current
        if chosen.groups is None:
            return self.applied(chosen.name, layer, x, y)
        if chosen.numbers is not None:
            return self.applied_by_number(chosen.numbers, layer, x, y)
        if isinstance(layer, nn.Embedding):
            self.selection.check_rows(layer, inputs)
        tail = x.shape[-1:] if x.is_floating_point() else ()
        by_row, result = (t.reshape(len(chosen.rows), -1, *end) for t, end in ((x, tail), (y, y.shape[-1:])))
        for name, rows in chosen.groups.items():
            if any(one in self for one in self.selection.chain(name)):
                result = result.index_copy(0, rows, self.applied(name, layer, by_row[rows], result[rows]))
        return result.view_as(y)

    def applied_by_number(self, numbers: Tensor, layer: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """Return y (B, ..., O), the output of a layer for the input x, changed in each row by the row's adapter, which
        is given by its number in `numbers` (B,)."""
        result, by_row = y, numbers.view(-1, *[1] * (y.dim() - 1))
        for number, name in enumerate(self.selection.current.in_use):
            if any(one in self for one in self.selection.chain(name)):
                result = torch.ops.onward.rows_of(by_row, number, self.applied(name, layer, x, y), result)
        return result

    def applied(self, name: str, layer: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        for one in self.selection.chain(name):
            y = self[one](layer, x, y) if one in self else y
        return y

    def weight(self, weight: Tensor) -> Tensor:
        """Return `weight` with the adapter that all rows use merged into it; `weight` itself if rows use different
        adapters or none."""
        chosen = self.selection.current
        for name in self.selection.chain(chosen.name) if chosen.groups is None else ():
            weight = self[name].merged(weight) if name in self else weight
        return weight


def selection(model: nn.Module) -> Selection:
    """Return the Selection of a model, which stores which of its LoRA adapters apply; a new one if the model has no
    adapters."""
    return next((one.selection for one in model.modules() if isinstance(one, WeightAdapters)), None) or Selection()


def adapter_names(model: nn.Module) -> list[str]:
    """Return the names of a model's LoRA adapters, in the order in which they were added."""
    found = (name for module in model.modules() if isinstance(module, WeightAdapters) for name in module)
    return list(dict.fromkeys(found))


def check_adapter(name: str, known: Sequence[str]) -> None:
    """Raise a UserError, with the nearest name, if `name` is not among the `known` names of adapters; "" means no
    adapter and is accepted."""
    if name and name not in known:
        hint = nearest(name, known) if known else "the model has none: load one with adapter"
        raise UserError(f"there is no adapter with the name {name!r}: {hint}")


def adapted(module: nn.Module, name: str) -> Tensor:
    """Return the weight that `module` stores in the attribute `name`, with its LoRA adapter merged in if all rows use
    the same adapter; for code that multiplies with a weight without calling a layer."""
    weight, adapters = getattr(module, name), module._modules.get(f"{name}_lora")
    return adapters.weight(weight) if isinstance(adapters, WeightAdapters) else weight


def rows_differ(module: nn.Module) -> bool:
    """Return whether the rows of the current batch use different LoRA adapters for the attribute `weight` of a module,
    so that no single merged weight exists."""
    adapters = module._modules.get("weight_lora")
    return isinstance(adapters, WeightAdapters) and adapters.selection.current.groups is not None


def each_adapter(module: nn.Module, inputs: tuple[Tensor, ...], y: Tensor) -> Tensor | None:
    """Recompute a module's output y once per LoRA adapter, each for its own rows of the input (B, T, D), if rows use
    different adapters; a forward hook for modules with adapted stacks of experts. Returns None, which keeps y, if all
    rows use the same adapter."""
    selection = next(child.selection for child in module.children() if isinstance(child, WeightAdapters))
    if (groups := selection.current.groups) is None:
        return None
    for name, rows in groups.items():
        with selection.use(name):
            y = y.index_copy(0, rows, type(module).forward(module, inputs[0][rows]))
    return y


def rows_of(numbers: Tensor, number: int, x: Tensor, y: Tensor) -> Tensor:
    return torch.where(numbers == number, x, y)


LIBRARY = torch.library.Library("onward", "FRAGMENT")  # the recorder of decoding steps sees `rows_of` as one operation
LIBRARY.define("rows_of(Tensor numbers, int number, Tensor x, Tensor y) -> Tensor")
LIBRARY.impl("rows_of", rows_of, "CompositeExplicitAutograd")
