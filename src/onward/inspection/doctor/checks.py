"""The doctor's checks: each is a function from a subject to a finding, and a row of one table.

Shapes: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from time import perf_counter
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onward.inspection.doctor.subject import TARGET_NAMES, Adapter, Subject

Status = Literal["ok", "failed", "told", "not applicable"]
OVERFIT_STEPS, OVERFIT_SECONDS = 80, 10.0


@dataclass(frozen=True)
class Finding:
    """What a check found."""

    check: str
    status: Status
    what: str  # with the number that was measured
    where: str = ""  # a module or parameters
    why: str = ""  # it matters
    mend: str = ""


@dataclass(frozen=True)
class Check:
    """A row of the table: why a failure matters, how it is mended, and the function that looks for it."""

    why: str
    mend: str
    run: Callable[[Subject], Outcome]


Outcome = tuple[Status, str] | tuple[Status, str, str]  # status, what, and where


def largest(x: Tensor) -> float:
    """The largest absolute value of a tensor."""
    return float(x.abs().max()) if x.numel() else 0.0


def verdict(good: bool, what: str, where: str = "") -> Outcome:
    return "ok" if good else "failed", what, "" if good else where


def finite(s: Subject) -> Outcome:
    with s.outputs() as outputs:
        logits = s(s.tokens)
    bad = next((name for name, x in outputs if not x.isfinite().all()), "the last step")
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


def causal(s: Subject) -> Outcome:
    cut = s.tokens.size(1) // 2
    changed = s.tokens.clone()
    changed[:, cut:] = (changed[:, cut:] + 1) % s.vocab_size
    with s.outputs() as before:
        s(s.tokens)
    with s.outputs() as after:
        logits = s(changed)
    difference = largest((logits - s.logits)[:, :cut])
    leak = ""
    for (name, one), (_, other) in zip(before, after):
        same = one.shape == other.shape and one.dim() > 1 and one.shape[:2] == s.tokens.shape
        if same and largest((one - other)[:, :cut]) > 1e-4 * max(1e-3, largest(one)):
            leak = name
            break
    what = f"changing the tokens from {cut} on changes logits before them by {difference:.1e}"
    return verdict(difference <= s.allowed, f"{what}, of {largest(s.logits):.1e}", f"first in {leak}" if leak else "")


def context(s: Subject) -> Outcome:
    changed = s.tokens.clone()
    changed[:, 0] = (changed[:, 0] + 1) % s.vocab_size
    difference = largest((s(changed) - s.logits)[:, 1:])
    return verdict(difference > s.allowed / 100, f"changing the first token changes later logits by {difference:.1e}")


def rows(s: Subject) -> Outcome:
    alone = torch.cat([s(row[None]) for row in s.tokens])
    difference = largest(alone - s.logits)
    return verdict(difference <= s.allowed, f"logits of a row alone and in a batch differ by {difference:.1e}")


def order(s: Subject) -> Outcome:
    swapped = s.tokens.clone()
    swapped[:, :-1] = swapped[:, :-1].flip(1)
    difference = largest((s(swapped) - s.logits)[:, -1])
    return "told", f"another order of earlier tokens changes the last logits by {difference:.1e}"


def length(s: Subject) -> Outcome:
    if not s.context_length:
        return "not applicable", "the model has no attribute that says its context length"
    if s.context_length > 4096:
        return "not applicable", f"a context of {s.context_length:,} tokens takes too long to try"
    tokens = s.tokens[:1].repeat(1, -(-s.context_length // s.tokens.size(1)))[:, : s.context_length]
    wrong = int((~s(tokens).isfinite()).sum())
    return verdict(not wrong, f"{wrong:,} logits of a text of {s.context_length:,} tokens, the context, are not finite")


def cached(s: Subject) -> Outcome:
    if s.new_cache() is None:
        return "not applicable", "forward has no cache that the doctor knows (a parameter cache, a method new_cache())"
    plain, worst, where = s.logits[:1], 0.0, ""
    for name, sizes in {"token by token": [1], "in chunks of 5": [5], "in chunks of 3 and 1": [3, 1]}.items():
        step, pieces, start, turn = s.new_cache(), [], 0, 0
        assert step
        while start < plain.size(1):
            pieces.append(step(s.tokens[:1, start : start + sizes[turn % len(sizes)]]))
            start, turn = start + sizes[turn % len(sizes)], turn + 1
        difference = (torch.cat(pieces, 1) - plain).abs().amax((0, 2))
        if (found := largest(difference)) > worst:
            worst, where = found, f"{name}, first at token {int((difference > s.allowed).float().argmax())}"
    return verdict(worst <= s.allowed, f"logits with the cache and without differ by {worst:.1e}", where)


def cross_entropy(logits: Tensor, targets: Tensor, offset: int = 0) -> Tensor:
    """The mean cross-entropy of the logits at i and the targets at i + offset."""
    count = logits.size(1) - abs(offset)
    z, y = logits[:, max(0, -offset) :][:, :count], targets[:, max(0, offset) :][:, :count]
    return F.cross_entropy(z.flatten(0, 1).float(), y.flatten())


def loss(s: Subject) -> Outcome:
    targets = torch.randint(s.vocab_size, s.tokens.shape, generator=torch.Generator().manual_seed(1)).to(s.device)
    theirs = s.loss(s.tokens, targets)
    if theirs is None:
        return "not applicable", f"forward takes no targets ({', '.join(TARGET_NAMES)}), or returns no loss for them"
    name, z = s.parameter(*TARGET_NAMES), s.logits
    right = 1 if name.startswith("label") else 0  # as in transformers, and as in nanoGPT
    known = {f"that of targets {k} ahead of the logits": float(cross_entropy(z, targets, k)) for k in (-1, 0, 1, 2)}
    known["that over the wrong axis, with (B, T, V) viewed as (B, V, T)"] = float(
        F.cross_entropy(z.reshape(z.size(0), z.size(2), z.size(1)).float(), targets)
    )
    flat = z.transpose(1, 2).reshape(-1, s.vocab_size).float()
    known["that of logits whose axes were exchanged"] = float(F.cross_entropy(flat, targets.flatten()))
    expected, value = known[f"that of targets {right} ahead of the logits"], float(theirs)
    good = abs(value - expected) <= 1e-5 * expected
    like = next((what for what, one in known.items() if abs(one - value) <= 1e-5 * one), "")
    shift = "are shifted by one inside" if right else "come shifted by one"
    what = f"the loss is {value:.4f}, and the cross-entropy {expected:.4f} where {name} {shift}"
    return verdict(good, what, f"it is {like}" if like else "")


def first_loss(s: Subject) -> Outcome:
    if not s.fresh:
        return "not applicable", "the weights are not those of the initialization"
    value, uniform = float(cross_entropy(s.logits, s.tokens, 1)), math.log(s.vocab_size)
    return verdict(value < uniform + 0.5, f"the first loss is {value:.2f}, and a uniform guess costs {uniform:.2f}")


def gradients(s: Subject) -> Outcome:
    s.model.zero_grad(set_to_none=True)
    with torch.enable_grad():
        cross_entropy(s(s.tokens), s.tokens, 1).backward()
    frozen = [name for name, p in s.model.named_parameters() if not p.requires_grad]
    dead = [
        name
        for name, p in s.model.named_parameters()
        if p.requires_grad and "expert" not in name and (p.grad is None or not p.grad.any())
    ]
    s.model.zero_grad(set_to_none=True)
    what = f"{len(dead)} parameters get no gradient" + (f", {len(frozen)} are frozen" if frozen else "")
    return verdict(not dead, what, ", ".join(dead[:5]))


def tied(s: Subject) -> Outcome:
    if not s.attribute(("tied", "tie_word_embeddings", "tie_weights", "weight_tying")):
        return "not applicable", "the model does not say that its head is tied to its embedding"
    matrices = [p for p in s.model.parameters() if p.dim() == 2 and p.size(0) == s.vocab_size]
    heads = [m.weight for m in s.model.modules() if isinstance(m, nn.Linear) and m.out_features == s.vocab_size]
    shared = len({p.data_ptr() for p in [*matrices, *heads]}) == 1
    return verdict(shared, f"embedding and head are {'one matrix' if shared else 'two matrices'}, and should be one")


def overfit(s: Subject) -> Outcome:
    if not s.fresh:
        return "not applicable", "the weights are not those of the initialization"
    copy = Subject(deepcopy(s.model), vocab_size=s.vocab_size, adapter=s.adapter)
    optimizer = torch.optim.Adam([p for p in copy.model.parameters() if p.requires_grad], lr=3e-3)
    began, values = perf_counter(), list[float]()
    with torch.enable_grad():
        while len(values) < OVERFIT_STEPS and perf_counter() - began < OVERFIT_SECONDS:
            optimizer.zero_grad()
            step = cross_entropy(copy(s.tokens), s.tokens, 1)
            step.backward()
            optimizer.step()
            values.append(float(step.detach()))
    what = f"the loss of one batch falls from {values[0]:.2f} to {values[-1]:.2f} in {len(values)} steps"
    if len(values) < OVERFIT_STEPS:
        return "told", f"{what}, for which {OVERFIT_SECONDS:.0f} s were enough"
    return verdict(values[-1] < values[0] / 2, what)


CHECKS: dict[str, Check] = {
    "finite": Check(
        "a model with NaN or infinite logits neither trains nor generates",
        "look at divisions, logarithms and masks in the module named; a row of a mask must not forbid every key",
        finite,
    ),
    "repeatable": Check(
        "evaluation and generation are random, and worse than the model is",
        "give dropout the flag: F.dropout(x, p, self.training), or use nn.Dropout and call model.eval()",
        repeatable,
    ),
    "causal": Check(
        "the model sees the token it is to predict: training looks perfect, and generation is noise",
        "mask the scores of keys after the query before the softmax, which goes over the keys",
        causal,
    ),
    "context": Check(
        "a model that does not read its context predicts from the last token alone",
        "look for a mask that hides all keys but its own, or attention that is never added",
        context,
    ),
    "rows": Check(
        "an answer depends on the other texts of its batch",
        "look for a reshape or a mean that takes in the batch dimension: (B, T, H, E) needs transpose(1, 2)",
        rows,
    ),
    "order": Check("", "", order),
    "length": Check("", "make the table of positions and the mask as long as the context", length),
    "cached": Check(
        "generation with the cache is another model than the one that was trained",
        "give new tokens the positions after those in the cache, and mask query i against key j by position",
        cached,
    ),
    "loss": Check(
        "the model learns to copy its input, or something that is not the next token",
        "F.cross_entropy(logits.flatten(0, 1), targets.flatten()), where targets[i] is the token after tokens[i]",
        loss,
    ),
    "first loss": Check(
        "the first steps only undo the initialization, or the loss is not a mean over tokens",
        "initialize matrices with a deviation of about 0.02 and scale the last one of each branch by depth",
        first_loss,
    ),
    "gradients": Check(
        "parameters that get no gradient never learn",
        "look for .detach(), torch.no_grad(), .data or a module that is made and not called",
        gradients,
    ),
    "tied": Check(
        "head and embedding drift apart, and a saved model is read as another one",
        "self.head.weight = self.embed.weight, after the initialization",
        tied,
    ),
    "overfit": Check(
        "a model that cannot learn one batch by heart cannot learn",
        "look at the checks above, then at the learning rate, at residual connections and at norms",
        overfit,
    ),
}


@torch.no_grad()
def examine(subject: Subject) -> Iterator[Finding]:
    """The findings of all checks on a subject, one by one."""
    for name, check in CHECKS.items():
        try:
            status, what, *where = check.run(subject)
        except Exception as error:  # of the model's own code
            cause = error.__cause__ or error
            status, what, where = "failed", f"the model raises {type(cause).__name__}: {cause}".splitlines()[0], []
        failed = status == "failed"
        yield Finding(name, status, what, "".join(where), check.why if failed else "", check.mend if failed else "")


def doctor(
    model: nn.Module,
    *,
    vocab_size: int = 0,
    context_length: int = 0,
    fresh: bool = False,
    adapter: Adapter | None = None,
) -> list[Finding]:
    """The findings of all checks on a model that takes token ids (B, T) and returns logits (B, T, V), a tuple that
    begins with them, or an object with `.logits`.

    `fresh` says that the weights are those of the initialization, which two checks need. `adapter(model, tokens)`
    returns the logits of a model that is called in another way. The model is left as it was, in eval mode.
    """
    return list(
        examine(Subject(model, vocab_size=vocab_size, context_length=context_length, fresh=fresh, adapter=adapter))
    )
