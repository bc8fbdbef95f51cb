"""Functions for callers of a decoder that may be divided among processes.

`parallel/` sets attributes on a decoder that it divides. These functions look for them, so that losses, engines and
evaluations work with any decoder without importing `parallel/`: for a decoder of one process, each function has its
plain behavior.

Shapes: N tokens, D d_model, V vocabulary.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from onward.config.decoder import DecoderConfig
from onward.config.mesh import divided_heads
from onward.kernels.cross_entropy import cross_entropy
from onward.model.decoder import Decoder

MAX_LOGITS = 1 << 25  # maximum number of logits in memory at once: 128 MiB in fp32


def rows_at_once(columns: int) -> int:
    """Return the number of tokens whose logits are in memory at once, given the number of logits per token."""
    return max(1, MAX_LOGITS // columns)


class Scores:
    """The logits (N, V) of N tokens, and values computed from them in at least fp32 for losses, such as
    log-probabilities."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits

    @cached_property
    def exact(self) -> Tensor:
        """The logits in at least fp32."""
        return self.logits.to(torch.promote_types(self.logits.dtype, torch.float32))

    @cached_property
    def log_z(self) -> Tensor:
        """The logarithms of the softmax's denominators, (N,)."""
        return self.exact.logsumexp(-1)

    @property
    def mean(self) -> Tensor:
        """The means of the logits, (N,)."""
        return self.exact.mean(-1)

    def logprobs(self, targets: Tensor) -> Tensor:
        """Return the log-probabilities (N,) of the token ids `targets` (N,)."""
        return self.exact.log_softmax(-1).gather(-1, targets[:, None])[:, 0]

    def cross_entropy(self, targets: Tensor, ignored: int) -> Tensor:
        """Return the sum of the cross-entropies of the logits for the token ids `targets` (N,), without targets equal
        to `ignored`."""
        return cross_entropy(self.logits, targets, ignored)


def scores(model: Any, hidden: Tensor) -> Scores:
    """Return the Scores of a decoder for hidden states (N, D): the logits from its head, with methods for the values
    that losses need. If processes divide the vocabulary, each computes the logits of its part."""
    vocabulary = getattr(model, "vocabulary", None)
    return vocabulary.scores(hidden) if vocabulary else Scores(model.logits(hidden))


def inside(model: Any, function: Callable[..., Any], *inputs: Any) -> Any:
    """Call a function that computes with a model, with these inputs. If the model is sharded, the call is one forward
    pass of it, so that the function may also use single modules of the model."""
    one_forward = getattr(model, "inside", None)
    return one_forward(function, *inputs) if one_forward else function(*inputs)


def resharded(model: Any) -> None:
    """Free the gathered weights of a sharded model, so that later changes of its shards take effect."""
    if hasattr(model, "reshard"):
        model.reshard()


def keep_gathered(model: Any) -> None:
    """Keep the embedding and the head of a sharded, frozen model gathered from its first call on, so that each process
    can compute logits without the others: in the backward pass, processes may recompute logits a different number of
    times."""
    if one_forward := getattr(model, "inside", None):
        one_forward.frees = False


def unsharded(model: Any) -> Decoder:
    """Return a decoder with the weights of `model` that this process can run without the others: the unsharded copy if
    `model` is sharded, otherwise `model` itself. All processes of a sharded model must call this together."""
    copy = getattr(model, "unsharded_copy", None)
    return copy.gather(model) if copy else model


def tensor_axis(model: Any) -> int:
    """Return the number of processes of the tensor axis that divides the heads of a model; 1 for undivided heads."""
    stream = getattr(model, "stream", None)
    return stream.mesh.size() if stream else 1


def cache_config(model: Decoder) -> DecoderConfig:
    """Return the configuration of a KV cache for a model: the model's configuration or, if a tensor axis divides the
    heads, a copy with the numbers of this process's heads."""
    n = tensor_axis(model)
    return divided_heads(model.config, n) if n > 1 else model.config
