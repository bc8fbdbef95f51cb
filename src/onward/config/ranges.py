"""The ranges of numbers in parts and options, for annotations of their fields."""

from typing import Annotated

from onward.base.arguments import Range

MOST = 2**31 - 1
Size = Annotated[int, Range(1, MOST)]
SizeOrZero = Annotated[int, Range(0, MOST)]  # the field's comment explains 0
Epsilon = Annotated[float, Range(1e-30, 1)]  # of a norm
Factor = Annotated[float, Range(1e-6, 1e6)]  # multiplies or divides activations, scores or frequencies
Positive = Annotated[float, Range(1e-6, 1e6)]
NotNegative = Annotated[float, Range(0, 1e15)]
Share = Annotated[float, Range(0, 1)]
BelowOne = Annotated[float, Range(0, 0.999999)]
Rate = Annotated[float, Range(0, 0.999)]  # of dropout
Offset = Annotated[float, Range(-1e6, 1e6)]  # offset of a norm's weight
Base = Annotated[float, Range(2, 1e30)]  # base of the wavelengths of sinusoidal and rotary positions
