"""The planned memory of an evaluation, compared with its allocations."""

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from onward import Decoder
from onward.config.mesh import Mesh
from onward.evaluation.continuations import Pair, score_continuations
from onward.evaluation.score import evaluate
from onward.kernels import cross_entropy
from onward.planning import weight_bytes
from onward.planning.evaluation import memory_of_questions, memory_of_text

from support.grids import thinned
from support.heap import HeapPeak
from support.peak import decoder

READ = decoder(10_000, 256, 2, 256)
RANDOM = np.random.default_rng(0)


def read_text(model: Decoder) -> None:
    evaluate(model, RANDOM.integers(0, READ.vocab_size, 4200), 4200)


def read_questions(model: Decoder) -> None:
    contexts = RANDOM.integers(0, READ.vocab_size, (64, READ.context_length - 8))
    score_continuations(model, [Pair(tuple(context.tolist()), (*range(8),)) for context in contexts])


WORKS: dict[Callable[[Decoder], None], Any] = {read_text: memory_of_text, read_questions: memory_of_questions}


@pytest.mark.parametrize(
    ("read", "dtype"), thinned({read.__name__: read for read in WORKS}, [torch.float32, torch.bfloat16])
)
def test_planned_memory_is_enough_and_little_more(
    read: Callable[[Decoder], None], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    # without the kernel, which needs less memory than PyTorch
    monkeypatch.setattr(cross_entropy, "takes_kernel", lambda *_: False)
    model = Decoder(READ).to(device="cpu", dtype=dtype).eval().requires_grad_(False)
    read(model)  # compiles the kernels before memory is measured
    gc.collect()
    with HeapPeak() as heap:
        read(model)
    said = WORKS[read](READ, Mesh(), dtype, 0.0)
    assert said.weights == weight_bytes(READ, dtype)
    assert 0.98 * heap.bytes < said.peak - said.weights < 1.4 * heap.bytes
