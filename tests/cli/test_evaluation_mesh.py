"""The mesh that `onward evaluate` chooses in several processes: replicas if a whole model fits on a device, else the
smallest tensor axis for which each process's part fits or, if none fits, the largest that divides the model."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import onward
from onward import Decoder, DecoderConfig, LanguageModel
from onward.cli.commands.evaluate import Options, chosen
from onward.config.mesh import Mesh
from onward.planning import choice
from onward.planning.evaluation import memory_of_questions, memory_of_text
from onward.planning.memory import HOLES

from support.decoders import DECODERS

SMALL = replace(DECODERS["llama"], vocab_size=64, d_model=64, n_kv_heads=4, context_length=64)
BF16 = torch.bfloat16


def need(config: DecoderConfig, mesh: str = "replicate=4", memory: Any = memory_of_text, dtype: Any = None) -> int:
    return int(memory(config, Mesh.parse(mesh), dtype or torch.float32, HOLES).peak)


def saved(folder: Path, config: DecoderConfig) -> str:
    onward.save(LanguageModel(Decoder(config)), folder)
    return str(folder)


def choose(monkeypatch: pytest.MonkeyPatch, memory: float, model: str, *sources: str, **options: Any) -> str:
    """The mesh chosen for four processes whose devices have `memory` bytes."""
    monkeypatch.setattr(choice, "device_bytes", lambda device: int(memory))
    mesh, said = chosen(Options(model=model, sources=sources, device="cpu", **options), 4)
    assert said.partition(":")[0] == (f"mesh {mesh}" if mesh.divides else "")
    return str(mesh)


@pytest.mark.long
def test_smallest_tensor_axis_that_fits_is_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, meshes = saved(tmp_path, SMALL), ("replicate=4", "replicate=2 tensor=2", "tensor=4")
    for mesh, next_mesh in zip(meshes, [*meshes[1:], meshes[-1]]):
        assert choose(monkeypatch, need(SMALL, mesh) / 0.89, model, "text") == mesh
        assert choose(monkeypatch, need(SMALL, mesh) / 0.91, model, "text") == next_mesh
    assert choose(monkeypatch, 0, model) == "tensor=4"


MODELS = {
    "six heads": (replace(SMALL, d_model=96, n_heads=6, n_kv_heads=6), "replicate=2 tensor=2"),
    "three heads": (replace(SMALL, d_model=48, n_heads=3, n_kv_heads=3), "replicate=4"),
    "a part without a rule": (DECODERS["no-output"], "replicate=4"),
}


@pytest.mark.parametrize("name", MODELS)
def test_largest_axis_that_divides_the_model_is_chosen_if_none_fits(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config, mesh = MODELS[name]
    assert choose(monkeypatch, 0, saved(tmp_path, config)) == mesh


def test_models_and_options_that_cannot_be_divided_get_replicas(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, integers = saved(tmp_path / "model", SMALL), tmp_path / "int8"
    onward.save(onward.load(model, quantize="int8"), integers)
    for name in integers, tmp_path / "gone":
        assert choose(monkeypatch, 0, str(name)) == "replicate=4"
        assert choose(monkeypatch, 0, model, str(name), tasks="copying") == "replicate=4"
    assert choose(monkeypatch, 0, model, quantize="int4") == "replicate=4"


@pytest.mark.long
def test_memory_is_that_of_the_work_in_the_dtype_of_the_weights(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wide = replace(SMALL, d_model=128)
    model, other = saved(tmp_path / "model", SMALL), saved(tmp_path / "wide", wide)
    cases: list[tuple[int, tuple[str, ...], dict[str, Any]]] = [
        (need(SMALL, dtype=BF16), (model, "text"), {"dtype": "bfloat16"}),
        (need(SMALL, memory=memory_of_questions), (model,), {"tasks": "copying"}),
        (need(SMALL, memory=memory_of_questions), (model,), {}),
        (need(wide, memory=memory_of_questions), (model, other), {"choices": "exam.jsonl"}),
        (need(replace(SMALL, context_length=128)), (model, "text"), {"rope": "linear:2"}),
    ]
    for memory, models, options in cases:
        assert choose(monkeypatch, memory / 0.89, *models, **options) == "replicate=4"
        assert choose(monkeypatch, memory / 0.91, *models, **options) == "replicate=2 tensor=2"


def test_sentence_gives_the_memory_by_kind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(choice, "device_bytes", lambda device: 10**6)
    model = saved(tmp_path, replace(SMALL, vocab_size=66))
    _, said = chosen(Options(model=model, tasks="copying", device="cpu"), 4)
    kinds = r"weights \S+ MB, activations \S+ MB, cache \S+ MB"
    undivided = "embedding and head are not divided, since 4 does not divide vocab_size 66"
    assert re.fullmatch(rf"mesh tensor=4: each process needs about \S+ MB of 1.0 MB \({kinds}\); {undivided}", said)
