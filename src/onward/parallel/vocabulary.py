"""The vocabulary divided over the processes of a tensor axis. Each process has some rows of the embedding and of the
head, and some columns of the logits. Losses read these columns without gathering the full logits (Shoeybi et al.
2019, section 3).

Shapes: N tokens, D d_model, V vocabulary, n processes.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from torch import Tensor
from torch.distributed import DeviceMesh
from torch.nn import functional as F

from onward.model.attachments import attach, without
from onward.model.decoder import Decoder
from onward.model.divided import Scores
from onward.parallel.functions import Copy, Join, Sum, reduced
from onward.parallel.stream import divided_layers


class DividedScores(Scores):
    """Scores over a vocabulary that is divided over n processes: this process has the logits of its part, (N, V / n).
    Each result is reduced over the processes, so all processes must request the same results in the same order."""

    def __init__(self, logits: Tensor, vocabulary: Vocabulary) -> None:
        super().__init__(logits)
        self.vocabulary = vocabulary

    @cached_property
    def log_z(self) -> Tensor:
        own, group = self.exact.logsumexp(-1), self.vocabulary.group
        top = reduced(own.detach(), "max", group)
        return top + Sum.apply((own - top).exp(), group).log()

    @property
    def mean(self) -> Tensor:
        total: Tensor = Sum.apply(self.exact.sum(-1), self.vocabulary.group)
        return total / self.vocabulary.size

    def logprobs(self, targets: Tensor) -> Tensor:
        rows, foreign = self.vocabulary.rows_of(targets)
        logits = self.exact.gather(-1, rows[:, None])[:, 0].masked_fill(foreign, 0)
        return Sum.apply(logits, self.vocabulary.group) - self.log_z  # type: ignore[no-any-return]

    def cross_entropy(self, targets: Tensor, ignored: int) -> Tensor:
        without = targets == ignored
        return -self.logprobs(targets.masked_fill(without, 0)).masked_fill(without, 0).sum()


class Vocabulary:
    """The vocabulary of V tokens of a decoder, divided over the n processes of a mesh with one axis: this process has V
    / n rows of the embedding and of the head. The decoder's embedding looks up each token in the process that has its
    row, and the decoder's `logits` gathers the logits of all processes; `scores` does not gather logits."""

    def __init__(self, model: Decoder, mesh: DeviceMesh) -> None:
        self.group, self.part = mesh.get_group(), mesh.get_local_rank()
        self.size, self.own = model.config.vocab_size, model.config.vocab_size // mesh.size()
        changed: Any = model
        self.model, self.mesh, changed.vocabulary = changed, mesh, self
        attachment = attach(model, "tensor", divided_layers(mesh.size()))
        attachment.wrap(model.embed, "forward", self.vectors)
        attachment.wrap(model, "logits", self.logits)
        attachment.before(model.head, lambda _, inputs: (Copy.apply(inputs[0], self.group),))
        model.head.out_features = self.own

    def vectors(self, _: Any, tokens: Tensor) -> Tensor:
        """Return the embeddings (..., D) of token ids (...), summed over the processes, each of which looks up its own
        rows."""
        rows, foreign = self.rows_of(tokens)
        vectors = F.embedding(rows, self.model.embed.weight)
        return Sum.apply(vectors.masked_fill(foreign[..., None], 0), self.group)  # type: ignore[no-any-return]

    def logits(self, own: Any, hidden: Tensor) -> Tensor:
        return Join.apply(own(hidden), -1, self.mesh)  # type: ignore[no-any-return]

    def scores(self, hidden: Tensor) -> DividedScores:
        """Return the DividedScores of hidden states (N, D). This process computes only the logits of its part of the
        vocabulary."""
        return DividedScores(without("tensor", self.model, "logits")(hidden), self)

    def rows_of(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return two tensors for token ids of any shape: the index of each token among this process's rows (0 for
        tokens of other processes), and whether the token belongs to another process. An id outside the vocabulary gets
        an index outside the rows, so its lookup raises an error."""
        rows = tokens - self.part * self.own
        foreign = (tokens >= 0) & (tokens < self.size) & ((rows < 0) | (rows >= self.own))
        return rows.masked_fill(foreign, 0), foreign
