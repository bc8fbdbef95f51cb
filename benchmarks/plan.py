"""What `onward plan` expects of this machine beside what it does: `python -m benchmarks.plan [MODEL ...]`.

For each model, with random weights, in one process: the tokens per second of decoding and of training that the plan
says after its calibration, those measured, and their ratio. Decoding is expected within a factor of 1.5.
"""

import sys
from dataclasses import replace

import torch

from onward.cli.plan import decoder_of
from onward.model.decoder import Decoder
from onward.planning.machine import measured_machine
from onward.planning.speed import Limits, measure, step_overhead
from onward.reports.plan import Planned
from onward.training.speed import measure_training, trial_share

MODELS = "mini", "small", "pythia-70m", "gpt2"
PROMPT, NEW, CONTEXT = 64, 64, 128


def compare(name: str) -> dict[str, tuple[float, float]]:
    """Expected and measured tokens per second, for decoding and training in fp32."""
    config = decoder_of(name, 4096)
    machine = replace(measured_machine(), step_overhead=step_overhead())
    peak = machine.flops["fp32"]
    machine = replace(machine, training_share=trial_share(config, "fp32", CONTEXT, peak, seconds=1))
    planned = Planned(config, machine, CONTEXT, dtype="float32", precision="fp32")
    expected = {line.what: line.value for line in planned.speeds()}
    limits = Limits(machine.bandwidth, {torch.float32: peak})
    decoding = measure(Decoder(config).eval(), "float32", 1, prompt=PROMPT, new=NEW, seconds=4, limits=limits).decode
    training = measure_training(Decoder(config), "fp32", 4, CONTEXT, peak=peak, seconds=4).tokens_per_second
    return {"decoding": (expected["decode"], decoding), "training": (expected["training"], training)}


def main() -> None:
    print("model         what        expected   measured    ratio")
    for name in sys.argv[1:] or MODELS:
        for what, (expected, measured) in compare(name).items():
            print(f"{name:13} {what:9}{expected:11,.0f}{measured:11,.0f}{expected / measured:9.2f}", flush=True)


if __name__ == "__main__":
    main()
