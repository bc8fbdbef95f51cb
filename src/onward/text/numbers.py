"""Numbers in texts."""

import math
import re

NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


def last_number(text: str) -> float | None:
    """Return the last number written in a text, such as 1234.5 for "1,234.5"; None if it has none. Used to find the
    result in a model's answer."""
    numbers = NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None


def same_number(text: str, expected: str) -> bool:
    """Return whether the last numbers in a text and in the expected text are equal, to 1e-9; False if either has
    none."""
    value, right = last_number(text), last_number(expected)
    return value is not None and right is not None and math.isclose(value, right, abs_tol=1e-9)
