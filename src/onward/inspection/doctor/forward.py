"""Checks of the forward: who sees whom, in which mode, of which length and in which precision.

Shapes: B rows, T tokens, D width, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from itertools import chain
from types import CodeType

import torch
from torch import Tensor, nn

from onward.inspection.doctor.finding import Check, Outcome, largest, verdict
from onward.inspection.doctor.subject import POSITION_NAMES, Subject, Use

LONGEST = 4096  # tokens of a context that is tried
COPIED = 2_000_000_000  # parameters of a model that is copied in another precision
DRIFT = 0.2  # the share of a logit's size that bf16 may change, in the median of the tokens


def finite(s: Subject) -> Outcome:
    with s.outputs() as uses:
        logits = s(s.tokens)
    bad = next((use.name for use in uses if not use.result.isfinite().all()), "the last step")
    count = int((~logits.isfinite()).sum())
    return verdict(not count, f"{count:,} of {logits.numel():,} logits are NaN or infinite", bad)


def repeatable(s: Subject) -> Outcome:
    difference = largest(s(s.tokens) - s.logits)
    active = [name for name, module in s.model.named_modules() if module.training]
    return verdict(
        difference == 0,
        f"two calls in eval mode differ by {difference:.1e}",
        ", ".join(active[:3]) or "a function that ignores self.training, such as F.dropout(x, p)",
    )


def dropout_rates(model: nn.Module) -> list[tuple[nn.Module, str, float]]:
    """Each module with the name and the value of a rate of dropout that it holds."""
    return [
        (module, name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, float) and ("drop" in name or (name == "p" and "Dropout" in type(module).__name__))
    ]


@contextmanager
def train_mode(s: Subject) -> Iterator[list[tuple[nn.Module, str, float]]]:
    """The model in train mode; then all is as before. Gives its rates of dropout, which may be changed."""
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
    def seeded(tokens: Tensor, seed: int) -> Tensor:
        torch.manual_seed(seed)
        return s(tokens)

    with train_mode(s) as rates:
        rate = max((value for _, _, value in rates), default=0.0)
        acts = largest(seeded(s.tokens, 0) - seeded(s.tokens, 1)) > 0
        for module, name, _ in rates:
            setattr(module, name, 0.0)
        plain = seeded(s.tokens, 0)
        random = largest(plain - seeded(s.tokens, 1))
        others = torch.cat([seeded(row[None], 0) for row in s.tokens])
        later = seeded(s.later, 0)
    if rate and not acts:
        return "failed", f"dropout has a rate of {rate:g}, and changes nothing in train mode"
    if random:
        return "told", f"two calls in train mode without dropout differ by {random:.1e}: nothing else can be compared"
    if not s.is_causal:
        return "not applicable", "later tokens change logits in eval mode too"
    worst = max(s.leak(plain, later), largest(others - plain))
    dropout = f"dropout of up to {rate:g} acts" if rate else "there is no dropout"
    where = "a module that uses the statistics of the batch, such as nn.BatchNorm1d"
    what = f"in train mode {dropout}, and later tokens and other rows change logits by {worst:.1e}"
    return verdict(worst <= s.allowed, what, where)


def causal(s: Subject) -> Outcome:
    cut = s.tokens.size(1) // 2
    with s.outputs() as before:
        s(s.tokens)
    with s.outputs() as after:
        difference = s.leak(s.logits, s(s.later))
    leak = first_different(before, after, s, slice(cut))
    what = f"changing the tokens from {cut} on changes logits before them by {difference:.1e}"
    return verdict(difference <= s.allowed, f"{what}, of {largest(s.logits):.1e}", f"first in {leak}" if leak else "")


def first_different(before: list[Use], after: list[Use], s: Subject, tokens: slice) -> str:
    """The first module whose results (B, T, ...) differ at these tokens; "" where there is none."""
    for (name, one, _), (_, other, _) in zip(before, after):
        same = one.shape == other.shape and one.dim() > 1 and one.shape[:2] == s.tokens.shape
        if same and largest((one - other)[:, tokens]) > 1e-4 * max(1e-3, largest(one)):
            return name
    return ""


def context(s: Subject) -> Outcome:
    changed = s.tokens.clone()
    changed[:, 0] = (changed[:, 0] + 1) % s.vocab_size
    difference = largest((s(changed) - s.logits)[:, 1:])
    return verdict(difference > s.allowed / 100, f"changing the first token changes later logits by {difference:.1e}")


def rows(s: Subject) -> Outcome:
    alone = torch.cat([s(row[None]) for row in s.tokens])
    difference = largest(alone - s.logits)
    return verdict(difference <= s.allowed, f"logits of a row alone and in a batch differ by {difference:.1e}")


def padding(s: Subject) -> Outcome:
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
    left = [s(torch.cat([torch.full_like(mask[:, :pads], i), text], 1), attention_mask=mask, **more) for i in (0, 1)]
    zeros, ones = (logits[:, pads:] for logits in left)
    if (seen := largest(zeros - ones)) > s.allowed:
        return "failed", f"other padding tokens change logits by {seen:.1e} although the mask forbids them"
    moved = largest(zeros - alone)
    return verdict(
        moved <= s.allowed, f"{pads} masked tokens before a text change its logits by {moved:.1e}", "positions"
    )


def positions(s: Subject) -> Outcome:
    swapped = s.tokens.clone()
    swapped[:, :-1] = swapped[:, :-1].flip(1)
    order = f"another order of earlier tokens changes the last logits by {largest((s(swapped) - s.logits)[:, -1]):.1e}"
    same = s.tokens[:1, :1].expand(1, s.tokens.size(1))
    with s.outputs() as uses:
        logits = s(same)
    spread = largest(logits - logits[:, :1])
    told = f"{order}; in a text of one token, repeated, logits differ by {spread:.1e}"
    if spread <= s.allowed:
        return "told", f"{told}: positions are relative, or there are none"
    half, name = s.tokens.size(1) // 2, s.parameter(*POSITION_NAMES)
    if name and half:
        places = torch.arange(half, device=s.device).expand(len(s.tokens), half)
        here, there = (s(s.tokens[:, :half], **{name: places + by}) for by in (0, s.tokens.size(1) - half))
        moved = largest(here - there)
        told += f", and with all positions {s.tokens.size(1) - half} further by {moved:.1e}"
        if moved <= s.allowed:
            return "told", f"{told}: positions are relative"
    if not rotary(s.model):
        return "told", f"{told}: positions are absolute"
    vary = [
        use.name
        for use in uses
        if use.result.dim() == 3
        and use.result.size(1) == same.size(1)
        and largest(use.result - use.result[:, :1]) > 1e-5
    ]
    return "failed", f"{told}: the positions of a rotary model are not relative", f"first in {vary[0]}" if vary else ""


def rotary(model: nn.Module) -> bool:
    """Whether a model speaks of rotary positions, and of no others and of no sinks."""
    named = " ".join([name for name, _ in [*model.named_parameters(), *model.named_buffers(), *model.named_modules()]])
    names = [type(module).__name__ for module in model.modules()]
    names += [name for module in model.modules() for name in names_in(getattr(type(module).forward, "__code__", None))]
    others = re.search(r"(?<!ex)pos|wpe|sink", named, re.I)
    return bool(re.search("rot|rope|inv_freq", " ".join([named, *names]), re.I)) and not others


def names_in(code: CodeType | None) -> list[str]:
    """The names that a function uses, in what it defines too."""
    inner = [names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType)] if code else []
    return [*(code.co_names if code else ()), *chain.from_iterable(inner)]


def length(s: Subject) -> Outcome:
    n = s.context_length
    if not n:
        return "not applicable", "no attribute of the model says its context length: give --context-length"
    if n > LONGEST:
        return "not applicable", f"a context of {n:,} tokens takes too long to try"
    tokens = s.tokens[:1].repeat(1, -(-n // s.tokens.size(1)) + 1)[:, : n + 1]
    wrong = int((~s(tokens[:, :n]).isfinite()).sum())
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
            return "told", f"the model does not run in {dtype}: {error.__cause__ or error}".splitlines()[0]
        blocks = {name for name, _ in s.blocks}
        results.append([*(use for use in uses if use.name in blocks), Use("the logits", logits, None)])
    drift = {one.name: drifted(one.result, other.result) for one, other in zip(*results)}
    where = next((name for name, value in drift.items() if not value <= DRIFT / 2), "the logits")
    told = ", ".join(f"{name.rpartition('.')[2]}: {value:.1%}" for name, value in drift.items())
    return verdict(drift["the logits"] <= DRIFT, f"bf16 differs from fp32 by {told} (blocks, then logits)", where)


def drifted(one: Tensor, other: Tensor) -> float:
    """The median over tokens of the norm of a difference, as a share of what varies over the width."""
    one, other = (x.float() - x.float().mean(-1, keepdim=True) for x in (one, other))
    return float(((one - other).norm(dim=-1) / one.norm(dim=-1).clamp(min=1e-9)).median())


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
        "later tokens are changed: no earlier logit may change; the first module that does is named",
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
    "padding": Check(
        "an attention_mask, for padding on the left",
        "a text with tokens after it; with masked tokens before it, of two kinds; and alone",
        "an answer depends on how long the other prompts of its batch are",
        "forbid keys where the mask is 0, and count positions from the first token that is none",
        padding,
        cheap=True,
    ),
    "positions": Check(
        "",
        "earlier tokens in another order, one token repeated, and all positions shifted (told; judged for rotary)",
        "with rotary positions, only distances may count: values that are turned too make each place another",
        "rotate queries and keys, and leave values as they are",
        positions,
        cheap=True,
    ),
    "length": Check(
        "a context length",
        "a text as long as the context, and one token longer",
        "texts that the model is said to take end in an error or in NaN",
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
