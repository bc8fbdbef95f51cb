"""Reinforcement: the model answers prompts with our engine, answers are rewarded, and a policy-gradient loss follows.

It is a loss like any other: `prepare` turns batches of prompts into batches of rewarded completions before a step.
Shapes: P prompts, G completions of each, N = P G, T tokens, M tokens of completions, D d_model, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from onward.arguments import Range, check_fields, named
from onward.data.windows import IGNORE_INDEX, Batch
from onward.errors import UserError
from onward.generation.engine import Engine, growing_cache
from onward.generation.request import Request
from onward.generation.sampling import Sampling
from onward.model.decoder import Decoder, without_dropout
from onward.model.part_types import Size
from onward.text.tokenizer import Tokenizer
from onward.training.answers import Reference
from onward.training.finetuning import Reduction
from onward.training.loss import MAX_LOGITS
from onward.training.policy_losses import (
    clipped,
    gae,
    group_advantages,
    kl_estimate,
    leave_one_out,
    reduced,
    value_loss,
    whitened,
)
from onward.training.rewards import Reward, rewarded

ROWS = 256  # completions that the engine continues at a time
CHUNK = 256  # at least as many prompt tokens are read at a time


@named
@dataclass(frozen=True)
class PolicyOptions:
    """How completions are sampled and turned into a loss."""

    method: Literal["grpo", "rloo", "ppo"] = "grpo"
    samples: Size = 8  # completions of each prompt
    completion_length: Size = 256  # the most tokens of a completion
    temperature: Annotated[float, Range(1e-6, 1e6)] = 1.0  # of the samples, and of the probabilities in the loss
    reduction: Reduction = "dapo"  # what the mean loss of GRPO is over: see policy_losses.reduced
    scaled: bool = True  # GRPO divides advantages by the deviation of their group
    clip_low: Annotated[float, Range(0, 1)] = 0.2  # the ratio of probabilities is clipped to 1 - clip_low
    clip_high: Annotated[float, Range(0, 100)] = 0.2  # and to 1 + clip_high
    kl: Annotated[float, Range(0, 1e3)] = 0.0  # weight of the KL from the reference, in the loss (GRPO) or the reward
    iterations: Size = 1  # steps that use the same completions
    gamma: Annotated[float, Range(0, 1)] = 1.0  # PPO: discount
    lam: Annotated[float, Range(0, 1)] = 0.95  # PPO: lambda of the generalized advantages
    value_weight: Annotated[float, Range(0, 100)] = 0.5  # PPO: weight of the loss of the values

    def __post_init__(self) -> None:
        check_fields(self)
        if self.samples < 2 and self.method != "ppo":
            raise UserError(f"samples is {self.samples}: {self.method} compares completions, so give at least 2")


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
    ended: Tensor = field(default_factory=lambda: torch.empty(0))  # (N,), 1 where the completion ends by itself
    share: int = 1  # the divisor

    @property
    def divisor(self) -> int:
        return self.share

    @property
    def mask(self) -> Tensor:
        """(N, T), 1 for targets."""
        return (self.targets != IGNORE_INDEX).float()


class PolicyGradient:
    """GRPO, RLOO or PPO as a Loss; make the Trainer with `loss=` this object.

    `samples` holds the prompt, completion and reward of each completion of the last step.
    """

    def __init__(
        self, options: PolicyOptions, tokenizer: Tokenizer, reward: Reward, reference: Reference | None = None
    ) -> None:
        self.options, self.tokenizer, self.reward, self.reference = options, tokenizer, reward, reference
        self.sampling = Sampling(temperature=options.temperature)
        self.ends = frozenset(tokenizer.end_ids)  # tokens that end a completion
        self.samples: list[tuple[str, str, float]] = []
        self.kept: list[Rollouts] = []
        self.remaining = 0  # further steps that use the kept rollouts
        self.largest_gap, self.gap_share = 0.0, 0

    def prepare(self, model: Decoder, batches: Sequence[Batch]) -> list[Rollouts]:
        """The completions of a step: new ones, or those of the step before where they serve several `iterations`."""
        if self.remaining:
            self.remaining -= 1
        else:
            self.kept = self.rollouts(model, batches)
            self.remaining = self.options.iterations - 1
        self.largest_gap, self.gap_share = 0.0, 0
        return self.kept

    @torch.no_grad()
    def rollouts(self, model: Decoder, batches: Sequence[Batch]) -> list[Rollouts]:
        """New completions of the prompts in batches, with their advantages."""
        o, length = self.options, model.config.context_length
        prompts = [prompts_of(batch, self.tokenizer) for batch in batches]
        requests = [
            [
                self.request(p, batch.seed, i * o.samples + j, length)
                for i, (p, _) in enumerate(pairs)
                for j in range(o.samples)
            ]
            for batch, pairs in zip(batches, prompts)
        ]
        everything = [request for some in requests for request in some]
        rows = min(len(everything), ROWS)
        cache = growing_cache(model, rows, length, max(CHUNK, min(512, length)))
        engine = Engine(model, rows=rows, cache=cache, compile_after=None)
        for sample in range(o.samples):  # all prompts first, so that their copies find them in the cache
            for request in everything[sample :: o.samples]:
                engine.add(request)
        for _ in engine.run():
            pass
        if failed := next((request for request in everything if request.error), None):
            raise failed.error  # type: ignore[misc]
        texts = [self.tokenizer.decode([t for t in r.tokens if t not in self.ends]) for r in everything]
        questions = [self.tokenizer.decode(request.prompt) for request in everything]
        answers = [answer for pairs in prompts for _, answer in pairs for _ in range(o.samples)]
        values = rewarded(self.reward, questions, texts, answers)
        self.samples = list(zip(questions, texts, values))
        result, start = [], 0
        for batch, some in zip(batches, requests):
            rewards = torch.tensor(values[start : start + len(some)])
            result.append(self.rollout(model, batch, some, rewards))
            start += len(some)
        return result

    def request(self, prompt: list[int], seed: int, number: int, length: int) -> Request:
        """The request of a completion within a context of `length` tokens. An end token is a part of the completion, so
        that it is learned."""
        return Request(
            prompt,
            self.sampling,
            min(self.options.completion_length, max(1, length - len(prompt))),
            stop=self.ends.__contains__,
            seed=seed * 1_000_003 + number,
            num_logprobs=0,
        )

    def rollout(self, model: Decoder, batch: Batch, requests: Sequence[Request], rewards: Tensor) -> Rollouts:
        """Completions as a batch, padded at the end."""
        o, width = self.options, max(len(r.prompt) + len(r.tokens) for r in requests) - 1
        tokens = torch.zeros(len(requests), width, dtype=torch.int64)
        targets = torch.full((len(requests), width), IGNORE_INDEX)
        logprobs = torch.zeros(len(requests), width)
        for row, r in enumerate(requests):
            whole, start = torch.tensor(r.prompt + r.tokens), len(r.prompt) - 1
            tokens[row, : len(whole) - 1] = whole[:-1]
            targets[row, start : len(whole) - 1] = whole[start + 1 :]
            logprobs[row, start : len(whole) - 1] = torch.tensor([one.logprob for one in r.logprobs])
        ended = torch.tensor([float(r.tokens[-1] in self.ends) for r in requests])
        found = Rollouts(tokens, targets, seed=batch.seed, rewards=rewards, ended=ended, engine_logprobs=logprobs)
        found = found.to(model.device)
        mask, changes = found.mask, dict[str, Any]()
        with without_dropout(model):
            reference = self.reference_logprobs(model, found) if o.kl else None
            if o.iterations > 1 or o.method == "ppo" or reference is not None:
                old, _, values = completion_logprobs(model, found, o.temperature)
                changes = {"old_logprobs": old if o.iterations > 1 else None, "reference_logprobs": reference}
        if o.method == "ppo":
            per_token = torch.zeros_like(mask)
            last = mask.shape[1] - 1 - mask.flip(1).argmax(1)
            per_token[torch.arange(len(mask)), last] = found.rewards
            if reference is not None:
                per_token -= o.kl * (old - reference) * mask
            advantages, returns = gae(per_token, values * mask, mask, o.gamma, o.lam)
            changes |= {"old_values": values * mask, "returns": returns}
            advantages = whitened(advantages, mask)
        else:
            score = found.rewards
            if o.method == "rloo" and reference is not None:
                score = score - o.kl * ((old - reference) * mask).sum(1)
            scores = (
                leave_one_out(score, o.samples)
                if o.method == "rloo"
                else group_advantages(score, o.samples, scaled=o.scaled)
            )
            advantages = scores[:, None]
        share = reduced(mask, mask, self.reduction, o.completion_length)[1] if o.method != "rloo" else len(mask)
        return found.changed(advantages=advantages, share=share, **changes)

    def reference_logprobs(self, model: Decoder, batch: Batch) -> Tensor:
        """The log-probabilities (N, T) of targets by the reference."""
        if self.reference is None:
            raise UserError("kl is given without a reference: give the model to compare with")
        with self.reference.of(model) as other:
            return completion_logprobs(other, batch, self.options.temperature)[0]

    @property
    def reduction(self) -> Reduction:
        """What the mean is over; PPO takes it over all tokens."""
        return "dapo" if self.options.method == "ppo" else self.options.reduction

    def __call__(self, model: Decoder, batch: Batch) -> tuple[Tensor, Tensor, Mapping[str, Tensor]]:
        """The sum to minimize, the sum to report, and figures; prompts are answered first."""
        o = self.options
        if not isinstance(batch, Rollouts):  # such as in validation
            share, [rollouts] = batch.divisor, self.rollouts(model, [batch])
            total, reported, sums = self(model, rollouts)
            scale = share / rollouts.divisor
            return total * scale, reported * scale, {name: value * scale for name, value in sums.items()}
        mask, reference = batch.mask, batch.reference_logprobs
        logprobs, entropy, values = completion_logprobs(model, batch, o.temperature)
        old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        if o.method == "rloo":  # the ratio of whole completions
            loss, is_clipped = clipped(
                (logprobs * mask).sum(1), (old * mask).sum(1), batch.advantages[:, 0], o.clip_low, o.clip_high
            )
            total, clip_share = loss.sum(), is_clipped.float().mean()
        else:
            loss, is_clipped = clipped(logprobs, old, batch.advantages, o.clip_low, o.clip_high)
            if o.method == "grpo" and reference is not None:
                loss = loss + o.kl * kl_estimate(logprobs, reference)
            if batch.old_values is not None and batch.returns is not None:
                loss = loss + o.value_weight * value_loss(values, batch.old_values, batch.returns, 0.2)
            total, _ = reduced(loss, mask, self.reduction, o.completion_length)
            clip_share = (is_clipped * mask).sum() / mask.sum()
        count = mask.sum()
        figures = {
            "reward": batch.rewards.mean(),
            "length": mask.sum(1).mean(),
            "ended": batch.ended.mean(),
            "entropy": (entropy * mask).sum() / count,
            "clip_share": clip_share,
        }
        if reference is not None:
            figures["kl"] = (kl_estimate(logprobs.detach(), reference) * mask).sum() / count
        sums = {name: value.detach() * batch.divisor for name, value in figures.items()}
        if batch.old_logprobs is None and o.temperature == 1.0:
            sums["logprob_gap"] = self.gap(
                ((logprobs.detach() - batch.engine_logprobs).abs() * mask).max(), batch.divisor
            )
        return total, total.detach(), sums

    def gap(self, gap: Tensor, share: int) -> Tensor:
        """A sum that becomes the largest difference of engine and trainer over all batches of a step, once the sums of
        its batches are divided by their shares."""
        before = self.largest_gap * self.gap_share
        self.largest_gap, self.gap_share = max(self.largest_gap, gap.item()), self.gap_share + share
        return gap.new_tensor(self.largest_gap * self.gap_share - before)


def prompts_of(batch: Batch, tokenizer: Tokenizer) -> list[tuple[list[int], str]]:
    """The prompt and the answer in each row of a batch: the tokens before the first target, and the text of the targets
    without the end token."""
    found = []
    for tokens, targets in zip(batch.tokens.tolist(), batch.targets.tolist()):
        first = next(i for i, target in enumerate(targets) if target != IGNORE_INDEX)
        answer = [target for target in targets if target != IGNORE_INDEX and target not in tokenizer.end_ids]
        found.append((tokens[: first + 1], tokenizer.decode(answer)))
    return found


def completion_logprobs(model: Decoder, batch: Batch, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of the targets, entropies without gradient, and values where the model has a head `value`, each
    (N, T), 0 where there is no target. Logits are made for targets only, and chunk by chunk where there are many."""
    hidden = model.hidden(batch.tokens, batch.positions)
    inside = batch.targets != IGNORE_INDEX
    states, targets = hidden[inside], batch.targets[inside]

    def part(h: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        logits = model.logits(h[None])[0]
        log_p = (logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature).log_softmax(-1)
        entropy = -(log_p.detach().exp() * log_p.detach()).sum(-1)
        return log_p.gather(1, t[:, None])[:, 0], entropy

    size = max(1, MAX_LOGITS // model.config.vocab_size)
    pieces = list(zip(states.split(size), targets.split(size)))
    run = (
        part
        if len(pieces) == 1 or not torch.is_grad_enabled()
        else lambda h, t: checkpoint(part, h, t, use_reentrant=False)
    )
    logprobs, entropies = (torch.cat(some) for some in zip(*(run(h, t) for h, t in pieces)))
    spread = lambda x: torch.zeros(inside.shape, dtype=x.dtype, device=x.device).masked_scatter(inside, x)
    head = model._modules.get("value")
    values = (
        spread(head(states)[:, 0].to(logprobs.dtype))
        if head is not None
        else torch.zeros_like(inside, dtype=logprobs.dtype)
    )
    return spread(logprobs), spread(entropies), values


def add_value_head(model: Decoder) -> None:
    """Give a model a head of values, from hidden states (..., D) to (..., 1), which begin at 0."""
    head = nn.Linear(
        model.config.d_model, 1, device=model.device, dtype=torch.promote_types(model.dtype, torch.float32)
    )
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    model.add_module("value", head)
