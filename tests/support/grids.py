"""Grids of cases: `make test` runs a part of them, `make test-all` runs all."""

from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet


def thinned(*axes: Mapping[str, Any] | Iterable[Any], times: int = 1) -> list[ParameterSet]:
    """All combinations of the values of several axes, as cases for `pytest.mark.parametrize`.

    `make test` runs the cases whose sum of indices, modulo the length of the last axis, is less than `times`: each
    value of the first axis is combined with `times` values of the last axis, in rotation. The other cases are marked
    `long`.
    """
    named = [
        list(axis.items()) if isinstance(axis, Mapping) else [(str(value), value) for value in axis] for axis in axes
    ]
    cases = []
    for indices in product(*(range(len(axis)) for axis in named)):
        chosen = [axis[index] for axis, index in zip(named, indices)]
        marks = () if sum(indices) % len(named[-1]) < times else pytest.mark.long
        cases.append(
            pytest.param(*(value for _, value in chosen), id="-".join(name for name, _ in chosen), marks=marks)
        )
    return cases


def first(count: int, cases: Iterable[Any]) -> list[ParameterSet]:
    """The cases, for `pytest.mark.parametrize`; all but the first `count` are marked `long`."""
    return [pytest.param(case, marks=pytest.mark.long if i >= count else ()) for i, case in enumerate(cases)]
