"""Rotary positions that rotate neighboring elements equal Onward's with reordered rows of the projections."""

import pytest
import torch
from torch import Tensor

from onward import Rotary
from onward.families import interleaved
from onward.kernels.operations import rotate
from onward.model.context import angles_at, rotary

D, HEADS, E = 12, 3, 8


def turn_neighbors(x: Tensor, positions: Tensor, rope_dim: int) -> Tensor:
    """Rotate elements 2 i and 2 i + 1 of x (B, T, H, E) together, as in the formula of RoFormer."""
    y, angles = x.clone(), angles_at(positions, 10_000.0, rope_dim)[:, :, None]
    a, b = x[..., 0:rope_dim:2], x[..., 1:rope_dim:2]
    y[..., 0:rope_dim:2], y[..., 1:rope_dim:2] = (
        a * angles.cos() - b * angles.sin(),
        b * angles.cos() + a * angles.sin(),
    )
    return y


@pytest.mark.parametrize("rope_dim", [8, 4])
def test_interleaved_rotary_has_the_same_scores_through_its_weights(rope_dim: int) -> None:
    torch.manual_seed(0)
    x, positions = torch.randn(1, 5, D, dtype=torch.float64), torch.arange(3, 8)[None].double()
    weights = torch.randn(2, HEADS * E, D, dtype=torch.float64)
    into, back = interleaved(E, rope_dim)
    theirs = [turn_neighbors((x @ w.T).unflatten(-1, (HEADS, E)), positions, rope_dim) for w in weights]
    cos, sin = rotary(Rotary(), rope_dim, positions, positions)
    ours = [rotate((x @ into(w).T).unflatten(-1, (HEADS, E)), cos, sin) for w in weights]
    scores = [torch.einsum("bqhe,bkhe->bhqk", *pair) for pair in (theirs, ours)]
    torch.testing.assert_close(*scores, rtol=0, atol=1e-12)
    bias = torch.arange(HEADS * E)
    assert torch.equal(back(into(weights[0])), weights[0])
    assert torch.equal(back(into(bias)), bias)
    assert not torch.equal(into(bias), bias)
