"""Compares the results of a reader's function with those of the answer: whether they are equal, how they differ, and
how to show them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

LONGEST = 200  # maximum number of characters of a shown value


def numbers(value: Any) -> Tensor | None:
    """A number, a tensor, an array or a list of numbers as a tensor; None for anything else."""
    if isinstance(value, list | tuple) and any(isinstance(one, Tensor) for one in value):
        return None
    try:
        return torch.as_tensor(value).detach().to("cpu", torch.float64)
    except (TypeError, ValueError, RuntimeError):
        return None


def same(one: Any, other: Any) -> bool:
    """Whether two results are equal up to rounding: numbers of the same shape, sequences of these, or equal values of
    one type."""
    first, second = numbers(one), numbers(other)
    if first is not None and second is not None:
        return first.shape == second.shape and torch.allclose(first, second, rtol=1e-4, atol=1e-5, equal_nan=True)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return first is None and second is None and type(one) is type(other) and bool(one == other)


def difference(expected: Sequence[Any], got: Sequence[Any]) -> str:
    """A common mistake, not specific to an exercise, that the results suggest, as text; "" if there is none."""
    if all(one is None for one in got):
        return "the function returns nothing: end it with return and the result"
    if isinstance(expected[0], tuple) and not any(isinstance(one, list | tuple) for one in got):
        return f"one value is returned: return {len(expected[0])} values"
    right, wrong = ([one for value in values if (one := numbers(value)) is not None] for values in (expected, got))
    if len(right) < len(expected) or len(wrong) < len(got):
        return ""
    pairs = [*zip(right, wrong)]
    if any(two.isnan().any() and not one.isnan().any() for one, two in pairs):
        return (
            "the result has NaN: look for a softmax over only −∞, 0 / 0, or the root or logarithm of a number below 0"
        )
    if all(one.dim() > 1 and same(one.mT, two) for one, two in pairs):
        return "the last two axes are exchanged: transpose the result"
    if any(one.shape != two.shape for one, two in pairs):
        return "the shape is wrong: print the shapes of all steps"
    ours, theirs = (torch.cat([one.flatten() for one in several]) for several in (right, wrong))
    if same(ours, theirs.where(theirs > -1000, -torch.inf)):
        return "a large negative number stands for −∞: use -torch.inf"
    ratios = (theirs / ours)[ours.isfinite() & (ours != 0)]
    if len(ratios) > 1 and ratios.isfinite().all() and same(ratios, ratios[:1].expand_as(ratios)):
        ratio = ratios[0].item()
        return "the sign is wrong" if same(ratio, -1) else f"each number is {ratio:.4g} times the expected one"
    return ""


def short(value: Any) -> str:
    """A value in at most about 200 characters; a tensor after its shape."""
    text = (
        f"{tuple(value.shape)} {plain(value.tolist())}" if isinstance(value, Tensor) and value.dim() else plain(value)
    )
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


def plain(value: Any) -> str:
    match value:
        case Tensor() if value.dim() == 0:
            return plain(value.item())
        case Tensor():
            return short(value)
        case float():
            return f"{value:.4g}"
        case list():
            return f"[{', '.join(map(plain, value))}]"
        case tuple():
            return f"({', '.join(map(plain, value))})"
    return repr(value)
