"""onward bench: the speed of generation or training, as a share of this machine's limits."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args

from onward.base.arguments import Range
from onward.base.errors import UserError
from onward.cli.shared.options import parse
from onward.cli.shared.output import console, print_json, print_next, print_table
from onward.config.ranges import Size

if TYPE_CHECKING:
    import torch

    from onward.measuring.generation import MachineLimits, Speed

ABOUT = """\
Measure the speed of prefill and decoding for several numbers of rows and precisions. The result shows tokens per
second, bytes read per decoded token, and the shares of this machine's bandwidth and operations that the model reaches.
Other programs that run at the same time lower the figures.

With --train, train the model on random tokens without saving it. The result shows tokens per second, operations per
token, the share of peak operations (MFU), and the milliseconds of each part of a step.

examples:
  onward bench runs/mybook
  onward bench runs/mybook --batch 1,4,16 --precision bfloat16,int8 --json
  onward bench pythia-160m --out roofline.svg      a published release, with random weights
  onward bench small --train --batch 4,12          a preset of onward train, with 4,096 tokens in its vocabulary
"""
MILLION, BILLION = 1e6, 1e9


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `onward bench`, which measures the speed of generating or training."""

    positional: ClassVar[tuple[str, ...]] = ("model",)
    reads: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "training": ("context", "optimizer"),
        "decoding": ("prompt", "new", "out"),
    }
    model: str  # folder of the model, its name on the hub, or a published release (with random weights)
    batch: str = ""  # numbers of rows to decode together, default: 1,16; with --train, windows per batch, default: 8
    precision: str = ""  # weight precisions, default: float32,bfloat16,int8,int4; with --train: float32,bfloat16
    train: bool = False  # measure training
    context: Size | None = None  # number of tokens in a window, with --train; default: the model's full context
    optimizer: Literal["adamw", "muon", "normuon"] = "adamw"  # optimizer, with --train
    prompt: Annotated[int, Range(1, 1 << 20)] | None = None  # tokens in each prompt; default: 128, or half the context
    new: Annotated[int, Range(8, 1 << 20)] | None = None  # new tokens in each answer; default: 128, or half the context
    seconds: Annotated[float, Range(0, 3600)] = 10.0  # seconds to measure each combination of batch and precision
    threads: Annotated[int, Range(0, 4096)] = 0  # number of CPU threads; 0: PyTorch's default
    device: str = "auto"  # auto, cpu, cuda, mps
    out: str = ""  # also draw a roofline, to a file that ends in .svg, .pdf, .png, .html, .json or .csv
    revision: str = ""  # branch, tag or commit of a model on the hub; default: main
    json: bool = False  # print the result as JSON

    @property
    def view(self) -> str:
        return "training" if self.train else "decoding"


def main(argv: Sequence[str]) -> None:
    options = parse(Options, argv, prog="onward bench", about=ABOUT)
    batches = numbers(options.batch or ("8" if options.train else "1,16"))
    import torch

    from onward.measuring.decoders import has_random_weights

    if options.revision and has_random_weights(options.model):
        raise UserError(
            f"Cannot load revision {options.revision!r} of {options.model}, which gets random weights: leave out "
            "--revision"
        )
    if options.threads:
        torch.set_num_threads(options.threads)
    (train if options.train else generate)(options, batches)


def generate(options: Options, batches: Sequence[int]) -> None:
    import torch

    from onward.base.device import choose_device
    from onward.measuring.decoders import stored_precision
    from onward.measuring.generation import Precision
    from onward.measuring.roofline import roofline
    from onward.measuring.speeds import generation_lengths, generation_speeds
    from onward.reports.pictures.picture import format_of

    stored = stored_precision(options.model, options.revision)
    precisions = words(options.precision or stored or ",".join(get_args(Precision)), get_args(Precision), "precision")
    if stored and {"int8", "int4"} & {*precisions} - {stored}:
        raise UserError(f"Cannot quantize {options.model}, whose weights are stored as {stored}: leave out --precision")
    if options.out:
        format_of(Path(options.out))
    device = choose_device(options.device)
    prompt, new = generation_lengths(options.model, options.prompt, options.new)
    cases = len(batches) * len(precisions)
    console.print(
        f"{cases} cases of about {options.seconds:g} s, longer if a single run takes longer: about "
        f"{cases * options.seconds + 5:,.0f} s in total, plus loading",
        soft_wrap=True,
    )
    with console.status("bandwidth and arithmetic of this machine") as status:
        speeds, limits = generation_speeds(
            options.model,
            precisions,
            batches,
            device,
            prompt=prompt,
            new=new,
            seconds=options.seconds,
            revision=options.revision,
            watch=status.update,
        )
    if options.out:
        roofline(options.model, speeds, limits).write(Path(options.out))
    peaks = {str(dtype).removeprefix("torch."): flops for dtype, flops in limits.flops.items()}
    if options.json:
        machine = {"device": str(device), "threads": torch.get_num_threads(), "bandwidth": limits.bandwidth}
        print_json({"model": options.model, **machine, "flops": peaks, "speeds": [asdict(speed) for speed in speeds]})
        return
    show_generation(options, speeds, limits, device)
    quantizable = Path(options.model).exists() and stored is None
    print_next(f"onward quantize {quote(options.model)} OUT" if quantizable else "onward models")


def show_generation(
    options: Options, speeds: "Sequence[Speed]", limits: "MachineLimits", device: "torch.device"
) -> None:
    import torch

    from onward.measuring.speeds import plain_cases

    print_table(
        [
            {
                "precision": speed.precision,
                "batch": speed.batch,
                "prefill tokens/s": f"{speed.prefill:,.0f}",
                "of the arithmetic": f"{speed.flops_share:.0%}",
                "decode tokens/s": f"{speed.decode:,.0f}",
                "MB per token": f"{speed.bytes_per_token / MILLION:,.3g}",
                "of the bandwidth": f"{speed.bandwidth_share:.0%}",
            }
            for speed in speeds
        ]
    )
    names = {str(dtype).removeprefix("torch."): flops for dtype, flops in limits.flops.items()}
    arithmetic = ", ".join(f"{flops / BILLION:,.0f} GFLOP/s in {name}" for name, flops in names.items())
    console.print(
        f"\nthis machine, measured: reads {limits.bandwidth / BILLION:.1f} GB/s; {arithmetic}; device {device}, "
        f"{torch.get_num_threads()} threads",
        soft_wrap=True,
    )
    for reason, where in plain_cases(speeds).items():
        console.print(f"plain steps, not compiled ({where}): {reason}", markup=False, soft_wrap=True)
    if options.out:
        console.print(f"picture: {options.out}", markup=False, soft_wrap=True)


def train(options: Options, batches: Sequence[int]) -> None:
    import torch

    from onward.base.device import choose_device
    from onward.measuring.speeds import TRAINED, training_speeds

    device = choose_device(options.device)
    precisions = [name.strip() for name in (options.precision or "float32,bfloat16").split(",")]
    for name in precisions:
        if name not in TRAINED:
            raise UserError(f"Cannot measure training with precision {name!r}: choose {' or '.join(TRAINED)}")
    with console.status("arithmetic of this machine") as status:
        speeds, peaks = training_speeds(
            options.model,
            precisions,
            batches,
            device,
            context=options.context,
            optimizer=options.optimizer,
            seconds=options.seconds,
            revision=options.revision,
            watch=status.update,
        )
    if options.json:
        machine = {"device": str(device), "threads": torch.get_num_threads(), "flops": peaks}
        print_json({"model": options.model, **machine, "training": [asdict(speed) for speed in speeds]})
        return
    print_table(
        [
            {
                "precision": speed.precision,
                "batch": f"{speed.batch} x {speed.context:,}",
                "tokens/s": f"{speed.tokens_per_second:,.0f}",
                "GFLOP per token": f"{speed.flops_per_token / BILLION:,.3g}",
                "of the arithmetic": f"{speed.flops_share:.0%}",
                "ms per step": f"{1000 * speed.step:,.1f}",
                **{part: f"{1000 * spent:,.1f}" for part, spent in speed.seconds.items()},
            }
            for speed in speeds
        ]
    )
    arithmetic = ", ".join(f"{flops / BILLION:,.0f} GFLOP/s in {name}" for name, flops in peaks.items())
    console.print(f"\nthis machine, measured: {arithmetic}; device {device}, {torch.get_num_threads()} threads")
    print_next(f"onward plan {quote(options.model)}")


def words(text: str, known: Sequence[str], name: str) -> list[Any]:
    from onward.base.fields import nearest

    names = [word.strip() for word in text.split(",")]
    for word in names:
        if word not in known:
            raise UserError(f"{name} has {word!r}: {nearest(word, known)}")
    return names


def numbers(text: str) -> list[int]:
    values = [int(word) if word.strip().isdecimal() else 0 for word in text.split(",")]
    if not all(1 <= number <= 4096 for number in values):
        raise UserError(f"batch is {text!r}: write numbers of rows from 1 to 4096, such as 1,16")
    return values
