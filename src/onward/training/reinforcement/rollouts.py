"""Rewarded completions as batches, and the outputs of a model for them.

Shapes: N completions, T tokens, K terms of a reward, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from onward.base.arguments import named
from onward.data.windows import IGNORE_INDEX, Batch
from onward.model.decoder import Decoder
from onward.model.divided import rows_at_once
from onward.training.reinforcement.shared_prompts import target_states
from onward.transforms.heads import VALUE, head_labels, head_of


@named
@dataclass(frozen=True)
class Rollouts(Batch):
    """A batch of N sampled completions with their prompts (at most T + 1 tokens together), their rewards, and the
    tensors that the loss needs; `targets` are the tokens of the completions."""

    advantages: Tensor = field(default_factory=lambda: torch.empty(0))  # advantages: (N, T) per target, or (N, 1)
    engine_logprobs: Tensor = field(default_factory=lambda: torch.empty(0))  # (N, T), as reported by the engine
    old_logprobs: Tensor | None = None  # (N, T), from the model that sampled; None: from the current model
    reference_logprobs: Tensor | None = None  # (N, T), from the reference
    old_values: Tensor | None = None  # (N, T), only for PPO
    returns: Tensor | None = None  # (N, T), only for PPO
    rewards: Tensor = field(default_factory=lambda: torch.empty(0))  # (N,)
    terms: Tensor = field(default_factory=lambda: torch.empty(0))  # (N, K), score of each of the K terms of the reward
    ended: Tensor = field(default_factory=lambda: torch.empty(0))  # (N,), 1 if the completion ends with a stop token
    used: Tensor | None = None  # (N,), 1 if the completion counts in the loss; None: all count
    gap: float | None = None  # gap between engine and trainer when the completions were sampled; None: not computed yet
    share: int = 1  # divisor of the loss

    @property
    def divisor(self) -> int:
        """The number by which the trainer divides the batch's summed loss; see `policy_losses.reduced`."""
        return self.share

    @property
    def mask(self) -> Tensor:
        """A mask (N, T): 1 for the tokens of completions that count in the loss, else 0."""
        mask = (self.targets != IGNORE_INDEX).float()
        return mask if self.used is None else mask * self.used[:, None]


def largest(differences: Tensor, mask: Tensor) -> float:
    """Return the largest absolute value of `differences` (N, T) at the tokens whose `mask` (N, T) is 1; used for the
    gap between the log-probabilities of the engine and of the trainer."""
    return (differences.abs() * mask).max().item()


@dataclass(frozen=True)
class PolicyOutputs:
    """The outputs of a model for targets, such as log-probabilities and entropies, each (N, T), 0 at other
    positions."""

    logprobs: Tensor  # log-probabilities, with logits divided by the temperature
    entropy: Tensor  # entropies of these distributions, without gradient
    plain: Tensor  # log-probabilities at temperature 1, without gradient
    values: Tensor  # outputs of the value head; 0 without one


def policy_outputs(model: Decoder, batch: Batch, temperature: float) -> PolicyOutputs:
    """Return the log-probabilities, entropies and values of a model at the targets of a batch, with logits divided by
    `temperature`. Logits are computed for targets only, in chunks if there are many."""
    inside = batch.targets != IGNORE_INDEX
    states, targets = target_states(model, batch), batch.targets[inside]

    def part(h: Tensor, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = model.logits(h[None])[0]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        log_p = (logits / temperature).log_softmax(-1)
        entropy = -(log_p.detach().exp() * log_p.detach()).sum(-1)
        plain = log_p.detach() if temperature == 1.0 else logits.detach().log_softmax(-1)
        return log_p.gather(1, t[:, None])[:, 0], entropy, plain.gather(1, t[:, None])[:, 0]

    size = rows_at_once(model.config.vocab_size)
    pieces = list(zip(states.split(size), targets.split(size)))
    run = (
        part
        if len(pieces) == 1 or not torch.is_grad_enabled()
        else lambda h, t: checkpoint(part, h, t, use_reentrant=False)
    )
    logprobs, entropies, plain = (torch.cat(some) for some in zip(*(run(h, t) for h, t in pieces)))
    spread = lambda x: torch.zeros(inside.shape, dtype=x.dtype, device=x.device).masked_scatter(inside, x)
    if head_labels(model) == VALUE:
        values = spread(head_of(model)(states)[:, 0].to(logprobs.dtype))
    else:
        values = torch.zeros_like(inside, dtype=logprobs.dtype)
    return PolicyOutputs(spread(logprobs), spread(entropies), spread(plain), values)
