"""Losses that compare whole answers: log-probabilities of sequences, of the model and of a reference.

Shapes: B rows, T tokens of each, N targets, S sequences, M examples, V vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from onward.checkpoint.saves.state import copied_to
from onward.data.packing import ExampleBatch
from onward.data.windows import IGNORE_INDEX
from onward.model.adapters import adapter_names
from onward.model.decoder import Decoder, without_dropout
from onward.model.divided import inside, resharded, rows_at_once, scores
from onward.training.step.loss import Loss, Sums
from onward.transforms.heads import NAME
from onward.transforms.lora import use_adapter

START, FIRST = "start", "first"  # names of frozen adapters: the initial values, and the adapter below the trained one
REFERENCE = "reference/"  # prefix of fields with reference log-probabilities, followed by the sequence number


@dataclass(frozen=True)
class Logprobs:
    """The sum of the log-probabilities of the trained tokens of each sequence of a batch, and the number of these
    tokens."""

    total: Tensor  # (S,), sum of the log-probabilities
    count: Tensor  # (S,), the number of tokens

    @property
    def mean(self) -> Tensor:
        """The mean log-probability over the tokens of each sequence, (S,)."""
        return self.total / self.count.clamp(min=1)


@dataclass(frozen=True)
class Answers:
    """The log-probabilities of M answers, either the chosen or the rejected answers of M pairs, under the model and
    under the reference."""

    logprob: Tensor  # (M,), sum of log p over the tokens of each answer
    reference: Tensor  # (M,), the same sum under the reference; 0 without a reference
    count: Tensor  # (M,), the number of tokens

    @property
    def ratio(self) -> Tensor:
        """log p(answer) - log p_ref(answer), (M,)."""
        return self.logprob - self.reference

    @property
    def mean_logprob(self) -> Tensor:
        """The mean of log p over the tokens of each answer, (M,)."""
        return self.logprob / self.count.clamp(min=1)

    @property
    def mean_ratio(self) -> Tensor:
        """The mean of log p - log p_ref over the tokens of each answer, (M,)."""
        return self.ratio / self.count.clamp(min=1)


def sequence_logprobs(model: Decoder, batch: ExampleBatch, tail: float = 1.0) -> Logprobs:
    """Compute the log-probability of each sequence of a batch under a model, summed over its trained tokens, in at
    least fp32; see `logprobs_of` for `tail`."""
    return logprobs_of(model, hidden_states(model, batch), batch, tail)


def hidden_states(model: Decoder, batch: ExampleBatch) -> Tensor:
    """Compute the hidden states of a model for a batch, (B * T, D).

    With gradients enabled, embeddings require gradients even in a frozen model: a policy and its reference then use the
    same attention kernels and give bit-for-bit identical results before the first step, even in bf16.
    """
    vectors = model.embed(batch.tokens)
    if torch.is_grad_enabled() and not vectors.requires_grad:
        vectors.requires_grad_()
    return model.hidden(vectors, batch.positions).flatten(0, 1)


def logprobs_of(model: Decoder, hidden: Tensor, batch: ExampleBatch, tail: float = 1.0) -> Logprobs:
    """Compute the log-probability of each sequence of a batch from hidden states (B * T, D) of the batch. Logits are
    computed for targets only, and in chunks that the backward pass recomputes if all logits at once would fill the
    memory.

    The two answers of a pair are sequences 2 i and 2 i + 1; `tail` is the weight of those tokens of the longer answer
    that lie beyond the length of the shorter answer.
    """
    targets = batch.targets.flatten()
    chosen = (targets != IGNORE_INDEX).nonzero()[:, 0]
    sequences = batch.sequences.flatten()[chosen]
    size = rows_at_once(model.head.out_features)
    parts = zip(hidden[chosen].split(size), targets[chosen].split(size))
    if len(chosen) <= size:
        logprobs = [target_logprobs(model, h, t) for h, t in parts]
    else:
        logprobs = [checkpoint(target_logprobs, model, h, t, use_reentrant=False) for h, t in parts]
    values = torch.cat(logprobs)
    counts = torch.bincount(sequences, minlength=batch.num_sequences)
    if tail != 1.0:
        starts = (counts.cumsum(0) - counts)[sequences]  # targets are in the order of their sequences
        index = torch.arange(len(values), device=values.device) - starts
        shorter = counts.view(-1, 2).amin(1).repeat_interleave(2)[sequences]
        values = torch.where(index < shorter, values, tail * values)
    return Logprobs(values.new_zeros(batch.num_sequences).index_add(0, sequences, values), counts)


def target_logprobs(model: Decoder, hidden: Tensor, targets: Tensor) -> Tensor:
    return scores(model, hidden).logprobs(targets)


class Frozen:
    """A frozen model, such as a reference or a teacher. The function `load` loads it at its first use. If the function
    `divide` is set, `load` is called with True, so that the weights are deferred, and `divide` shards the model over
    the processes."""

    def __init__(self, load: Callable[[bool], Decoder]) -> None:
        self.load = load
        self.model: Decoder | None = None
        self.divide: Callable[[Decoder], object] | None = None

    def on(self, device: torch.device) -> Decoder:
        """Return the model on a device; loads it at the first call."""
        if self.model is None:
            self.model = self.load(self.divide is not None).eval().requires_grad_(False)
            if self.divide:
                self.divide(self.model)
        return self.model.to(device)


class Reference(Frozen):
    """The reference model, a copy of the model at the start of the run. Losses compare the policy (the model in
    training) with it.

    A policy that trains only adapters is its own reference, with the adapters it started with, if any. For other
    policies the reference is a separate model.
    """

    @contextmanager
    def of(self, policy: Decoder) -> Iterator[Decoder]:
        """A context manager that yields the reference model of a policy."""
        names = adapter_names(policy)
        if names and not trains_weights(policy):
            with use_adapter(policy, next((name for name in (START, FIRST) if name in names), "")):
                yield policy
        else:
            yield self.on(policy.device)

    def follow(self, policy: Decoder) -> None:
        """Move the weights of the reference towards those of the policy; called before each step.
        By default does nothing."""

    def state(self) -> Mapping[str, Tensor]:
        return {}

    def load_state(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        """Restore the tensors that `state` returned; by default does nothing."""

    def totals(self, policy: Decoder, batch: ExampleBatch, tail: float = 1.0) -> Tensor:
        """Return the log-probabilities (S,) of a batch's sequences under the reference, without gradient; the stored
        values if the batch has them. See `logprobs_of` for `tail`."""
        kept = [batch.numbers[name] for name in sorted(batch.numbers) if name.startswith(REFERENCE)]
        if kept:
            return torch.stack(kept, 1).flatten().float()
        with self.of(policy) as model, without_dropout(model):
            logprobs: Logprobs = inside(model, sequence_logprobs, model, batch, tail)
            return logprobs.total.detach()


def trains_weights(model: Decoder) -> bool:
    """Whether the model trains weights other than those of adapters and of a head."""
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return any("_lora." not in name and not name.startswith(f"{NAME}.") for name in trained)


class SyncedReference(Reference):
    """A reference that follows the policy (the model in training): every `every` steps, each parameter of the reference
    becomes `share` times the policy's value plus 1 - `share` times its old value."""

    def __init__(self, load: Callable[[bool], Decoder], every: int, share: float) -> None:
        super().__init__(load)
        self.every, self.share, self.steps = every, share, 0

    @torch.no_grad()
    def follow(self, policy: Decoder) -> None:
        if self.steps and self.steps % self.every == 0:
            for own, new in self.pairs(policy):
                own.lerp_(new.to(own.dtype), self.share)
        self.steps += 1

    def pairs(self, policy: Decoder) -> list[tuple[Tensor, Tensor]]:
        """Return (reference parameter, policy parameter) for each trained parameter of the policy; both have the same
        name."""
        reference = self.on(policy.device)
        resharded(reference)  # the last forward pass had no backward pass, so the weights may still be gathered
        own = dict(reference.named_parameters())
        return [(own[name], p) for name, p in policy.named_parameters() if p.requires_grad and name in own]

    def state(self) -> Mapping[str, Tensor]:
        weights = dict(self.model.named_parameters()) if self.model else {}
        return {**weights, "steps": torch.tensor(self.steps)}

    def load_state(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        self.steps = int(tensors.get("steps", 0))
        place = copied_to
        if self.divide:
            from onward.parallel.parts import divided as place
        for name, parameter in self.on(device).named_parameters() if tensors.keys() - {"steps"} else ():
            parameter.copy_(place(tensors[name], parameter))


class ReferencedLoss(Loss):
    """The base class of losses that may compare the trained model with a `reference`, such as the model at the start of
    the run; None: no comparison."""

    uses_all: ClassVar[bool] = True
    reference: Reference | None

    def prepare(self, model: Any, batches: Sequence[Any]) -> Sequence[Any]:
        if self.reference is not None:
            self.reference.follow(model)
        return batches

    def divide(self, divide: Callable[[Decoder], object]) -> None:
        if self.reference is not None:
            self.reference.divide = divide

    def state(self) -> Mapping[str, Tensor]:
        return {} if self.reference is None else self.reference.state()

    def load_state(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        if self.reference is not None:
            self.reference.load_state(tensors, device)


@dataclass(frozen=True)
class PairLoss(ReferencedLoss):
    """A loss of pairs of answers: each batch contains a chosen and a rejected answer of each pair, in this order."""

    of_pairs: Callable[[Answers, Answers], Tensor]  # loss of chosen and rejected answers -> (M,)
    beta: float  # factor of the reported rewards
    reference: Reference | None = None
    tail: float = 1.0  # see `logprobs_of`

    def logprobs(self, model: Decoder, batch: ExampleBatch) -> Logprobs:
        return sequence_logprobs(model, batch, self.tail)

    def __call__(self, model: Decoder, batch: ExampleBatch) -> Sums:
        """Return the sums over pairs of the loss and of the figures: accuracy (the chosen answer scores higher), margin
        and rewards. A reward is beta * (log p under the model - log p under the reference) or, without a reference,
        beta * the mean log p of the answer's tokens."""
        reference = None if self.reference is None else self.reference.totals(model, batch, self.tail)
        with without_dropout(model):
            scores = self.logprobs(model, batch)
        known = torch.zeros_like(scores.total) if reference is None else reference
        chosen, rejected = (Answers(scores.total[i::2], known[i::2], scores.count[i::2]) for i in (0, 1))
        loss = self.of_pairs(chosen, rejected).sum()
        rewards = [a.mean_ratio if reference is None else a.ratio for a in (chosen, rejected)]
        return loss, loss.detach(), preference_figures(*(self.beta * reward.detach() for reward in rewards))


def preference_figures(chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    """Compute the figures to report for M pairs, as sums over the pairs, by name: accuracy, margin and the rewards.
    `chosen` and `rejected` are the rewards (M,) of both answers; a tie counts as half correct."""
    right = (chosen > rejected).float() + 0.5 * (chosen == rejected)
    return {
        "accuracy": right.sum(),
        "margin": (chosen - rejected).sum(),
        "chosen_reward": chosen.sum(),
        "rejected_reward": rejected.sum(),
    }


@dataclass(frozen=True)
class JudgedLoss(ReferencedLoss):
    """A loss of single answers with a `label`: 1 for a wanted answer, 0 for an unwanted one. Each example has a second
    sequence, an answer to another prompt; the log-probabilities of these answers estimate the divergence from the
    reference."""

    of_answers: Callable[[Tensor, Tensor, Tensor], Tensor]  # log-ratios and labels (M,), KL () -> loss (M,)
    beta: float
    reference: Reference

    def logprobs(self, model: Decoder, batch: ExampleBatch) -> Logprobs:
        return sequence_logprobs(model, batch)

    def __call__(self, model: Decoder, batch: ExampleBatch) -> Sums:
        """Return the sums over examples of the loss and of the figures."""
        reference = self.reference.totals(model, batch)
        with without_dropout(model):
            ratio = self.logprobs(model, batch).total - reference
        label = batch.numbers["label"].to(ratio.dtype)
        kl = ratio[1::2].detach().mean().clamp(min=0)
        loss = self.of_answers(ratio[::2], label, kl).sum()
        reward = self.beta * ratio[::2].detach()
        right = (reward > 0) == (label > 0)
        return loss, loss.detach(), {"accuracy": right.float().sum(), "kl": kl * len(label), "reward": reward.sum()}
