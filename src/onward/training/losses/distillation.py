"""Distillation: a student learns the distributions of a teacher, on given texts or on the student's own answers.

Shapes: N targets, D d_model, V vocabulary.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from onward.checkpoint.lazy import load_outline
from onward.checkpoint.load import load_model
from onward.data.windows import IGNORE_INDEX, Batch
from onward.generation.sampling import Sampling
from onward.hub.folder import locate
from onward.model.decoder import Decoder
from onward.model.divided import keep_gathered, rows_at_once, unsharded
from onward.text.tokenizer import Tokenizer
from onward.training.losses.answers import Frozen
from onward.training.losses.completions import complete, completion_batch, prompts_of
from onward.training.step.loss import Loss, Sums


def divergence(student: Tensor, teacher: Tensor, mix: float) -> Tensor:
    """Return the divergence (N,), in nats, of the distributions given by two tensors of logits (N, V).

    With `mix` 0 it is the forward KL(teacher || student), with 1 the reverse KL(student || teacher), and in between the
    generalized Jensen-Shannon divergence mix KL(teacher || m) + (1 - mix) KL(student || m), where m = mix teacher + (1
    - mix) student (Agarwal et al. 2024, equation 1).
    """
    s, t = (x.log_softmax(-1) for x in (student, teacher))
    kl = lambda p, q: (p.exp() * (p - q).masked_fill(p == -math.inf, 0)).sum(-1)  # tokens of probability 0 add 0
    if mix in (0, 1):
        return kl(s, t) if mix else kl(t, s)
    lowest = torch.finfo(s.dtype).min  # the gradient of logaddexp is NaN where both are -inf
    m = torch.logaddexp(s.clamp(min=lowest) + math.log1p(-mix), t.clamp(min=lowest) + math.log(mix))
    return mix * kl(t, m) + (1 - mix) * kl(s, m)


class Teacher(Frozen):
    """The teacher of a distillation: a frozen model in a folder or on the hub, given by `name`, loaded in fp32 at its
    first use."""

    def __init__(self, name: str) -> None:
        super().__init__(lambda lazy: (load_outline if lazy else load_model)(locate(name), torch.float32)[0])


@dataclass(frozen=True)
class Distillation(Loss):
    """The divergence of a student from a teacher, summed over the trained tokens; see `divergence` for `mix`. The
    logits of both models are divided by `temperature`.

    If the head of one model has more rows, because its vocabulary is padded, the extra rows are ignored.
    """

    teacher: Frozen
    mix: float
    temperature: float = 1.0
    chunk: int = 0  # targets whose logits are in memory at once; 0: as many as fit in 128 MiB in fp32, for both models

    def __call__(self, model: Decoder, batch: Batch) -> Sums:
        """Return the sum over targets. Logits are computed for targets only, and in chunks that the backward pass
        recomputes if all logits at once would fill the memory."""
        teacher = self.teacher.on(model.device)
        keep_gathered(teacher)
        with torch.no_grad():
            wanted = teacher.hidden(batch.tokens, batch.positions).flatten(0, 1)
        hidden = model.hidden(batch.tokens, batch.positions).flatten(0, 1)
        chosen = (batch.targets.flatten() != IGNORE_INDEX).nonzero()[:, 0]
        size = self.chunk or rows_at_once(2 * model.config.vocab_size)
        parts = [*zip(hidden[chosen].split(size), wanted[chosen].split(size))]
        of_chunk = partial(self.of_hidden, model, teacher)
        if len(parts) > 1:
            of_chunk = partial(checkpoint, of_chunk, use_reentrant=False)
        loss = torch.stack([of_chunk(h, w) for h, w in parts]).sum()
        return loss, loss.detach()

    def divide(self, divide: Callable[[Decoder], object]) -> None:
        self.teacher.divide = divide

    def of_hidden(self, model: Decoder, teacher: Decoder, hidden: Tensor, wanted: Tensor) -> Tensor:
        """Return the sum of the divergences at N tokens, from hidden states (N, D) of the student (`model`, `hidden`)
        and of the teacher (`teacher`, `wanted`)."""
        size = min(model.config.vocab_size, teacher.config.vocab_size)
        logits = [model.logits(hidden)[:, :size], teacher.logits(wanted)[:, :size]]
        student, other = (x.to(torch.promote_types(x.dtype, torch.float32)) / self.temperature for x in logits)
        return divergence(student, other, self.mix).sum()


class OnPolicy(Loss):
    """Distillation on completions by the student (Agarwal et al. 2024, algorithm 1): in a fraction `share` of the
    batches, each row's answer is replaced by an answer of the student, of at most `most` tokens. The seed of a batch
    determines whether its answers are replaced, and seeds the sampling."""

    def __init__(self, distillation: Distillation, share: float, most: int, tokenizer: Tokenizer) -> None:
        self.distillation, self.share, self.most, self.tokenizer = distillation, share, most, tokenizer
        self.sampling, self.ends = Sampling(temperature=distillation.temperature), frozenset(tokenizer.end_ids)
        self.answers: list[dict[str, Any]] = []

    @property
    def samples(self) -> Sequence[Mapping[str, Any]]:
        return self.answers

    def prepare(self, model: Decoder, batches: Sequence[Batch]) -> list[Batch]:
        sampler = unsharded(model)  # collective: every process calls it, even one that samples nothing
        return [self.answered(sampler, b) if Random(b.seed).random() < self.share else b for b in batches]

    def divide(self, divide: Callable[[Decoder], object]) -> None:
        self.distillation.divide(divide)

    def answered(self, model: Decoder, batch: Batch) -> Batch:
        """Return a batch with its answers replaced by answers of the student `model`."""
        prompts = [prompt for prompt, _ in prompts_of(batch)]
        seeds = [batch.seed * 1_000_003 + number for number in range(len(prompts))]
        made = complete(model, prompts, seeds, self.sampling, self.most, self.ends)
        text = self.tokenizer.decode
        self.answers = [{"prompt": text(list(one.prompt)), "text": text(one.tokens)} for one in made]
        tokens, targets, _ = completion_batch(made)
        return Batch(tokens, targets, seed=batch.seed).to(model.device)

    def __call__(self, model: Decoder, batch: Batch) -> Sums:
        return self.distillation(model, batch)
