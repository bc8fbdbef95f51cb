"""Mutants of the styles of decoders: a kind of bug, and, for each style in which it is possible, the line and its
replacement. A kind's name describes the mistake."""

from support.mutants.attention import ATTENTION
from support.mutants.layers import LAYERS
from support.mutants.positions import POSITIONS
from support.mutants.training import TRAINING

KINDS = ATTENTION | POSITIONS | LAYERS | TRAINING  # {kind: {style: "line => line instead"}}
MUTANTS = [(style, kind) for kind, styles in KINDS.items() for style in styles]
