"""Records the operations of a forward pass, in any style of code: products with weights, attention, and sums.

A decoder consists of a few kinds of PyTorch operations, whether it is written with modules, functions, einsum or fused
attention. A dispatch mode sees them all. Attention is recognized as a product of queries and keys with a (T, T)
result for each head, followed by a product of weights (T, T) and values.

Shapes: H heads, K key/value heads, T tokens, E size of a head, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from onward.inspection.doctor.subject import Subject, hooked
from onward.model.recurrent.carried import Recurrence

PRODUCTS = "mm", "bmm", "addmm", "baddbmm"
COPIES = "clone", "_to_copy", "contiguous", "_unsafe_view", "copy", "_reshape_copy"
SOFTMAXES = "_softmax", "_safe_softmax", "softmax"
LOOKUPS = "embedding", "index", "index_select"


@dataclass(eq=False)
class RecordedProduct:
    """A recorded matrix product with a weight of the model."""

    given: Tensor
    weight: Tensor
    result: Tensor
    module: str
    after: RecordedProduct | None  # product from which `given` is computed by nothing but views and biases
    read: bool = False  # whether an operation other than a product with a weight uses the result


@dataclass(eq=False)
class RecordedAttention:
    """A recorded attention: the product of queries and keys, and the later product of weights and values."""

    module: str
    queries: Tensor  # (H, T, E), as passed to the product
    keys: Tensor
    weights: Tensor  # (H, T, T)
    values: Tensor
    sources: dict[str, list[Tensor]]  # outputs of the projections that queries, keys and values are computed from
    softmax_of_softmax: bool
    width: int  # D, width of the projected vectors


@dataclass(eq=False)
class RecordedSum:
    left: Tensor
    right: Tensor
    result: Tensor
    module: str


def is_continuous(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


class Operations(TorchDispatchMode):
    """Records the products, sums and attentions of any model's forward pass over a text (1, T), where T is `length`."""

    def __init__(self, model: nn.Module, length: int) -> None:
        super().__init__()
        self.length = length
        self.linears: list[RecordedProduct] = []
        self.attentions: list[RecordedAttention] = []
        self.sums: list[RecordedSum] = []
        self.lookups: list[Tensor] = []  # rows (T, D) looked up in embedding tables
        self.tables: set[int] = set()  # addresses of these tables
        self.module: list[str] = []  # stack of the names of running modules
        self.called: set[str] = set()  # names of the modules called so far
        self.alive: list[Tensor] = []  # keeps tensors alive, so that their ids stay unique
        self.recurrent = {name for name, module in model.named_modules() if isinstance(module, Recurrence)}
        self.weights = {id(p) for p in model.parameters()}
        self.storages = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.sources: dict[int, list[Tensor]] = {}
        # products with a weight, by the id of their result, also after views and biases
        self.direct: dict[int, RecordedProduct] = {}
        self.soft: set[int] = set()  # ids of (T, T) tensors computed from a softmax
        self.twice = False
        self.scores: tuple[Tensor, Tensor] | None = None  # queries and keys of the last (T, T) product

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        name = func.overloadpacket.__name__
        for out in result if isinstance(result, list | tuple) else [result]:
            if isinstance(out, Tensor) and is_continuous(out):
                self.note(name, given, out)
        return result

    def is_weight(self, x: Tensor) -> bool:
        """Whether a tensor is a parameter, a view of one, or computed from parameters alone."""
        return id(x) in self.weights or x.untyped_storage().data_ptr() in self.storages

    def note(self, name: str, given: list[Tensor], out: Tensor) -> None:
        self.alive += [*given, out]
        floats = [x for x in given if is_continuous(x)]
        if name in LOOKUPS and floats and self.is_weight(floats[0]):
            self.lookups.append(out)
            self.tables.add(floats[0].untyped_storage().data_ptr())
            return
        if floats and all(map(self.is_weight, floats)):
            self.weights.add(id(out))
            return
        if name in PRODUCTS:
            self.product(given[-2], given[-1], out)
            return
        self.follow(name, floats, out)
        if name in ("add", "add_") and len(floats) == 2 and floats[0].shape == floats[1].shape:
            self.sums.append(RecordedSum(floats[0], floats[1], out, self.current_module()))

    def current_module(self) -> str:
        return self.module[-1] if self.module else ""

    def product(self, left: Tensor, right: Tensor, out: Tensor) -> None:
        """Record a product with a weight, of queries and keys, or of attention weights and values."""
        weights = self.is_weight(left), self.is_weight(right)
        if sum(weights) == 1:
            x, weight = (right, left) if weights[0] else (left, right)
            linear = RecordedProduct(x, weight, out, self.current_module(), self.direct.get(id(x)))
            self.linears.append(linear)
            self.sources[id(out)], self.direct[id(out)] = [out], linear
            return
        self.mark_read(left, right)
        T = self.length
        if self.current_module() in self.recurrent:  # multiplies queries and keys, but is not attention
            return
        if out.size(-1) == T and not out.size(-2) % T and left.size(-1) % T:
            self.scores = left, right
        elif self.scores and left.size(-1) == T and not left.size(-2) % T:
            self.mixed(left, right, right)
        elif self.scores and right.shape[-2:] == (T, T) and left.size(-1) == T:  # values first, both transposed
            self.mixed(right.transpose(-2, -1), left.transpose(-2, -1), left)

    def mixed(self, weights: Tensor, values: Tensor, of_values: Tensor) -> None:
        """Pair the product of weights and values with the last one of queries and keys. Grouped heads (K, G T, E),
        whose G queries per key share one matrix, become (K G, T, E)."""
        assert self.scores
        T, (queries, keys) = self.length, self.scores
        of = lambda x: self.sources.get(id(x), [])
        sources = {"queries": of(queries), "keys": of(keys), "values": of(of_values)}
        flat = [x.detach() if x.dim() == 3 else x.detach()[None] for x in (queries, keys.mT, weights, values)]
        group = flat[0].size(1) // T
        unfold = lambda x: x.unflatten(1, (-1, T)).flatten(0, 1).double()
        repeat = lambda x: x.repeat_interleave(group, 0).double()
        q, k, w, v = unfold(flat[0]), repeat(flat[1]), unfold(flat[2]), repeat(flat[3])
        if q.shape[:2] == k.shape[:2] == w.shape[:2] == v.shape[:2]:
            width = self.linears[-1].given.size(-1) if self.linears else 0
            self.attentions.append(RecordedAttention(self.current_module(), q, k, w, v, sources, self.twice, width))
        self.scores, self.twice = None, False

    def follow(self, name: str, floats: list[Tensor], out: Tensor) -> None:
        """Record the projections from which a result is computed."""
        T, known = self.length, [x for x in floats if not self.is_weight(x)]
        if out.shape[-2:] == (T, T):
            descends = any(id(x) in self.soft for x in known)
            if name in SOFTMAXES and descends:
                self.twice = True
            if name in SOFTMAXES or descends:
                self.soft.add(id(out))
        if name in ("add", "sub") and known and all(id(x) in self.direct for x in known):
            self.direct[id(out)] = self.direct[id(known[0])]  # a sum of products with weights also counts
        elif len(known) != 1 or known[0] is out:
            self.mark_read(*known)
        if len(known) != 1 or known[0] is out:
            reached = {id(s): s for x in known for s in self.sources.get(id(x), [])}
            self.sources[id(out)] = [*reached.values()]
            return
        x = known[0]
        view = out.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        before = self.sources.get(id(x), [])
        unchanged = len(before) == 1 and before[0] is x  # x is the result of a projection
        same = view or name in COPIES or (name in ("add", "add_") and len(floats) == 2)
        self.sources[id(out)] = [out] if unchanged and same and out.is_floating_point() else before
        if same and id(x) in self.direct:
            self.direct[id(out)] = self.direct[id(x)]
        elif not same:
            self.mark_read(x)

    def mark_read(self, *tensors: Tensor) -> None:
        """Mark products as used by an operation other than a product with a weight, such as an activation."""
        for x in tensors:
            if id(x) in self.direct:
                self.direct[id(x)].read = True


def length_of_texts(s: Subject) -> int:
    """A text length T from 4 to 13 that divides no dimension of the parameters, so that a (T, T) tensor can only be
    attention; 0 if there is none."""
    sizes = {size for p in s.model.parameters() for size in p.shape}
    return next((n for n in range(min(13, s.tokens.size(1)), 3, -1) if all(size % n for size in sizes)), 0)


@torch.no_grad()
def operations(s: Subject, tokens: Tensor) -> Operations:
    """The recorded operations of the model on a text (1, T)."""
    watched = Operations(s.model, tokens.size(1))

    def enter(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            watched.module.append(name)
            watched.called.add(name)

        return hook

    def leave(module: nn.Module, args: Any, result: Any) -> None:
        watched.module.pop()

    # the fast path is a single operation, in which attention cannot be recognized
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    named = [(name, module) for name, module in s.model.named_modules() if name]
    handles = [module.register_forward_pre_hook(enter(name)) for name, module in named]
    handles += [module.register_forward_hook(leave) for _, module in named]
    try:
        # with gradients enabled, a model takes its training path, without custom kernels
        with hooked(handles), sdpa_kernel(SDPBackend.MATH), torch.enable_grad(), watched:
            s(tokens)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return watched


@contextmanager
def changed(model: nn.Module, new: Callable[[Tensor], Tensor | None]) -> Iterator[None]:
    """Replace each parameter p by new(p), unless that is None, inside the `with` block."""
    kept: list[tuple[Tensor, Tensor]] = []
    try:
        with torch.no_grad():
            for p in model.parameters():
                value = new(p) if p.is_floating_point() else None
                if value is not None:
                    kept.append((p, p.detach().clone()))
                    p.copy_(value)
        yield
    finally:
        with torch.no_grad():
            for parameter, before in kept:
                parameter.copy_(before)


def loud(s: Subject, gain: float = 1.5) -> Any:
    """Return a context manager in which every part has a visible effect: each matrix multiplies the size of vectors by
    about `gain`, and no parameter has only zeros. In a fresh model, the effect of many mistakes is smaller than
    rounding errors."""
    generator = torch.Generator().manual_seed(2)

    def new(p: Tensor) -> Tensor | None:
        size = float(p.detach().float().square().mean().sqrt()) if p.numel() else 1.0
        if not size:
            return torch.randn(p.shape, generator=generator).to(p) * 0.3
        return p * (gain / p.numel() ** 0.25 / size) if p.dim() > 1 else None

    return changed(s.model, new)
