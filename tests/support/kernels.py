"""Every kernel at the limits of its sizes, compared with the PyTorch operations that it replaces."""

from collections.abc import Iterator
from itertools import product
from typing import Any, get_args

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from onward import (
    Alibi,
    BlockManager,
    CacheManager,
    Decoder,
    DecoderConfig,
    KVCache,
    NoPosition,
    PagedKVCache,
    Request,
    Sampling,
    SelfAttention,
)
from onward.compiled.program import Program
from onward.compiled.recording import record_step
from onward.compiled.steps import compile_step
from onward.data import IGNORE_INDEX
from onward.generation import Proposal
from onward.generation.engine.sampler import Sampler
from onward.kernels.cached_attention import attend
from onward.kernels.chosen import chosen_linear, plain_chosen_linear
from onward.kernels.cross_entropy import cross_entropies, cross_entropy
from onward.kernels.llvm.code import LANES
from onward.kernels.operations import ACTIVATIONS, gate, linear, rotate
from onward.kernels.quantized_linear import quantized_linear
from onward.kernels.self_test import plain_attend
from onward.model import RMSNormModule
from onward.model import attention as backends
from onward.model.cache import CacheView
from onward.model.cache_codes import quantize
from onward.model.context import attention_contexts
from onward.model.layer_cache import SCALE
from onward.model.mask import AttentionMask
from onward.model.reference import reference
from onward.transforms.quantize import Precision, quantize_weight

from support.adapters import stirred
from support.decoders import DECODERS
from support.guard import Allocator, Case

Found = Iterator[tuple[Tensor, Tensor, float]]
DTYPES = {torch.float32: 1e-5, torch.bfloat16: 2**-6}  # maximum difference, relative to the largest value
EDGES = (1, LANES - 1, LANES, LANES + 1, 2 * LANES + 3)


class Plain(TorchDispatchMode):
    """Disables kernels: an active dispatch mode leaves all operations to PyTorch."""

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        return function(*arguments, **(options or {}))


MATRICES = (320, 17, 37), (64, 33, 32)  # inputs, rows and outputs of matrix products for a matrix unit


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=torch.float32).to(dtype)


@torch.no_grad()
def products(memory: Allocator) -> Found:
    for dtype, bound in DTYPES.items():
        sizes = [(inputs, rows, inputs % 7 + rows) for inputs, rows in product(EDGES, (1, 3, 4, 9))]
        for inputs, rows, outputs in [*sizes, *MATRICES]:
            x, weight, bias = (
                memory.place(numbers(*s, dtype=dtype)) for s in ((rows, inputs), (outputs, inputs), (outputs,))
            )
            for given in bias, None:
                wanted = F.linear(x.double(), weight.double(), None if given is None else given.double())
                yield linear(x, weight, given), wanted, bound


@torch.no_grad()
def quantized_products(memory: Allocator) -> Found:
    for dtype, precision in product(DTYPES, get_args(Precision)):
        edges = (32, 64, 96) if precision == "int4" else EDGES
        sizes = [(inputs, rows, inputs % 5 + rows) for inputs, rows in product(edges, (1, 5))]
        for inputs, rows, outputs in [*sizes, *MATRICES]:
            x, bias = (memory.place(numbers(*s, dtype=dtype)) for s in ((rows, inputs), (outputs,)))
            operands = [x, *map(memory.place, quantize_weight(numbers(outputs, inputs), precision)), bias]
            with Plain():
                wanted = quantized_linear(*operands)
            yield quantized_linear(*operands), wanted, 2 * DTYPES[dtype]


@torch.no_grad()
def chosen_products(memory: Allocator) -> Found:
    """Two of five experts for each token, with the same experts for most tokens, with and without biases."""
    for (dtype, bound), inputs, tokens in product(DTYPES.items(), EDGES, (3, 11)):
        outputs, ids = inputs % 5 + 2, memory.place(torch.tensor([4, 0, 1, 3, 1, *[0, 4] * 10][: 2 * tokens]))
        shapes = (tokens, inputs), (5, outputs, inputs), (5, outputs)
        x, weights, biases = (memory.place(numbers(*shape, dtype=dtype)) for shape in shapes)
        for given in biases, None:
            exact = None if given is None else given.double()
            wanted = plain_chosen_linear(x.double(), ids, weights.double(), exact)
            yield chosen_linear(x, ids, weights, given), wanted, bound


def norms(memory: Allocator) -> Found:
    for (dtype, bound), width in product(DTYPES.items(), EDGES):
        norm = RMSNormModule(width, 1e-6, 1.0).to(dtype)
        norm.weight.data = memory.place(numbers(width, dtype=dtype))
        x = memory.place(numbers(3, 5, width, dtype=dtype).requires_grad_())
        outer = memory.place(numbers(3, 5, width, dtype=dtype))
        found = []
        for mode in False, True:
            with Plain() if mode else torch.enable_grad():
                y = norm(x)
                found.append([y.detach(), *torch.autograd.grad(y, (x, norm.weight), outer)])
        yield from ((a, b, 2 * bound) for a, b in zip(*found))


def rotations(memory: Allocator) -> Found:
    for (dtype, bound), (d_head, half) in product(DTYPES.items(), ((2, 1), (6, 3), (70, 17), (64, 32))):
        x = memory.place(numbers(2, 3, 3, d_head, dtype=dtype).requires_grad_())
        angles = numbers(2, 3, 1, half)
        cos, sin, outer = (
            memory.place(angles.cos()),
            memory.place(angles.sin()),
            memory.place(numbers(*x.shape, dtype=dtype)),
        )
        found = []
        for mode in False, True:
            with Plain() if mode else torch.enable_grad():
                y = rotate(x, cos, sin)
                found.append([y.detach(), *torch.autograd.grad(y, x, outer)])
        yield from ((a, b, 2 * bound) for a, b in zip(*found))


def gates(memory: Allocator) -> Found:
    for (dtype, bound), activation, width in product(DTYPES.items(), ACTIVATIONS, EDGES):
        x, y, outer = (memory.place(numbers(3, width, dtype=dtype).requires_grad_()) for _ in range(3))
        found = []
        for mode in False, True:
            with Plain() if mode else torch.enable_grad():
                z = gate(x, y, activation)
                found.append([z.detach(), *torch.autograd.grad(z, (x, y), outer)])
        yield from ((a, b, 4 * bound) for a, b in zip(*found))


def losses(memory: Allocator) -> Found:
    for (dtype, bound), width in product(DTYPES.items(), EDGES):
        logits = memory.place(numbers(5, width, dtype=dtype).requires_grad_())
        targets = memory.place(torch.tensor([0, width - 1, IGNORE_INDEX, width // 2, 0]))
        found = []
        for mode in False, True:
            with Plain() if mode else torch.enable_grad():
                total = cross_entropy(logits, targets, IGNORE_INDEX)
                each = cross_entropies(logits, targets, IGNORE_INDEX)
                found.append([total.detach(), *torch.autograd.grad(total, logits), each])
        yield from ((a, b, 2 * bound) for a, b in zip(*found))


@torch.no_grad()
def attentions(memory: Allocator) -> Found:
    forms = (  # dtype, H, K, E, window (negative: chunks), cap, positions, whether the cache is quantized
        (torch.float32, 4, 2, 8, 0, None, NoPosition(), False),
        (torch.float32, 3, 1, 17, 3, 2.0, NoPosition(), False),
        (torch.float32, 2, 2, 1, 0, 2.0, Alibi(), False),
        (torch.bfloat16, 4, 2, 33, 0, 2.0, NoPosition(), False),
        (torch.bfloat16, 6, 1, 16, 3, None, Alibi(), False),
        (torch.float32, 6, 3, 17, 3, 2.0, Alibi(), True),
        (torch.bfloat16, 4, 2, 33, 0, None, NoPosition(), True),
        (torch.float32, 4, 2, 8, -4, None, NoPosition(), False),
        (torch.bfloat16, 6, 1, 16, -3, 2.0, Alibi(), False),
    )
    for dtype, heads, kv_heads, d_head, window, softcap, position, quantized in forms:
        parts: dict[str, Any] = {
            "attention": SelfAttention(window=abs(window), chunked=window < 0),
            "position": position,
        }
        config = DecoderConfig(9, 8, 1, heads, n_kv_heads=kv_heads, d_head=d_head, **parts)
        options: dict[str, Any] = {
            "scale": 0.3,
            "softcap": softcap,
            "sinks": softcap and memory.place(numbers(heads, dtype=dtype)),
        }
        for manager in managers(config, 2, 5, dtype, quantized):
            whole = [numbers(2, 11, n, d_head, dtype=dtype) for n in (heads, kv_heads, kv_heads)]
            for start, end in (0, 4), (4, 9), (9, 11):
                assert all(manager.reserve(row, start, end) for row in range(2))
                memory.cache(manager.cache)
                q, k, v = (memory.place(t[:, start:end].contiguous()) for t in whole)
                positions = torch.arange(start, end)[None].expand(2, -1)
                context = attention_contexts(config, dtype, positions, manager.cache.view(length=11), plain=False)[0]
                entries: Any = context.update(k=k, v=v)
            given: Any = q, *entries, context.mask
            found = entries[0].attend(q, entries[1], context.mask, **options)
            assert found is not None
            yield found, reference(*given, **options), 2 * DTYPES[dtype]
            layer = entries[0].cache
            cached = [layer.entries[name] for name in ("k", "v")]
            scales = [layer.entries[name + SCALE] for name in ("k", "v")] if quantized else []
            given = *cached, positions, layer.table, None, scales
            all_options: dict[str, Any] = options | context.mask.reach
            plain = plain_attend(q, *given, slopes=context.mask.slopes, **all_options)
            yield found, plain, 2 * DTYPES[dtype]


def causal_windows(memory: Allocator) -> Found:
    """Causal attention of contiguous and strided tensors, with one and with several query heads per key head; compared
    with fp64."""
    forms = (1, 16, 1, 1, 16), (2, 48, 4, 2, 32), (3, 32, 6, 2, 48), (2, 64, 3, 3, 16)  # B, T, H, K, E
    for (dtype, bound), form, strided in product(DTYPES.items(), forms, (False, True)):
        rows, tokens, heads, kv_heads, width = form
        positions = torch.arange(tokens)[None]
        mask = AttentionMask(positions, positions, plain=True)
        whole = memory.place(numbers(rows, tokens, heads + 2 * kv_heads, width, dtype=dtype))
        parts = whole.split([heads, kv_heads, kv_heads], 2)
        given = [(t if strided else memory.place(t.contiguous())).requires_grad_() for t in parts]
        exact = [t.detach().double().requires_grad_() for t in given]
        outer = memory.place(numbers(rows, tokens, heads, width, dtype=dtype))
        q, k, v = given
        y = backends.attend(q, k, v, mask, scale=0.3)
        q, k, v = exact
        wanted = reference(q, k, v, mask, scale=0.3)
        yield y.detach(), wanted.detach(), bound
        found = torch.autograd.grad(y, given, outer), torch.autograd.grad(wanted, exact, outer.double())
        yield from ((a, b, bound) for a, b in zip(*found))


def managers(
    config: DecoderConfig, rows: int, chunk: int, dtype: torch.dtype, quantized: bool = False
) -> tuple[CacheManager, ...]:
    """The managers of a contiguous, a growing and a paged cache, for 12 positions."""
    given: dict[str, Any] = {"dtype": dtype, "quantized": quantized}
    return (
        CacheManager(KVCache(config, rows, 12, chunk, **given)),
        CacheManager(KVCache(config, rows, 12, chunk, step=3, **given)),
        BlockManager(PagedKVCache(config, rows, 12, chunk, blocks=40, block_size=2, **given)),
    )


@torch.no_grad()
def tails(memory: Allocator) -> Found:
    """Keys whose last elements are in a separate tensor, shared by more heads than a thread computes together."""
    forms = (torch.float32, 9, 17, 0), (torch.float32, 11, 1, 5), (torch.bfloat16, 10, 17, 5)  # dtype, H, R, window
    for dtype, heads, width, window in forms:
        positions = torch.tensor([[6, 7, 8], [8, 9, 10]]) + window  # slots are reused only with windows
        shapes = (2, 3, heads, 20 + width), (2, 11, 1, 20), (2, 11, 1, width)
        q, keys, tails = (memory.place(numbers(*shape, dtype=dtype)) for shape in shapes)
        options: dict[str, Any] = {"window": window, "scale": 0.3, "softcap": None, "sinks": None}
        given = q, keys, keys, memory.place(positions), None, tails
        yield attend(*given, **options), plain_attend(*given, **options), 2 * DTYPES[dtype]
        codes, scales = zip(*(map(memory.place, quantize(t, dtype)) for t in (keys, keys, tails)))
        given = q, *codes[:2], given[3], None, codes[2], scales
        yield attend(*given, **options), plain_attend(*given, **options), 2 * DTYPES[dtype]


@torch.no_grad()
def quantized_writes(memory: Allocator) -> Found:
    """A step that only writes its vectors to the cache: codes and scales equal those of `LayerCache.update` bit for
    bit."""
    for dtype, width, kind in product(DTYPES, (1, 16, 35), (0, 2)):
        config = DecoderConfig(9, 8, 1, 2, d_head=width, position=NoPosition())
        pair = [managers(config, 2, 3, dtype, quantized=True)[kind] for _ in range(2)]
        weight = memory.place(numbers(9, 2 * width, dtype=dtype))
        weight[3] = 0  # a zero vector still needs a nonzero scale
        weight[5] = torch.arange(2 * width) - width  # half of these values lie between two codes

        def run(tokens: Tensor, positions: Tensor, view: CacheView, weight: Tensor = weight) -> Tensor:
            vectors, layer = F.embedding(tokens, weight), view.layers[0]
            layer.update("k", vectors.unflatten(-1, (2, -1)), layer.slot_indices(positions))
            return vectors

        for manager in pair:
            memory.cache(manager.cache)
        program = Program(record_step(run, pair[0].cache, (2, 3)), pair[0].cache, [weight])
        for start in 0, 3, 6:
            assert all(manager.reserve(row, start, start + 3) for manager in pair for row in range(2))
            tokens, positions = torch.randint(9, (2, 3)), start + torch.arange(3).expand(2, -1)
            tokens[0, :2] = torch.tensor([3, 5])
            program.run(tokens, positions, pair[0].cache, 12)
            run(tokens, positions, pair[1].cache.view(0, 2))
        for name in "k", "k" + SCALE:
            got, wanted = (manager.cache.layers[0].entries[name] for manager in pair)
            yield got, wanted, 0


@torch.no_grad()
def draws(memory: Allocator) -> Found:
    for dtype, width, masked in product(DTYPES, EDGES, (False, True)):
        logits = memory.place(numbers(4, width, dtype=dtype))
        allowed = memory.place(torch.arange(width) % 3 != 1) if masked else None
        requests = [Request([1], Sampling(temperature=t), 5, seed=i) for i, t in enumerate((0, 0.5, 1, 3))]
        sampler, proposals = Sampler(allowed), [Proposal()] * 4
        found = sampler.sample_plain(logits, requests, proposals)
        assert found is not None
        sampler.sample_plain = lambda *_: None  # type: ignore[method-assign]
        wanted = sampler.sample(logits, requests, proposals)
        yield found[1], wanted[1], 0


@torch.no_grad()
def programs(memory: Allocator) -> Found:
    steps = (  # decoder, dtype, kind of cache, whether it is quantized, tokens per row
        ("llama", torch.bfloat16, 0, False, 1),
        ("gemma2", torch.float32, 2, False, 1),
        ("gpt2", torch.float32, 1, True, 3),
        ("neox", torch.bfloat16, 2, False, 2),
        ("bloom", torch.float32, 2, False, 1),
        ("gpt-oss", torch.float32, 0, False, 1),
        ("deepseek", torch.float32, 2, True, 2),
    )
    for name, dtype, kind, quantized, width in steps:
        torch.manual_seed(0)
        config = DECODERS[name]
        model = Decoder(config).to(dtype).eval()
        model = memory.model(stirred(model, "one") if name == "neox" else model)
        pair = [managers(config, 3, 3, dtype, quantized)[kind] for _ in range(2)]
        for manager in pair:
            memory.cache(manager.cache)
        program = compile_step(model, pair[0].cache, (3, width))
        for start in range(0, 12 - width, width):
            assert all(manager.reserve(row, start, start + width) for manager in pair for row in range(3))
            tokens = torch.randint(config.vocab_size, (3, width))
            positions = start + torch.arange(width).expand(3, -1)
            logits = program.run(tokens, positions, pair[0].cache, 12)
            yield logits.clone(), model(tokens, positions, pair[1].cache), 4 * DTYPES[dtype]


CASES: dict[str, Case] = {
    case.__name__: case
    for case in (
        products,
        quantized_products,
        chosen_products,
        norms,
        rotations,
        gates,
        losses,
        attentions,
        tails,
        quantized_writes,
        causal_windows,
        draws,
        programs,
    )
}
