"""Compares with the plan the peak memory of a process that trains or decodes: `python -m support.peak
NAME` prints both, in bytes. Works only on Linux."""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import onward
from onward import (
    Batch,
    DecoderConfig,
    Experts,
    LayerNorm,
    Learned,
    Plain,
    SelfAttention,
    StepConfig,
    StepPlan,
    Trainer,
)
from onward.planning import generation_memory, training_memory
from onward.training import CrossEntropy, optimizers
from onward.training.step.build import choose_backend


def decoder(vocab_size: int, d_model: int, n_layers: int, length: int, **parts: object) -> DecoderConfig:
    return DecoderConfig(vocab_size, d_model, n_layers, d_model // 64, context_length=length, **parts)  # type: ignore[arg-type]


LLAMA = decoder(8000, 512, 6, 512, n_kv_heads=2)
GPT2 = decoder(8000, 512, 6, 512, position=Learned(), mlp=Plain(), norm=LayerNorm(), tied=True)
WINDOWS = decoder(1000, 256, 4, 1024, attention=(SelfAttention(window=128), SelfAttention()))
TRAINING = {  # decoder, windows of a batch, and precision
    "quick": (decoder(2000, 256, 4, 256), 8, "fp32"),
    "llama": (LLAMA, 4, "fp32"),
    "llama in bf16": (LLAMA, 4, "bf16"),
    "gpt2": (GPT2, 8, "fp32"),
    "experts": (decoder(2000, 256, 4, 512, mlp=Experts(count=8, d_ff=512)), 4, "fp32"),
    "windows": (WINDOWS, 4, "fp32"),
    "few activations": (decoder(1000, 1024, 4, 128), 1, "fp32"),
}
DECODING = {  # decoder, rows, and dtype
    "decoding": (decoder(8000, 768, 4, 1024), 4, torch.float32),
    "decoding in bf16": (decoder(8000, 768, 8, 1024), 4, torch.bfloat16),
    "decoding with experts": (decoder(8000, 512, 4, 1024, mlp=Experts(count=8, d_ff=1024)), 4, torch.float32),
}


def train(config: DecoderConfig, rows: int, precision: Any) -> None:
    """Run three steps; the first one allocates the optimizer state."""
    model = onward.Decoder(config)
    choose_backend(model, "loop")
    parts = optimizers(model, "adamw", 1e-3, 0.1, (0.9, 0.99))
    trainer = Trainer(model, parts, lambda step: 1e-3, StepConfig(1.0, precision))
    for _ in range(3):
        tokens = torch.randint(config.vocab_size, (rows, config.context_length))
        trainer.train_step(StepPlan([Batch(tokens, tokens)]))


def decode(config: DecoderConfig, rows: int, dtype: torch.dtype) -> None:
    """Continue long prompts with some new tokens, up to the end of the context."""
    with torch.device("meta"):
        model = onward.Decoder(config)
    model = model.to(dtype).to_empty(device="cpu").eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    new = config.context_length // 64
    prompts = torch.randint(config.vocab_size, (rows, config.context_length - new)).tolist()
    engine = onward.Engine(model, rows=rows)
    for prompt in prompts:
        engine.add(onward.Request(prompt, onward.Sampling(temperature=0), new))
    for _ in engine.run():
        pass


def status(key: str) -> int:
    """A field of this process in /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def plan(name: str) -> tuple[Callable[[DecoderConfig, int], None], DecoderConfig, int, int]:
    """The function of a case, its decoder, its number of rows, and the planned peak."""
    if name in TRAINING:
        config, rows, precision = TRAINING[name]
        said = training_memory(config, rows, config.context_length, CrossEntropy(), precision=precision).peak
        return partial(train, precision=precision), config, rows, said
    config, rows, dtype = DECODING[name]
    return (
        partial(decode, dtype=dtype),
        config,
        rows,
        generation_memory(config, rows, config.context_length, dtype).peak,
    )


def main(name: str) -> None:
    run, config, rows, said = plan(name)
    small: dict[str, Any] = {
        "d_model": 64,
        "n_layers": 2,
        "n_heads": 1,
        "n_kv_heads": 1,
        "d_embed": 64,
        "context_length": 64,
    }
    # a small run first, so that libraries and compiled kernels are not counted
    run(replace(config, vocab_size=4096, **small), 1)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = status("VmRSS")
    run(config, rows)
    print(status("VmHWM") - before, said)


if __name__ == "__main__":
    main(sys.argv[1])
