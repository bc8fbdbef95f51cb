"""Reinforcement learning in several processes: equal to one process, and resumed exactly."""

import gc
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from onward import DecoderConfig, FinetuneConfig, Run
from onward.checkpoint.load import load_model
from onward.checkpoint.saves.folder import saves
from onward.checkpoint.weights import read_tensors
from onward.config.mesh import Mesh
from onward.planning.parameters import parameters
from onward.training.run.arrangement import memory_per_process

from support.finetuning import base_model, config, write_rows
from support.grids import first
from support.heap import HeapPeak
from support.ranks import Ranks
from support.runs import metrics

OPTIONS: dict[str, Any] = {"method": "grpo", "reward": "length(characters=3)", "samples": 2, "completion_length": 4}
OPTIONS |= {"batch_size": 2, "accumulation": 2, "steps": 4, "validate_every": 4}


def train(options: FinetuneConfig, until: int = 4, *, again: bool = False) -> None:
    """Start or, if `again`, resume a run, and train up to a step."""
    run = Run.resume(options.out) if again else Run.start(options)
    list(run.train(lambda: run.step >= until))


def prompts(folder: Path) -> Path:
    return write_rows(folder / "sums.jsonl", [{"prompt": f"{i} + {i % 7}?", "answer": str(i)} for i in range(24)])


@pytest.mark.long
@pytest.mark.parametrize("mesh", first(1, ["replicate=2", "shard=2"]))
def test_processes_resume_with_their_own_completions(mesh: str, two: Ranks, tmp_path: Path) -> None:
    """The run is stopped between steps on the same completions, with prompts to replay."""
    options = OPTIONS | {"iterations": 3, "replay": 4, "mesh": mesh}
    base, rows = base_model(tmp_path / "base"), prompts(tmp_path)
    of = lambda out: config(base, rows, out, **options)
    two.run(train, of(tmp_path / "whole"))
    two.run(train, of(tmp_path / "parts"), 2)
    two.run(partial(train, again=True), of(tmp_path / "parts"))
    for name in "model.safetensors", "state.safetensors":
        one, other = (saves(tmp_path / run)[-1] / name for run in ("whole", "parts"))
        assert one.read_bytes() == other.read_bytes()


METHODS: dict[str, dict[str, Any]] = {
    "grpo": {"kl": 0.1, "iterations": 2},
    "online_dpo": {"method": "online_dpo"},
    "adapters": {"lora": 2, "kl": 0.1},
    "ppo": {"method": "ppo", "kl": 0.1},
}


@pytest.mark.parametrize("name", first(1, METHODS))
def test_shards_learn_from_the_completions_of_one_process(name: str, two: Ranks, tmp_path: Path) -> None:
    base, rows, options = base_model(tmp_path / "base"), prompts(tmp_path), OPTIONS | METHODS[name]
    train(config(base, rows, tmp_path / "one", **options))
    two.run(train, config(base, rows, tmp_path / "two", **options, mesh="shard=2"))
    for a, b in zip(metrics(tmp_path / "one"), metrics(tmp_path / "two"), strict=True):
        shared = a.keys() & b.keys() - {"logprob_gap"}
        assert {key: a[key] for key in shared} == pytest.approx({key: b[key] for key in shared}, rel=1e-3, abs=1e-5)
    name = "adapter_model.safetensors" if name == "adapters" else "model.safetensors"
    one, other = (read_tensors(tmp_path / run / name) for run in ("one", "two"))
    assert one.keys() == other.keys()
    for key, tensor in one.items():
        torch.testing.assert_close(tensor, other[key], rtol=1e-3, atol=1e-5)


def test_plan_counts_the_weights_and_the_cache_of_the_engine() -> None:
    decoder = DecoderConfig(vocab_size=1000, d_model=64, n_layers=2, n_heads=4, n_kv_heads=2, context_length=2048)
    of = lambda method, mesh: memory_per_process(
        FinetuneConfig.of(base="x", sources=("y",), device="cpu", **method, batch_size=4, accumulation=4),
        decoder,
        Mesh.parse(mesh),
    )
    grpo = {"method": "grpo", "reward": "exact", "samples": 8, "completion_length": 100}
    plain, shards, replicas = of({"method": "sft"}, "shard=2"), of(grpo, "shard=2"), of(grpo, "replicate=2")
    assert (shards.engine, replicas.engine, plain.engine) == (4 * parameters(decoder), 0, 0)
    rows, slots, keys_and_values = 2 * 4 * 8, 512 + 256 + 100, 2 * 2 * 16
    assert shards.cache == replicas.cache == rows * slots * keys_and_values * decoder.n_layers * 4
    assert shards.peak == plain.weights + plain.optimizer + shards.engine + max(
        plain.transient + plain.holes, shards.cache
    )


def peak(options: FinetuneConfig) -> int:
    """The peak of allocated bytes of a run in its first two steps, before it copies its state for a save."""
    gc.collect()
    with HeapPeak() as heap:
        run = Run.start(options)
        events = run.train()
        while run.step < 2:
            next(events)
    return heap.bytes


@pytest.mark.long
def test_processes_allocate_the_planned_memory(two: Ranks, tmp_path: Path) -> None:
    base = base_model(tmp_path / "base", d_model=512, n_layers=8, n_heads=4, dropout=0.0)
    options = config(base, prompts(tmp_path), tmp_path / "run", **OPTIONS, mesh="shard=2")
    memory = memory_per_process(options, load_model(base)[0].config, Mesh(shard=2))
    assert two.run(peak, options) == pytest.approx([memory.peak - memory.holes] * 2, rel=0.1)
