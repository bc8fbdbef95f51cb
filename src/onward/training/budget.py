"""The time of a run that was given one. Steps are fixed at the start; what is optional is left out where time is short.

Does not import torch.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import perf_counter


@dataclass(frozen=True)
class Costs:
    """Seconds that the parts of a run take."""

    step: float
    validation: float = 0.0  # of a part of the validation text, with the save and the sample that come with it
    evaluation: float = 0.0  # of the whole validation text, once after the last step


@dataclass
class Budget:
    """The end of a run's time by a clock in seconds, and the costs of what is left to do, measured while it runs."""

    end: float
    costs: Costs
    clock: Callable[[], float] = perf_counter

    def note_step(self, seconds: float) -> None:
        """Take account of a step."""
        self.costs = replace(self.costs, step=0.9 * self.costs.step + 0.1 * seconds)

    @contextmanager
    def validating(self) -> Iterator[None]:
        """A context that takes account of the validation made in it."""
        start = self.clock()
        yield
        self.costs = replace(self.costs, validation=self.clock() - start)

    def affords_validation(self, steps_left: int) -> bool:
        """Whether a validation fits beside the steps that are left, the validation after them and the evaluation."""
        c = self.costs
        return self.clock() + steps_left * c.step + 2 * c.validation + c.evaluation <= self.end
