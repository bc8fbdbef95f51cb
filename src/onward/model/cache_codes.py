"""The int8 codes of the vectors of a quantized cache.

Shapes: E width of a vector.
"""

import torch
from torch import Tensor


def quantize(vectors: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize vectors (..., E) of a cache to int8: return codes (..., E), and scales (..., 1) in `dtype`. The error of
    code * scale is at most scale / 2."""
    vectors = vectors.to(torch.promote_types(vectors.dtype, torch.float32))
    scale = (vectors.abs().amax(-1, keepdim=True) / 127).to(dtype).clamp(min=torch.finfo(dtype).tiny)
    return (vectors / scale).round().clamp(-127, 127).to(torch.int8), scale
