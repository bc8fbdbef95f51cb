"""Distillation: a student learns the distributions of a teacher.

Shapes: N targets, D d_model, V vocabulary.
"""

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from onward.data.windows import IGNORE_INDEX, Batch
from onward.model.decoder import Decoder
from onward.training.answers import Frozen
from onward.training.loss import MAX_LOGITS, Sums


def divergence(student: Tensor, teacher: Tensor, mix: float) -> Tensor:
    """The divergence of the distributions of two tensors of logits (N, V), (N,), in nats.

    0: KL(teacher || student), forward; 1: KL(student || teacher), reverse; between, the generalized Jensen-Shannon
    divergence mix KL(teacher || m) + (1 - mix) KL(student || m), where m = mix teacher + (1 - mix) student (Agarwal et
    al. 2024, equation 1).
    """
    s, t = (x.log_softmax(-1) for x in (student, teacher))
    kl = lambda p, q: (p.exp() * (p - q)).sum(-1)
    if mix in (0, 1):
        return kl(s, t) if mix else kl(t, s)
    m = torch.logaddexp(s + math.log1p(-mix), t + math.log(mix))
    return mix * kl(t, m) + (1 - mix) * kl(s, m)


@dataclass(frozen=True)
class Distillation:
    """The divergence from a teacher at the trained tokens, summed; a Loss. Logits are divided by `temperature`."""

    teacher: Frozen
    mix: float
    temperature: float = 1.0
    chunk: int = 0  # targets whose logits are in memory at once; 0: as many as take 128 MiB in fp32, of both models

    def __call__(self, model: Decoder, batch: Batch) -> Sums:
        """The sum over targets. Logits are made for targets only, and in chunks, which are made again in the backward,
        where all at once would fill the memory."""
        teacher = self.teacher.on(model.device)
        with torch.no_grad():
            wanted = teacher.hidden(batch.tokens, batch.positions).flatten(0, 1)
        hidden = model.hidden(batch.tokens, batch.positions).flatten(0, 1)
        chosen = (batch.targets.flatten() != IGNORE_INDEX).nonzero()[:, 0]
        size = self.chunk or max(1, MAX_LOGITS // model.config.vocab_size // 2)
        parts = [*zip(hidden[chosen].split(size), wanted[chosen].split(size))]
        of_chunk = partial(self.of_hidden, model, teacher)
        if len(parts) > 1:
            of_chunk = partial(checkpoint, of_chunk, use_reentrant=False)
        loss = torch.stack([of_chunk(h, w) for h, w in parts]).sum()
        return loss, loss.detach()

    def of_hidden(self, model: Decoder, teacher: Decoder, hidden: Tensor, wanted: Tensor) -> Tensor:
        """The sum for hidden states of the student (N, D) and of the teacher."""
        logits = [model.logits(hidden), teacher.logits(wanted)]
        student, other = (x.to(torch.promote_types(x.dtype, torch.float32)) / self.temperature for x in logits)
        return divergence(student, other, self.mix).sum()
