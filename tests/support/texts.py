"""Two texts that differ in one token, and the logits of a model for them."""

import torch
from torch import Tensor

import onward

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]
OTHERS = [3, 1, 4, 7, 5, 9, 2, 6]


def run(model: onward.Decoder, tokens: list[int] = TOKENS) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens]))[0]
