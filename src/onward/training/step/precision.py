"""Mixed precision: matrix products in bf16 or fp16, weights in fp32 (Micikevicius et al. 2018)."""

from contextlib import AbstractContextManager, nullcontext

import torch

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Return a context manager for matrix products in "bf16" or "fp16"; with other precisions, they use the dtype of
    the weights."""
    return torch.autocast(device.type, PRECISIONS[precision]) if precision in PRECISIONS else nullcontext()


def grad_scaler(precision: str, device: torch.device) -> torch.amp.GradScaler:
    """Return the loss scaler that keeps fp16 gradients from underflowing to 0; disabled in other precisions."""
    return torch.amp.GradScaler(device.type, enabled=precision == "fp16")
