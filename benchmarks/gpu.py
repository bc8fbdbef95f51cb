"""Generation and training on a GPU compared with transformers, and the utilization of memory bandwidth and arithmetic.

    python -m benchmarks.gpu                       prints the tables as Markdown; needs about 40 GB of GPU memory
    python -m benchmarks.gpu --model smollm2-135m  a smaller model
    python -m benchmarks.gpu --device cpu --model tiny --trained tiny --prompts 8 --new 4 --context 16 --seconds 0.1

Weights and tokens are random. Utilization is relative to the bandwidth and the speed of matrix products, which the
command measures on the GPU first; it also prints the data sheet's limits of the GPU, if `onward.planning.devices` lists
it. The last command is a dry run.
"""

import argparse
import importlib
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from statistics import median
from time import perf_counter
from typing import Any

import torch

import onward
from benchmarks.text import machine
from onward.families import express
from onward.measuring import measure_training
from onward.measuring.decoders import decoder_of, models_in
from onward.measuring.generation import GREEDY, Precision, serve
from onward.measuring.speeds import VOCABULARY, generation_speeds
from onward.planning import peak_flops
from onward.planning.devices import DEVICES
from onward.planning.machine import wait
from onward.transforms import compile_blocks

PRECISIONS: tuple[Precision, ...] = ("bfloat16", "int8", "int4")
ROWS, WINDOWS, ROUNDS = (1, 4, 16), (8, 32), 5
TARGETS = {"bandwidth": 0.8, "arithmetic": 0.5}  # shares: decoding of one row in bf16, and training

Row = Sequence[str]


def table(title: str, columns: Row, rows: Sequence[Row]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join([f"## {title}", "", *(f"| {' | '.join(line)} |" for line in lines), ""])


def limits(device: torch.device, bandwidth: float, peak: float) -> str:
    name = f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}" if device.type == "cuda" else machine()
    known = next((one for key, one in DEVICES.items() if key in name.lower().replace(" ", "")), None)
    sheet = f"; data sheet: {known.bandwidth / 1e9:,.0f} GB/s, {known.flops / 1e12:,.0f} TFLOP/s" if known else ""
    measured = f"{bandwidth / 1e9:,.0f} GB/s, {peak / 1e12:,.1f} TFLOP/s in bf16"
    return f"{name}; measured: {measured}{sheet}\n"


def generation(options: argparse.Namespace, device: torch.device) -> Iterator[str]:
    """Yield the limits of the device, and one table of speeds by prompt length, precision and number of rows."""
    rows: list[Row] = []
    for prompt in options.prompts:
        run = {"prompt": prompt, "new": options.new, "seconds": options.seconds}
        speeds, found = generation_speeds(options.model, PRECISIONS, ROWS, device, **run)
        if not rows:
            yield limits(device, found.bandwidth, found.flops[torch.bfloat16])
        for one in speeds:
            shares = f"{one.flops_share:.2f}", f"{one.decode:,.0f}", f"{one.bandwidth_share:.2f}"
            rows.append(
                [str(prompt), one.precision, str(one.batch), f"{one.prefill:,.0f}", *shares, one.plain or "yes"]
            )
    columns = ["prompt", "precision", "rows", "prefill, tokens/s", "share of arithmetic", "decode, tokens/s"]
    title = f"Generation of {options.new} tokens, {options.model} (target: {TARGETS['bandwidth']} of the bandwidth)"
    yield table(title, [*columns, "share of bandwidth", "compiled"], rows)


def decoded_by_onward(config: onward.DecoderConfig, device: torch.device, ids: torch.Tensor, new: int) -> float:
    model = onward.Decoder(config).to(device, torch.bfloat16).eval()
    engine = onward.Engine(model, rows=len(ids), compile_after=0)
    return timed(lambda: serve(engine, [onward.Request(row, GREEDY, new) for row in ids.tolist()]), device)


def decoded_by_transformers(config: onward.DecoderConfig, device: torch.device, ids: torch.Tensor, new: int) -> float:
    library = importlib.import_module("transformers")
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    theirs = library.AutoConfig.for_model(**{**express(config), **ends})
    model = library.AutoModelForCausalLM.from_config(theirs, dtype=torch.bfloat16).to(device).eval()
    given: dict[str, Any] = {"do_sample": False, "max_new_tokens": new, "pad_token_id": 0}
    inputs = ids.to(device)
    return timed(lambda: model.generate(inputs, attention_mask=torch.ones_like(inputs), **given), device)


@torch.inference_mode()
def timed(run: Any, device: torch.device) -> float:
    """The median time of a call in seconds, after one warm-up call."""
    taken = []
    for _ in range(ROUNDS + 1):
        start = perf_counter()
        run()
        wait(device)
        taken.append(perf_counter() - start)
    return median(taken[1:])


def peers(options: argparse.Namespace, device: torch.device) -> str:
    """Return a table of the speed of answering prompts in bf16, compared with transformers."""
    config, prompt, new = decoder_of(options.model, VOCABULARY), options.prompts[0], options.new
    rows = []
    for count in ROWS:
        ids = torch.randint(config.vocab_size, (count, prompt), generator=torch.Generator().manual_seed(0))
        ours, theirs = (run(config, device, ids, new) for run in (decoded_by_onward, decoded_by_transformers))
        rows.append([str(count), *(f"{count * new / one:,.0f}" for one in (ours, theirs)), f"{theirs / ours:.2f}"])
    title = f"Prompts of {prompt} tokens and answers of {new}, bf16: answered tokens/s"
    return table(title, ["rows", "Onward", "transformers", "ratio"], rows)


def training(options: argparse.Namespace, device: torch.device) -> str:
    peak, rows = peak_flops(torch.bfloat16, device), []
    for windows in WINDOWS if device.type == "cuda" else WINDOWS[:1]:
        for compiled in (False, True) if device.type == "cuda" else (False,):
            _, model = next(models_in(["float32"], options.trained, device, VOCABULARY))
            if compiled:
                compile_blocks(model)
            context = min(options.context, model.config.context_length)
            speed = measure_training(model, "bf16", windows, context, peak=peak, seconds=options.seconds)
            size = str(windows), str(context), "yes" if compiled else "no"
            rows.append([*size, f"{speed.tokens_per_second:,.0f}", f"{speed.flops_share:.2f}"])
    title = f"Training, {options.trained} in bf16 (target: {TARGETS['arithmetic']} of the arithmetic)"
    return table(title, ["windows", "tokens", "torch.compile", "tokens/s", "share of arithmetic"], rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="llama-3.1-8b", help="release or folder of the model for generation")
    parser.add_argument("--trained", default="gpt2", help="release or preset of the model for training")
    parser.add_argument("--prompts", type=int, nargs="+", default=[128, 512, 2048], help="tokens of the prompts")
    parser.add_argument("--new", type=int, default=128, help="new tokens of an answer")
    parser.add_argument("--context", type=int, default=1024, help="tokens of a training window, at most")
    parser.add_argument("--seconds", type=float, default=10.0, help="time of each measurement")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device: run this on a machine with a GPU, or try it with --device cpu and small models")
    device = torch.device(options.device)
    for text in generation(options, device):
        print(text, flush=True)
    if find_spec("transformers"):
        print(peers(options, device), flush=True)
    print(training(options, device), flush=True)


if __name__ == "__main__":
    main()
