"""Numbers in texts."""

import math
import re

NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


def last_number(text: str) -> float | None:
    """The last number in a text, such as 1234.5 for "1,234.5"; None if it has none."""
    numbers = NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None


def same_number(text: str, expected: str) -> bool:
    """Whether the last numbers in both texts are equal, to a relative or absolute tolerance of 1e-9."""
    value, right = last_number(text), last_number(expected)
    return value is not None and right is not None and math.isclose(value, right, abs_tol=1e-9)
