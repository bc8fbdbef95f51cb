"""The doctor: a set of checks that finds common mistakes in any decoder that maps token ids to logits."""

from onward.inspection.doctor.checks import doctor
from onward.inspection.doctor.finding import Finding

__all__ = ["Finding", "doctor"]
