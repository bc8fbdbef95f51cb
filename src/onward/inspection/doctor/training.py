"""Checks of a training loop: its batches, its validation batches, and the gradients of its steps.

Shapes: T tokens.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from onward.inspection.doctor.finding import Check, Outcome, verdict
from onward.inspection.doctor.forward import dropout_rates
from onward.inspection.doctor.subject import ReachedError, Subject, hooked

STEPS = 3  # steps of the optimizer that are recorded
PASSAGE = 8  # number of tokens in a compared passage
COMMON = 0.1  # largest share of common passages, since similar texts share phrases
FEW = 4  # minimum number of pairs of rows for judging their order
SAME = 0.999  # the cosine above which gradients count as equal
NO_BATCHES = "no batches are given: add --batches"


def padded(s: Subject) -> Outcome:
    """Check that the loss ignores the token that most rows repeat at their end, such as padding."""
    if not s.batches:
        return "not applicable", NO_BATCHES
    ends, counted = Counter[int](), Counter[int]()  # by token: rows that end with a run of it, and its targets there
    rows = 0
    for tokens, wanted in s.batches:
        for row, target in zip(tokens.tolist(), wanted.tolist()):
            run = next((i for i, token in enumerate(reversed(row)) if token != row[-1]), len(row))
            rows += 1
            if run > 2:
                ends[row[-1]] += 1
                counted[row[-1]] += target[-run:].count(row[-1])
    token, repeated = max(ends.items(), key=lambda item: item[1], default=(-1, 0))
    what = f"{repeated} of {rows} rows end with a repeated token"
    if repeated < 2 or not counted[token]:
        return "ok", what
    if not changes_loss(s, token):
        return "ok", f"{what}, {token}, which the loss ignores"
    return "failed", f"{what}, {token}, and {counted[token]} of their targets are that token", "padding targets"


def changes_loss(s: Subject, token: int) -> bool:
    """Whether the logits at targets equal to `token` affect the user's loss; True if this is unknown."""
    if not s.about.get("loss"):
        return True
    rows = s.tokens.clone()
    rows[:, -2:] = token
    other = s.logits.clone()
    other[:, -2:] = other[:, -2:].flip(-1) + 1.0 * torch.arange(s.vocab_size).to(other)
    before, after = s.loss(s.logits, rows), s.loss(other, rows)
    return before is None or after is None or not torch.equal(before, after)


def shuffled(s: Subject) -> Outcome:
    """Check that neighboring rows of a batch are not consecutive in a text."""
    if not s.batches:
        return "not applicable", NO_BATCHES
    pairs = [pair for tokens, wanted in s.batches for pair in zip(tokens, tokens[1:], wanted)]
    if len(pairs) < FEW or len({tuple(row.tolist()) for row, _, _ in pairs}) < FEW:
        return "not applicable", f"{len(pairs)} pairs of neighboring rows are too few"
    T = pairs[0][0].size(0)
    ahead = {}  # for each shift, the share of rows that equal the previous row shifted by it
    for k in range(1, T + 1):
        follows = [follows_by(row, following, targets, k) for row, following, targets in pairs]
        ahead[k] = sum(follows) / len(follows)
    best = max(ahead, key=lambda k: ahead[k])
    what = f"{ahead[best]:.0%} of {len(pairs)} rows equal the previous row, shifted by {best} tokens"
    return verdict(ahead[best] < 0.9, what, "the order of the windows")


def follows_by(row: Tensor, following: Tensor, targets: Tensor, k: int) -> bool:
    """Whether `following` equals `row` shifted by k tokens; for k = T, whether `following` begins with the last of
    `targets`."""
    T = row.size(0)
    return torch.equal(following[: T - k], row[k:]) if T - k >= 2 else k == T and bool(following[0] == targets[-1])


def held_out(s: Subject) -> Outcome:
    """Check that at most the share COMMON of the passages of the validation batches occurs in the training batches."""
    if not s.batches or not s.validation_batches:
        return (
            "not applicable",
            NO_BATCHES if not s.batches else "no validation batches are given: add --validation-batches",
        )
    passages = lambda batches, step: {
        tuple(row[i : i + PASSAGE])
        for tokens, _ in batches
        for row in tokens.tolist()
        for i in range(0, len(row) - PASSAGE + 1, step)
    }
    trained, validation = passages(s.batches, 1), passages(s.validation_batches, PASSAGE)
    if not validation or not trained:
        return "not applicable", f"rows have fewer than {PASSAGE} tokens"
    share = len(validation & trained) / len(validation)
    what = f"{share:.0%} of {len(validation):,} validation passages of {PASSAGE} tokens occur in training batches"
    return verdict(share <= COMMON, what, "the split of the texts")


class GradientWatch:
    """Records gradients while the user's function trains: sums over backward passes, and their cosine similarity to the
    gradients that the optimizer receives."""

    def __init__(self, model: nn.Module) -> None:
        self.trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.since = {name: torch.zeros_like(p) for name, p in self.trained.items()}  # sums since the last step
        self.ever = {name: torch.zeros_like(p) for name, p in self.trained.items()}
        self.steps = self.backward = 0
        self.optimized: set[int] = set()
        self.cosines: list[tuple[float, float]] = []  # similarity of the optimizer's gradients to `since` and to `ever`
        self.eval = False

    def gradient(self, name: str) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            self.backward += 1
            self.since[name] += gradient
            self.ever[name] += gradient

        return hook

    def step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Hook before each optimizer step; a ReachedError ends the training after STEPS steps."""
        received = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not received & {id(p) for p in self.trained.values()}:
            return
        if self.steps == STEPS:
            raise ReachedError
        self.optimized |= received
        given = torch.cat([(p.new_zeros(()).expand_as(p) if p.grad is None else p.grad).flatten() for p in self.all()])
        flat = lambda sums: torch.cat([x.flatten() for x in sums.values()])
        cosine = lambda sums: float(torch.nn.functional.cosine_similarity(given, flat(sums), 0))
        self.cosines.append((cosine(self.since), cosine(self.ever)))
        for total in self.since.values():
            total.zero_()
        self.steps += 1

    def all(self) -> list[Tensor]:
        return [*self.trained.values()]


@contextmanager
def stopped() -> Iterator[None]:
    try:
        yield
    except ReachedError:
        pass


def step(s: Subject) -> Outcome:
    """Check that the last recorded optimizer step uses neither zeros nor the gradients of all steps, that the model is
    in train mode, and that its parameters are in an optimizer and change."""
    train = s.about.get("train")
    if train is None:
        return "not applicable", "no training function is given: add --train"
    model = deepcopy(s.model).train()
    watch = GradientWatch(model)
    mode = lambda module, args: setattr(watch, "eval", watch.eval or not module.training)
    hooks: list[Any] = [p.register_hook(watch.gradient(name)) for name, p in watch.trained.items()]
    before = [p.detach().clone() for p in watch.all()]
    hooks += [model.register_forward_pre_hook(mode), register_optimizer_step_pre_hook(watch.step)]
    with hooked(hooks), torch.enable_grad(), torch.random.fork_rng(), stopped():
        run(s, train, model)
    if not watch.steps:
        return "failed", "no optimizer of the model's parameters takes a step", "optimizer.step()"
    if not watch.backward:
        return "failed", f"the optimizer takes {watch.steps} steps without a gradient", "loss.backward()"
    if watch.eval and dropout_rates(model):
        return "failed", "the model is in eval mode during training", "model.train()"
    return judged(watch, before)


def judged(watch: GradientWatch, before: list[Tensor]) -> Outcome:
    since, ever = watch.cosines[-1]
    what = (
        f"in step {watch.steps}, the cosine of the optimizer's gradients and those since the last step is {since:.4f}"
    )
    if since < SAME and ever > SAME:
        return "failed", f"{what}, and with those of all steps {ever:.4f}", "optimizer.zero_grad() is never called"
    if since == 0:
        return "failed", what, "gradients are zeroed between backward() and step()"
    moved = sum(not torch.equal(p, old) for p, old in zip(watch.all(), before))
    if not moved:
        return "failed", f"no parameter changes in {watch.steps} steps", "the learning rate"
    orphans = [name for name, p in watch.trained.items() if id(p) not in watch.optimized and watch.ever[name].any()]
    if orphans:
        return "failed", f"{len(orphans)} parameters get gradients but are in no optimizer", ", ".join(orphans[:5])
    return "ok", f"{what}; {moved} of {len(before)} parameters change"


def run(s: Subject, train: Callable[..., Any], model: nn.Module) -> None:
    """Call train(model), which may loop without end, or train(model, optimizer, tokens, targets) STEPS times."""
    needed = [p for p in inspect.signature(train).parameters.values() if p.default is p.empty and p.kind < 2]
    if len(needed) == 1:
        train(model)
        return
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    generator = torch.Generator().manual_seed(4)
    for _ in range(STEPS):
        tokens = torch.randint(s.vocab_size, (2, s.tokens.size(1)), generator=generator).to(s.device)
        train(model, optimizer, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


TRAINING = {
    "padding in targets": Check(
        "batches",
        "looks for rows that end with a repeated token, whose targets must not count",
        "the model learns to generate padding, and its loss looks better than it is",
        "set padding targets to -100, which F.cross_entropy ignores",
        padded,
    ),
    "order": Check(
        "batches",
        "compares each row with the previous row, which it must not continue",
        "successive steps train on neighboring passages, and later steps undo their effect",
        "draw windows at random, or shuffle them",
        shuffled,
    ),
    "held out": Check(
        "batches and validation batches",
        f"searches the training batches for passages of {PASSAGE} tokens from the validation batches",
        "the validation loss falls while the model memorizes, and does not measure the loss on new texts",
        "split the text first, and take training windows from the training part only",
        held_out,
    ),
    "training step": Check(
        "a training function, train(model) or step(model, optimizer, tokens, targets)",
        f"trains a copy for {STEPS} steps: compares the optimizer's gradients with those of its backward passes",
        "each step repeats all earlier ones, or a part of the model is never trained",
        "call optimizer.zero_grad() before backward() in each step, and pass all parameters to the optimizer",
        step,
    ),
}
