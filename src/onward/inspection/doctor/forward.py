"""Checks of the forward pass: causality, modes, lengths and precision.

Shapes: B rows, T tokens, D width, H heads, E size of a head.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy

import torch
from torch import Tensor, nn

from onward.base.errors import UserError
from onward.inspection.doctor.finding import Check, Outcome, largest, verdict
from onward.inspection.doctor.operations import changed, loud
from onward.inspection.doctor.subject import POSITION_NAMES, Subject, Use

LONGEST = 4096  # tokens of the longest context that is checked
COPIED = 2_000_000_000  # parameters of the largest model that is copied in another precision
IDS = 256  # number of the first token ids that are compared, with half as many spread over the vocabulary
DRIFT = 0.2  # largest relative error of logits in bf16, as a median over tokens


def finite(s: Subject) -> Outcome:
    """Check that no logit is NaN or infinite, even with all matrices and biases set to zero."""
    with s.outputs() as uses:
        logits = s(s.tokens)
    bad = next((use.name for use in uses if not use.result.isfinite().all()), "the last operation")
    count = int((~logits.isfinite()).sum())
    if count:
        return "failed", f"{count:,} of {logits.numel():,} logits are NaN or infinite", bad
    biases = {id(p) for name, p in s.model.named_parameters() if "bias" in name}
    zero = lambda p: torch.zeros_like(p) if p.dim() > 1 or id(p) in biases else None
    with changed(s.model, zero), s.outputs() as uses:
        count = int((~s(s.tokens).isfinite()).sum())
    bad = next((use.name for use in uses if not use.result.isfinite().all()), "the last operation")
    what = f"0 of {logits.numel():,} logits are NaN or infinite, and {count:,} with all matrices set to zero"
    return verdict(not count, what, f"{bad}: a division by the size of a vector, such as a norm without epsilon")


def repeatable(s: Subject) -> Outcome:
    """Check that two calls in eval mode give the same logits."""
    difference = largest(s(s.tokens) - s.logits)
    active = [name for name, module in s.model.named_modules() if module.training]
    return verdict(
        difference == 0,
        f"two calls in eval mode differ by {difference:.1e}",
        ", ".join(active[:3]) or "a function that ignores self.training, such as F.dropout(x, p)",
    )


def dropout_rates(model: nn.Module) -> list[tuple[nn.Module, str, float]]:
    """(module, name of its attribute, rate) of each dropout."""
    return [
        (module, name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, float) and ("drop" in name or (name == "p" and "Dropout" in type(module).__name__))
    ]


@contextmanager
def train_mode(s: Subject) -> Iterator[list[tuple[nn.Module, str, float]]]:
    """Set train mode inside the `with` block; afterwards, set eval mode, and restore dropout rates and buffers. Yields
    the dropout rates, which the block may change."""
    rates, buffers = dropout_rates(s.model), [(buffer, buffer.clone()) for buffer in s.model.buffers()]
    try:
        s.model.train()
        with torch.random.fork_rng():
            yield rates
    finally:
        s.model.eval()
        for module, name, value in rates:
            setattr(module, name, value)
        for buffer, before in buffers:
            buffer.copy_(before)


def modes(s: Subject) -> Outcome:
    """Check that dropout acts in train mode, and that without it no row depends on other rows or later tokens."""

    def seeded(tokens: Tensor, seed: int) -> Tensor:
        torch.manual_seed(seed)
        return s(tokens)

    with train_mode(s) as rates:
        rate = max((value for _, _, value in rates), default=0.0)
        acts = largest(seeded(s.tokens, 0) - seeded(s.tokens, 1)) > 0
        with loud(s):  # residual branches may be initialized to zero
            acts = acts or largest(seeded(s.tokens, 0) - seeded(s.tokens, 1)) != 0
        for module, name, _ in rates:
            setattr(module, name, 0.0)
        plain = seeded(s.tokens, 0)
        random = largest(plain - seeded(s.tokens, 1))
        others = torch.cat([seeded(row[None], 0) for row in s.tokens])
        later = seeded(s.later, 0)
    if rate and not acts:
        return "failed", f"dropout has a rate of {rate:g} but changes nothing in train mode"
    if random:
        return (
            "noted",
            f"two calls in train mode without dropout differ by {random:.1e}: calls cannot be compared",
        )
    if not s.is_causal:
        return "not applicable", "later tokens change earlier logits, also in eval mode"
    worst = max(s.leak(plain, later), largest(others - plain))
    dropout = f"dropout of up to {rate:g} is active" if rate else "no dropout is active"
    where = "a module that uses batch statistics, such as nn.BatchNorm1d"
    what = f"in train mode {dropout}, and later tokens and other rows change logits by {worst:.1e}"
    return verdict(worst <= s.allowed, what, where)


def causal(s: Subject) -> Outcome:
    """Check that later tokens change no earlier logit."""
    cut = s.tokens.size(1) // 2
    with s.outputs() as before:
        s(s.tokens)
    with s.outputs() as after:
        difference = s.leak(s.logits, s(s.later))
    of = largest(s.logits)
    # scores near 0 may hide a leak, such as from a mask after the softmax, whose sum includes later keys
    if difference <= s.allowed:
        with loud(s):
            with s.outputs() as loudly:
                logits = s(s.tokens)
            with s.outputs() as later:
                leaked = s.leak(logits, s(s.later))
        if leaked > s.allowed * largest(logits) / max(1e-3, of):  # False if the logits are NaN
            difference, of, before, after = leaked, largest(logits), loudly, later
    leak = first_different(before, after, s, slice(cut))
    what = f"changing tokens {cut} and later changes earlier logits by {difference:.1e} (largest logit {of:.1e})"
    allowed = s.allowed * max(1.0, of / max(1e-3, largest(s.logits)))
    return verdict(difference <= allowed, what, f"first in {leak}" if leak else "")


def first_different(before: list[Use], after: list[Use], s: Subject, tokens: slice) -> str:
    """The first module whose results (B, T, ...) at `tokens` differ between two forward passes."""
    for (name, result, _), (_, changed_result, _) in zip(before, after):
        same = result.shape == changed_result.shape and result.dim() > 1 and result.shape[:2] == s.tokens.shape
        if same and largest((result - changed_result)[:, tokens]) > 1e-4 * max(1e-3, largest(result)):
            return name
    return ""


def context(s: Subject) -> Outcome:
    """Check that the first token changes later logits."""
    other = s.tokens.clone()
    other[:, 0] = (other[:, 0] + 1) % s.vocab_size
    difference = largest((s(other) - s.logits)[:, 1:])
    if difference <= s.allowed / 100:  # a head or residual branches of zeros hide the context
        with loud(s):
            difference = largest((s(other) - s(s.tokens))[:, 1:])
    return verdict(difference > s.allowed / 100, f"changing the first token changes later logits by {difference:.1e}")


def rows(s: Subject) -> Outcome:
    """Check that a row has the same logits alone and in a batch."""
    alone = torch.cat([s(row[None]) for row in s.tokens])
    difference = largest(alone - s.logits)
    return verdict(difference <= s.allowed, f"logits of a row alone and in a batch differ by {difference:.1e}")


def ids(s: Subject) -> Outcome:
    """Check that no two token ids, each as a text of its own, give the same logits."""
    count = min(s.vocab_size, IDS)
    spread = torch.linspace(0, s.vocab_size - 1, count // 2).long()
    chosen = torch.cat([spread, torch.arange(count)]).unique().to(s.device)  # neighbors, and ids far apart
    logits = torch.cat([s(part[:, None]) for part in chosen.split(IDS // 4)])[:, 0].float()
    if largest(logits - logits[:1]) == 0:
        return "noted", "single tokens have the same logits for all ids: the head may be initialized to zero"
    same = (torch.cdist(logits, logits, p=math.inf) == 0).triu(1).nonzero().tolist()
    what = f"{len(chosen)} token ids, each alone, have {len(chosen) - len({j for _, j in same}):,} distinct logits"
    pair = " and ".join(str(int(chosen[i])) for i in same[0]) if same else ""
    return verdict(not same, what, f"the model does not distinguish token ids {pair}")


def shapes(s: Subject) -> Outcome:
    """Check that token ids of other shapes give logits, or raise an AssertionError, ValueError or
    NotImplementedError."""
    T = s.tokens.size(1)
    done: list[str] = []
    for rows, length in (1, T), (3, T), (2, 1), (2, T - 1), (1, 2):
        name = f"({rows}, {length})"
        try:
            got = tuple(s(s.tokens[:1, :length].expand(rows, -1)).shape)
        except UserError as error:
            cause = error.__cause__ or error
            sentence = " ".join(f"token ids of shape {name} raise {type(cause).__name__}: {cause}".split())[:300]
            refused = isinstance(cause, AssertionError | ValueError | NotImplementedError)
            return ("noted", f"{sentence}; {', '.join(done)} give logits") if refused else ("failed", sentence)
        if got != (rows, length, s.vocab_size):
            return "failed", f"token ids of shape {name} give logits of shape {got}"
        done.append(name)
    return "ok", f"token ids of shapes {', '.join(done)} give logits"


def padding(s: Subject) -> Outcome:
    """Check that padding after a text, and masked padding before it, leaves its logits unchanged."""
    if not s.is_causal:
        return "not applicable", "later tokens change earlier logits even without padding"
    half = s.tokens.size(1) // 2
    text, alone = s.tokens[:, :half], s(s.tokens[:, :half])
    right = largest(alone - s.logits[:, :half])
    if right > s.allowed and not re.search("dynamic|long_?rope", repr(s.attribute("config")), re.I):
        return "failed", f"{s.tokens.size(1) - half} tokens appended to a text change its logits by {right:.1e}"
    if not s.parameter("attention_mask"):
        return (
            "ok",
            f"right padding changes logits by {right:.1e}; without an attention_mask, left padding is not checked",
        )
    pads = s.tokens.size(1) - half
    mask = torch.ones_like(s.tokens)
    mask[:, :pads] = 0
    name = s.parameter(*POSITION_NAMES)
    more = {name: (mask.cumsum(1) - 1).clamp(min=0)} if name else {}
    padded = [torch.cat([torch.full_like(mask[:, :pads], i), text], 1) for i in (0, 1)]
    zeros, ones = (s(tokens, attention_mask=mask, **more)[:, pads:] for tokens in padded)
    if (seen := largest(zeros - ones)) > s.allowed:
        return "failed", f"the ids of padding tokens change logits by {seen:.1e} although the mask hides them"
    moved = largest(zeros - alone)
    return verdict(
        moved <= s.allowed, f"{pads} masked padding tokens before a text change its logits by {moved:.1e}", "positions"
    )


def length(s: Subject) -> Outcome:
    """Check that a text as long as the context gives finite logits, and that one token more is refused or does so,
    too."""
    n = s.context_length
    if not n:
        return "not applicable", "no attribute of the model gives its context length: give --context-length"
    if n > LONGEST:
        return "not applicable", f"a context of {n:,} tokens is too long to check"
    tokens = s.tokens[:1].repeat(1, -(-n // s.tokens.size(1)) + 1)[:, : n + 1]
    try:
        wrong = int((~s(tokens[:, :n]).isfinite()).sum())
    except Exception as error:
        return "failed", f"a text of the whole context, {n:,} tokens, raises {type(error.__cause__ or error).__name__}"
    what = f"{wrong:,} logits of a text of the whole context, {n:,} tokens, are not finite"
    if wrong or s.device.type != "cpu":  # an index out of range would end the process on an accelerator
        return verdict(not wrong, what)
    try:
        beyond = int((~s(tokens).isfinite()).sum())
    except Exception as error:
        return "ok", f"{what}; one token more is refused ({type(error.__cause__ or error).__name__})"
    return verdict(not beyond, f"{what}; one token more is accepted, and {beyond:,} of its logits are not finite")


@torch.no_grad()
def precision(s: Subject) -> Outcome:
    """Check that the logits in bf16 are close to those in fp32."""
    size = sum(p.numel() for p in s.model.parameters())
    if size > COPIED:
        return "not applicable", f"a model of {size:,} parameters is too large to copy"
    results = []
    for dtype in torch.float32, torch.bfloat16:
        copy = Subject.__new__(Subject)
        copy.__dict__ |= {**s.__dict__, "model": deepcopy(s.model).to(dtype)}
        try:
            with copy.outputs() as uses:
                logits = copy(s.tokens)
        except Exception as error:
            return "noted", f"the model does not run in {dtype}: {error.__cause__ or error}".splitlines()[0]
        blocks = {name for name, _ in s.blocks}
        results.append([*(use for use in uses if use.name in blocks), Use("the logits", logits, None)])
    drift = {exact.name: drifted(exact.result, rounded.result) for exact, rounded in zip(*results)}
    where = next((name for name, value in drift.items() if not value <= DRIFT / 2), "the logits")
    rounding = ", ".join(f"{name.rpartition('.')[2]}: {value:.1%}" for name, value in drift.items())
    return verdict(drift["the logits"] <= DRIFT, f"bf16 differs from fp32 by {rounding} (blocks, then logits)", where)


def drifted(exact: Tensor, rounded: Tensor) -> float:
    """Median over tokens of the difference of vectors (..., D), relative to the variation of `exact` over D."""
    exact, rounded = (x.float() - x.float().mean(-1, keepdim=True) for x in (exact, rounded))
    return float(((exact - rounded).norm(dim=-1) / exact.norm(dim=-1).clamp(min=1e-9)).median())


FORWARD = {
    "finite": Check(
        "",
        "computes the logits of random tokens; names the first module whose output is NaN or infinite",
        "a model with NaN or infinite logits neither trains nor generates",
        "check divisions, logarithms and masks in the named module; no row of a mask may hide every key",
        finite,
        cheap=True,
    ),
    "repeatable": Check(
        "",
        "compares two calls in eval mode",
        "evaluation and generation are random, and worse than without the noise",
        "pass the mode to dropout: F.dropout(x, p, self.training), or use nn.Dropout and call model.eval()",
        repeatable,
        cheap=True,
    ),
    "modes": Check(
        "",
        "in train mode, compares two seeds, whose logits must differ if dropout is set; then, without dropout, runs "
        "the checks causal and rows",
        "training sees tokens that generation will not see, or the configured dropout has no effect",
        "pass self.training to F.dropout; normalize over the width, by LayerNorm or RMSNorm",
        modes,
        cheap=True,
    ),
    "causal": Check(
        "",
        "changes later tokens, which must not change earlier logits; names the first module that depends on them",
        "the model sees the token that it must predict: training looks perfect, and generated text is noise",
        "mask the scores of later keys before the softmax, and apply the softmax over the keys",
        causal,
        cheap=True,
    ),
    "context": Check(
        "",
        "changes the first token, which must change later logits",
        "the model ignores its context and predicts from the last token alone",
        "look for a mask that hides all keys but the query's own, or attention that is never added",
        context,
        cheap=True,
    ),
    "rows": Check(
        "",
        "compares each row alone and in a batch",
        "the logits of a text depend on the other texts in its batch",
        "look for a reshape or a mean over the batch dimension: (B, T, H, E) needs transpose(1, 2)",
        rows,
        cheap=True,
    ),
    "ids": Check(
        "",
        "compares the logits of token ids, one id at a time: no two may be equal",
        "the model treats different tokens as the same token",
        "look up token ids unchanged, in a table with a row for each id",
        ids,
        cheap=True,
    ),
    "shapes": Check(
        "",
        "runs token ids of other shapes: one row, three rows, one token, two tokens, one token fewer",
        "the model fails at the last batch of an epoch, or at the first generated token",
        "take B and T from the tokens, not from the config",
        shapes,
        cheap=True,
    ),
    "padding": Check(
        "an attention_mask, for left padding",
        "compares a text alone, followed by other tokens, and after masked tokens with two different ids",
        "the logits of a text depend on the lengths of the other prompts in its batch",
        "hide keys where the mask is 0, and count positions from the first token that is not padding",
        padding,
        cheap=True,
    ),
    "length": Check(
        "a context length",
        "runs a text as long as the context, and a text that is one token longer",
        "texts within the declared context raise an error or give NaN",
        "make the position table and the mask as long as the context, and refuse longer texts",
        length,
    ),
    "precision": Check(
        "",
        "compares the model in bf16 and in fp32, block by block, by the median relative difference over tokens",
        "the model behaves differently when trained or served in bf16",
        "keep the residual stream free of large offsets, and compute norms, softmax and rotary angles in fp32",
        precision,
    ),
}
