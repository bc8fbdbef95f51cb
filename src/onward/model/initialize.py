"""Initialization of the weights, in one function."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from onward.config.decoder import DecoderConfig, at


@torch.no_grad()
def initialize(model: nn.Module, config: DecoderConfig, std: float = 0.02) -> None:
    """Draw the weights of a decoder in place, from torch's default generator; on the meta device there are none.

    | parameters                                        | values                                                    |
    | ------------------------------------------------- | --------------------------------------------------------- |
    | `attn.out`, `mlp.down` (the ends of branches)     | normal, std / sqrt(N), N additions to the residual stream |
    | every other matrix, embeddings, stacks of experts | normal, std                                               |
    | biases, sinks                                     | 0                                                         |
    | norms                                             | unchanged: weights 1 - offset, biases 0                   |

    A block with attention and feed-forward adds 2 to N. The division keeps the variance of the residual stream from
    growing with depth (Radford et al. 2019, section 2.3).
    """
    if not next(model.parameters()).is_meta:
        draw(model.named_parameters(), config, std)


def draw(parameters: Iterable[tuple[str, Tensor]], config: DecoderConfig, std: float = 0.02) -> None:
    """Draw the values of a decoder's parameters, given with their names; see `initialize`."""
    additions = sum(at(config.block, layer).additions for layer in range(config.n_layers))
    for name, parameter in parameters:
        if parameter.ndim >= 2:
            ends_branch = name.removesuffix(".weight").endswith(("attn.out", ".down"))
            nn.init.normal_(parameter, std=std / additions**0.5 if ends_branch else std)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
