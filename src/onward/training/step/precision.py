"""Mixed precision: matrix products in bf16 or fp16, weights in fp32 (Micikevicius et al. 2018)."""

from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch

from onward.base.errors import UserError

Precision = Literal["fp32", "bf16", "fp16"]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Return a context manager for matrix products in "bf16" or "fp16"; in "fp32", they use the dtype of the weights.
    Raises a UserError for other precisions."""
    if precision not in ("fp32", *DTYPES):
        raise UserError(f"precision is {precision!r}: it must be fp32, bf16 or fp16")
    return nullcontext() if precision == "fp32" else torch.autocast(device.type, DTYPES[precision])


def grad_scaler(precision: Precision, device: torch.device) -> torch.amp.GradScaler:
    """Return the loss scaler that keeps fp16 gradients from underflowing to 0; disabled in other precisions."""
    return torch.amp.GradScaler(device.type, enabled=precision == "fp16")
