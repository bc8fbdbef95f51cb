"""The speed of a model, given by name, in generation and in training, with the limits of the machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from onward.base.errors import UserError
from onward.measuring.decoders import check_context, decoder_of, models_in
from onward.measuring.generation import SHORTEST, MachineLimits, Precision, Speed, measure
from onward.measuring.training import TrainingSpeed, measure_training
from onward.planning.machine import peak_flops, read_bandwidth

TRAINED = {"float32": "fp32", "bfloat16": "bf16"}  # names of the dtypes in which training computes matmuls
VOCABULARY = 4096  # vocabulary size of a training preset
TOKENS = 128  # default number of tokens of the prompt and of the answer, if they fit into the context


def silent(case: str) -> None: ...


def generation_lengths(model: str, prompt: int | None, new: int | None) -> tuple[int, int]:
    """Numbers of tokens of the prompt and the answer: 128 each by default, but at most half the context."""
    room = decoder_of(model, VOCABULARY).context_length
    if room < SHORTEST:
        raise UserError(
            f"Cannot measure generation with a context of {room} tokens: choose a model with at least {SHORTEST}"
        )
    prompt, new = prompt or min(TOKENS, room // 2), new or min(TOKENS, room // 2)
    if prompt + new > room:
        raise UserError(
            f"Cannot fit prompts of {prompt} tokens and {new} new ones into the context of {room}: lower "
            "--prompt or --new"
        )
    return prompt, new


def generation_speeds(
    model: str,
    precisions: Sequence[Precision],
    batches: Sequence[int],
    device: torch.device,
    *,
    prompt: int,
    new: int,
    seconds: float,
    revision: str = "",
    watch: Callable[[str], None] = silent,
) -> tuple[list[Speed], MachineLimits]:
    """Speeds for each precision and batch size, about `seconds` for each, and the machine's limits; `watch` is called
    with each case before it is measured."""
    dtypes = {torch.float32 if precision == "float32" else torch.bfloat16 for precision in precisions}
    limits = MachineLimits(read_bandwidth(device), {dtype: peak_flops(dtype, device, kernels=True) for dtype in dtypes})
    speeds = []
    for precision, decoder in models_in(precisions, model, device, VOCABULARY, revision):
        for batch in batches:
            watch(f"{precision}, batch {batch}")
            speeds.append(measure(decoder, precision, batch, prompt=prompt, new=new, seconds=seconds, limits=limits))
    return speeds, limits


def plain_cases(speeds: Sequence[Speed]) -> dict[str, str]:
    """The cases whose steps could not be compiled, grouped by reason."""
    cases: dict[str, list[str]] = {}
    for speed in speeds:
        if speed.plain:
            cases.setdefault(speed.plain, []).append(f"{speed.precision}, batch {speed.batch}")
    return {reason: "; ".join(where) for reason, where in cases.items()}


def training_speeds(
    model: str,
    precisions: Sequence[str],
    batches: Sequence[int],
    device: torch.device,
    *,
    context: int | None,
    optimizer: str,
    seconds: float,
    revision: str = "",
    watch: Callable[[str], None] = silent,
) -> tuple[list[TrainingSpeed], dict[str, float]]:
    """Speeds for each precision and number of windows, about `seconds` for each, and the peak operations per second by
    precision."""
    speeds, peaks = [], {}
    for name in precisions:
        peaks[name] = peak_flops(getattr(torch, name), device)
        for batch in batches:
            watch(f"{name}, batch {batch}")
            _, decoder = next(models_in(["float32"], model, device, VOCABULARY, revision))
            length = context or decoder.config.context_length
            check_context(decoder.config, length)
            speeds.append(
                measure_training(
                    decoder, TRAINED[name], batch, length, peak=peaks[name], seconds=seconds, optimizer=optimizer
                )
            )
    return speeds, peaks
