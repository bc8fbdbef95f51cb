"""The speed that `onward plan` predicts for this machine, and the measured speed: `python -m benchmarks.plan [MODEL
...]`.

For each model, with random weights, in one process: predicted and measured tokens per second, and their ratio, for
decoding (each precision, one and several rows) and training. The plan is calibrated first. Decoding is expected within
a factor of 1.5. The command takes about two minutes.
"""

import sys
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from itertools import chain, product
from typing import get_args

import torch

from onward import Decoder
from onward.measuring import measure_training
from onward.measuring.decoders import decoder_of
from onward.measuring.generation import MachineLimits, Precision, measure, step_seconds
from onward.measuring.training import trial_share
from onward.planning.machine import Machine, measured_machine
from onward.reports.plan import Planned
from onward.transforms import quantize_model

MODELS = "mini", "small", "gpt2"  # the calibration runs the first two, but not the last one
BATCHES = 1, 8
CPU = torch.device("cpu")
PROMPT, NEW, CONTEXT = 64, 64, 128
SECONDS = 1.5  # duration of a case


def decoding(name: str, machine: Machine) -> Iterator[tuple[str, float, float]]:
    """Expected and measured tokens per second of decoding in each precision, for several numbers of rows."""
    config = decoder_of(name, 4096)
    whole = Decoder(config).eval()
    for precision, batch in product(get_args(Precision), BATCHES):
        dtype = "float32" if precision == "float32" else "bfloat16"
        quantize = precision if precision in ("int8", "int4") else None
        model = deepcopy(whole).to(getattr(torch, dtype))
        if quantize:
            quantize_model(model, quantize)
        here = replace(machine, step_seconds=step_seconds(config, precision, batch, CPU))
        planned = Planned(config, here, CONTEXT, batch, dtype, quantize, precision="fp32")
        expected = {line.what: line.value for line in planned.speeds()}["decode"]
        limits = MachineLimits(machine.bandwidth, {model.dtype: machine.peak(dtype)})
        found = measure(model, precision, batch, prompt=PROMPT, new=NEW, seconds=SECONDS, limits=limits)
        yield f"{precision}, batch {batch}", expected, found.decode


def training(name: str, machine: Machine) -> Iterator[tuple[str, float, float]]:
    """Expected and measured tokens per second of training in fp32."""
    config, peak = decoder_of(name, 4096), machine.flops["fp32"]
    machine = replace(machine, training_share=trial_share(config, "fp32", CONTEXT, peak, CPU))
    expected = {line.what: line.value for line in Planned(config, machine, CONTEXT, precision="fp32").speeds()}
    found = measure_training(Decoder(config), "fp32", 4, CONTEXT, peak=peak, seconds=4)
    yield "training, fp32", expected["training"], found.tokens_per_second


def main() -> None:
    machine = measured_machine(("float32", "bfloat16", "fp32"))
    print(f"reads {machine.bandwidth / 1e9:.1f} GB/s")
    print("model         what                  expected   measured    ratio")
    for name in sys.argv[1:] or MODELS:
        for what, expected, found in chain(decoding(name, machine), training(name, machine)):
            print(f"{name:13} {what:19}{expected:11,.0f}{found:11,.0f}{expected / found:9.2f}", flush=True)


if __name__ == "__main__":
    main()
