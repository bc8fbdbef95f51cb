"""The draw of next tokens as a PyTorch operation, which a compiled step records as one operation (see `compiled/`).

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onward.kernels.draws import draw, draw_by_kernel


def drawn_tokens(logits: Tensor, factors: Tensor, seeds: Tensor, index: Tensor) -> Tensor:
    """Draw token ids (B,) as `draw_by_kernel` does, from the softmax of logits (B, V) times the inverse temperatures
    `factors` (B,) in fp32 (0 selects the likeliest token); `seeds` and `index`, the token indices, are (B,) in
    int64."""
    drawn = draw_by_kernel(logits, None, factors.tolist(), seeds.tolist(), index.tolist())
    if drawn is not None:
        return drawn
    tokens = draw((logits.float() * factors[:, None]).softmax(-1), seeds, index, 0)
    return torch.where(factors == 0, logits.argmax(-1), tokens)


LIBRARY = torch.library.Library("onward", "FRAGMENT")
LIBRARY.define("drawn_tokens(Tensor logits, Tensor factors, Tensor seeds, Tensor index) -> Tensor")
LIBRARY.impl("drawn_tokens", drawn_tokens, "CompositeExplicitAutograd")
