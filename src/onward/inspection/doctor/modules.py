"""Checks of modules whose mistakes the logits alone do not show: experts, norms, the embedding. Each check computes the
expected outputs from a module's own weights and inputs.

Shapes: B rows, T tokens, H heads, K key/value heads, E size of a head, D width.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from onward.inspection.doctor.finding import Check, Outcome, largest
from onward.inspection.doctor.subject import Subject, hooked

NAMES = {
    "q": r"q|w?_?query|queries|w_?q|q_proj|q_lin|to_q|c_q",
    "k": r"k|w?_?key|keys|w_?k|k_proj|k_lin|to_k|c_k",
    "v": r"v|w?_?value|values|w_?v|v_proj|v_lin|to_v|c_v",
    "qkv": r"qkv|c_attn|in_proj|qkv_proj|w_?qkv|to_qkv",
    "out": r"out|o|wo|w_o|o_proj|out_proj|proj|c_proj|dense|to_out|output|out_lin",
}
SIZE_NAMES = "head_dim", "d_head", "head_size", "d_k"
HEAD_NAMES = "n_heads", "num_heads", "n_head", "num_attention_heads", "heads", "nheads"
NOT_NORMALIZED = r"norm\w*['\"]?[=:] ?False|top_k['\"]?[=:] ?1\b"  # as in the configs of Qwen 2 and Switch
FIT = 0.05  # the largest relative residual of a fit
BY = 8.0  # the factor by which the residual stream is multiplied


@dataclass(frozen=True)
class AttentionLayer:
    """An attention module whose projections are recognized by their names."""

    name: str
    module: nn.Module
    parts: Mapping[str, nn.Module]  # q, k, v (or qkv) and out
    size: int  # E
    heads: int  # H
    kv_heads: int  # K


def width(module: nn.Module) -> int:
    """Number of outputs of a linear layer, or of transformers' Conv1D; 0 for any other module."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or isinstance(module, nn.Embedding):
        return 0
    return weight.size(1) if type(module).__name__ == "Conv1D" else weight.size(0)


def number(module: nn.Module, names: Sequence[str]) -> int:
    """The first attribute among `names` that is a positive integer; 0 if there is none."""
    return next((value for name in names if isinstance(value := getattr(module, name, None), int) and value > 0), 0)


def attention_layers(s: Subject) -> list[AttentionLayer]:
    result = []
    for name, module in s.model.named_modules():
        children = {child: m for child, m in module.named_children() if width(m)}
        parts = {
            part: m
            for part, names in NAMES.items()
            for child, m in children.items()
            if re.fullmatch(names, child, re.I)
        }
        if "out" not in parts or not ({"q", "k", "v"} <= parts.keys() or "qkv" in parts):
            continue
        size, heads = number(module, SIZE_NAMES), number(module, HEAD_NAMES) or s.attribute(*HEAD_NAMES)
        features = width(parts["q"]) if "q" in parts else width(parts["qkv"]) // 3
        if not size and not isinstance(heads, int):
            continue
        size = size or features // heads
        kv_features = width(parts["k"]) if "k" in parts else features
        if features % size == kv_features % size == 0 and kv_features:
            result.append(AttentionLayer(name, module, parts, size, features // size, kv_features // size))
    return result


def experts(s: Subject) -> Outcome:
    """Check that the weights of a token's experts have the same sum for all tokens."""
    notes = []
    for name, module in s.model.named_modules():
        lists = [m for _, m in module.named_children() if isinstance(m, nn.ModuleList) and len(m) > 1]
        routed = [m for m in lists if any(width(child) == len(m) for _, child in module.named_children())]
        if not routed:
            continue
        zeros, ones = (replaced(s, module, routed[0], value) for value in (0.0, 1.0))
        if zeros is None or ones is None:
            continue
        shares = (ones - zeros).mean(-1).flatten()  # sum of each token's expert weights
        low, high = float(shares.min()), float(shares.max())
        what = f"the weights of a token's experts in {name} sum to between {low:.3f} and {high:.3f}"
        if high - low > 1e-3 * max(1.0, high) and not re.search(NOT_NORMALIZED, repr(s.attribute("config"))):
            return "failed", what, name
        notes.append(what)
    return ("noted", notes[0]) if notes else ("not applicable", "no module has a list of experts and their router")


def replaced(s: Subject, module: nn.Module, items: nn.ModuleList, value: float) -> Tensor | None:
    """The result of `module` on the test tokens if its submodules `items` return the constant `value`."""
    inputs: list[Tensor] = []
    fill = lambda item, args, result: torch.full_like(result, value)
    record = lambda module, args, result: inputs.append(result[0] if isinstance(result, tuple) else result)
    with hooked([*(item.register_forward_hook(fill) for item in items), module.register_forward_hook(record)]):
        s(s.tokens)
    return inputs[0].detach() if inputs and isinstance(inputs[0], Tensor) else None


def norms(s: Subject) -> Outcome:
    """Check that either all branches of a block or none have a norm before them, and that the first norm divides by the
    size of its input."""
    if not s.blocks:
        return "not applicable", "no list of blocks that take and return (B, T, D) was recognized"
    scaled = lambda x: x * BY if isinstance(x, Tensor) and x.is_floating_point() and x.dim() == 3 else x

    def scale(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        first = next((name for name in kwargs if "hidden" in name or name == "x"), None)
        return (scaled(args[0]), *args[1:]) if args else (), kwargs if args or not first else {
            **kwargs,
            first: scaled(kwargs[first]),
        }

    with s.outputs() as before:
        s(s.tokens)
    with hooked([s.blocks[0][1].register_forward_pre_hook(scale, with_kwargs=True)]), s.outputs() as after:
        s(s.tokens)
    modules = dict(s.model.named_modules())
    size = lambda x: float(x.float().square().mean().sqrt())
    for block, _ in s.blocks:
        pairs = [(a.result, b.result) for a, b in zip(before, after) if a.name == block]
        stream = next((size(b) / max(size(a), 1e-12) for a, b in pairs), 0.0)
        ratios: dict[str, float] = {}  # ratio at the input of the first linear layer of each branch
        for (name, _, given), (_, _, scaled_input) in zip(before, after):
            if (
                name.startswith(f"{block}.")
                and width(modules[name])
                and given is not None
                and scaled_input is not None
                and given.dim() == 3
            ):
                ratios.setdefault(
                    ".".join(name.split(".")[: block.count(".") + 2]), size(scaled_input) / max(size(given), 1e-12)
                )
        odd = next(iter(ratios), "")  # the first branch reads the stream, or a norm of it
        if block == s.blocks[0][0] and odd and not 0.5 < ratios[odd] < 2 * BY:
            what = f"scaling the residual stream by {BY:g} scales the input of {odd} by {ratios[odd]:.2g}"
            return "failed", f"{what}: a norm must divide by the size of its input", odd
        bare = [name for name, ratio in ratios.items() if ratio > BY / 2]
        if stream > BY / 2 and bare and len(bare) < len(ratios):
            normed = [name for name in ratios if name not in bare]
            what = f"scaling the residual stream by {BY:g} scales the input of {bare[0]} by {ratios[bare[0]]:.1f}"
            return "failed", f"{what} and the input of {normed[0]} by {ratios[normed[0]]:.1f}", bare[0]
    return "ok", f"in each of {len(s.blocks)} blocks, all branches have a norm before them or none has"


def embedding(s: Subject) -> Outcome:
    """Check that the embedding is not scaled twice before the first block."""
    tables = [m for m in s.model.modules() if isinstance(m, nn.Embedding) and m.num_embeddings >= s.vocab_size]
    stream = s.given_to(s.blocks[0][1], s.tokens) if s.blocks else None
    if not tables or stream is None or stream.size(-1) != tables[0].embedding_dim:
        return "not applicable", "no embedding table whose vectors enter the first block was recognized"
    rows = tables[0].weight.detach()[s.tokens].float()
    theirs, ours = stream.float()[0] - stream.float()[1], rows[0] - rows[1]  # position embeddings cancel out
    factor = float((theirs * ours).sum() / ours.square().sum())
    if largest(theirs - factor * ours) > FIT * largest(theirs):
        return "not applicable", "a nonlinear operation lies between the embedding and the first block"
    d, declared = stream.size(-1), s.declares("embed\\w*(?:scal|multipl)|scale_emb")
    what = f"token embeddings are scaled by {factor:.4g} before the first block"
    twice = next((x for x in (math.sqrt(d), *declared) if x > 1 and abs(factor / x**2 - 1) < 0.01), None)
    if twice and not any(abs(factor / x - 1) < 0.01 for x in declared):
        return (
            "failed",
            f"{what}: a scale of {twice:.4g}, applied twice",
            "the code between the embedding and the first block",
        )
    return "noted", what


PARTS = {
    "embedding": Check(
        "an nn.Embedding and a list of blocks",
        "compares the difference of two tokens before the first block with the difference of their rows in the table",
        "the embeddings are so large that they hide the outputs of the blocks",
        "scale by √D once, in the embedding or after it",
        embedding,
        cheap=True,
    ),
    "norms": Check(
        "a list of blocks",
        f"scales the residual stream by {BY:g}: the inputs of all branches must grow, or none may",
        "one branch reads the residual stream without a norm, and its size grows with depth and training",
        "put a norm before the branch: x = x + mlp(norm(x))",
        norms,
        cheap=True,
    ),
    "experts": Check(
        "a list of experts and their router in one module",
        "makes the experts return a constant, so that the output shows the sum of each token's routing weights",
        "the size of the module's output depends on the confidence of the router, and changes in training",
        "divide the weights of the chosen experts by their sum, or apply the softmax after the choice",
        experts,
        cheap=True,
    ),
}
