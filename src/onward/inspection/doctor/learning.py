"""Checks of the parts of a training step: targets, loss, gradients, initialization.

Shapes: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from copy import deepcopy
from statistics import median
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onward.inspection.doctor.finding import Check, Outcome, cross_entropy, verdict
from onward.inspection.doctor.operations import loud
from onward.inspection.doctor.subject import TARGET_NAMES, Subject

OVERFIT_STEPS, OVERFIT_SECONDS = 80, 10.0
RATE = 0.064  # learning rate of sign descent, times the width; halves a loss in about 30 steps at any width
NARROW = 16  # a narrower model may be unable to learn a batch of random tokens
READS = 0.05  # as a share of the first loss: how much the loss must rise on other tokens if the model reads its input
IGNORED = -100  # a target that does not count
MOST, ODD = 10.0, 3.0  # largest ratio of standard deviations between layers; ODD if they do not rise or fall with depth
CLOSE = {torch.bfloat16: 2e-2, torch.float16: 2e-3}  # tolerance relative to a loss; fp32: 1e-5
NOT_FRESH = "the weights are not declared as fresh"

ALL_FROZEN = "all parameters are frozen"


def targets(s: Subject) -> Outcome:
    """Check that the targets of the user's batches are the next tokens."""
    if not s.batches:
        return "not applicable", "no batches are given"
    shares = {k: share_equal(s.batches, k) for k in (1, 0, 2, -1)}
    best = max(shares, key=lambda k: shares[k])
    what = f"{shares[1]:.1%} of the targets in {len(s.batches)} batches are the next token"
    descriptions = {0: "the token itself", 2: "the token after the next", -1: "the token before"}
    return verdict(shares[1] > 0.999, what, f"{shares[best]:.1%} are {descriptions[best]}" if best != 1 else "")


def share_equal(batches: list[tuple[Tensor, Tensor]], offset: int) -> float:
    """Share of the counted targets that equal the token at their position plus `offset`; 1 is the next token."""
    equal = total = 0
    for tokens, wanted in batches:
        span = tokens.size(1) - abs(offset)
        expected, y = tokens[:, max(0, offset) :][:, :span], wanted[:, max(0, -offset) :][:, :span]
        counted = y != IGNORED
        equal, total = equal + int((expected == y)[counted].sum()), total + int(counted.sum())
    return equal / max(1, total)


def loss(s: Subject) -> Outcome:
    """Check that the loss is the cross-entropy of each position's logits and the next token."""
    wanted = spread_targets(s)
    theirs = s.loss(s.logits, wanted)
    if theirs is None:
        return (
            "not applicable",
            f"no loss is given, and forward has no parameter {', '.join(TARGET_NAMES)} for which it returns a loss",
        )
    if theirs.dim():
        return "failed", f"the loss has the shape {tuple(theirs.shape)}", "a loss is a scalar, the mean over tokens"
    name, z = ("" if s.about.get("loss") else s.parameter(*TARGET_NAMES)), s.logits
    right = 1 if name.startswith("label") else 0  # `labels` as in transformers, `targets` as in nanoGPT
    expected, value = float(cross_entropy(z, wanted, right)), float(theirs)
    close = CLOSE.get(s.dtype, 1e-5)
    same = lambda other: abs(value - other) <= close * max(1e-3, abs(other))
    shift = "shifted inside the model" if right else "already shifted"
    what = f"the loss is {value:.4f} and the cross-entropy {expected:.4f}, assuming {name or 'targets'} {shift}"
    if same(expected):
        return ignored(s, wanted, right, what)
    if mistake := next((name for name, loss in mistakes(z, wanted, expected).items() if same(loss)), ""):
        return "failed", what, f"the value is {mistake}"
    others = wanted.roll(1, 0).flip(1)  # a part that does not depend on the targets is an auxiliary loss
    more, gap = s.loss(s.logits, others), value - expected
    assert more is not None
    if gap > 0 and abs(float(more) - float(cross_entropy(z, others, right)) - gap) <= 10 * close * expected:
        return "noted", f"{what}: {gap:.2g} of it does not depend on the targets, as in a load-balancing loss"
    return "failed", what


def spread_targets(s: Subject) -> Tensor:
    """Random targets (B, T), among them the first and last token ids, which a faulty loss may treat differently."""
    generator = torch.Generator().manual_seed(1)
    wanted = torch.randint(s.vocab_size, s.tokens.shape, generator=generator)
    wanted[:, 1], wanted[:, 2] = 0, s.vocab_size - 1
    return wanted.to(s.device)


def mistakes(z: Tensor, wanted: Tensor, expected: float) -> dict[str, float]:
    """Values of a loss with each of the common mistakes, for logits (B, T, V), by description of the mistake."""
    values = {f"the loss of targets at offset {k}": float(cross_entropy(z, wanted, k)) for k in (-1, 0, 1, 2)}
    values["the loss over the wrong axis, with (B, T, V) viewed as (B, V, T)"] = float(
        F.cross_entropy(z.reshape(z.size(0), z.size(2), z.size(1)).float(), wanted)
    )
    flat = z.transpose(1, 2).reshape(-1, z.size(2)).float()
    values["the loss of transposed logits"] = float(F.cross_entropy(flat, wanted.flatten()))
    values["the sum over tokens instead of their mean"] = expected * wanted.numel()
    for token in 0, z.size(2) - 1:
        kept = wanted.masked_fill(wanted == token, IGNORED)
        for k in 0, 1:
            values[f"the loss with ignore_index={token}"] = float(cross_entropy(z, kept, k))
    return values


def ignored(s: Subject, wanted: Tensor, right: int, what: str) -> Outcome:
    """Check that the loss ignores targets of -100, as in PyTorch, or of -1, as in nanoGPT. `right` is the offset
    between logits and targets that the loss assumes (1 if it shifts tokens itself). Not checked for the model's own
    loss if the model has a padding token."""
    if s.about.get("loss") is None and s.attribute("pad_token_id", "padding_idx") is not None:
        return "ok", what
    for value in IGNORED, -1:
        marked = wanted.clone()
        marked[:, -3:] = value
        try:
            theirs = s.loss(s.logits, marked)
        except Exception:
            continue  # an index out of range
        expected = float(cross_entropy(s.logits, marked.masked_fill(marked == value, IGNORED), right))
        if theirs is not None and abs(float(theirs) - expected) <= CLOSE.get(s.dtype, 1e-5) * expected:
            return "ok", f"{what}; targets of {value} are ignored"
    where = "padding targets count: pass ignore_index"
    return "failed", f"{what}; targets of neither {IGNORED} nor -1 are ignored", where


def first_loss(s: Subject) -> Outcome:
    """Check that the loss before training is at most about that of a uniform guess."""
    if not s.fresh:
        return "not applicable", NOT_FRESH
    value, uniform = float(cross_entropy(s.logits, s.tokens, 1)), math.log(s.vocab_size)
    return verdict(value < uniform + 0.5, f"the first loss is {value:.2f}; that of a uniform guess is {uniform:.2f}")


def gradients(s: Subject) -> Outcome:
    """Check that trainable parameters, other than those of experts and reward heads, get a gradient, and that
    parameters meant to be frozen get none."""
    trained = {name: p for name, p in s.model.named_parameters() if p.requires_grad}
    if not trained:
        return "not applicable", ALL_FROZEN
    with loud(s), torch.enable_grad():  # a zero matrix, as LoRA begins with, blocks the gradients of others
        value = cross_entropy(s(s.tokens), s.tokens, 1)
        if not value.requires_grad:
            return (
                "failed",
                "no parameter gets a gradient: the logits have no graph",
                "torch.no_grad() or .detach()",
            )
        grads = torch.autograd.grad(value, [*trained.values()], allow_unused=True)
    reached = {name for name, g in zip(trained, grads) if g is not None and bool(g.any())}
    frozen = [name for name, p in s.model.named_parameters() if not p.requires_grad]
    apart = re.compile(r"expert|^score\.")  # some experts may get no tokens, and logits do not depend on a reward head
    dead = [name for name in trained if name not in reached and not apart.search(name)]
    dead += [name for name, g in zip(trained, grads) if g is not None and unread(s, name, g) and name in reached]
    pattern = s.about.get("frozen") or "$^"
    thawed = [name for name in reached if re.search(pattern, name)]
    what = f"{len(dead)} parameters get no gradient" + (f", {len(frozen)} are frozen" if frozen else "")
    if thawed:
        return "failed", f"{what}, and {len(thawed)} that should be frozen get one", ", ".join(sorted(thawed)[:5])
    return verdict(not dead, what, ", ".join(dead[:5]))


def unread(s: Subject, name: str, gradient: Tensor) -> bool:
    """Whether a contiguous quarter of a linear weight's rows or columns gets no gradient, as if the values were missing
    in a packed projection."""
    if not isinstance(s.model.get_submodule(name.rpartition(".")[0]), nn.Linear) or gradient.dim() != 2:
        return False
    if re.search("expert|rout|gate", name):
        return False
    for zero in (~gradient.any(1), ~gradient.any(0)):
        size = max(4, zero.numel() // 4)
        if zero.numel() >= size and bool(zero.unfold(0, size, 1).all(1).any()):
            return True
    return False


def tied(s: Subject) -> Outcome:
    """Check that head and embedding share one matrix if the model declares them tied."""
    if not s.attribute("tied", "tie_word_embeddings", "tie_weights", "weight_tying"):
        return "not applicable", "the model does not declare that its head is tied to its embedding"
    matrices = [p for p in s.model.parameters() if p.dim() == 2 and p.size(0) == s.vocab_size]
    heads = [m.weight for m in s.model.modules() if isinstance(m, nn.Linear) and m.out_features == s.vocab_size]
    shared = len({p.data_ptr() for p in [*matrices, *heads]}) == 1
    return verdict(
        shared, f"embedding and head are {'one matrix' if shared else 'two matrices'}; the model declares them tied"
    )


def shared(s: Subject) -> Outcome:
    """Note modules with parameters that occur twice; a Universal Transformer shares its block by design."""
    first: dict[int, str] = {}
    for name, module in s.model.named_modules(remove_duplicate=False):
        known = first.setdefault(id(module), name)
        if known != name and any(True for _ in module.parameters()):
            return (
                "noted",
                f"{known} and {name} are one module with one set of parameters, as in [block] * n",
            )
    return "ok", "no module with parameters occurs twice"


def initialization(s: Subject) -> Outcome:
    """Check that no linear layer has equal rows, and that the standard deviation of each kind of matrix is similar in
    all layers, or rises or falls with depth, by at most a factor of MOST."""
    if not s.fresh:
        return "not applicable", NOT_FRESH
    layers: dict[str, dict[str, float]] = defaultdict(dict)  # standard deviation of a matrix in each layer
    for name, p in s.model.named_parameters():
        if p.dim() > 1 and (deviation := float(p.detach().float().std())):
            layers[re.sub(r"\.\d+\.", ".*.", name, count=1)][name] = deviation
    spread = [value for of_kind in layers.values() for value in of_kind.values()]
    equal = [name for name, m in s.model.named_modules() if isinstance(m, nn.Linear) and same_rows(m.weight)]
    if equal:
        return "failed", f"all rows of {len(equal)} matrices are equal, so their units stay equal", equal[0]
    for kind, of_kind in layers.items():
        values = [*of_kind.values()]
        times = max(values) / min(values)
        if times > MOST or (times > ODD and values not in (sorted(values), sorted(values, reverse=True))):
            odd = max(of_kind, key=lambda name: abs(math.log(of_kind[name] / median(spread))))
            return "failed", f"the standard deviation of {kind} differs by a factor of {times:.3g} between layers", odd
    what = f"standard deviations of matrices are {min(spread):.2g} to {max(spread):.2g}, similar or monotonic in depth"
    if s.blocks:
        with s.outputs() as uses:
            s(s.tokens)
        sizes = {use.name: float(use.result.float().square().mean().sqrt()) for use in uses}
        first, last = sizes[s.blocks[0][0]], sizes[s.blocks[-1][0]]
        what += f"; the RMS of the residual stream is {first:.2g} after the first block and {last:.2g} after the last"
    return "ok", what


def same_rows(p: Tensor) -> bool:
    return min(p.shape) > 1 and bool(p.any()) and bool((p == p[:1]).all())


def overfit(s: Subject) -> Outcome:
    """Check that some steps of sign descent on one batch halve its loss."""
    if not s.fresh:
        return "not applicable", NOT_FRESH
    copy = Subject(deepcopy(s.model), vocab_size=s.vocab_size, adapter=s.adapter)
    trained = [p for p in copy.model.parameters() if p.requires_grad]
    if not trained:
        return "not applicable", ALL_FROZEN
    began, values = perf_counter(), list[float]()
    with torch.enable_grad():
        while len(values) < OVERFIT_STEPS and perf_counter() - began < OVERFIT_SECONDS:
            step = cross_entropy(copy(s.tokens), s.tokens, 1)
            if not step.requires_grad:
                return "not applicable", "the logits have no gradient"
            for p, gradient in zip(trained, torch.autograd.grad(step, trained, allow_unused=True)):
                if gradient is not None:
                    p.data.sub_(gradient.sign(), alpha=RATE / max(32, p.size(-1) if p.dim() else 1))
            values.append(float(step.detach()))
            if values[-1] < values[0] / 2:
                break
    width = min((min(p.shape) for p in trained if p.dim() == 2 and s.vocab_size in p.shape), default=0)
    with torch.no_grad():  # other input tokens do not change the loss of a model that ignores its input
        swapped = float(cross_entropy(copy(s.tokens.flip(0).roll(3, 1)), s.tokens, 1))
    what = f"the loss of one batch falls from {values[0]:.2f} to {values[-1]:.2f}"
    what += f" in {len(values)} steps of sign descent"
    what += f", at a width of {width}" if width else ""
    if values[-1] < values[0] / 2:
        return "ok", what
    what += f", and is {swapped:.2f} for other input tokens"
    if swapped - values[-1] > READS * values[0]:
        return "noted", f"{what}: the model learns slowly" + (", as narrow models do" if 0 < width < NARROW else "")
    if len(values) < OVERFIT_STEPS:
        return "noted", f"{what}; stopped after {OVERFIT_SECONDS:.0f} s"
    return "failed", what


LEARNING = {
    "targets": Check(
        "batches",
        "measures the share of targets that are the next token, the token itself, or a neighbor",
        "the model learns to copy its input, or to skip a token",
        "shift targets by one token: inputs tokens[:, :-1] and targets tokens[:, 1:]",
        targets,
    ),
    "loss": Check(
        "a loss, given or returned by forward",
        "compares the loss for random targets with the cross-entropy and with the results of common mistakes",
        "the model learns to copy its input, or to predict something other than the next token",
        "F.cross_entropy(logits.flatten(0, 1), targets.flatten()), where targets[i] is the token after tokens[i]",
        loss,
    ),
    "first loss": Check(
        "a fresh model",
        "compares the loss for random tokens with that of a uniform guess, ln V",
        "the first steps only undo the initialization, or the loss is not a mean over tokens",
        "initialize matrices with a standard deviation of about 0.02, and scale the last one of each branch by depth",
        first_loss,
    ),
    "initialization": Check(
        "a fresh model",
        "compares the standard deviation of each kind of matrix across layers; notes the RMS of the residual stream",
        "one layer dominates the others, or contributes nothing",
        "initialize all layers by one rule; in deeper models, the last matrix of a branch may have a smaller one",
        initialization,
    ),
    "gradients": Check(
        "for frozen parameters, a pattern for their names",
        "looks for parameters without a gradient, and for gradients of parameters that should be frozen",
        "parameters without a gradient never learn, and parameters meant to be frozen change",
        "look for .detach(), torch.no_grad(), .data or a module never called; freeze with requires_grad_(False)",
        gradients,
        cheap=True,
    ),
    "tied": Check(
        "a model that declares its head as tied",
        "compares the memory addresses of embedding and head",
        "head and embedding drift apart, and loading a saved model restores only one of them",
        "set self.head.weight = self.embed.weight after the initialization",
        tied,
        cheap=True,
    ),
    "shared": Check(
        "",
        "looks for modules with parameters that occur more than once in the model (noted)",
        "a model of n layers has the parameters of one layer",
        "write [Block() for _ in range(n)], which creates n blocks",
        shared,
        cheap=True,
    ),
    "overfit": Check(
        "a fresh model",
        f"runs sign descent on one batch for {OVERFIT_STEPS} steps or {OVERFIT_SECONDS:.0f} s: "
        "the loss must halve, or at least rise if the input tokens are replaced",
        "a model that cannot overfit one batch cannot learn",
        "fix the other failures first; then check residual connections, norms and the learning rate",
        overfit,
    ),
}
