"""Decoders with parts from outside the package: what their layers keep of earlier tokens, and whether their logits with
a cache equal those without.

A first forward pass finds the cache entries and states of each call (`Kept`). A trial then compares forward passes on
random tokens and weights, in fp64 or, if the parts do not support it, fp32; it uses a small vocabulary and, if the
layers of the decoder have more than a few million weights, fewer layers.

Shapes: B rows, T tokens in a call, D d_model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from onward.base.errors import UserError
from onward.base.own import code_of, own_parts
from onward.config.decoder import DecoderConfig, at, each
from onward.config.part_types import States
from onward.model.cache import CacheView, KVCache
from onward.model.calls import Kept
from onward.model.decoder import Decoder
from onward.model.layer_cache import CacheEntry, LayerCache, SlotIndices
from onward.model.no_states import NoStates
from onward.model.states import RowStates, StateIndices, StateLayerCache, StateSlots

VOCABULARY = 64  # vocabulary size of a trial's decoder
WEIGHTS = 1 << 22  # approximate number of weights in the layers of a trial's decoder
NOISE = 0.05  # standard deviation of the noise added to a trial's weights, so that none is 0
ROWS, LENGTH, KEEP = 3, 20, 3  # rows of a trial, tokens per row, and the number of tokens that can be rolled back
SEEDS = 8  # number of trials of a decoder whose forward pass reads values of tensors
FOUND: dict[DecoderConfig, tuple[list[Kept], bool]] = {}  # Kept, and whether values of tensors are read
TRIED: dict[DecoderConfig, str] = {}  # what is broken in each reduced decoder
CODE: dict[DecoderConfig, frozenset[object]] = {}  # code of a decoder's parts when it was first read


def known(config: DecoderConfig) -> list[Kept]:
    """Return a description of the cache entries and states that each layer keeps, determined in a first forward
    pass."""
    if CODE.setdefault(config, code := code_of(own_parts(config))) != code:  # a cell of a notebook was run again
        for kept in FOUND, TRIED, CODE:
            kept.clear()
        CODE[config] = code
    if config not in FOUND:
        small = reduced(config)
        alike = small != config and small.n_layers == config.n_layers
        FOUND[config] = (known(small), FOUND[small][1]) if alike else found(config)
    return FOUND[config][0]


def tried(config: DecoderConfig) -> list[Kept]:
    """Return the same description as `known`. Raises a UserError if the trial of the decoder's parts fails."""
    small = reduced(config)
    known(small)
    if small not in TRIED:
        TRIED[small] = ""  # lets the trial make caches
        try:
            seeds = range(SEEDS if FOUND[small][1] else 1)
            TRIED[small] = next(filter(None, (trial(small, seed) for seed in seeds)), "")
        except BaseException:
            del TRIED[small]
            raise
    if broken := TRIED[small]:
        names = " and ".join(sorted({type(part).__name__ for part in own_parts(config)}))
        raise UserError(f"Cannot generate with {names}, because {broken}")
    return known(config)


def reduced(config: DecoderConfig) -> DecoderConfig:
    """Return the config of a trial's decoder, with a small vocabulary and as many layers as have about WEIGHTS
    elements, but at least two, and one with each attention, block, MLP and position. If layers share keys and values,
    all remain."""
    period = max(len(each(parts)) for parts in (config.attention, config.block, config.mlp, config.position))
    most = max(period, 2, WEIGHTS // (4 * config.d_model**2 + 3 * config.d_model * config.d_ff))
    shared = any(part.shares_kv for part in each(config.attention))
    layers = config.n_layers if shared else min(config.n_layers, most)
    return replace(config, vocab_size=min(config.vocab_size, VOCABULARY), n_layers=layers, dropout=0.0)


class ValueReads(TorchDispatchMode):
    """A dispatch mode that records whether an operation reads the value of a tensor, on which control flow may
    depend."""

    found = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # True, the default of PyTorch, imports its compiler, which takes a second
        return False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found |= function.overloadpacket.__name__ in ("_local_scalar_dense", "equal", "is_nonzero")
        return function(*args, **(kwargs or {}))


@dataclass(frozen=True, eq=False, kw_only=True)
class FindingLayerCache(StateLayerCache):
    """The cache of a layer in the first forward pass: it collects the vectors and states of all calls."""

    entries: dict[str, Tensor] = field(default_factory=dict)
    states: dict[str, Tensor] = field(default_factory=dict)
    base: LayerCache = field(default_factory=lambda: LayerCache({}, 0))
    rows: RowStates = field(default_factory=lambda: RowStates([], torch.empty(0)))
    leads: bool = False
    declared: States = field(default_factory=dict)

    def slot_indices(self, positions: Tensor) -> StateSlots:
        first = positions[:, :1]
        call = StateIndices(first, first, first[:, 0] == 0, first, torch.full_like(first, positions.size(1) - 1), None)
        return StateSlots(write=(positions, positions), key_positions=positions, states=call)

    def update(self, name: str, vectors: Tensor, indices: SlotIndices) -> CacheEntry:
        assert isinstance(indices, StateSlots)
        name = indices.numbered(self, name)
        self.entries[name] = vectors
        return CacheEntry(self, name, indices)

    def before(self, name: str, call: StateIndices, empty: Tensor) -> Tensor:
        self.states[name] = empty[:, None]
        return empty

    def read(self, name: str, call: StateIndices) -> Tensor:
        shape, own = self.declared[name]
        empty = torch.zeros(len(call.rows), *shape, dtype=getattr(torch, own) if own else None)
        return self.before(name, call, empty)

    def write(self, name: str, states: Tensor, call: StateIndices) -> None:
        """Keep nothing: the next forward pass has another cache."""


def found(config: DecoderConfig) -> tuple[list[Kept], bool]:
    """Run a first forward pass; return what each layer keeps, and whether values of tensors are read into Python."""
    layers, dtype, reads = list[FindingLayerCache](), torch.float16, ValueReads()
    for device in ("cpu",) if config == reduced(config) else ("meta", "cpu"):
        with on(device, 0):
            model = Decoder(config).eval()
            for dtype in torch.float16, torch.float32:  # fp16 tells states in fp32 from those in the model's dtype
                parts = [at(config.attention, i) for i in range(config.n_layers)]
                layers = [FindingLayerCache(window=part.window, declared=part.states(config)) for part in parts]
                view = CacheView([*layers], torch.full((2,), 4), NoStates(), 4, 4, 4)
                tokens = torch.arange(4).expand(2, -1)
                try:
                    with torch.no_grad(), reads:
                        model.to(dtype).hidden_of_checked(tokens % config.vocab_size, tokens, view)
                except Exception:  # raised by user code, which may support only fp32; the trial reports the failure
                    continue
                return [kept(layer, dtype) for layer in layers], reads.found
    return [kept(layer, dtype) for layer in layers], reads.found


def kept(cache: FindingLayerCache, dtype: torch.dtype) -> Kept:
    """Return what the calls in a layer keep; states have the shapes and dtypes that its attention declares, if any."""
    states: States = {}
    for name, state in cache.states.items():
        own = None if state.dtype == dtype else str(state.dtype).removeprefix("torch.")
        states[name] = cache.declared.get(name.partition("@")[0], (tuple(state.shape[2:]), own))
    return Kept(
        cache.window, {name: tuple(vectors.shape[2:]) for name, vectors in cache.entries.items()}, states, own=True
    )


@contextmanager
def on(device: str, seed: int) -> Iterator[None]:
    """A context manager that creates tensors on a device and seeds torch's CPU generator, whose state is restored on
    exit."""
    usual = torch.get_default_device().type == device  # a device mode would slow each operation
    with torch.random.fork_rng(devices=[]), nullcontext() if usual else torch.device(device):
        torch.manual_seed(seed)
        yield


@torch.no_grad()
def trial(config: DecoderConfig, seed: int) -> str:
    """Compare forward passes of a decoder on random tokens; return what its parts break, and how to mend it, or ""."""
    with on("cpu", seed):
        model: Any = Decoder(config).eval()
        tokens = torch.randint(config.vocab_size, (2, ROWS, min(LENGTH, config.context_length)))
        initial = [parameter.clone() for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.add_(NOISE * (1 + seed) * torch.randn_like(parameter))
        tolerance = 1e-7
        try:
            plain = model.double().hidden(tokens[0])
        except Exception:  # user code may support only fp32
            plain, tolerance = model.float().hidden(tokens[0]), 1e-3
        if not plain.isfinite().all():  # noise may take a weight out of its valid range
            for parameter, values in zip(model.parameters(), initial):
                parameter.copy_(values)
            plain = model.hidden(tokens[0])
        return Trial(model, tokens[0], tokens[1], tolerance).broken(plain)


@dataclass(frozen=True)
class Trial:
    """Forward passes of one decoder on tokens (B, T), and on `others` (B, T), compared with a relative `tolerance`."""

    model: Any  # a Decoder, whose custom modules may compute anything
    tokens: Tensor
    others: Tensor
    tolerance: float

    def broken(self, plain: Tensor) -> str:
        """Return what differs from the outputs `plain` (B, T, D) of `tokens`, and how to mend it, or ""."""
        tokens, half = self.tokens, -(-self.tokens.size(1) // 2)
        if not self.same(plain, self.model.hidden(tokens)):
            return (
                "two forward passes over the same tokens give different logits in evaluation mode: use randomness only "
                "if self.training, and keep nothing from one forward pass to the next in the module"
            )
        if not self.same(plain[1:2], self.model.hidden(tokens[1:2])):
            return "the logits of a row depend on the other rows of the batch: compute each row by itself"
        changed = torch.cat([tokens[:, :half], self.others[:, half:]], 1)
        if not self.same(plain[:, :half], self.model.hidden(changed)[:, :half]):
            return (
                "a token reads tokens after it, which do not exist yet when a text is generated: read only earlier "
                "tokens, as attention and onward.model.previous do"
            )
        try:
            different = next((what for what, pair in self.cached(plain) if not self.same(*pair)), "")
        except Exception as error:  # raised by user code
            return (
                f"its forward pass with a cache fails ({type(error).__name__}: {error}): see the contract in "
                "CONTRIBUTING.md"
            )
        if different:
            return (
                f"its logits with a cache differ from those without ({different}): take positions from the "
                "AttentionContext, and read earlier tokens by attention, onward.model.previous or onward.model.scan, "
                "equally often in every forward pass"
            )
        return ""

    def same(self, a: Tensor, b: Tensor) -> bool:
        return bool((a - b).abs().max() <= self.tolerance * a.abs().max())

    def cached(self, plain: Tensor) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
        """Yield (case, outputs without a cache and with one, which must be equal): a prompt in pieces; other texts of
        different lengths in the same rows, then token by token; rows that were rolled back."""
        tokens, length = self.tokens, self.tokens.size(1)
        cache = KVCache(self.model.config, ROWS, length, length, keep=KEEP, dtype=plain.dtype)
        third, y = length // 3, list[Tensor]()
        cuts = {0, third, third + 1, third + 2, third + 2 + length // 4, length}
        for start, end in pairwise(sorted(cut for cut in cuts if cut <= length)):
            y.append(self.step(cache, tokens[:, start:end], [start] * ROWS, [end - start] * ROWS))
        yield "a prompt in pieces", (plain, torch.cat(y, 1))
        starts = [max(1, length // 2 - 2 * row) for row in range(ROWS)]  # other texts, of different lengths
        other = self.model.hidden(self.others)
        padded = torch.stack(
            [torch.cat([row[:n], row[n - 1 :][:1].expand(starts[0] - n)]) for row, n in zip(self.others, starts)]
        )
        y = [self.step(cache, padded, [0] * ROWS, starts)]
        yield "rows of different lengths", stacked(other, y[0], [0] * ROWS, starts)
        for _ in range(min(2, length - starts[0])):
            column = self.others.gather(1, torch.tensor(starts)[:, None])
            step = self.step(cache, column, starts, [1] * ROWS)
            yield "rows of different lengths", stacked(other, step, starts, [1] * ROWS)
            starts = [start + 1 for start in starts]
        back = [start - 1 for start in starts]
        step = self.step(cache, self.others.gather(1, torch.tensor(back)[:, None]), back, [1] * ROWS)
        yield "a row that was rolled back", stacked(other, step, back, [1] * ROWS)

    def step(self, cache: KVCache, tokens: Tensor, starts: Sequence[int], counts: Sequence[int]) -> Tensor:
        positions = torch.tensor(starts)[:, None] + torch.arange(tokens.size(1))
        ragged = min(counts) < tokens.size(1)
        view = cache.view(counts=torch.tensor(counts) if ragged and isinstance(cache.states, RowStates) else None)
        y: Tensor = self.model.hidden(tokens, positions, view)
        return y


def stacked(plain: Tensor, y: Tensor, starts: Sequence[int], counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the outputs (N, D) of the tokens of each row: `counts` tokens, which begin at `starts` in `plain` and at 0
    in y."""
    rows = range(len(y))
    return (
        torch.cat([plain[i, starts[i] : starts[i] + counts[i]] for i in rows]),
        torch.cat([y[i, : counts[i]] for i in rows]),
    )
