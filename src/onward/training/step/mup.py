"""muP: hyperparameters chosen at one width transfer to every width (Yang et al. 2022, arXiv:2203.03466, tables 3 and
8).

Multiplying the output of a matrix by a factor gives the same function, and with Adam the same training, as multiplying
its initial weights and its learning rate by this factor. Therefore the factors of logits and scores are also moved into
weights: the decoder's configuration is unchanged, and every program that loads models of the preset can load the
result.

With m = d_model / base, relative to m = 1:

| parameters                                      | initial weights | learning rate |
| ----------------------------------------------- | --------------- | ------------- |
| embeddings, biases, norms                       | 1               | 1             |
| matrices whose inputs and outputs grow          | m ** -1/2       | 1 / m         |
| matrices whose inputs grow (a router)           | 1 / m           | 1 / m         |
| matrices whose inputs do not grow               | 1               | 1             |
| the final norm: logits / m                      | 1 / m           | 1 / m         |
| the norm of queries, or else their projection:  | times           | times         |
| scores / d_head instead of / d_head ** 1/2      | d_head ** -1/2  | d_head ** -1/2 |

The factor of the scores is relative to the head size of the preset at the base width, where all factors are 1. If
embeddings are scaled by d_model ** 1/2 (Gemma), a tied embedding has m ** -1/2 in both columns, and the final norm has
the remaining factor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from onward.base.errors import UserError
from onward.config.decoder import DecoderConfig, SelfAttention, at
from onward.model.decoder import Decoder
from onward.training.config import RunConfig
from onward.training.presets import decoder, resize
from onward.training.step.optimizer import is_matrix


@dataclass(frozen=True)
class Factors:
    """The factors of a parameter's initial weights and learning rate in muP, which transfers hyperparameters from a
    narrow model to a wider one."""

    init: float = 1.0
    rate: float = 1.0

    def times(self, factor: float) -> Factors:
        return replace(self, init=self.init * factor, rate=self.rate * factor)


def factors(config: DecoderConfig, base: int, base_head: float) -> dict[str, Factors]:
    """Compute the muP factors of each parameter of a decoder, by name, for hyperparameters that were chosen at a width
    `base`, where attention heads have the width `base_head`.

    A dimension of a parameter counts as growing if it is larger in the same decoder with twice the width. Raises a
    UserError for a decoder whose logits cannot be scaled by weights (its head is tied to the embedding, and its final
    norm has no weight), and for one whose scores cannot be scaled (a norm of queries without a weight).
    """
    m, twice = config.d_model / base, resize(config, {"d_model": 2 * config.d_model})
    with torch.device("meta"):
        shapes, wide = (
            {n: (p.shape, is_matrix(n, p)) for n, p in Decoder(c).named_parameters()} for c in (config, twice)
        )
    result: dict[str, Factors] = {}
    for name, (shape, matrix) in shapes.items():
        grown = [a != b for a, b in zip(shape, wide[name][0])]
        if not matrix or not grown[-1] or name.startswith(("embed.", "position.", "head.")):
            result[name] = Factors()
        else:
            result[name] = Factors(m**-0.5 if grown[-2] else 1 / m, 1 / m)
    embed = m**-0.5 if twice.embed_scale != config.embed_scale else 1.0
    result["embed.weight"] = Factors(embed, embed)
    if twice.d_embed != config.d_embed:  # otherwise (fixed d_embed) the projection before the head is scaled
        names = ["norm.weight", "norm.bias"] if "norm.weight" in result else ["head.weight"]
        last = [name for name in names if name in result]
        if not last:
            raise UserError(
                "Cannot scale logits for mup, because this decoder's head is tied and its final norm has no weight: "
                "leave out mup"
            )
        for name in last:
            result[name] = Factors().times(1 / (m * (embed if config.tied else 1.0)))
    for layer in range(config.n_layers):
        part = at(config.attention, layer)
        if isinstance(part, SelfAttention) and not part.d_head:  # an explicit d_head does not grow
            if part.qk_norm != "none" and not getattr(at(config.norm, layer), "weight", True):
                raise UserError(
                    "Cannot scale scores for mup, because the norm of queries has no weight (norm.weight no): leave "
                    "out mup"
                )
            queries = f"blocks.{layer}.attn.q"
            names = [n for n in result if n.startswith(f"{queries}_norm.")] or [f"{queries}.weight", f"{queries}.bias"]
            for name in result.keys() & {*names}:
                result[name] = result[name].times((base_head / config.d_head) ** 0.5)
    return result


def factors_of(config: RunConfig, model: DecoderConfig) -> Mapping[str, Factors]:
    """Return the muP factors of each parameter of a run's model, by name; {} if the run does not use muP."""
    if not config.mup:
        return {}
    preset = decoder(config.preset, model.vocab_size, {})
    grows = resize(preset, {"d_model": 2 * preset.d_model}).d_head != preset.d_head
    return factors(model, config.mup, preset.d_head * (config.mup / preset.d_model if grows else 1))


@torch.no_grad()
def scale_weights(model: Decoder, scaled: Mapping[str, Factors]) -> None:
    """Multiply the newly initialized weights of a model by their muP factors `scaled`, given by parameter name. In a
    norm that multiplies by weight + offset, this sum is scaled."""
    for name, parameter in model.named_parameters():
        if name in scaled and not math.isclose(scaled[name].init, 1):
            offset = getattr(model.get_submodule(name.rpartition(".")[0]), "offset", 0.0) * name.endswith("weight")
            parameter.add_(offset).mul_(scaled[name].init).sub_(offset)
