"""Reinforcement learning: the engine samples completions of prompts from the model, a reward scores them, and a policy
loss compares them.

The loss has the usual interface: before a step, `prepare` turns batches of prompts into batches of rewarded
completions. Shapes: P prompts, G completions of each, N = P G, T tokens, M tokens of completions, D d_model, V
vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from functools import partial
from itertools import accumulate, groupby
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from onward.base.errors import UserError
from onward.data.packing import columns_of
from onward.data.windows import Batch
from onward.generation.sampling import Sampling
from onward.model.decoder import Decoder, without_dropout
from onward.model.divided import inside, unsharded
from onward.text.tokenizer import Tokenizer
from onward.training.environments.environment import Environment, Replier, reply_tokens
from onward.training.losses.answers import Reference
from onward.training.losses.completions import ModelCompletion, complete, completion_batch, prompts_of
from onward.training.reinforcement.policy_losses import Reduction, kl_estimate, reduced
from onward.training.reinforcement.replay import Question, Replay
from onward.training.reinforcement.rollouts import PolicyOutputs, Rollouts, largest, policy_outputs
from onward.training.rewards.reward import Completion, Reward
from onward.training.rewards.sum import OpenReward
from onward.training.step.loss import Loss

REPLAYED = 500_000  # difference between the seeds of a step's completions and those of its replayed prompts


@dataclass(frozen=True)
class CompletionGroup:
    """The G sampled completions (`made`) of a prompt (`question`), with their scores (G, K) by the K terms of the
    reward, and their rewards (G,)."""

    question: Question
    made: Sequence[ModelCompletion]
    terms: Tensor
    rewards: Tensor

    @property
    def deviation(self) -> float:
        return float(self.rewards.std(correction=0))


class Rule(Protocol):
    """The fields and functions of a reinforcement learning method, such as GRPO, that PolicyGradient uses; see
    `methods.policy.PolicyMethod`."""

    @property
    def samples(self) -> int: ...
    @property
    def completion_length(self) -> int: ...
    @property
    def temperature(self) -> float: ...
    @property
    def loss_temperature(self) -> float: ...
    @property
    def dropout(self) -> bool: ...
    @property
    def reference(self) -> object: ...
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
    @property
    def environment(self) -> Environment | None: ...
    @property
    def replay(self) -> int: ...
    def advantages(self, rollouts: Rollouts, sampled: PolicyOutputs | None) -> Mapping[str, Any]: ...
    def token_losses(self, outputs: PolicyOutputs, rollouts: Rollouts) -> tuple[Tensor, Mapping[str, Tensor]]: ...


class PolicyGradient(Loss):
    """The loss of a reinforcement learning method: samples completions of prompts, scores them by a reward, and
    compares the model with a reference, if any. Pass it to a Trainer as `loss`."""

    of_batches: ClassVar[bool] = True

    def __init__(
        self,
        method: Rule,
        tokenizer: Tokenizer,
        reward: Reward,
        reference: Reference | None = None,
        *,
        device: str = "auto",  # device of a reward model
    ) -> None:
        self.method, self.tokenizer, self.reference = method, tokenizer, reference
        self.reward = OpenReward(reward, tokenizer, device)
        self.sampling = Sampling(temperature=method.temperature)
        self.ends = frozenset(tokenizer.end_ids)  # tokens that end a completion
        self.replay = Replay(method.replay)
        self.replier: Replier | None = method.environment.open() if method.environment else None
        if method.environment:
            # raises the error if there is no chat template
            reply_tokens(tokenizer, getattr(method.environment, "role", ""), "")
        self.kept: list[Rollouts] = []
        self.remaining = 0  # number of further steps that use the kept rollouts
        self.largest_gap, self.gap_share = 0.0, 0

    def prepare(self, model: Decoder, batches: Sequence[Batch]) -> list[Rollouts]:
        """Return the completions to train on in a step, sampled by `model` from the prompts in `batches` or, if the
        method uses completions in several steps (`iterations`), those of the previous step."""
        if self.remaining:
            self.remaining -= 1
        else:
            self.kept = self.rollouts(model, batches, replay=True)
            self.remaining = self.method.iterations - 1
        self.largest_gap, self.gap_share = 0.0, 0
        return self.kept

    @torch.no_grad()
    def rollouts(self, model: Decoder, batches: Sequence[Batch], *, replay: bool = False) -> list[Rollouts]:
        """Sample completions of the prompts in `batches` from `model`, score them, and return them with their
        advantages, a Rollouts for each batch. With `replay`, prompts whose completions all have the same reward are
        replaced by prompts of the replay buffer, as far as it has any."""
        samples, questions, seeds = self.method.samples, list[Question](), list[int]()
        for batch in batches:
            rows = zip(prompts_of(batch), columns_of(batch))
            own = [Question(tuple(prompt), tuple(answer), columns) for (prompt, answer), columns in rows]
            questions += own
            seeds += [batch.seed * 1_000_003 + number * samples for number in range(len(own))]
        sampler = unsharded(model)
        groups = self.ask(sampler, questions, seeds)
        if replay and self.replay.size:
            self.replace(sampler, groups, seeds[0])
        sizes = [len(batch.tokens) for batch in batches]
        ends = accumulate(sizes)
        return [self.rollout(model, batch, groups[end - size : end]) for batch, size, end in zip(batches, sizes, ends)]

    def ask(self, model: Decoder, questions: Sequence[Question], seeds: Sequence[int]) -> list[CompletionGroup]:
        """Sample completions of each question (a prompt with its record), score them, and return a CompletionGroup for
        each question. The completions of question i have consecutive seeds, beginning with seeds[i]."""
        m = self.method
        owners = [question for question in questions for _ in range(m.samples)]
        prompts, own = [q.prompt for q in owners], [seed + i for seed in seeds for i in range(m.samples)]
        reply = partial(self.replies, owners) if m.environment else None
        made = complete(model, prompts, own, self.sampling, m.completion_length, self.ends, m.samples, reply)
        completions = list(map(self.completion, owners, made))
        terms = torch.tensor(self.reward.terms(completions), dtype=torch.float64).T
        rewards = (terms @ torch.tensor(self.reward.weights, dtype=terms.dtype)).float()
        parts = [slice(i * m.samples, (i + 1) * m.samples) for i in range(len(questions))]
        return [CompletionGroup(q, made[part], terms[part].float(), rewards[part]) for q, part in zip(questions, parts)]

    def replace(self, model: Decoder, groups: list[CompletionGroup], seed: int) -> None:
        """Replace, in place, the groups whose completions all have the same reward by groups with new completions of
        prompts from the replay buffer; `seed` determines which prompts. The other prompts of this step are put into the
        buffer first."""
        for group in groups:
            self.replay.note(group.question, group.deviation)
        equal = [i for i, group in enumerate(groups) if not group.deviation]
        drawn = self.replay.draw(len(equal), seed)
        seeds = [seed + REPLAYED + i * self.method.samples for i in range(len(drawn))]
        for i, group in zip(equal, self.ask(model, drawn, seeds) if drawn else ()):
            groups[i] = group
            self.replay.note(group.question, group.deviation)

    def completion(self, question: Question, made: ModelCompletion) -> Completion:
        """Convert a sampled completion to a Completion, with its text and the fields of its record, for rewards and
        environments."""
        turns = self.turns(made)
        prompt, answer = self.tokenizer.decode(list(question.prompt)), self.text(question.answer)
        return Completion(prompt, turns[-1], answer, question.columns, question.prompt, made.tokens, turns)

    def turns(self, made: ModelCompletion) -> list[str]:
        """Return the texts of a completion's parts in order: the turns of the model and the replies between them."""
        parts = groupby(zip(made.tokens, made.by_model), key=lambda pair: pair[1])
        return [self.text([token for token, _ in part]) for _, part in parts]

    def replies(
        self, owners: Sequence[Question], numbers: Sequence[int], made: Sequence[ModelCompletion]
    ) -> list[list[int] | None]:
        """Return, for each completion in `made`, the tokens of the environment's reply, or None if the completion has
        ended. Completion i answers the question `owners[numbers[i]]`."""
        environment: Any = self.method.environment
        assert self.replier is not None
        completions = [self.completion(owners[i], one) for i, one in zip(numbers, made)]
        open_ = [c for c in completions if len(c.turns) // 2 + 1 < environment.turns]
        texts = iter(self.replier(open_) if open_ else ())
        replies = [next(texts) if len(c.turns) // 2 + 1 < environment.turns else None for c in completions]
        return [None if text is None else reply_tokens(self.tokenizer, environment.role, text) for text in replies]

    @property
    def samples(self) -> list[dict[str, Any]]:
        """A dict for each completion of the last step, for the run's samples.jsonl: its prompt, text and reward, and
        the score of each term if the reward is a sum."""
        return [
            {"prompt": self.tokenizer.decode(prompt), "text": self.text(answer), "reward": reward}
            | ({"rewards": dict(zip(self.reward.names, terms))} if len(terms) > 1 else {})
            for rollouts in self.kept
            for (prompt, answer), reward, terms in zip(
                prompts_of(rollouts), rollouts.rewards.tolist(), rollouts.terms.tolist()
            )
        ]

    def text(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode([token for token in tokens if token not in self.ends])

    def rollout(self, model: Decoder, batch: Batch, groups: Sequence[CompletionGroup]) -> Rollouts:
        """Return the completions in `groups` as a batch, padded at the end, with rewards, advantages, and the
        log-probabilities that the loss compares with. `batch` contains the prompts of these completions."""
        m, made = self.method, [one for group in groups for one in group.made]
        tokens, targets, logprobs = completion_batch(made)
        rewards, terms = (torch.cat(parts) for parts in zip(*((group.rewards, group.terms) for group in groups)))
        ended = torch.tensor([float(one.ended) for one in made])
        used = ended if m.mask_truncated else None
        new = Rollouts(tokens, targets, seed=batch.seed, rewards=rewards, ended=ended, used=used)
        new = new.changed(engine_logprobs=logprobs, terms=terms).to(model.device)
        sampled = None
        with without_dropout(model):
            if m.reference:
                new = new.changed(reference_logprobs=self.reference_logprobs(model, new))
            if m.iterations > 1 or m.needs_sampled:
                sampled = self.outputs(model, new)
            if sampled is not None and m.iterations > 1:
                gap = largest(sampled.plain - new.engine_logprobs, new.mask)
                new = new.changed(old_logprobs=sampled.logprobs, gap=gap)
        share = reduced(new.mask, new.mask, m.mean_over, m.completion_length)[1]
        return new.changed(share=max(1, share), **m.advantages(new, sampled))

    def divide(self, divide: Callable[[Decoder], object]) -> None:
        if self.reference is not None:
            self.reference.divide = divide

    def state(self) -> dict[str, Tensor]:
        """Return the tensors to save with a run: the completions that later steps use again, the number of these steps,
        and the prompts to replay."""
        tensors = {"remaining": torch.tensor(self.remaining)}
        if self.replay.size:
            tensors["replay"] = torch.tensor(list(self.replay.state().encode()), dtype=torch.uint8)
        for i, rollouts in enumerate(self.kept if self.remaining else ()):
            values = {one.name: getattr(rollouts, one.name) for one in fields(rollouts)}
            tensors |= {f"{i}/{name}": torch.as_tensor(v) for name, v in values.items() if v is not None}
        return tensors

    def load_state(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        """Restore the tensors that `state` returned."""
        self.remaining = int(tensors.get("remaining", 0))
        self.replay.load_state(bytes(tensors.get("replay", torch.empty(0)).tolist()).decode())
        rows = defaultdict[int, dict[str, Any]](dict)
        for key, tensor in tensors.items():
            number, _, name = key.partition("/")
            if name:
                rows[int(number)][name] = tensor if tensor.ndim else tensor.item()
        self.kept = [Rollouts(**rows[i]).to(device) for i in sorted(rows)]

    def reference_logprobs(self, model: Decoder, batch: Batch) -> Tensor:
        """Return the log-probabilities (N, T) of a batch's targets under the reference model, at the temperature of the
        loss. Raises a UserError if there is no reference model."""
        if self.reference is None:
            raise UserError(
                "Cannot compute the KL, because there is no reference model: give the model to compare with"
            )
        with self.reference.of(model) as other:
            return self.outputs(other, batch).logprobs

    def outputs(self, model: Decoder, batch: Batch) -> PolicyOutputs:
        """Compute the outputs of a model for the targets of a batch, at the temperature of the loss, in one forward
        pass even if the model is sharded."""
        outputs: PolicyOutputs = inside(model, policy_outputs, model, batch, self.method.loss_temperature)
        return outputs

    def __call__(self, model: Decoder, batch: Batch) -> tuple[Tensor, Tensor, Mapping[str, Tensor]]:
        """Return the sum to minimize, the sum to report, and figures. Prompts without completions, as in validation,
        are completed first."""
        m = self.method
        if not isinstance(batch, Rollouts):
            share, [rollouts] = batch.divisor, self.rollouts(model, [batch])
            total, reported, sums = self(model, rollouts)
            scale = share / rollouts.divisor
            return total * scale, reported * scale, {name: value * scale for name, value in sums.items()}
        mask, reference = batch.mask, batch.reference_logprobs
        with nullcontext() if m.dropout else without_dropout(model):
            outputs = self.outputs(model, batch)
        logprobs = outputs.logprobs
        loss, further = m.token_losses(outputs, batch)
        if m.kl and m.kl_in_loss and reference is not None:
            loss = loss + m.kl * kl_estimate(logprobs, reference)
        total, _ = reduced(loss, mask, m.mean_over, m.completion_length)
        count, grouped = mask.sum().clamp(min=1), batch.rewards.view(-1, m.samples)
        figures = {
            "reward": batch.rewards.mean(),
            "length": mask.sum(1).mean(),
            "ended": batch.ended.mean(),
            "entropy": (outputs.entropy * mask).sum() / count,
            "zero_spread": (grouped.amax(1) == grouped.amin(1)).float().mean(),
            **further,
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
        """Return the contribution of a batch to the figure `logprob_gap`, the largest difference between the engine's
        and the trainer's log-probabilities in a step. `gap` is the largest difference in this batch, `share` its
        divisor. The trainer divides the sum of the contributions by the sum of the divisors; the contributions are
        chosen so that this quotient is the largest difference."""
        before = self.largest_gap * self.gap_share
        self.largest_gap, self.gap_share = max(self.largest_gap, gap), self.gap_share + share
        return self.largest_gap * self.gap_share - before
