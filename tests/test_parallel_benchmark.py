"""benchmarks/parallel.py: the share of communication that computation hides, from the spans of a trace."""

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.parallel import communication


def test_hidden_share_is_that_of_collectives_within_operations() -> None:
    spans = [("gloo:all_reduce", 0, 10), ("gloo:all_reduce", 5, 20), ("aten::mm", 4, 9), ("aten::add", 8, 12)]
    spans += [("aten::mm", 18, 40), ("Optimizer.step", 0, 40)]
    events = [SimpleNamespace(name=name, time_range=SimpleNamespace(start=a, end=b)) for name, a, b in spans]
    trace: Any = SimpleNamespace(events=lambda: events)
    assert communication(trace, 40e-6) == pytest.approx((20 / 40, (8 + 2) / 20))
