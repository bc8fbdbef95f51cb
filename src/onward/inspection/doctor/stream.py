"""Checks of the residual stream, the activation functions and the range of the logits, from the operations of a forward
pass.

Shapes: T tokens, D width.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from onward.inspection.doctor.finding import Check, Outcome, largest, verdict
from onward.inspection.doctor.operations import (
    Operations,
    RecordedProduct,
    changed,
    length_of_texts,
    loud,
    operations,
)
from onward.inspection.doctor.subject import Subject

LOUD, QUIET = 1e3, 1e-3  # RMS given to embedding tables, and factor of branch matrices
KEPT = 0.3  # smallest cosine between an embedding and the input of the head, with branches near 0
TIMES = 1.9  # a stream that contains the embeddings more than this many times was added to itself
REACH = 1.5  # with logits within ±1.5, no token is more than e^3 times as likely as another
HEAD = 100.0  # size to which the logits are scaled
NO_TEXT = "every short text length divides a width of the model, so shapes are ambiguous"


def traced(s: Subject) -> Operations | None:
    """The operations on a random text with weights scaled by `loud`, cached for other checks; None if no text length is
    usable."""
    if "traced" not in s.memo:
        T = length_of_texts(s)
        with loud(s):
            s.memo["traced"] = operations(s, s.tokens[:1, :T].contiguous()) if T else None
    return s.memo["traced"]


def head_of(ops: Operations, s: Subject) -> RecordedProduct | None:
    """The product that computes the logits."""
    return next((x for x in reversed(ops.linears) if x.result.size(-1) >= s.vocab_size), None)


def residual(s: Subject) -> Outcome:
    """Check that each branch is added to the residual stream, which carries the embeddings to the head."""
    ops = traced(s)
    head = head_of(ops, s) if ops else None
    if not ops or not ops.attentions or not head:
        return "not applicable", NO_TEXT if not ops else "no attention or no head was recognized"
    if head.after:
        return "not applicable", "a matrix product lies between the residual stream and the head"
    tables, last = ops.tables, head.weight.untyped_storage().data_ptr()

    def new(p: Tensor) -> Tensor | None:
        address = p.untyped_storage().data_ptr()
        if address in tables:
            return p * (LOUD / max(1e-12, float(p.detach().float().square().mean().sqrt())))
        return p * QUIET if p.dim() > 1 and address != last else None

    with loud(s), changed(s.model, new):
        return kept_once(operations(s, s.tokens[:1, : length_of_texts(s)].contiguous()), s)


def kept_once(ops: Operations, s: Subject) -> Outcome:
    """Check that the head reads the embeddings exactly once, in a forward pass whose branches are near 0."""
    head = head_of(ops, s)
    assert head
    read = head.given.flatten(0, -2)
    rows = [x.flatten(0, -2) for x in ops.lookups]
    kept = [cosine(x, read) for x in rows if x.shape == read.shape]
    if not kept:
        return "not applicable", "no embedding table is as wide as the input of the head"
    what = f"with branches near 0, the cosine of the head's input and the token embeddings is {max(kept):.2f}"
    if max(kept) < KEPT:
        return "failed", f"{what}: a branch replaces the residual stream", "the sum of the stream and a branch"
    began: Tensor | None = None  # residual stream before its first branch
    for addition in ops.sums:
        small, big = sorted((addition.left, addition.right), key=lambda x: float(x.norm()))
        share = float(small.norm() / big.norm().clamp(min=1e-12))
        if addition.result.size(-1) != read.size(-1) or (began is not None and addition.result.shape != began.shape):
            continue
        if share > 1 / 3 and cosine(small, big) > 0.99:
            return "failed", f"{what}; the residual stream is added to itself", addition.module
        if share < 0.05:
            began = big if began is None else began
            times = float((addition.result * began).sum() / began.square().sum())
            if times > TIMES and cosine(addition.result, began) > 0.9:
                return (
                    "failed",
                    f"{what}; after a branch, the stream contains the embeddings {times:.2g} times",
                    addition.module,
                )
    return "ok", what


def cosine(x: Tensor, y: Tensor) -> float:
    """Mean cosine similarity of vectors (..., D), centered over D."""
    x, y = (z.detach().float() - z.detach().float().mean(-1, keepdim=True) for z in (x, y))
    return float(F.cosine_similarity(x, y, -1).mean())


def activation(s: Subject) -> Outcome:
    """Check that no two matrices follow each other without an activation between them, and that activations are
    called."""
    ops = traced(s)
    if not ops:
        return "not applicable", NO_TEXT
    for linear in ops.linears:
        if linear.after is None or linear.after.read:
            continue
        sizes = linear.after.given.size(-1), linear.given.size(-1), linear.result.size(-1)
        if sizes[1] >= min(sizes[0], sizes[2]):  # a narrower inner width is a low-rank matrix, as in LoRA
            what = "two matrices of widths {}, {}, {} have no activation between them".format(*sizes)
            return "failed", f"{what}: they act as one matrix", linear.module or linear.after.module
    acts = [(name, m) for name, m in s.model.named_modules() if type(m).__module__ in ACTIVATIONS]
    acts = [(name, m) for name, m in acts if not isinstance(m, nn.MultiheadAttention | nn.Softmax | nn.LogSoftmax)]
    unused = [name for name, _ in acts if name not in ops.called]
    if acts and len(unused) == len(acts) and ops.attentions:  # if only some are unused, a kernel may call them
        return "failed", f"none of the {len(acts)} activation modules is called", unused[0]
    return "ok", f"no two of {len(ops.linears)} matrices follow each other without an activation between them"


ACTIVATIONS = "torch.nn.modules.activation", "transformers.activations"


def reach(s: Subject) -> Outcome:
    """Check that a larger head makes logits large, positive and negative: no final tanh or ReLU limits them."""
    ops = traced(s)
    head = head_of(ops, s) if ops else None
    if not head:
        return "not applicable", "no matrix product that returns the logits was recognized"
    address, times = head.weight.untyped_storage().data_ptr(), HEAD / max(1e-12, largest(head.result))
    larger = lambda p: p * times if p.untyped_storage().data_ptr() == address else None
    with loud(s), changed(s.model, larger):
        logits = s(s.tokens)
    logits = logits[logits.isfinite()]
    if not logits.numel():
        return "not applicable", "no logit is finite"
    low, high = float(logits.min()), float(logits.max())
    what = f"with the head scaled by {times:.2g}, logits range from {low:.3g} to {high:.3g}"
    return verdict(low < -REACH and high > REACH, what, "the operation after the head")


STREAM = {
    "residual": Check(
        "attention, and an embedding table as wide as the residual stream",
        "scales branches to nearly 0: the head must read the embeddings, once each",
        "the model forgets its tokens layer by layer, or the outputs of its layers have no effect",
        "add each branch once to its input: x = x + attention(norm(x)), x = x + mlp(norm(x))",
        residual,
        cheap=True,
    ),
    "activation": Check(
        "",
        "looks for matrices without an activation between them, and for activation functions that are never called",
        "two matrices without an activation between them can represent no more than one matrix",
        "put the activation function between the two matrices of the MLP",
        activation,
        cheap=True,
    ),
    "reach": Check(
        "a matrix that returns the logits",
        "scales up the head: some logits must become large and positive, others large and negative",
        "a softmax, ReLU or tanh on the logits limits the model's confidence, or is applied twice",
        "return the output of the head: the loss and the sampler apply the softmax",
        reach,
        cheap=True,
    ),
}
