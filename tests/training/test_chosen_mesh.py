"""The mesh that a run chooses by default: replicas if the training fits on one device, else shards."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from onward import Decoder, DecoderConfig, FinetuneConfig, LoRA, RunConfig, add_lora
from onward.base.limits import in_bytes
from onward.config.mesh import Mesh
from onward.data.progress import silent
from onward.parallel.processes import Processes
from onward.planning import choice
from onward.training.run.arrangement import chosen, in_words, memory_per_process, trained_with
from onward.training.run.beginning import Given, begun

from support.runs import config

DECODER = DecoderConfig(4096, 256, 4, 4, context_length=8192)
TRAINED = RunConfig(device="cpu", batch_size=1, steps=4)


def tuned(**options: Any) -> FinetuneConfig:
    return FinetuneConfig.of(base="x", sources=("y",), device="cpu", batch_size=1, **{"length": 64} | options)


def peak(config: RunConfig, mesh: str = "replicate=4") -> int:
    return memory_per_process(config, DECODER, Mesh.parse(mesh)).peak


@pytest.mark.long
def test_replicas_are_chosen_while_a_device_holds_all(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = replace(DECODER, context_length=64)
    need = {mesh: memory_per_process(TRAINED, decoder, Mesh.parse(mesh)).peak for mesh in ("replicate=4", "shard=4")}
    for fits, mesh in (0.89, "replicate=4"), (0.91, "shard=4"), (2.0, "shard=4"):
        memory = int(need["replicate=4"] / fits)
        monkeypatch.setattr(choice, "device_bytes", lambda device, memory=memory: memory)
        assert chosen(TRAINED, decoder, 4) == Mesh.parse(mesh)
        said = f"mesh {mesh}: each process needs about {in_bytes(need[mesh])} of {in_bytes(memory)} (weights "
        assert in_words(TRAINED, decoder, chosen(TRAINED, decoder, 4)).startswith(said)


def test_the_sentence_names_what_takes_the_memory() -> None:
    kinds = "weights 5.3 MB, gradients 5.3 MB, optimizer 10.6 MB, activations .*, gathered .*"
    assert re.search(rf"\({kinds}\)$", in_words(TRAINED, DECODER, Mesh(shard=4)))
    undivided = r"gathered [^,]*\); embedding and head are not divided, since 2 does not divide vocab_size 4,095$"
    assert re.search(undivided, in_words(TRAINED, replace(DECODER, vocab_size=4095), Mesh(shard=2, tensor=2)))


CHOICES: dict[str, tuple[dict[str, Any], str]] = {
    "all weights": ({}, "shard=4"),
    "adapters": ({"lora": 4}, "replicate=4"),
    "adapters and the whole embedding": ({"lora": LoRA(rank=4, full=("embed", "head", "blocks"))}, "shard=4"),
    "a method that samples": ({"method": "grpo", "reward": "length(tokens=5)", "samples": 2}, "shard=4"),
    "quantized": ({"lora": 4, "quantize": "int8"}, "replicate=4"),
}


@pytest.mark.parametrize(("options", "mesh"), CHOICES.values(), ids=CHOICES)
def test_weights_without_gradients_need_no_shards(
    options: dict[str, Any], mesh: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert peak(tuned(lora=4)) < 0.6 * peak(tuned())
    monkeypatch.setattr(choice, "device_bytes", lambda device: int(peak(tuned(lora=4)) / 0.89))
    assert chosen(tuned(**options), DECODER, 4) == Mesh.parse(mesh)


def test_the_parameters_of_adapters_are_counted() -> None:
    lora, small = LoRA(rank=4, full=("norm",)), DecoderConfig(16, 16, 2, 4, context_length=8)
    model = Decoder(small)
    add_lora(model, lora)
    assert trained_with(lora, small) == sum(p.numel() for p in model.parameters() if p.requires_grad)
    memory = memory_per_process(tuned(lora=4), DECODER, Mesh(replicate=4))
    assert memory.optimizer == 2 * memory.gradients == 8 * trained_with(LoRA(rank=4), DECODER)


def test_examples_are_as_long_as_the_run_has_them() -> None:
    assert peak(tuned()) < peak(tuned(length=4096))


@pytest.mark.parametrize("from_base", [False, True], ids=["new weights", "a base model"])
def test_memory_is_planned_once_at_a_start(
    from_base: bool, base: Path, story_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = list[Mesh]()

    def first(meshes: Sequence[Mesh], peak: Callable[[Mesh], int], device: str) -> Mesh:
        planned.extend(meshes)
        return meshes[-1]

    monkeypatch.setattr(choice, "first_that_fits", first)
    named = {"base": str(base), "tokenizer": "", "model": {}} if from_base else {}
    options = config(story_file, tmp_path, accumulation=2, **named)
    parts = begun(options, Given(None, None, lambda *_: None, silent, 0.0), Processes(count=2))
    assert planned == [Mesh(replicate=2), Mesh(shard=2)]
    assert parts.processes
    assert parts.processes.mesh == Mesh(shard=2)
    assert not parts.whole, "no process loads the whole model, since all divide it"
