"""Mutants of the styles of decoders: a kind of bug, and in each style where it can stand the line and what is there
instead. A kind's name says what is wrong."""

from support.mutants.attention import ATTENTION
from support.mutants.layers import LAYERS
from support.mutants.positions import POSITIONS
from support.mutants.training import TRAINING

KINDS = ATTENTION | POSITIONS | LAYERS | TRAINING  # {kind: {style: "line => line instead"}}
MUTANTS = [(style, kind) for kind, styles in KINDS.items() for style in styles]
