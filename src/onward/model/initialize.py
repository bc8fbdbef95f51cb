"""Fresh weights, all in one function."""

from typing import TYPE_CHECKING

import torch
from torch import nn

from onward.model.config import at

if TYPE_CHECKING:
    from onward.model.decoder import Decoder


@torch.no_grad()
def initialize(model: "Decoder", std: float = 0.02) -> None:
    """Draw the weights of a decoder from torch's default generator.

    | parameters                                    | values                                                   |
    | --------------------------------------------- | -------------------------------------------------------- |
    | `attn.out`, `mlp.down` (the ends of branches)  | normal, std / sqrt(N), N additions to the residual stream |
    | every other matrix, embeddings, stacks of experts | normal, std                                         |
    | biases, sinks                                  | 0                                                        |
    | norms                                          | as made: 1 (0 where 1 is added), biases 0                |

    A block with attention and feed-forward adds 2 to N. The division keeps the variance of the residual stream from
    growing with depth (Radford et al. 2019, section 2.3).
    """
    config = model.config
    additions = sum(at(config.block, layer).additions for layer in range(config.n_layers))
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            ends_branch = name.removesuffix(".weight").endswith(("attn.out", ".down"))
            nn.init.normal_(parameter, std=std / additions**0.5 if ends_branch else std)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
