"""The operations of decoders with parts from outside the package, counted by PyTorch in dry forward passes of two
lengths.

n tokens take a n + b n² operations: a operations for each token, in products with weights, and b for each pair of a
query and a key.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from onward.checkpoint.source import SizeLimit
from onward.config.decoder import DecoderConfig, each
from onward.model.decoder import Decoder
from onward.model.experts import ExpertsModule
from onward.planning.dry import Shortened

LENGTH, CHUNK = 8, 64  # tokens of the shorter forward pass; with recurrent layers, one chunk of their recurrence


def of_attention(q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any, **__: Any) -> int:
    """The operations of attention with queries (B, H, T, E), keys (B, H, S, E) and values (B, H, S, F)."""
    return 2 * q[0] * q[1] * q[2] * k[2] * (q[3] + v[3])


KERNEL: Any = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: of_attention}  # not counted by torch


@dataclass(frozen=True)
class CountedFlops:
    """The operations of a forward pass: for one token by path of the module, and for one query and key by layer."""

    modules: dict[str, int]
    pairs: list[int]
    experts: frozenset[str]  # the paths of mixtures of experts


@lru_cache(maxsize=64)
def counted(config: DecoderConfig) -> CountedFlops:
    """Count the operations of a forward pass. Uses fake tensors, without memory or computation, unless the code of the
    decoder's parts reads values of tensors."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    try:
        return counted_in(FakeTensorMode(), config)
    except Exception:  # user code reads a value; other errors occur again below
        return counted_in(nullcontext(), config)


def counted_in(mode: Any, config: DecoderConfig) -> CountedFlops:
    with mode, SizeLimit(1 << 62), torch.random.fork_rng(devices=[]):
        model: Any = Decoder(config).eval()
        model.hidden = model.hidden_of_checked
        length = CHUNK if any(part.states(config) for part in each(config.attention)) else LENGTH
        if isinstance(mode, nullcontext):  # tables of positions limit the length
            length = max(1, min(length, config.context_length // 2))
        short, long = (totals(model, tokens) for tokens in (length, 2 * length))
    pairs = {name: (long[name] - 2 * short[name]) // (2 * length**2) for name in long}
    linear = {name: short[name] // length - length * pairs[name] for name in long}
    own = Counter(linear)  # counts of the modules without their children
    for name, count in linear.items():
        if name:
            own[name.rpartition(".")[0]] -= count
    experts = frozenset(name for name, module in model.named_modules() if isinstance(module, ExpertsModule))
    return CountedFlops(
        {name: count for name, count in own.items() if count},
        [pairs.get(f"blocks.{layer}", 0) for layer in range(config.n_layers)],
        experts,
    )


def totals(model: nn.Module | Any, length: int) -> Counter[str]:
    """Return the operations of a forward pass over `length` tokens, by path of the module; those of a module include
    its children's."""
    tokens = torch.zeros(1, length, dtype=torch.int64)
    with torch.no_grad(), Shortened(), FlopCounterMode(display=False, custom_mapping=KERNEL) as counter:
        model(tokens)
    root = type(model).__name__
    counts = counter.get_flop_counts()
    found = Counter({name.removeprefix(root).removeprefix("."): sum(ops.values()) for name, ops in counts.items()})
    found[""] = counter.get_total_flops()
    return found
