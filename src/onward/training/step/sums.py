"""The sums that a loss returns."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from onward.base.errors import UserError

Sums = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Mapping[str, Tensor]]


def two_sums(result: Any, function: Any) -> Sums:
    """Return the result of a user's loss `function`. Raises a UserError unless the result is two sums, each a tensor
    with one number, optionally with a dict of further sums."""
    numbers = result[:2] if isinstance(result, tuple) else ()
    table = result[2] if len(numbers) == 2 and len(result) == 3 else {}
    single = [one for one in numbers if isinstance(one, Tensor) and one.numel() == 1]
    if len(single) == 2 and len(result) < 4 and isinstance(table, Mapping):
        return result  # type: ignore[no-any-return]
    returned = f"a tuple of {len(result)}" if isinstance(result, tuple) else f"a {type(result).__name__}"
    name = getattr(function, "__name__", type(function).__name__)
    raise UserError(
        f"The loss {name} returned {returned} instead of two sums over the targets, tensors with one number each: "
        "return (loss, loss.detach()), as sums, not means"
    )
