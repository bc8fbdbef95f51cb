"""Counts the floating-point operations of a decoder, by part. The product of a vector with a weight (O, I) takes 2 O I
operations.

Products with weights, of queries with keys, and of attention weights with values are counted. Norms, activations and
the softmax are not: their time depends on the memory they read, not on their arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from onward.base.own import own_parts
from onward.config.decoder import Attention, DecoderConfig, at
from onward.config.latent_parts import index_flops, most_keys
from onward.model.experts import ExpertsModule
from onward.planning.counted import counted
from onward.planning.parameters import modules

NO_PRODUCTS = "embed.", "position.", "layer_inputs.embed."  # lookup tables
ORDER = "embedding", "positions", "attention", "feed-forward", "experts", "router", "shared expert", "norms", "head"


@dataclass(frozen=True)
class PartSize:
    """The parameters and the operations per token of one part of a decoder, such as its attention, summed over all
    layers."""

    name: str
    parameters: int  # trainable parameters; shared parameters count once
    active: int  # parameters that one token uses
    flops: int  # for one token, in products with the part's weights


def part_sizes(config: DecoderConfig) -> list[PartSize]:
    """Return the sizes of a decoder's parts, in the order in which a token passes through them. A tied head counts no
    parameters, because they are the embedding's, but all of its operations."""
    sums: dict[str, list[int]] = {}
    for module, count in modules(config):
        for name, numbers in sized(module):
            total = sums.setdefault(name, [0, 0, 0])
            sums[name] = [a + count * b for a, b in zip(total, numbers)]
    if own_parts(config):
        sums = {name: [*numbers[:2], 0] for name, numbers in sums.items()}
        for path, flops in counted(config).modules.items():
            sums.setdefault(kind_of(path, config), [0, 0, 0])[2] += flops
        sums = {name: numbers for name, numbers in sums.items() if any(numbers)}
    order = {name: place for place, name in enumerate(ORDER)}
    return [PartSize(name, *sums[name]) for name in sorted(sums, key=lambda name: order.get(name, len(order)))]


def sized(module: nn.Module) -> Iterator[tuple[str, tuple[int, int, int]]]:
    """For each parameter of a block, or of a decoder without blocks: its kind of component, and (elements, elements
    that one token uses, operations per token). Both numbers of elements are 0 for a parameter that is not trained or
    was counted before."""
    experts = {
        id(stack): m.part for m in module.modules() if isinstance(m, ExpertsModule) for stack in m.parameters(False)
    }
    seen = set[int]()
    for name, parameter in module.named_parameters(remove_duplicate=False):
        kind, size = part_of(name, id(parameter) in experts), parameter.numel()
        if part := experts.get(id(parameter)):
            size = size // part.count * part.top_k
        is_matrix = parameter.ndim >= 2 and not name.endswith("bias") and not name.startswith(NO_PRODUCTS)
        owned = parameter.requires_grad and id(parameter) not in seen
        seen.add(id(parameter))
        yield kind, (parameter.numel() * owned, size * owned, 2 * size * is_matrix)


def kind_of(path: str, config: DecoderConfig) -> str:
    """The kind of component of a module of a decoder with parts from outside the package."""
    blocks, _, rest = path.partition(".")
    inside = rest.partition(".")[2] if blocks == "blocks" else path
    return part_of(inside, path in counted(config).experts)


def part_of(name: str, in_stack: bool) -> str:
    """The kind of component of a parameter; `in_stack`: it is a stack of the weights of experts."""
    path = name.split(".")
    if any(word.endswith("norm") for word in path):
        return "norms"
    if path[0] == "mlp":
        inner = {"router": "router", "shared": "shared expert"}.get(path[1], "feed-forward")
        return "experts" if in_stack else inner
    known = {"layer_inputs": "embedding", "attn": "attention", "head": "head", "position": "positions"}
    return "embedding" if path[0].startswith("embed") else known.get(path[0], "other")


def weight_flops(config: DecoderConfig) -> int:
    """Count the operations per token of a forward pass in products with weights, the output head included."""
    return sum(part.flops for part in part_sizes(config))


def attention_flops(config: DecoderConfig, keys: float, decoding: bool = False) -> float:
    """Count the operations per token, summed over layers, of attention to `keys` keys and values; a layer with a window
    or an indexer may attend to fewer keys, and recurrent layers change and read their states. With `decoding`, the keys
    are in a cache, so latent attention works on its latents."""
    total = 0.0
    for part, states, index, pair in layer_flops(config, decoding):
        total += states + index * keys + pair * min(keys, most_keys(part, config) or keys)
    return total


def layer_flops(config: DecoderConfig, decoding: bool = False) -> list[tuple[Attention, int, int, int]]:
    """Return for each layer its attention part, and its operations on states per token, of an indexer per key, and per
    pair of a query and a key. For parts from outside the package, operations on states are included in those of the
    products with weights, and operations of an indexer in those of pairs."""
    parts = [at(config.attention, layer) for layer in range(config.n_layers)]
    if own_parts(config):
        return [(part, 0, 0, pair) for part, pair in zip(parts, counted(config).pairs)]
    return [(part, part.state_flops(config), index_flops(part), part.key_flops(config, decoding)) for part in parts]


def flops_per_token(config: DecoderConfig, keys: float) -> float:
    """Count the operations of the forward pass for a token that attends to `keys` keys, logits included."""
    return weight_flops(config) + attention_flops(config, keys)


def causal_attention_flops(config: DecoderConfig, length: int) -> float:
    """Count the operations per token of causal attention: the mean over a text of `length` tokens, each of which
    attends to itself and the tokens before it, within the window."""
    total = 0.0
    for part, states, index, pair in layer_flops(config):
        total += states + index * mean_keys(length)
        total += pair * mean_keys(length, most_keys(part, config), part.chunked)
    return total


def mean_keys(length: int, window: int = 0, chunked: bool = False) -> float:
    """Mean number of keys that the tokens of a text attend to."""
    most = min(window or length, length)
    if chunked:
        whole, rest = divmod(length, most)
        return (whole * most * (most + 1) + rest * (rest + 1)) / (2 * length)
    return most - most * (most - 1) / (2 * length)


def training_flops(config: DecoderConfig, length: int, recompute: bool = False) -> float:
    """Count the operations per token of a training step on texts of `length` tokens: three times those of the forward
    pass, since the backward pass computes two gradients for each product. With `recompute`, blocks have a second
    forward pass."""
    head = sum(part.flops for part in part_sizes(config) if part.name == "head")
    forward = weight_flops(config) + causal_attention_flops(config, length)
    return 3 * forward + (forward - head if recompute else 0)
