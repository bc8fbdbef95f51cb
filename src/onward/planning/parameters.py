"""Counts the parameters of a decoder, and the bytes that its cache needs per token."""

import math
import sys
from dataclasses import replace

import torch
from torch import nn

from onward.base.own import own_parts
from onward.checkpoint.source import SizeLimit
from onward.config.decoder import DecoderConfig, at
from onward.model.build import build_block
from onward.model.cache import declared
from onward.model.calls import Kept
from onward.model.decoder import Decoder
from onward.model.experts import ExpertsModule
from onward.model.own import known


def modules(config: DecoderConfig) -> list[tuple[nn.Module, int]]:
    """The modules of a decoder on the meta device: one block of each kind, then the rest, each with its number of
    copies."""
    final_norm = config.final_norm or at(config.norm, config.n_layers - 1)
    with torch.device("meta"), SizeLimit(sys.maxsize):
        rest = Decoder(replace(config, n_layers=1, final_norm=final_norm))
        rest.blocks = nn.ModuleList()
        if rest.layer_inputs is not None:
            rest.layer_inputs = at(config.block, 0).layer_inputs(config)  # type: ignore[attr-defined]  # of all layers
        blocks = [build_block(at(config.block, layers[0]), config, layers[0]) for layers in kinds(config)]
        return [*zip(blocks, map(len, kinds(config))), (rest, 1)]


def kinds(config: DecoderConfig) -> list[list[int]]:
    """Layers by kind of block (the same components), in the order of first appearance."""
    slots, layers_of = (
        (config.block, config.attention, config.mlp, config.norm, config.position),
        dict[object, list[int]](),
    )
    for layer in range(config.n_layers):
        layers_of.setdefault(tuple(at(parts, layer) for parts in slots), []).append(layer)  # type: ignore[type-var]
    return [*layers_of.values()]


def size(module: nn.Module) -> int:
    """Trainable parameters; a routing bias has no gradient and does not count."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def parameters(config: DecoderConfig) -> int:
    """Count the parameters of a decoder; a tied head counts once."""
    return sum(count * size(module) for module, count in modules(config))


def active_parameters(config: DecoderConfig) -> int:
    """Count the parameters that one token uses: all but those of the experts that the token is not assigned to."""
    return sum(count * (size(module) - idle(module)) for module, count in modules(config))


def idle(module: nn.Module) -> int:
    """Parameters of the experts that a token is not assigned to."""
    experts = [m for m in module.modules() if isinstance(m, ExpertsModule)]
    stacks = ((m.part, stack) for m in experts for stack in m.parameters(recurse=False))
    return sum(stack.numel() // part.count * (part.count - part.top_k) for part, stack in stacks)


def biases(config: DecoderConfig) -> str:
    """The layers with a bias, such as `q, k, v, out, mlp, norms`; "none" without one."""
    trained = [name for module, _ in modules(config) for name, p in module.named_parameters() if p.requires_grad]
    names = [name.split(".") for name in trained]
    owners = dict.fromkeys(owner(path) for *path, leaf in names if leaf.endswith("bias"))
    return ", ".join(sorted(owners, key="norms".__eq__)) or "none"


def owner(path: list[str]) -> str:
    if any(name.endswith("norm") for name in path):
        return "norms"
    return "mlp" if path[0] == "mlp" and path[-1] != "router" else path[-1]


def kept(config: DecoderConfig) -> list[Kept]:
    """Return the cache entries and states of each layer, without the trial of parts from outside the package."""
    return known(config) if own_parts(config) else declared(config)


def cache_bytes_per_token(config: DecoderConfig, bytes_per_number: int = 2, length: float = 0) -> int:
    """Compute the bytes that the KV cache needs for one more token of a row that has `length` tokens.

    For self-attention, n_kv_heads * (d_head + d_value) * bytes_per_number in each layer. A layer with a window needs
    none once the row is as long as the window.
    """
    growing = (layer for layer in kept(config) if not 0 < layer.window <= length)
    return bytes_per_number * sum(math.prod(shape) for layer in growing for shape in layer.entries.values())


def state_bytes(config: DecoderConfig, bytes_per_number: int = 2) -> int:
    """Compute the bytes of the recurrent layers' states of one row at one position, which do not depend on the row's
    length. States with their own dtype (fp32) take at least 4 bytes per number."""
    states = [state for layer in kept(config) for state in layer.states.values()]
    return sum(math.prod(shape) * (max(4, bytes_per_number) if own else bytes_per_number) for shape, own in states)
