"""Compares the results of a reader's function with those of the answer: whether they are equal, how they differ, and
how to show them."""

from collections.abc import Sequence
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

LONGEST = 200  # maximum number of characters of a shown value


def as_tensor(value: Any) -> Tensor | None:
    """A real number, a tensor, an array, a list of these or a tuple of numbers as a tensor; None for anything else."""
    if isinstance(value, list):
        value = [one.tolist() if hasattr(one, "tolist") else one for one in value]
    elif isinstance(value, tuple) and any(hasattr(one, "tolist") for one in value):
        return None
    try:
        tensor = torch.as_tensor(value).detach()
    except (TypeError, ValueError, RuntimeError):
        return None
    return None if tensor.is_complex() else tensor


def numbers(value: Any) -> Tensor | None:
    """The tensor of `as_tensor` in a common type."""
    tensor = as_tensor(value)
    return None if tensor is None else tensor.to("cpu", torch.float64)


def is_mask(value: Any) -> bool:
    tensor = as_tensor(value)
    return tensor is not None and tensor.dtype == torch.bool


def same(one: Any, other: Any) -> bool:
    """Whether a result, `other`, equals the expected one up to rounding: numbers of the same shape, of bool where bool
    is expected; sequences of these, or equal values of one type."""
    first, second = numbers(one), numbers(other)
    if first is not None and second is not None:
        if is_mask(one) and not is_mask(other):
            return False
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
    if isinstance(expected[0], tuple) and not isinstance(expected[0][0], str):
        return difference_of_tuples(expected, got)
    right, wrong = ([one for value in values if (one := numbers(value)) is not None] for values in (expected, got))
    if len(right) < len(expected) or len(wrong) < len(got):
        return ""
    if is_mask(expected[0]) and not all(map(is_mask, got)):
        return "the result holds numbers: return a tensor of bool (True and False)"
    pairs = [*zip(right, wrong)]
    if any(two.isnan().any() and not one.isnan().any() for one, two in pairs):
        return (
            "the result has NaN: look for a softmax over only −∞, 0 / 0, 0 · ∞, or the root or logarithm of a number "
            "below 0"
        )
    if all(one.dim() > 1 and same(one.mT, two) for one, two in pairs):
        return "the last two axes are exchanged: transpose the result"
    if isinstance(expected[0], list) and any(one.shape != two.shape for one, two in pairs):
        return "the list is too long or too short: follow the failing case by hand"
    if any(one.shape != two.shape for one, two in pairs):
        return "the shape is wrong: print the shapes of all steps"
    ours, theirs = (torch.cat([one.flatten() for one in several]) for several in (right, wrong))
    if same(ours, theirs.where(theirs > -1000, -torch.inf)):
        return "a large negative number stands for −∞: use -torch.inf"
    rounded = all(isinstance(one, Tensor) and one.dtype in (torch.bfloat16, torch.float16) for one in got)
    if rounded and torch.allclose(ours, theirs, rtol=0.05, atol=0.05):
        return "the numbers are rounded to 16 bits: compute in float32"
    ratios = (theirs / ours)[ours.isfinite() & (ours != 0)]
    if len(ratios) > 1 and (ratio := ratios[0].item()) and same(ours * ratio, theirs):
        return "the sign is wrong" if same(ratio, -1) else f"each number is {ratio:.4g} times the expected one"
    return ""


def difference_of_tuples(expected: Sequence[Any], got: Sequence[Any]) -> str:
    """As `difference`, for results of several values: their number or order, or the only one that is wrong."""
    count = len(expected[0])
    if any(not isinstance(one, list | tuple) or len(one) != count for one in got):
        return f"the number of values is wrong: return {count}"
    for order in list(permutations(range(count)))[1:]:
        if all(same(one, [two[i] for i in order]) for one, two in zip(expected, got)):
            return "the values are in the wrong order: return them in that of the task"
    wrong = [i for i in range(count) if not all(same(one[i], two[i]) for one, two in zip(expected, got))]
    if len(wrong) != 1:
        return ""
    what = difference(*([one[wrong[0]] for one in results] for results in (expected, got)))
    return f"only value {wrong[0] + 1} of {count} is wrong" + (f"; {what}" if what else "")


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
