"""The doctor: a set of checks that finds the usual mistakes in any decoder, given only that it maps token ids to
logits."""

from onward.inspection.doctor.checks import doctor
from onward.inspection.doctor.finding import Finding

__all__ = ["Finding", "doctor"]
