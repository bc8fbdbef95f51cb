"""The memory of one process that evaluates a decoder, in bytes, and the meshes that can evaluate it."""

from collections.abc import Callable, Iterable

import torch

from onward.base.errors import UserError
from onward.config.decoder import DecoderConfig
from onward.config.mesh import Mesh, divides_tokens
from onward.evaluation.continuations import CHUNK, ROWS, TOKENS
from onward.evaluation.score import LOGITS, TOGETHER
from onward.planning.arrangements import tensor_sizes
from onward.planning.device_memory import narrowed
from onward.planning.divided_parameters import groups
from onward.planning.dry import dry_step
from onward.planning.memory import GenerationMemory, cache_bytes

LOGIT = (
    10  # most bytes per logit: in bf16, with an fp32 copy and a log-probability, or in fp32, with its gathered parts
)

Work = Callable[
    [DecoderConfig, Mesh, torch.dtype, float], GenerationMemory
]  # function that computes the memory of an evaluation


def memory_of_text(config: DecoderConfig, mesh: Mesh, dtype: torch.dtype, holes: float) -> GenerationMemory:
    """Memory of reading a text window by window, in one process of a mesh of replicas and a tensor axis."""
    length = config.context_length
    rows = max(1, TOGETHER // (length + 1))
    return memory_of(config, mesh, dtype, holes, rows, length)


def memory_of_questions(config: DecoderConfig, mesh: Mesh, dtype: torch.dtype, holes: float) -> GenerationMemory:
    """Memory of answering questions with choices, with a KV cache of their contexts."""
    length = min(config.context_length, TOKENS // ROWS)  # the length at which a batch has the most cache slots
    chunk = min(CHUNK, length)
    cache = cache_bytes(narrowed(config, mesh.tensor), ROWS, length, dtype, chunk=chunk)
    return memory_of(config, mesh, dtype, holes, ROWS, chunk, cache)


def memory_of(
    config: DecoderConfig, mesh: Mesh, dtype: torch.dtype, holes: float, rows: int, length: int, cache: int = 0
) -> GenerationMemory:
    """Memory of reading `rows` texts of `length` tokens at a time, and of their logits; `cache` is in bytes."""
    weights = dtype.itemsize * sum(group.count * group.total("local") for group in groups(config, mesh))
    parts = mesh.tensor if divides_tokens(length, mesh.tensor) else 1
    forward = dry_step(narrowed(config, mesh.tensor), rows, length, parts=parts).forward
    logits = LOGIT * min(rows * length, LOGITS) * config.vocab_size
    kept, peak = (int(size * dtype.itemsize / 4) for size in (forward.kept, forward.peak))
    most = max(peak, kept + logits - cache)  # the cache is freed before logits are computed
    return GenerationMemory(weights, cache, int((1 + holes) * most), length)


def evaluation_meshes(decoders: Iterable[DecoderConfig], count: int) -> list[Mesh]:
    """Meshes in which `count` processes can evaluate all decoders; the first has replicas only."""
    # no shards: processes would wait for each other, since they have different numbers of questions
    sizes = set.intersection(*({n for n in tensor_sizes(one, count, count) if divisible(one, n)} for one in decoders))
    return [Mesh(replicate=count // n, tensor=n) for n in sorted(sizes)]


def divisible(config: DecoderConfig, tensor: int) -> bool:
    try:
        groups(config, Mesh(tensor=tensor))
    except UserError:
        return False
    return True
