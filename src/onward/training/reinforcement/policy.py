"""Reinforcement: the model answers prompts with our engine, answers are rewarded, and a policy-gradient loss follows.

It is a loss like any other: `prepare` turns batches of prompts into batches of rewarded completions before a step.
Shapes: P prompts, G completions of each, N = P G, T tokens, M tokens of completions, D d_model, V vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from onward.arguments import named
from onward.data.packing import columns_of
from onward.data.windows import IGNORE_INDEX, Batch
from onward.errors import UserError
from onward.generation.request import Request
from onward.generation.sampling import Sampling
from onward.model.decoder import Decoder, without_dropout
from onward.text.tokenizer import Tokenizer
from onward.training.losses.answers import Reference
from onward.training.losses.completions import complete, completion_batch, prompts_of
from onward.training.reinforcement.policy_losses import Reduction, kl_estimate, reduced
from onward.training.rewards.reward import Completion, Reward
from onward.training.rewards.sum import OpenReward
from onward.training.step.loss import MAX_LOGITS, Loss
from onward.transforms.heads import VALUE, head_labels, head_of


@named
@dataclass(frozen=True)
class Rollouts(Batch):
    """Completions with their rewards: `targets` are the tokens of the completions."""

    advantages: Tensor = field(default_factory=lambda: torch.empty(0))  # (N, T) of each target, or (N, 1)
    engine_logprobs: Tensor = field(default_factory=lambda: torch.empty(0))  # (N, T), as the engine reported them
    old_logprobs: Tensor | None = None  # (N, T), of the model that sampled; None: of the model as it is
    reference_logprobs: Tensor | None = None  # (N, T), of the reference
    old_values: Tensor | None = None  # (N, T), PPO
    returns: Tensor | None = None  # (N, T), PPO
    rewards: Tensor = field(default_factory=lambda: torch.empty(0))  # (N,)
    terms: Tensor = field(default_factory=lambda: torch.empty(0))  # (N, K), scores by the K terms of the reward
    ended: Tensor = field(default_factory=lambda: torch.empty(0))  # (N,), 1 where the completion ends by itself
    used: Tensor | None = None  # (N,), 1 where the completion is in the loss; None: all are
    gap: float | None = None  # of engine and trainer when these were sampled; None: to be computed
    share: int = 1  # the divisor

    @property
    def divisor(self) -> int:
        """The divisor of the batch's sums; see `policy_losses.reduced`."""
        return self.share

    @property
    def mask(self) -> Tensor:
        """(N, T), 1 for the tokens of completions in the loss, else 0."""
        mask = (self.targets != IGNORE_INDEX).float()
        return mask if self.used is None else mask * self.used[:, None]


class Rule(Protocol):
    """The fields and functions of a policy-gradient method, such as GRPO; see `methods.policy.PolicyMethod`."""

    @property
    def samples(self) -> int: ...
    @property
    def completion_length(self) -> int: ...
    @property
    def temperature(self) -> float: ...
    @property
    def kl(self) -> float: ...
    @property
    def kl_in_loss(self) -> bool: ...
    @property
    def iterations(self) -> int: ...
    @property
    def mask_truncated(self) -> bool: ...
    @property
    def mean_over(self) -> Reduction: ...
    @property
    def needs_sampled(self) -> bool: ...
    def advantages(self, rollouts: Rollouts, sampled: PolicyOutputs | None) -> Mapping[str, Any]: ...
    def surrogate(self, logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]: ...
    def further_loss(self, outputs: PolicyOutputs, rollouts: Rollouts) -> Tensor | float: ...


class PolicyGradient(Loss):
    """A policy-gradient method as a Loss; make the Trainer with `loss=` this object."""

    def __init__(
        self,
        method: Rule,
        tokenizer: Tokenizer,
        reward: Reward,
        reference: Reference | None = None,
        *,
        device: str = "auto",  # of a reward model
    ) -> None:
        self.method, self.tokenizer, self.reference = method, tokenizer, reference
        self.reward = OpenReward(reward, tokenizer, device)
        self.sampling = Sampling(temperature=method.temperature)
        self.ends = frozenset(tokenizer.end_ids)  # tokens that end a completion
        self.kept: list[Rollouts] = []
        self.remaining = 0  # further steps that use the kept rollouts
        self.largest_gap, self.gap_share = 0.0, 0

    def prepare(self, model: Decoder, batches: Sequence[Batch]) -> list[Rollouts]:
        """The completions of a step: new ones or, for `iterations` above 1, those of the step before."""
        if self.remaining:
            self.remaining -= 1
        else:
            self.kept = self.rollouts(model, batches)
            self.remaining = self.method.iterations - 1
        self.largest_gap, self.gap_share = 0.0, 0
        return self.kept

    @torch.no_grad()
    def rollouts(self, model: Decoder, batches: Sequence[Batch]) -> list[Rollouts]:
        """New completions of the prompts in batches, with their advantages."""
        m = self.method
        rows = [prompts_of(batch) for batch in batches]
        prompts = [prompt for some in rows for prompt, _ in some for _ in range(m.samples)]
        seeds = [
            batch.seed * 1_000_003 + number
            for batch, some in zip(batches, rows)
            for number in range(len(some) * m.samples)
        ]
        requests = complete(model, prompts, seeds, self.sampling, m.completion_length, self.ends, m.samples)
        answers = [answer for some in rows for _, answer in some]
        terms = self.rewards(requests, answers, [columns for batch in batches for columns in columns_of(batch)])
        sizes = [len(some) * m.samples for some in rows]
        ends = accumulate(sizes)
        return [
            self.rollout(model, batch, requests[end - size : end], terms[end - size : end])
            for batch, size, end in zip(batches, sizes, ends)
        ]

    def rewards(
        self, requests: Sequence[Request], answers: Sequence[Sequence[int]], columns: Sequence[Mapping[str, Any]]
    ) -> Tensor:
        """The scores (N, K) of completions by the terms of the reward, `samples` for each record with its answer and
        columns."""
        records = [pair for pair in zip(map(self.text, answers), columns) for _ in range(self.method.samples)]
        completions = [
            Completion(self.tokenizer.decode(r.prompt), self.text(r.tokens), answer, fields_, r.prompt, r.tokens)
            for r, (answer, fields_) in zip(requests, records)
        ]
        return torch.tensor(self.reward.terms(completions), dtype=torch.float64).T

    @property
    def samples(self) -> list[dict[str, Any]]:
        """The prompt, text and reward of each completion of the last step, and the scores of a sum's terms."""
        return [
            {"prompt": self.tokenizer.decode(prompt), "text": self.text(answer), "reward": reward}
            | ({"rewards": dict(zip(self.reward.names, terms))} if len(terms) > 1 else {})
            for rollouts in self.kept
            for (prompt, answer), reward, terms in zip(
                prompts_of(rollouts), rollouts.rewards.tolist(), rollouts.terms.tolist()
            )
        ]

    def text(self, tokens: Sequence[int]) -> str:
        """The text of a completion, without its end token."""
        return self.tokenizer.decode([token for token in tokens if token not in self.ends])

    def rollout(self, model: Decoder, batch: Batch, requests: Sequence[Request], terms: Tensor) -> Rollouts:
        """Completions, with their scores (N, K) by the terms of the reward, as a batch, padded at the end."""
        m = self.method
        rewards = (terms @ torch.tensor(self.reward.weights, dtype=terms.dtype)).float()
        tokens, targets, logprobs = completion_batch(requests)
        ended = torch.tensor([float(r.tokens[-1] in self.ends) for r in requests])
        used = ended if m.mask_truncated else None
        new = Rollouts(tokens, targets, seed=batch.seed, rewards=rewards, ended=ended, used=used)
        new = new.changed(engine_logprobs=logprobs, terms=terms.float()).to(model.device)
        sampled = None
        with without_dropout(model):
            if m.kl:
                new = new.changed(reference_logprobs=self.reference_logprobs(model, new))
            if m.iterations > 1 or m.needs_sampled:
                sampled = policy_outputs(model, new, m.temperature)
            if sampled is not None and m.iterations > 1:
                gap = largest(sampled.plain - new.engine_logprobs, new.mask)
                new = new.changed(old_logprobs=sampled.logprobs, gap=gap)
        share = reduced(new.mask, new.mask, m.mean_over, m.completion_length)[1]
        return new.changed(share=max(1, share), **m.advantages(new, sampled))

    def state(self) -> dict[str, Tensor]:
        """The completions that further steps use, and the number of these steps."""
        if not self.remaining:
            return {}
        tensors = {
            f"{i}/{one.name}": value if isinstance(value, Tensor) else torch.tensor(value)
            for i, rollouts in enumerate(self.kept)
            for one in fields(rollouts)
            if (value := getattr(rollouts, one.name)) is not None
        }
        return tensors | {"remaining": torch.tensor(self.remaining)}

    def load_state(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        """Go on from a `state`."""
        self.remaining = int(tensors.get("remaining", 0))
        rows = defaultdict[int, dict[str, Any]](dict)
        for key, tensor in tensors.items():
            number, _, name = key.partition("/")
            if name:
                rows[int(number)][name] = tensor if tensor.ndim else tensor.item()
        self.kept = [Rollouts(**rows[i]).to(device) for i in sorted(rows)]

    def reference_logprobs(self, model: Decoder, batch: Batch) -> Tensor:
        """The log-probabilities (N, T) of targets by the reference."""
        if self.reference is None:
            raise UserError("kl is given without a reference: give the model to compare with")
        with self.reference.of(model) as other:
            return policy_outputs(other, batch, self.method.temperature).logprobs

    def __call__(self, model: Decoder, batch: Batch) -> tuple[Tensor, Tensor, Mapping[str, Tensor]]:
        """The sum to minimize, the sum to report, and figures. Prompts without completions, as in validation, are
        completed first."""
        m = self.method
        if not isinstance(batch, Rollouts):  # such as in validation
            share, [rollouts] = batch.divisor, self.rollouts(model, [batch])
            total, reported, sums = self(model, rollouts)
            scale = share / rollouts.divisor
            return total * scale, reported * scale, {name: value * scale for name, value in sums.items()}
        mask, reference = batch.mask, batch.reference_logprobs
        outputs = policy_outputs(model, batch, m.temperature)
        logprobs = outputs.logprobs
        old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        loss, is_clipped = m.surrogate(logprobs, old, batch.advantages, mask)
        if m.kl_in_loss and reference is not None:
            loss = loss + m.kl * kl_estimate(logprobs, reference)
        loss = loss + m.further_loss(outputs, batch)
        total, _ = reduced(loss, mask, m.mean_over, m.completion_length)
        clip_share = (is_clipped * mask).sum() / mask.sum().clamp(min=1)
        count = mask.sum().clamp(min=1)
        figures = {
            "reward": batch.rewards.mean(),
            "length": mask.sum(1).mean(),
            "ended": batch.ended.mean(),
            "entropy": (outputs.entropy * mask).sum() / count,
            "clip_share": clip_share,
        }
        if len(self.reward.names) > 1:
            figures |= {f"reward/{name}": mean for name, mean in zip(self.reward.names, batch.terms.mean(0))}
        if reference is not None:
            figures["kl"] = (kl_estimate(logprobs.detach(), reference) * mask).sum() / count
        sums = {name: value.detach() * batch.divisor for name, value in figures.items()}
        gap = largest(outputs.plain - batch.engine_logprobs, mask) if batch.gap is None else batch.gap
        sums["logprob_gap"] = total.new_tensor(self.gap(gap, batch.divisor))
        return total, total.detach(), sums

    def gap(self, gap: float, share: int) -> float:
        """This batch's share of the largest difference between the engine's and the trainer's log-probabilities. The
        shares of a step's batches, summed and divided by their divisors, give the largest difference."""
        before = self.largest_gap * self.gap_share
        self.largest_gap, self.gap_share = max(self.largest_gap, gap), self.gap_share + share
        return self.largest_gap * self.gap_share - before


def largest(differences: Tensor, mask: Tensor) -> float:
    """The largest absolute difference at the masked tokens."""
    return (differences.abs() * mask).max().item()


@dataclass(frozen=True)
class PolicyOutputs:
    """The outputs of a model for targets, each (N, T), 0 at other positions."""

    logprobs: Tensor  # log-probabilities, with logits divided by the temperature
    entropy: Tensor  # of these distributions, without gradient
    plain: Tensor  # log-probabilities at temperature 1, without gradient
    values: Tensor  # where the model has a head of values


def policy_outputs(model: Decoder, batch: Batch, temperature: float) -> PolicyOutputs:
    """The outputs for the targets of a batch. Logits are computed for targets only, in chunks if there are many."""
    hidden = model.hidden(batch.tokens, batch.positions)
    inside = batch.targets != IGNORE_INDEX
    states, targets = hidden[inside], batch.targets[inside]

    def part(h: Tensor, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = model.logits(h[None])[0]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        log_p = (logits / temperature).log_softmax(-1)
        entropy = -(log_p.detach().exp() * log_p.detach()).sum(-1)
        plain = log_p.detach() if temperature == 1.0 else logits.detach().log_softmax(-1)
        return log_p.gather(1, t[:, None])[:, 0], entropy, plain.gather(1, t[:, None])[:, 0]

    size = max(1, MAX_LOGITS // model.config.vocab_size)
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
