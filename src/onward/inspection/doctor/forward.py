"""Checks of the forward: causality, modes, lengths and precision.

Shapes: B rows, T tokens, D width, V vocabulary.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy

import torch
from torch import Tensor, nn

from onward.errors import UserError
from onward.inspection.doctor.finding import Check, Outcome, largest, verdict
from onward.inspection.doctor.operations import changed, loud
from onward.inspection.doctor.subject import POSITION_NAMES, Subject, Use

LONGEST = 4096  # tokens of the longest context that is checked
COPIED = 2_000_000_000  # parameters of the largest model that is copied in another precision
IDS = 256  # number of token ids that are compared
DRIFT = 0.2  # the share of a logit's size that bf16 may change, in the median of the tokens


def finite(s: Subject) -> Outcome:
    """Check that no logit is NaN or infinite, with the model's weights and with zero matrices."""
    with s.outputs() as uses:
        logits = s(s.tokens)
    bad = next((use.name for use in uses if not use.result.isfinite().all()), "the last step")
    count = int((~logits.isfinite()).sum())
    if count:
        return "failed", f"{count:,} of {logits.numel():,} logits are NaN or infinite", bad
    biases = {id(p) for name, p in s.model.named_parameters() if "bias" in name}
    zero = lambda p: torch.zeros_like(p) if p.dim() > 1 or id(p) in biases else None
    with changed(s.model, zero), s.outputs() as uses:
        count = int((~s(s.tokens).isfinite()).sum())
    bad = next((use.name for use in uses if not use.result.isfinite().all()), "the last step")
    what = f"0 of {logits.numel():,} logits are NaN or infinite, and {count:,} where all matrices are zero"
    return verdict(not count, what, f"{bad}: a division by the size of a vector, such as a norm without its epsilon")


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
    """Return the dropout rates of a model as (module, name of the attribute, rate)."""
    return [
        (module, name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, float) and ("drop" in name or (name == "p" and "Dropout" in type(module).__name__))
    ]


@contextmanager
def train_mode(s: Subject) -> Iterator[list[tuple[nn.Module, str, float]]]:
    """Set the model to train mode inside the `with` block, and restore mode, rates and buffers at its end. Yields its
    dropout rates as (module, name of the attribute, rate); the block may change them."""
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
    """Check that dropout acts in train mode, and that without it rows and earlier logits stay independent."""

    def seeded(tokens: Tensor, seed: int) -> Tensor:
        torch.manual_seed(seed)
        return s(tokens)

    with train_mode(s) as rates:
        rate = max((value for _, _, value in rates), default=0.0)
        acts = largest(seeded(s.tokens, 0) - seeded(s.tokens, 1)) > 0
        with loud(s):  # branches may begin at zero
            acts = acts or largest(seeded(s.tokens, 0) - seeded(s.tokens, 1)) != 0
        for module, name, _ in rates:
            setattr(module, name, 0.0)
        plain = seeded(s.tokens, 0)
        random = largest(plain - seeded(s.tokens, 1))
        others = torch.cat([seeded(row[None], 0) for row in s.tokens])
        later = seeded(s.later, 0)
    if rate and not acts:
        return "failed", f"dropout has a rate of {rate:g}, and changes nothing in train mode"
    if random:
        return "noted", f"two calls in train mode without dropout differ by {random:.1e}: nothing else can be compared"
    if not s.is_causal:
        return "not applicable", "later tokens change logits in eval mode too"
    worst = max(s.leak(plain, later), largest(others - plain))
    dropout = f"dropout of up to {rate:g} acts" if rate else "there is no dropout"
    where = "a module that uses the statistics of the batch, such as nn.BatchNorm1d"
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
    if difference <= s.allowed:  # scores near 0 may hide a leak, as of a mask after the softmax through the sum
        with loud(s):
            with s.outputs() as loudly:
                logits = s(s.tokens)
            with s.outputs() as later:
                leaked = s.leak(logits, s(s.later))
        if leaked > s.allowed * largest(logits) / max(1e-3, of):  # never where they are NaN
            difference, of, before, after = leaked, largest(logits), loudly, later
    leak = first_different(before, after, s, slice(cut))
    what = f"changing the tokens from {cut} on changes logits before them by {difference:.1e}, of {of:.1e}"
    allowed = s.allowed * max(1.0, of / max(1e-3, largest(s.logits)))
    return verdict(difference <= allowed, what, f"first in {leak}" if leak else "")


def first_different(before: list[Use], after: list[Use], s: Subject, tokens: slice) -> str:
    """Return the name of the first module whose results (B, T, ...) differ at these tokens between two recordings of
    `Subject.outputs`; "" if none differs."""
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
    if difference <= s.allowed / 100:  # a head or branches of zeros hide the context
        with loud(s):
            difference = largest((s(other) - s(s.tokens))[:, 1:])
    return verdict(difference > s.allowed / 100, f"changing the first token changes later logits by {difference:.1e}")


def rows(s: Subject) -> Outcome:
    """Check that a row has the same logits alone and in a batch."""
    alone = torch.cat([s(row[None]) for row in s.tokens])
    difference = largest(alone - s.logits)
    return verdict(difference <= s.allowed, f"logits of a row alone and in a batch differ by {difference:.1e}")


def ids(s: Subject) -> Outcome:
    """Check that no two token ids, each alone, have the same logits."""
    count = min(s.vocab_size, IDS)
    spread = torch.linspace(0, s.vocab_size - 1, count // 2).long()
    chosen = torch.cat([spread, torch.arange(count)]).unique().to(s.device)  # neighbors, and ids far apart
    logits = torch.cat([s(part[:, None]) for part in chosen.split(IDS // 4)])[:, 0].float()
    if largest(logits - logits[:1]) == 0:
        return "noted", "the logits of one token are the same for all token ids: the head may be zero at first"
    same = (torch.cdist(logits, logits, p=math.inf) == 0).triu(1).nonzero().tolist()
    what = f"{len(chosen)} token ids, each alone, have {len(chosen) - len({j for _, j in same}):,} different logits"
    pair = " and ".join(str(int(chosen[i])) for i in same[0]) if same else ""
    return verdict(not same, what, f"the model does not distinguish token ids {pair}")


def shapes(s: Subject) -> Outcome:
    """Check that token ids of other shapes give logits. A model may refuse shapes with an error that names them."""
    T = s.tokens.size(1)
    done: list[str] = []
    for rows, length in (1, T), (3, T), (2, 1), (2, T - 1), (1, 2):
        name = f"({rows}, {length})"
        try:
            got = tuple(s(s.tokens[:1, :length].expand(rows, -1)).shape)
        except UserError as error:
            cause = error.__cause__ or error
            sentence = " ".join(f"token ids {name} give {type(cause).__name__}: {cause}".split())[:300]
            refused = isinstance(cause, AssertionError | ValueError | NotImplementedError)
            return ("noted", f"{sentence}; {', '.join(done)} give logits") if refused else ("failed", sentence)
        if got != (rows, length, s.vocab_size):
            return "failed", f"token ids {name} give logits {got}"
        done.append(name)
    return "ok", f"token ids {', '.join(done)} give logits"


def padding(s: Subject) -> Outcome:
    """Check that padding after a text, and masked padding before it, leaves its logits unchanged."""
    if not s.is_causal:
        return "not applicable", "later tokens change logits without being padding"
    half = s.tokens.size(1) // 2
    text, alone = s.tokens[:, :half], s(s.tokens[:, :half])
    right = largest(alone - s.logits[:, :half])
    if right > s.allowed and not re.search("dynamic|long_?rope", repr(s.attribute("config")), re.I):
        return "failed", f"{s.tokens.size(1) - half} tokens after a text change its logits by {right:.1e}"
    if not s.parameter("attention_mask"):
        return "ok", f"padding on the right changes logits by {right:.1e}; forward takes no attention_mask for the left"
    pads = s.tokens.size(1) - half
    mask = torch.ones_like(s.tokens)
    mask[:, :pads] = 0
    name = s.parameter(*POSITION_NAMES)
    more = {name: (mask.cumsum(1) - 1).clamp(min=0)} if name else {}
    padded = [torch.cat([torch.full_like(mask[:, :pads], i), text], 1) for i in (0, 1)]
    zeros, ones = (s(tokens, attention_mask=mask, **more)[:, pads:] for tokens in padded)
    if (seen := largest(zeros - ones)) > s.allowed:
        return "failed", f"other padding tokens change logits by {seen:.1e} although the mask forbids them"
    moved = largest(zeros - alone)
    return verdict(
        moved <= s.allowed, f"{pads} masked tokens before a text change its logits by {moved:.1e}", "positions"
    )


def length(s: Subject) -> Outcome:
    """Check that a text as long as the context gives finite logits."""
    n = s.context_length
    if not n:
        return "not applicable", "no attribute of the model gives its context length: give --context-length"
    if n > LONGEST:
        return "not applicable", f"a context of {n:,} tokens takes too long to try"
    tokens = s.tokens[:1].repeat(1, -(-n // s.tokens.size(1)) + 1)[:, : n + 1]
    try:
        wrong = int((~s(tokens[:, :n]).isfinite()).sum())
    except Exception as error:
        return "failed", f"a text of {n:,} tokens, the context, raises {type(error.__cause__ or error).__name__}"
    what = f"{wrong:,} logits of a text of {n:,} tokens, the context, are not finite"
    if wrong or s.device.type != "cpu":  # an index out of range would end the process on an accelerator
        return verdict(not wrong, what)
    try:
        beyond = int((~s(tokens).isfinite()).sum())
    except Exception as error:
        return "ok", f"{what}; one token more is refused ({type(error.__cause__ or error).__name__})"
    return verdict(not beyond, f"{what}, and {beyond:,} of one token more, which is not refused")


@torch.no_grad()
def precision(s: Subject) -> Outcome:
    """Check that the logits of the model in bf16 are close to those in fp32."""
    size = sum(p.numel() for p in s.model.parameters())
    if size > COPIED:
        return "not applicable", f"a model of {size:,} parameters is too large to be copied"
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
    """Return the median over tokens of the norm of exact - rounded, both (..., D), relative to the variation of `exact`
    over D."""
    exact, rounded = (x.float() - x.float().mean(-1, keepdim=True) for x in (exact, rounded))
    return float(((exact - rounded).norm(dim=-1) / exact.norm(dim=-1).clamp(min=1e-9)).median())


FORWARD = {
    "finite": Check(
        "",
        "the logits of random tokens, and the first module whose result is NaN or infinite",
        "a model with NaN or infinite logits neither trains nor generates",
        "look at divisions, logarithms and masks in the module named; a row of a mask must not forbid every key",
        finite,
        cheap=True,
    ),
    "repeatable": Check(
        "",
        "two calls in eval mode",
        "evaluation and generation are random, and worse than the model is",
        "give dropout the flag: F.dropout(x, p, self.training), or use nn.Dropout and call model.eval()",
        repeatable,
        cheap=True,
    ),
    "modes": Check(
        "",
        "train mode: two seeds must differ if a rate of dropout is set; without dropout, as causal and rows",
        "training sees other tokens than generation will, or regularization that is configured never acts",
        "pass self.training to F.dropout; normalize over the width, with LayerNorm or RMSNorm",
        modes,
        cheap=True,
    ),
    "causal": Check(
        "",
        "later tokens are changed: no earlier logit may change; the first module that depends on them is named",
        "the model sees the token it is to predict: training looks perfect, and generation is noise",
        "mask the scores of keys after the query before the softmax, which goes over the keys",
        causal,
        cheap=True,
    ),
    "context": Check(
        "",
        "the first token is changed: later logits must change",
        "a model that does not read its context predicts from the last token alone",
        "look for a mask that hides all keys but its own, or attention that is never added",
        context,
        cheap=True,
    ),
    "rows": Check(
        "",
        "each row alone and in a batch",
        "an answer depends on the other texts of its batch",
        "look for a reshape or a mean that takes in the batch dimension: (B, T, H, E) needs transpose(1, 2)",
        rows,
        cheap=True,
    ),
    "ids": Check(
        "",
        "token ids, each alone: no two may have the same logits",
        "two tokens that the model cannot tell apart have the same meaning, and the same continuation",
        "look the tokens up as they are, in a table with a row for each",
        ids,
        cheap=True,
    ),
    "shapes": Check(
        "",
        "token ids of other shapes: one row, three rows, one token, one token fewer",
        "the model stops with an error at the last batch of an epoch, or at the first token of a generation",
        "take B and T from the tokens, not from the configuration",
        shapes,
        cheap=True,
    ),
    "padding": Check(
        "an attention_mask, for padding on the left",
        "a text alone, followed by other tokens, and after masked tokens of two kinds",
        "an answer depends on how long the other prompts of its batch are",
        "forbid keys where the mask is 0, and count positions from the first token that is none",
        padding,
        cheap=True,
    ),
    "length": Check(
        "a context length",
        "a text as long as the context, and one token longer",
        "texts within the declared context end in an error or in NaN",
        "make the table of positions and the mask as long as the context, and refuse longer texts",
        length,
    ),
    "precision": Check(
        "",
        "the model in bf16 and in fp32, block by block: the median over tokens of the relative difference",
        "trained or served in bf16 it is another model",
        "keep the residual stream free of large offsets, and compute norms, softmax and rotary angles in fp32",
        precision,
    ),
}
