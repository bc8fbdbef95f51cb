"""The estimated time of verifying draft tokens, by the kind of a model's weights."""

from __future__ import annotations

from typing import Any

import torch

from onward.config.decoder import at
from onward.config.feedforward_parts import Experts
from onward.kernels.available import unavailable
from onward.model.decoder import Decoder

COST = 0.06  # time of verifying a token, relative to a step; measured for dense models of 30 and 124 million parameters
EXPERTS = 0.5  # COST in a mixture of experts, where each token reads its own experts
INTEGERS = 0.3  # COST if rounds_rows_apart: fewer than four rows read the integer weights one after the other


def cost_of(model: Decoder) -> float:
    """Return the estimated time of verifying one more token, relative to a step."""
    if rounds_rows_apart(model):
        return INTEGERS
    mlps = (at(model.config.mlp, layer) for layer in range(model.config.n_layers))
    return EXPERTS if any(isinstance(mlp, Experts) for mlp in mlps) else COST


def rounds_rows_apart(model: Decoder) -> bool:
    """Return whether a matmul of four or more rows rounds differently from one of fewer rows, as with integer weights
    unless a CPU's matrix unit multiplies them."""
    if not any(hasattr(module, "precision") for module in model.blocks[-1].modules()):
        return False  # avoids a walk over all modules
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "precision")]
    sizes = frozenset((layer.in_features, layer.out_features) for layer in layers)
    return not (model.device.type == "cpu" and has_fast_rows(model.dtype, sizes))


def has_fast_rows(dtype: torch.dtype, sizes: frozenset[tuple[int, int]]) -> bool:
    """Return whether the matrix unit of this CPU multiplies inputs in `dtype` with weights of these `sizes` (inputs,
    outputs): then a few rows take little longer than one, and each gets the same bits as alone."""
    if dtype != torch.bfloat16 or unavailable():
        return False
    from onward.kernels.llvm import matrix, matrix_products

    return matrix.has_matrix_unit(None) and all(matrix_products.supports(*size) for size in sizes)
