"""The doctor: finds the usual mistakes in any decoder of which only "token ids in, logits out" is known."""

from onward.inspection.doctor.checks import doctor
from onward.inspection.doctor.finding import Finding

__all__ = ["Finding", "doctor"]
