"""The reference model of a method: when its log-probabilities are computed, and whether its weights change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from onward.base.arguments import Range
from onward.base.fields import Part
from onward.config.ranges import Size
from onward.training.methods.method import Base

if TYPE_CHECKING:
    from onward.training.losses.answers import Reference


class ReferenceModel(Part):
    """The base class of the options for the reference model, with which a method compares the trained model; each
    reference starts as a copy of the model at the start of the run."""

    def open(self, base: Base) -> Reference:
        """Return the reference for the loss; `base` loads the base model of the run."""
        from onward.training.losses.answers import Reference

        return Reference(base.load)


@dataclass(frozen=True)
class Online(ReferenceModel, kind="online"):
    """A reference that is the model at the start of the run; its log-probabilities are computed in each step."""


@dataclass(frozen=True)
class Kept(ReferenceModel, kind="kept"):
    """A reference that is the model at the start of the run; its log-probabilities are computed once, before training,
    and stored with the examples."""


@dataclass(frozen=True)
class Synced(ReferenceModel, kind="synced"):
    """A reference that follows the trained model (TR-DPO, Gorbatovski et al. 2024): every `every` steps, its weights
    become `share` times the trained weights plus 1 - `share` times their old values. For runs that train the weights,
    not adapters."""

    every: Size = 512  # steps between updates of the reference
    share: Annotated[float, Range(1e-6, 1)] = 0.6  # weight of the trained model's values in an update

    def open(self, base: Base) -> Reference:
        from onward.training.losses.answers import SyncedReference

        return SyncedReference(base.load, self.every, self.share)
