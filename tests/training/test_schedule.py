"""Learning rate schedules."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward.training.step.schedule import FALL, Schedule, extent, lr_factor

shares = st.floats(0, 1)
extents = st.floats(0, 1, exclude_max=True) | st.integers(1, 600)
courses = given(
    kind=st.sampled_from(list(FALL)), steps=st.integers(1, 500), warmup=extents, final=shares, decay=extents
)


@courses
def test_learning_rate_rises_falls_and_ends_exactly(
    kind: Schedule, steps: int, warmup: float, final: float, decay: float
) -> None:
    course = [lr_factor(kind, step, steps, warmup, final, decay) for step in range(steps)]
    rise = min(extent(warmup, steps), steps - 1)
    assert all(0 < value <= 1 for value in course[: rise + 1])
    assert course[rise] == 1
    assert all(a < b for a, b in pairwise(course[: rise + 1]))
    assert all(a >= b >= 0 for a, b in pairwise(course[rise:]))
    assert kind == "constant" or rise == steps - 1 or course[-1] == final


@courses
def test_stable_lasts_until_the_last_share(
    kind: Schedule, steps: int, warmup: float, final: float, decay: float
) -> None:
    course = [lr_factor("wsd", step, steps, warmup, final / 2, decay) for step in range(steps)]
    rise = min(extent(warmup, steps), steps - 1)
    falling = sum(value < 1 for value in course[rise:])
    assert falling == min(max(1, extent(decay, steps)), steps - 1 - rise)


@pytest.mark.parametrize(
    ("kind", "course"),
    {
        "constant": [0.5, 1, 1, 1, 1, 1],
        "linear": [0.5, 1, 0.8, 0.6, 0.4, 0.2],
        "cosine": [0.5, 1, 0.2 + 0.8 * 0.85355339, 0.6, 0.2 + 0.8 * 0.14644661, 0.2],
        "wsd": [0.5, 1, 1, 1, 0.6, 0.2],
    }.items(),
)
def test_the_courses_of_six_steps(kind: Schedule, course: list[float]) -> None:
    assert [lr_factor(kind, step, 6, 1 / 6, 0.2, 1 / 3) for step in range(6)] == pytest.approx(course)


@given(warmup=st.integers(0, 50), stable=st.integers(1, 50), decay=st.integers(1, 50))
def test_the_steps_before_the_decay_do_not_depend_on_the_number_of_steps(warmup: int, stable: int, decay: int) -> None:
    known, steps = warmup + stable, warmup + stable + decay
    fixed = [lr_factor("wsd", step, steps, warmup, 0.1, decay) for step in range(steps)]
    assert [lr_factor("wsd", step, 0, warmup, 0.1, 0.4) for step in range(known)] == fixed[:known]
    assert fixed[known - 1] == 1 > fixed[known]
