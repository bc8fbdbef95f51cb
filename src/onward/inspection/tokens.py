"""Probabilities of the tokens of a text: the effect of each sampling option, ranks and entropies, loss by position, and
scores of alternative answers.

Shapes: B texts, T tokens, C candidates.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onward.base.errors import UserError
from onward.config.decoder import at
from onward.evaluation.score import logprobs
from onward.generation.distribution import KEEP, next_token_distribution
from onward.generation.sampling import Sampling
from onward.inspection.inputs import exact, logits
from onward.model.decoder import Decoder, without_dropout
from onward.text.tokenizer import Tokenizer

STEPS = {  # the fields of Sampling that each step uses, in the order of the steps
    "bias": ("logit_bias",),
    "penalties": ("repetition_penalty", "frequency_penalty", "presence_penalty"),
    "bans": ("no_repeat_ngram_size", "suppress_tokens", "forced_tokens"),
    "processors": ("processors",),
    "temperature": ("temperature",),
    **{name: (name,) for name in KEEP},
}


@dataclass(frozen=True)
class SamplingSteps:
    """The probabilities of the likeliest next tokens, first as the model predicts them, then after each sampling step
    (temperature, top-k, ...)."""

    candidates: list[int]  # token ids (C,), sorted by the model's probability, highest first
    steps: list[str]  # "model", then each step whose options are set
    probabilities: Tensor  # (steps, C)
    rest: Tensor  # (steps,), total probability of all other tokens
    kept: Tensor  # (steps,), number of tokens with a probability above 0


def sampling_steps(model: Decoder, tokens: Sequence[int], sampling: Sampling, top: int = 10) -> SamplingSteps:
    """Compute the effect of each sampling step (temperature, top-k, ...) on the distribution of the next token after
    a text, for the `top` likeliest tokens."""
    last = exact(logits(model, tokens)[-1:])
    neutral, given, steps = Sampling(temperature=1.0), dict[str, object](), {"model": last.softmax(-1)}
    for step, names in STEPS.items():
        changed = {name: getattr(sampling, name) for name in names if getattr(sampling, name) != getattr(neutral, name)}
        given |= changed
        if changed:
            values = {"temperature": 1.0} | given
            steps[step] = next_token_distribution(last, Sampling(**values), [list(tokens)])  # type: ignore[arg-type]
    rows = torch.cat([row.float() for row in steps.values()])
    candidates = rows[0].topk(min(top, rows.size(1))).indices
    probabilities = rows[:, candidates]
    rest = (1 - probabilities.sum(1)).clamp(min=0)
    return SamplingSteps(candidates.tolist(), [*steps], probabilities.cpu(), rest.cpu(), (rows > 0).sum(1).cpu())


@dataclass(frozen=True)
class TokenStatistics:
    """The log-probability, rank and entropy of each token of a text, given the tokens before it."""

    tokens: list[int]
    logprobs: Tensor  # (T,) in nats; NaN for the first token
    ranks: Tensor  # (T,), 1 for the likeliest token; 0 for the first
    entropies: Tensor  # (T,), entropy of the distribution that predicts the token, in nats; NaN for the first


def token_statistics(model: Decoder, tokens: Sequence[int]) -> TokenStatistics:
    """Compute the log-probability and the rank of each token of a text, and the entropy of the model's prediction of
    this token."""
    log_p = exact(logits(model, tokens)[:-1]).log_softmax(-1)
    ids = torch.tensor(list(tokens)[1:], device=log_p.device)
    of_token = log_p.gather(1, ids[:, None])
    ranks = (log_p > of_token).sum(1) + 1
    entropies = torch.special.entr(log_p.exp()).sum(1)
    first = log_p.new_full((1,), torch.nan)
    return TokenStatistics(
        list(tokens),
        torch.cat([first, of_token[:, 0]]).cpu(),
        torch.cat([ranks.new_zeros(1), ranks]).cpu(),
        torch.cat([first, entropies]).cpu(),
    )


@dataclass(frozen=True)
class PositionLoss:
    """The mean cross-entropy at each position of windows of a text, in nats per token."""

    loss: Tensor  # (T,) in nats per token; entry t is for the token at position t + 1
    windows: int  # number of windows in the mean
    trained: int  # context length of the model; later positions were never trained


@torch.inference_mode()
def loss_by_position(model: Decoder, windows: Iterable[Tensor]) -> PositionLoss:
    """Compute the mean cross-entropy at each position over windows of a text: `windows` yields batches (B, T + 1) of
    token ids, in which the first T tokens are read and the last T are predicted.

    Windows may exceed the context unless positions are learned; the end of the curve then shows how the model
    extrapolates. Raises a UserError without windows.
    """
    total, count = torch.zeros(0), 0
    for ids in windows:
        ids = ids.to(model.device)
        with without_dropout(model):
            scores = exact(model(ids[:, :-1]))
        nats = torch.nn.functional.cross_entropy(scores.transpose(1, 2), ids[:, 1:], reduction="none").sum(0).cpu()
        total, count = (nats if not count else total + nats), count + len(ids)
    if not count:
        raise UserError("there are no windows: give at least one batch of token ids (B, T + 1)")
    return PositionLoss(total / count, count, model.config.context_length)


def text_loss_by_position(model: Decoder, tokens: Sequence[int]) -> PositionLoss:
    """Compute the mean loss at each position of a window over a text, cut into windows as long as the context, or up to
    twice as long if the model's positions allow it; a shorter text is one window. Raises a UserError for a text of
    fewer than three tokens."""
    c = model.config
    most = 2 * c.context_length if at(c.position, 0).limit(c) > c.context_length else c.context_length
    length = min(len(tokens) - 1, most)
    if length < 2:
        raise UserError("Cannot measure the loss by position of a text of fewer than three tokens: give a longer one")
    count = (len(tokens) - 1) // length
    windows = torch.tensor(tokens[: count * length + 1]).unfold(0, length + 1, length)
    return loss_by_position(model, windows.split(16))


@dataclass(frozen=True)
class Alternatives:
    """The scores of alternative answers to one question: their log-probabilities, in nats, also per token and per
    byte."""

    texts: list[str]
    logprobs: list[float]  # sum over all tokens of each answer, in nats
    per_token: list[float]  # log-probability divided by the number of tokens
    per_byte: list[float]  # log-probability divided by the bytes of the text

    @property
    def best(self) -> str:
        """The answer with the greatest log-probability per byte, the criterion of acc_norm in lm-evaluation-harness."""
        return self.texts[max(range(len(self.texts)), key=self.per_byte.__getitem__)]


def score_alternatives(
    model: Decoder,
    tokenizer: Tokenizer,
    question: str,
    alternatives: Sequence[str],
    examples: Sequence[tuple[str, str]] = (),
    separator: str = "\n\n",
) -> Alternatives:
    """Compute the log-probability of each alternative as the text after a question. Raises a UserError if there
    are no alternatives, if one adds no token to the question, or if question and answer exceed the context.

    `examples` are pairs (question, answer) that precede the question, each followed by `separator`: none for zero-shot
    scoring, one for one-shot. Each answer follows its question directly, so a space between them must be part of one of
    the two.
    """
    if not alternatives:
        raise UserError("there are no alternatives: give at least one")
    prompt = "".join(f"{q}{a}{separator}" for q, a in examples) + question
    before = tokenizer.begin(tokenizer.encode(prompt))
    scored: list[tuple[float, int, int]] = []
    for text in alternatives:
        ids = tokenizer.begin(tokenizer.encode(prompt + text))
        first = next((i for i, (a, b) in enumerate(zip(before, ids)) if a != b), min(len(before), len(ids)))
        first = max(1, first)  # the first token has no preceding token
        if len(ids) <= first:
            raise UserError(f"the alternative {text!r} adds no token to the question: give a longer one")
        if len(ids) > model.config.context_length:
            raise UserError(
                f"Cannot score a question and answer of {len(ids)} tokens, which exceed the context: shorten them"
            )
        total = float(logprobs(model, torch.tensor([ids]).numpy(), first).sum())
        scored.append((total, len(ids) - first, len(text.encode())))
    return Alternatives(
        list(alternatives),
        [total for total, _, _ in scored],
        [total / count for total, count, _ in scored],
        [total / max(1, size) for total, _, size in scored],
    )
