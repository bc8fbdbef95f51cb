"""onward plan: the estimated memory, operations, speed and cost of a decoder."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from shlex import quote
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from onward.base.arguments import Range
from onward.base.errors import UserError
from onward.cli.shared.options import parse
from onward.cli.shared.output import console, human, print_json, print_next, print_table
from onward.config.mesh import Mesh
from onward.config.ranges import Size

if TYPE_CHECKING:
    from onward.reports.plan import Planned
    from onward.reports.plan_lines import Line

ABOUT = """\
Plan a decoder before you download, train or pay for it. The result shows the parameters and operations of each part,
the memory of generation and training, and the expected speed, each with its formula. No weights are read.

examples:
  onward plan gpt2                                            on this machine, after measuring its speed
  onward plan llama-3.1-8b --device h100 --context 8192 --batch 16
  onward plan llama-3.1-8b --memory 24GiB --quantize int4 --quantized-cache
  onward plan gpt2 --device a100 --tokens 10B --price 2.50    hours and cost of training
  onward plan llama-3.1-8b --devices 64xh100 --context 8192      a mesh of 64 devices, with its memory and its speed
  onward plan llama-3.1-8b --device h100 --mesh "replicate=8 shard=8" --context 8192    one mesh, and its traffic
  onward plan small --vocab 4096 --batch 12                   a preset of onward train
  onward plan runs/mybook --json                              a run, a folder, a config.json or a GGUF file
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `onward plan`, which estimates memory, speed and cost of a decoder."""

    positional: ClassVar[tuple[str, ...]] = ("model",)
    reads: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "a preset of training": ("vocab",),
        "tokens": ("price",),
    }
    model: str  # a release, a training preset, a folder, a config.json, a GGUF file or a name on the hub
    context: Size | None = None  # number of tokens per text; default: the model's full context
    batch: Annotated[int, Range(1, 1 << 20)] = 1  # number of texts generated together, or of windows per training step
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"  # dtype of the weights in generation
    quantize: Literal["none", "int8", "int4"] = "none"  # quantize the weights in generation
    quantized_cache: bool = False  # store the cache as int8
    precision: Literal["fp32", "bf16", "fp16"] = "bf16"  # precision of matrix products in training
    optimizer: str = "adamw"  # optimizer for training: adamw, muon, normuon or module:Class
    recompute: bool = False  # recompute activations in the backward pass
    vocab: Annotated[int, Range(2, 1 << 24)] = 4096  # vocabulary size, for the presets tiny, mini, small and medium
    device: str = "auto"  # auto, cpu, cuda, mps (measured here); or another, such as h100, mi300x or rtx4090
    count: Annotated[int, Range(1, 1 << 24)] = 1  # number of devices that train together
    mesh: str = ""  # devices that train together, as in onward train: "pipeline=2 replicate=2 shard=4 tensor=2"
    devices: str = ""  # devices, such as 64xh100, for which to propose a mesh; replaces device, count and mesh
    memory: str = ""  # memory of the device, such as 24GiB
    bandwidth: str = ""  # memory bandwidth, such as 3.35TB/s
    flops: str = ""  # operations per second, such as 989T
    share: Annotated[float, Range(0.01, 1)] | None = None  # share of peak speed in training; default: measured or 0.4
    tokens: str = ""  # total number of training tokens, such as 10B, to compute the training hours
    price: Annotated[float, Range(0, 1e9)] = 0.0  # price per device and hour, to compute the cost
    json: bool = False  # print the result as JSON

    @property
    def view(self) -> str:
        from onward.training.presets import PRESETS

        return "a preset of training" if self.model in PRESETS else "a model with a vocabulary"


def main(argv: Sequence[str]) -> None:
    options = parse(Options, argv, prog="onward plan", about=ABOUT)
    from onward.planning.flops import part_sizes
    from onward.planning.parameters import active_parameters, parameters

    planned = plan(options)
    config = planned.config
    parts, lines = part_sizes(config), [*planned.lines()]
    if options.json:
        count, active = parameters(config), active_parameters(config)
        figures = {"model": options.model, "parameters": count, "active_parameters": active}
        print_json(figures | {"parts": [asdict(part) for part in parts], "lines": [asdict(line) for line in lines]})
        return
    show(planned, lines)
    print_next(f"onward plan {quote(options.model)} --device h100 --json", "onward scaling optimum --flops 1e21")


def plan(options: Options) -> "Planned":
    """Estimate the model of the options; measure this machine unless they name another device."""
    from onward.measuring.decoders import check_context, decoder_of
    from onward.measuring.machine import machine_for
    from onward.planning.tables import amount, byte_count, operations
    from onward.reports.plan import Planned
    from onward.training.step.optimizer import check_optimizer

    check_optimizer(options.optimizer)
    config = decoder_of(options.model, options.vocab)
    context = options.context or config.context_length
    check_context(config, context)
    options = of_devices(options)
    mesh = Mesh.parse(options.mesh) if options.mesh else None
    if mesh:
        mesh.check_decoder(config)  # raises an error for indivisible sizes before anything is computed
    if mesh and options.count > 1:
        raise UserError(
            f"Cannot combine --count with --mesh, which already gives the number of devices, {mesh.count:,}"
        )
    quantize = None if options.quantize == "none" else options.quantize
    with console.status("speed of this machine"):
        machine = machine_for(
            config,
            options.device,
            context=context,
            batch=options.batch,
            weights=quantize or options.dtype,
            dtype=options.dtype,
            precision=options.precision,
            memory=byte_count(options.memory, "memory") if options.memory else 0.0,
            bandwidth=byte_count(options.bandwidth, "bandwidth") if options.bandwidth else 0.0,
            flops=operations(options.flops, "flops") if options.flops else 0.0,
            share=options.share,
        )
    planned = Planned(
        config,
        machine,
        context,
        options.batch,
        options.dtype,
        quantize,
        options.quantized_cache,
        options.precision,
        options.optimizer,
        options.recompute,
        amount(options.tokens, "tokens") if options.tokens else 0.0,
        options.price,
        mesh.count if mesh else options.count,
        mesh,
    )
    return planned.proposed_for(options.count) if options.devices else planned


def of_devices(options: Options) -> Options:
    """Set `device` and `count` from `--devices`, such as 64xh100."""
    if not options.devices:
        return options
    match = re.fullmatch(r"([1-9]\d{0,6})x([a-z]\w*)", options.devices)
    if not match:
        raise UserError(f"devices is {options.devices!r}: write a number and a device, such as 64xh100")
    if given := [name for name in ("device", "count", "mesh") if getattr(options, name) != getattr(Options, name)]:
        raise UserError(f"Cannot combine --devices with --{given[0]}: leave out the second")
    return replace(options, device=match[2], count=int(match[1]))


def show(planned: "Planned", lines: "Sequence[Line]") -> None:
    from onward.planning.flops import part_sizes

    parts = part_sizes(planned.config)
    count, active = sum(part.parameters for part in parts), sum(part.active for part in parts)
    rows = [
        {
            "part": part.name,
            "parameters": f"{part.parameters:,}"
            if part.parameters or not planned.config.tied
            else "shared with embedding",
            "share": f"{part.parameters / count:.1%}",
            "FLOPs per token": human(part.flops) if part.flops else "0",
        }
        for part in parts
    ]
    of = f", {human(active)} of them active per token" * (active != count)
    console.print(f"{human(count)} parameters{of}", soft_wrap=True)
    print_table(
        [
            *rows,
            {
                "part": "all",
                "parameters": f"{count:,}",
                "share": "",
                "FLOPs per token": human(sum(p.flops for p in parts)),
            },
        ]
    )
    for section, group in groupby(lines, key=lambda line: line.section):
        print()
        print_table([{section: line.what, "": line.text, "by": line.by} for line in group])
