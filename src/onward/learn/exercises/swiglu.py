"""The feed-forward layer of Llama."""

from random import Random

import torch
from torch import Tensor

from onward.learn.exercise import Exercise, Mistake


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Return down(silu(gate(x)) · up(x)), where silu(z) = z · sigmoid(z). The matrices are stored as in nn.Linear:
    (outputs, inputs).

    x (B, T, D), gate (F, D), up (F, D), down (D, F) -> (B, T, D)
    """
    gates = x @ gate.T
    return (gates * gates.sigmoid() * (x @ up.T)) @ down.T


def draw(pick: Random) -> tuple[Tensor, ...]:
    D, F = pick.randint(2, 3), pick.randint(4, 5)
    return torch.randn(1, pick.randint(1, 2), D), torch.randn(F, D), torch.randn(F, D), torch.randn(D, F)


EXERCISE = Exercise(
    chapter=6,
    answer=swiglu,
    draw=draw,
    mistakes=(
        Mistake(
            "gates = x @ gate.T\n", "gates, up = x @ up.T, gate\n", "gate and up are exchanged: silu applies to gate(x)"
        ),
        Mistake("gates * gates.sigmoid()", "gates.sigmoid()", "the gate is a sigmoid (GLU): silu(z) is z · sigmoid(z)"),
        Mistake("gates * gates.sigmoid()", "torch.nn.functional.gelu(gates)", "the gate is GELU (GEGLU): use silu"),
        Mistake("gates * gates.sigmoid()", "gates.relu()", "the gate is ReLU (ReGLU): use silu"),
        Mistake("gates * gates.sigmoid()", "gates", "the gate has no activation function: apply silu"),
        Mistake(
            "(gates * gates.sigmoid() * (x @ up.T))",
            "torch.nn.functional.silu(gates * (x @ up.T))",
            "silu is applied to the product: apply it only to gate(x)",
        ),
        Mistake(" * (x @ up.T)", "", "up(x) is missing: multiply by it"),
        Mistake("gates.sigmoid() * (x @ up.T)", "gates.sigmoid() + (x @ up.T)", "gate and up are added: multiply them"),
        Mistake(
            "(x @ up.T)", "torch.nn.functional.silu(x @ up.T)", "silu is applied to up(x) too: apply it only to gate(x)"
        ),
        Mistake(
            "gates * gates.sigmoid()",
            'torch.nn.functional.gelu(gates, approximate="tanh")',
            "the gate is the tanh approximation of GELU: use silu",
        ),
    ),
)
