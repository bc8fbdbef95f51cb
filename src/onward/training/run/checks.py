"""Checks the data and the model at the start of a run.

Shapes: B windows, T tokens of each, V vocabulary.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from onward.data.tokens import Tokens
from onward.data.windows import IGNORE_INDEX, Batch
from onward.model.decoder import Decoder, without_dropout
from onward.training.step.loss import CrossEntropy

CAUSAL_TOKENS, LOSS_TOKENS = 128, 1024  # number of tokens for the causality check, and for the check of the first loss
MAX_GAP = 0.5  # maximum difference, in nats per token, between the loss of a fresh model and its expected value
PROBES, LENGTH = 32, 32  # number of passages of the validation text to search for, and tokens of each
SEARCHED = 1 << 26  # maximum number of training tokens to search; takes about a second
CHUNK = 1 << 18  # number of tokens to search at a time
COMMON = 0.1  # maximum share of passages found in a passed check, since similar texts share phrases


@dataclass(frozen=True)
class Check:
    """The result of a check at the start of a run: whether it passed, and a sentence with the measured numbers."""

    name: str
    ok: bool
    sentence: str


def start_checks(
    model: Decoder, batch: Batch, train: Sequence[Tokens], validation: Tokens | None, *, fresh: bool
) -> Iterator[Check]:
    """Run the checks at the start of a run, and yield their results in order: targets, causality, the first loss if the
    model is `fresh` (newly initialized), and, given a validation text, its absence from the training text. `batch` is a
    training batch, `train` and `validation` are the tokens of both texts."""
    yield shifted(batch)
    yield causal(model, batch)
    if fresh:
        yield first_loss(model, batch)
    if validation is not None:
        yield apart(train, validation)


def shifted(batch: Batch) -> Check:
    """Check that each target of a batch, other than IGNORE_INDEX and the last column, is the next token."""
    targets, following = batch.targets[:, :-1], batch.tokens[:, 1:]
    counted = targets != IGNORE_INDEX
    total, right = int(counted.sum()), int((targets == following)[counted].sum())
    sentence = f"{right:,} of {total:,} targets are the next token"
    return Check("targets", right == total and batch.num_targets > 0, sentence)


@torch.no_grad()
def causal(model: Decoder, batch: Batch) -> Check:
    """Check that a model's logits for the first half of a text stay the same, up to rounding, if its second half
    changes."""
    tokens, half = batch.tokens[:1, :CAUSAL_TOKENS], min(batch.tokens.size(1), CAUSAL_TOKENS) // 2
    positions = None if batch.positions is None else batch.positions[:1, :CAUSAL_TOKENS]
    changed = torch.cat([tokens[:, :half], (tokens[:, half:] + 1) % model.config.vocab_size], 1)
    with without_dropout(model), torch.compiler.set_stance("force_eager"):
        before, after = (model(t, positions)[:, :half] for t in (tokens, changed))
    difference, largest = (x.abs().max().item() if half else 0.0 for x in (after - before, before))
    rounding = 100 * torch.finfo(before.dtype).eps * largest
    sentence = f"changing later tokens changes earlier logits by at most {difference:.1e} (largest logit {largest:.1e})"
    return Check("causality", difference <= rounding, sentence)


@torch.no_grad()
def first_loss(model: Decoder, batch: Batch) -> Check:
    """Check that the loss of a fresh model on a batch is near ln V, the loss of a uniform guess. Fresh logits have a
    variance of about 0.02² D, half of which adds to the loss."""
    few = slice(max(1, LOSS_TOKENS // batch.tokens.size(1)))
    positions = None if batch.positions is None else batch.positions[few]
    some = replace(batch, tokens=batch.tokens[few], targets=batch.targets[few], positions=positions)
    with without_dropout(model), torch.compiler.set_stance("force_eager"):
        loss = CrossEntropy()(model, some)[1].item() / max(1, some.num_targets)
    c, guessing = model.config, math.log(model.config.vocab_size)
    chance = 0.5 * 0.02**2 * c.d_embed * c.logit_scale**2
    sentence = f"the first loss is {loss:.2f}; that of a uniform guess among {c.vocab_size:,} tokens is {guessing:.2f}"
    return Check("first loss", abs(loss - guessing) < MAX_GAP + chance, sentence)


def apart(train: Sequence[Tokens], validation: Tokens, searched: int = SEARCHED) -> Check:
    """Check that at most the share COMMON of PROBES passages of the validation text occurs in the training text
    `train`. If the training text is longer than `searched` tokens, only about this many, in evenly spaced chunks, are
    searched."""
    text, length = Tokens.join(train), min(LENGTH, len(validation))
    starts = np.linspace(0, len(validation) - length, PROBES).astype(int)
    probes = np.unique([np.asarray(validation[i : i + length], np.uint32) for i in starts.tolist()], axis=0)
    present, chunks = np.zeros(len(probes), bool), math.ceil(len(text) / CHUNK)
    chosen = np.unique(np.linspace(0, chunks - 1, min(chunks, searched // CHUNK)).astype(int))
    for first in (chosen * CHUNK).tolist():
        chunk = np.asarray(text[first : first + CHUNK + length - 1], np.uint32)
        present[~present] = search(chunk, probes[~present])
    sentence = f"{present.sum()} of {len(present)} passages of the validation text are also in the training text"
    if len(chosen) < chunks:
        sentence += f", of which {len(chosen) / chunks:.1%} was searched"
    return Check("validation", float(present.mean()) <= COMMON, sentence)


# odd factors, so that multiplication modulo 2^32 is invertible
MIX = np.array([0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F], np.uint32)


def search(tokens: np.ndarray, probes: np.ndarray) -> np.ndarray:
    """Find which of the passages `probes` (P, L) occur in `tokens` (N,), both uint32; return a bool array (P,).

    A hash of four tokens selects candidate positions in one pass; only these are compared with the probes.
    """
    length = probes.shape[1]
    num_windows = len(tokens) - length + 1
    if num_windows < 1 or not len(probes):
        return np.zeros(len(probes), bool)
    offsets = np.linspace(0, length - 1, 4).astype(int)
    mixed = lambda column: sum(column(offset) * factor for offset, factor in zip(offsets, MIX)) >> np.uint32(16)
    wanted, there = mixed(lambda offset: probes[:, offset]), mixed(lambda offset: tokens[offset : offset + num_windows])
    table = np.zeros(1 << 16, bool)
    table[wanted] = True
    candidates = np.flatnonzero(table[there])
    result = []
    for probe, code in zip(probes, wanted):
        at = candidates[there[candidates] == code]
        for offset in range(length):
            at = at[tokens[at + offset] == probe[offset]]
        result.append(len(at) > 0)
    return np.array(result)
