"""Quantized layers under the names in a family's files: which files can store them, and which layers they are."""

from collections.abc import Mapping

from torch import Tensor

from onward.checkpoint.names import rows
from onward.checkpoint.packed import moves_rows
from onward.config.decoder import DecoderConfig
from onward.families import Names
from onward.transforms.quantize import Precision, QuantizedLinear


def packable(family: Names, config: DecoderConfig, ours: Mapping[str, Tensor | QuantizedLinear]) -> bool:
    """Whether a family's files can store the quantized layers: each as one tensor, or as rows of one tensor together
    with layers of the same precision."""
    for their, names, _, back in rows(family, config, ours):
        parts = [ours[name] for name in names]
        layers = [part for part in parts if isinstance(part, QuantizedLinear)]
        if layers and not (
            isinstance(their, str)
            and len({layer.precision for layer in layers}) == 1
            and len(layers) == len(parts)
            and moves_rows(back, sum(layer.out_features for layer in layers))
        ):
            return False
    return True


def layers_of(
    family: Names, config: DecoderConfig, ours: Mapping[str, Tensor | QuantizedLinear]
) -> tuple[dict[str, Precision], list[str]]:
    """({name in the files: precision} of quantized layers, names in the files of the other linear layers)."""
    quantized, plain = dict[str, Precision](), list[str]()
    for their, names, _, _ in rows(family, config, ours):
        first, layers = (
            ours[names[0]],
            [str(name).removesuffix(".weight") for name in ([their] if isinstance(their, str) else their)],
        )
        if isinstance(first, QuantizedLinear):
            quantized |= dict.fromkeys(layers, first.precision)
        elif first.ndim > 1 and not names[0].startswith(("embed.", "position.")):
            plain += layers
    return quantized, plain
