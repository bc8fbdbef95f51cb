"""A schedule: warm-up and cosine."""

import math
from random import Random

from onward.learn.exercise import Exercise, Mistake


def learning_rate(step: int, steps: int, warmup: int, peak: float, least: float) -> float:
    """Return the learning rate of a step, counted from 0. In the first `warmup` steps it rises linearly, from
    peak / warmup to `peak`. Then it follows half a period of a cosine, from `peak` at step `warmup` down to `least`,
    which it would reach at step `steps`.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    share = (step - warmup) / (steps - warmup)
    return least + (peak - least) * (1 + math.cos(math.pi * share)) / 2


def draw(pick: Random) -> tuple[int, int, int, float, float]:
    steps, warmup = pick.randint(20, 40), pick.randint(3, 6)
    step = pick.randrange(warmup) if pick.random() < 0.4 else pick.randrange(warmup + 1, steps)
    return step, steps, warmup, 1.0, 0.1


EXERCISE = Exercise(
    chapter=8,
    answer=learning_rate,
    draw=draw,
    mistakes=(
        Mistake(
            "(step + 1) / warmup", "step / warmup", "the learning rate of step 0 is 0, a wasted step: use step + 1"
        ),
        Mistake(
            "(step - warmup) / (steps - warmup)",
            "step / steps",
            "the cosine begins at step 0: begin it after the warm-up, (step − warmup) / (steps − warmup)",
        ),
        Mistake("/ (steps - warmup)", "/ steps", "the cosine ends too late: it lasts steps − warmup steps"),
        Mistake("least + (peak - least)", "peak", "the learning rate falls to 0: let it fall to least"),
        Mistake(
            "least + (peak - least)",
            "least + peak",
            "the learning rate begins above the peak: the cosine spans peak − least",
        ),
        Mistake("math.pi * share", "math.pi / 2 * share", "only a quarter of the cosine is used: multiply by π"),
        Mistake("math.pi * share", "2 * math.pi * share", "the learning rate rises again: half a period is π, not 2π"),
        Mistake("1 + math.cos", "1 - math.cos", "the learning rate rises after the warm-up: use 1 + cos"),
        Mistake(
            "(1 + math.cos(math.pi * share)) / 2",
            "(1 - share)",
            "the learning rate falls along a line: use (1 + cos(π share)) / 2",
        ),
        Mistake(
            "    if step < warmup:\n        return peak * (step + 1) / warmup\n",
            "",
            "the warm-up is missing: return peak · (step + 1) / warmup in the first steps",
        ),
        Mistake("math.pi * share", "share", "the cosine covers an angle of only 1: multiply the share by π"),
        Mistake(
            "peak * (step + 1) / warmup",
            "least + (peak - least) * (step + 1) / warmup",
            "the warm-up begins at least: begin it at 0, peak · (step + 1) / warmup",
        ),
        Mistake("share)) / 2", "share))", "the learning rate begins at almost twice the peak: divide 1 + cos by 2"),
        Mistake(
            "(1 + math.cos(math.pi * share)) / 2",
            "math.cos(math.pi * share)",
            "the learning rate falls below least, since the cosine falls to −1: use (1 + cos) / 2",
        ),
    ),
)
