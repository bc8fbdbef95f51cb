"""The config of the mesh of a run's processes. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

from onward.base.errors import UserError
from onward.base.suggestions import nearest
from onward.config.attention_options import Indexing, SharedIndexer
from onward.config.decoder import DecoderConfig, LatentAttention, each
from onward.config.feedforward_parts import Experts

DIVIDED = "n_heads", "n_kv_heads", "d_ff", "d_shared"  # sizes of a decoder and its parts that a tensor axis divides
MOST = 1 << 20  # maximum number of processes along an axis


@dataclass(frozen=True)
class Mesh:
    """The numbers of processes of a distributed run along five axes; processes with consecutive ranks differ along the
    last axis, `tensor`.

    `pipeline` stages each hold a range of blocks, and process the same windows one after the other (Huang et al. 2019,
    GPipe). Within a stage, `replicate` groups each hold the whole stage and process different training windows. The
    `shard` processes of a group divide weights, gradients and optimizer state, and process different windows too
    (FSDP). The `context` processes divide the tokens of the same windows (Grattafiori et al. 2024, Llama 3, section
    3.3.2) and, as further shards, the weights. The `tensor` processes divide the heads and feed-forward units of each
    layer and the vocabulary, and process the same tokens (Shoeybi et al. 2019, Megatron-LM).
    """

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1

    @classmethod
    @cache  # the text in a run's options is parsed repeatedly
    def parse(cls, text: str) -> Mesh:
        """Parse a text such as "replicate=2 shard=4 tensor=2"; an axis that is left out has one process. Raises a
        UserError for any other text."""
        sizes: dict[str, int] = {}
        axes = [field.name for field in fields(cls)]
        for word in text.replace(",", " ").split():
            axis, _, size = word.partition("=")
            if axis not in axes:
                raise UserError(f"mesh {text!r} has no axis {axis!r}: {nearest(axis, axes)}")
            if not (size.isascii() and size.isdecimal() and 1 <= int(size[:9]) <= MOST) or axis in sizes:
                raise UserError(
                    f"mesh is {text!r}: give each axis once, with its number of processes, such as {axis}=2"
                )
            sizes[axis] = int(size)
        if not sizes:
            raise UserError(f"mesh is {text!r}: name axes and their processes, such as 'replicate=2 shard=4'")
        return cls(**sizes)

    def __str__(self) -> str:
        """Return the text that `parse` reads, without axes of one process; "replicate=1" for a single process."""
        return " ".join(f"{axis}={size}" for axis, size in vars(self).items() if size > 1) or "replicate=1"

    @property
    def count(self) -> int:
        """The number of processes of the mesh, the product of its axes."""
        return self.pipeline * self.stage

    @property
    def stage(self) -> int:
        """The number of processes of a pipeline stage; without a pipeline, of the mesh."""
        return self.replicate * self.shards * self.tensor

    @property
    def data(self) -> int:
        """The number of groups of processes that process different training windows: `replicate` times `shard`. The
        processes of a group, `context` times `tensor` of them, process the same windows."""
        return self.replicate * self.shard

    @property
    def shards(self) -> int:
        """The number of processes that FSDP divides weights, gradients and optimizer state over: `shard` times
        `context`."""
        return self.shard * self.context

    @property
    def summed(self) -> int:
        """The number of groups of processes whose gradients are summed, since they process different tokens:
        `replicate` times `shards`."""
        return self.replicate * self.shards

    @property
    def divides(self) -> bool:
        """Whether the model is divided over processes (`pipeline`, `shard`, `context` or `tensor` above 1), so that no
        process holds all of it."""
        return self.pipeline * self.shards * self.tensor > 1

    def check_count(self, count: int) -> None:
        """Raise a UserError unless the mesh has `count` processes, the number of started processes."""
        if self.count != count:
            sizes = [str(size) for size in vars(self).values() if size > 1]
            product = f"{' x '.join(sizes)} = " * (len(sizes) > 1)
            raise UserError(
                f"mesh {str(self)!r} takes {product}{self.count} process{'es' * (self.count > 1)}, but there "
                f"{'are' if count > 1 else 'is'} {count}: start {self.count}, or give another mesh"
            )

    def check_decoder(self, config: DecoderConfig) -> None:
        """Raise a UserError if the mesh cannot divide a decoder: if it has both stages and a context axis; more stages
        than the decoder has blocks; stages and layers that share keys and values or an indexer; a context axis and an
        indexer; stages, a context or a tensor axis and recurrent layers; or a tensor axis that does not divide the
        heads and the feed-forward units evenly. If there are fewer key/value heads than processes, each head is copied
        to several processes."""
        if self.pipeline > 1 and self.context > 1:
            raise UserError(f"mesh {str(self)!r} cannot combine pipeline with context: choose one of them")
        if self.pipeline > config.n_layers:
            raise UserError(
                f"mesh {str(self)!r} has more stages than the decoder has blocks: choose pipeline of at most "
                f"{config.n_layers}"
            )
        if self.pipeline > 1 and any(attention.shares_kv for attention in each(config.attention)):
            raise UserError(
                f"mesh {str(self)!r} cannot divide the decoder into stages, because some layers use keys and values of "
                "others: use pipeline=1"
            )
        indexers = [part.indexer for part in each(config.attention) if isinstance(part, LatentAttention)]
        for axis, size, kind in ("pipeline", self.pipeline, SharedIndexer), ("context", self.context, Indexing):
            if size > 1 and any(isinstance(indexer, kind) for indexer in indexers):
                raise UserError(
                    f"mesh {str(self)!r} cannot divide {'a shared' if axis == 'pipeline' else 'an'} indexer over the "
                    f"{axis} axis: use {axis}=1"
                )
        for axis, size in {"pipeline": self.pipeline, "context": self.context, "tensor": self.tensor}.items():
            if size > 1 and any(part.states(config) for part in each(config.attention)):
                raise UserError(
                    f"mesh {str(self)!r} cannot divide recurrent layers over the {axis} axis: use {axis}=1, and the "
                    "axes replicate or shard"
                )
        uneven = undivided(config, self.tensor)
        if uneven:
            known = [n for n in range(1, config.n_heads + 1) if not undivided(config, n)]
            raise UserError(
                f"mesh {str(self)!r} cannot divide the decoder, because {self.tensor} does not divide {uneven}: choose "
                f"tensor among {', '.join(map(str, known))}"
            )

    def check_length(self, length: int) -> None:
        """Raise a UserError unless the processes of the context axis can divide windows of `length` tokens: each
        process gets two equal parts."""
        if self.context > 1 and length % (2 * self.context):
            fitting = f"{length + -length % (2 * self.context):,}"
            raise UserError(
                f"mesh {str(self)!r} cannot divide windows, because {2 * self.context} does not divide their "
                f"{length:,} tokens: choose a context_length of {fitting}, or another context axis"
            )


def divides_tokens(length: int, tensor: int) -> bool:
    """Whether a tensor axis of this size divides the tokens of each window outside the branches of the blocks."""
    return length % tensor == 0


def divides_vocabulary(config: DecoderConfig, n: int) -> bool:
    """Whether a tensor axis of size `n` divides the embedding and the head; if not, each process has full copies of
    both."""
    return config.vocab_size % n == 0


def layers_of_stage(n_layers: int, stages: int, stage: int) -> range:
    """Return the layers of a stage; if the layers cannot be divided evenly, some stages, the first included, have one
    more."""
    first, end = (-(-n_layers * i // stages) for i in (stage, stage + 1))
    return range(first, end)


def undivided(config: DecoderConfig, n: int) -> str:
    """Return the first size of a decoder that cannot be divided evenly over `n` processes, its name and value, such as
    "n_heads 6"; "" if all can."""
    sizes = list[tuple[str, int]]()
    for attention in each(config.attention):
        heads = attention.heads(config)
        sizes += [("n_heads", heads.n_heads)] + [("n_kv_heads", heads.n_kv_heads)] * (n % heads.n_kv_heads > 0)
    for part in each(config.mlp):
        if isinstance(part, Experts):
            sizes += [("d_ff of experts", part.width(config)), ("d_shared", part.d_shared)]
        else:
            sizes.append(("d_ff", part.width(config)))
    return next((f"{name} {size:,}" for name, size in sizes if size % n), "")


def divided_heads(config: DecoderConfig, n: int) -> DecoderConfig:
    """Return a decoder with the heads and the feed-forward units of one of `n` processes of a tensor axis. Each process
    has at least one key/value head, a copy if necessary."""

    def own(value: object) -> dict[str, Any]:
        return {name: max(1, size // n) for name in DIVIDED if (size := getattr(value, name, 0))}

    parts: dict[str, Any] = {
        name: tuple(replace(part, **own(part)) for part in each(getattr(config, name))) for name in ("attention", "mlp")
    }
    return replace(config, **own(config), **parts)
