"""onward quantize: the linear layers of a model as integers, saved as a folder."""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import quote
from typing import ClassVar, Literal

from onward.base.errors import UserError
from onward.cli.shared.options import parse
from onward.cli.shared.output import console, print_json, print_next, print_table

ABOUT = """\
Quantize the weights of a model's linear layers to int8, with a scale per output, or int4, with a scale per 32 inputs.
Activations are not quantized. Onward reads the resulting folder; transformers reads it with the compressed-tensors
library.

examples:
  onward quantize runs/mybook runs/mybook-int8
  onward quantize runs/mybook runs/mybook-int4 --to int4 --errors
  onward evaluate runs/mybook other.txt --quantize int4     the loss with int4 weights, without writing a folder
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `onward quantize`, which stores weights as integers."""

    positional: ClassVar[tuple[str, ...]] = ("model", "out")
    model: str  # folder of the model, or its name on the hub
    out: str  # folder to write the model to
    to: Literal["int8", "int4"] = "int8"  # precision of the weights
    errors: bool = False  # also print the quantization error of each layer's weight, largest first
    allow_nonfinite: bool = False  # write a model even if some weights are NaN or infinite
    revision: str = ""  # branch, tag or commit of a model on the hub; default: main
    json: bool = False  # print the result as JSON


def main(argv: Sequence[str]) -> None:
    options = parse(Options, argv, prog="onward quantize", about=ABOUT)
    if os.path.lexists(options.out):
        raise UserError(f"{options.out} exists: choose another folder for the quantized model")
    import onward
    from onward.base.files import atomic_write
    from onward.hub.folder import locate
    from onward.transforms.quantize import QuantizedLinear, layer_errors, quantized_bytes

    folder = locate(options.model, options.revision)
    load = lambda precision: onward.load(
        folder, device="cpu", quantize=precision, allow_nonfinite=options.allow_nonfinite
    )
    lm = load(options.to)
    layers = {name: m for name, m in lm.model.named_modules() if isinstance(m, QuantizedLinear)}
    if not layers:
        advice = ": choose --to int8" if options.to == "int4" else ""
        raise UserError(f"no linear layer of {options.model} can be quantized to {options.to}{advice}")
    with atomic_write(Path(options.out)) as new:
        onward.save(lm, new)
    of_layers = layer_errors(load(None).model, lm.model) if options.errors else []
    size, before = quantized_bytes(lm.model)
    errors = [asdict(error) for error in of_layers]
    if options.json:
        figures = {"layers": len(layers), "bytes": size, "bytes_before": before, "errors": errors}
        print_json({"model": options.model, "out": options.out, **figures})
        return
    if errors:
        print_table(errors)
    console.print(
        f"{options.out}: {len(layers)} linear layers as {options.to}; {size / 1e6:,.1f} MB of weights instead of "
        f"{before / 1e6:,.1f}, {size / before:.0%}",
        markup=False,
        soft_wrap=True,
    )
    print_next(f'onward generate {quote(options.out)} "Once upon"')
