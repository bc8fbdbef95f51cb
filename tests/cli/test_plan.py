"""onward plan: every figure with its formula, the models that fit, and mistakes in one sentence."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import onward
from onward.cli import main
from onward.families import presets
from onward.measuring.decoders import decoder_of
from onward.measuring.machine import machine_for
from onward.planning import cache_bytes, training_flops, weight_bytes
from onward.planning.devices import DEVICES
from onward.planning.machine import Machine, same_flops
from onward.planning.parameters import parameters
from onward.reports.plan import Planned

from support.gguf_files import split_in_two
from support.hub import put_in_cache

TINY = onward.DecoderConfig(vocab_size=64, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=64, context_length=64)
H100 = Machine("h100", "data sheet", 80e9, 3.35e12, same_flops(989e12, 494e12))


def planned(capsys: Any, *words: str) -> dict[str, float]:
    """The values in the lines of `onward plan WORDS --json`, by section and text."""
    assert main(["plan", *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert all(line["by"] for line in found["lines"])
    names = (line["section"].split(",")[0].split(" on ")[0] for line in found["lines"])
    return {f"{name}: {line['what']}": line["value"] for name, line in zip(names, found["lines"])}


def test_plan_of_a_release_has_its_operations_memory_speed_and_cost(capsys: Any) -> None:
    config = presets()["gpt2"].config
    found = planned(capsys, "gpt2", "--device", "a100", "--tokens", "10B", "--price", "2.5", "--count", "4")
    assert found["operations per token: training"] == training_flops(config, 1024)
    assert found["operations per token: training by the rule 6 N"] == 6 * parameters(config)
    assert found["speed: training"] == pytest.approx(0.4 * 4 * 312e12 / training_flops(config, 1024), rel=1e-6)
    hours = 10e9 / found["speed: training"] / 3600
    assert found["speed: hours"] == pytest.approx(hours)
    assert found["speed: cost"] == pytest.approx(hours * 2.5 * 4)
    assert found["memory of generation: longest context"] == 1024


def test_quantized_plan_of_windows_fits_the_longest_context_exactly() -> None:
    config = presets()["gemma-2-2b"].config
    small = Machine("m", "as given", 3.4e9, 1e11, H100.flops)
    plan = Planned(config, small, 4096, 2, quantize="int4", quantized_cache=True)
    found = {line.what: line.value for line in plan.generation_lines()}
    assert found["weights"] == weight_bytes(config, torch.bfloat16, "int4")
    longest = int(found["longest context"])
    assert 0 < longest < config.context_length
    fixed = plan.here.weights + plan.here.activations
    assert fixed + plan.cache(2, longest) <= 3.4e9 < fixed + plan.cache(2, longest + 1)
    assert plan.cache(2, 4096) == cache_bytes(config, 2, 4096, torch.bfloat16, quantized=True, chunk=512)


def test_decoding_is_limited_by_memory_for_one_row_and_shares_weights_among_many() -> None:
    config = presets()["llama-3.1-8b"].config
    speed = lambda rows: {line.what: line.value for line in Planned(config, H100, 4096, rows).speeds()}["decode"]
    assert speed(1) == pytest.approx(0.8 * 3.35e12 / 15.3e9, rel=0.1)
    assert 8 < speed(16) / speed(1) < 16


def test_plan_of_a_run_is_the_same_by_each_of_its_names(tiny_run: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((tiny_run / "config.json").read_bytes())
    onward.save(onward.load(tiny_run), tmp_path / "m.gguf")
    put_in_cache("org/planned", tmp_path)
    first = split_in_two(tmp_path / "m.gguf", tmp_path)
    names = tmp_path, tmp_path / "config.json", tmp_path / "m.gguf", first, "org/planned", "hf://org/planned"
    config = decoder_of(str(tiny_run), 0)
    assert [name for name in names if decoder_of(str(name), 0) != config] == []


def test_a_device_without_tf32_multiplies_in_fp32_by_its_data_sheet() -> None:
    peaks = {name: machine_for(TINY, name, context=64).peak("fp32") for name in ("v100", "a100")}
    assert peaks == {"v100": 15.7e12, "a100": 156e12}


def test_plan_of_a_preset_of_training_has_the_vocabulary_and_the_machine_that_are_given(capsys: Any) -> None:
    assert decoder_of("tiny", 99).vocab_size == 99
    assert main(["plan", "tiny", "--vocab", "99", "--memory", "1GB", "--bandwidth", "40GB/s", "--flops", "180G"]) == 0
    out = capsys.readouterr().out
    assert "speed on a machine (as given)" in out
    assert "training by the rule 6 N" in out


def test_plan_says_by_how_much_a_model_does_not_fit(capsys: Any) -> None:
    words = ["llama-3.1-70b", "--device", "rtx4090", "--context", "2048"]
    found = planned(capsys, *words)
    for use in "generation", "training":
        over = found[f"memory of {use}: peak"] - DEVICES["rtx4090"].memory
        assert found[f"memory of {use}: does not fit, exceeds memory by"] == over
    assert "memory of generation: longest context" not in found
    assert "memory of training: largest batch" not in found


def test_largest_batch_of_training_fills_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks: dict[int, int] = {}  # below batches of about 8, Muon needs more memory than the activations
    measure = Planned.training

    def training(self: Planned, batch: int) -> Any:
        memory = measure(self, batch)
        peaks[batch] = memory.peak
        return memory

    monkeypatch.setattr(Planned, "training", training)
    plan = Planned(replace(TINY, n_layers=1), replace(H100, memory=2e8), 64, optimizer="muon", recompute=True)
    largest = int({line.what: line.value for line in plan.training_lines()}["largest batch"])
    assert 0.999 * 2e8 <= peaks[largest] <= 2e8
    assert len(peaks) < 6  # each takes most of a second


def test_a_batch_of_millions_of_chunks_is_planned() -> None:
    config = onward.DecoderConfig(vocab_size=1 << 17, d_model=32, n_layers=1, n_heads=4, context_length=8192)
    assert Planned(config, H100, 8192).training(1 << 20).peak > H100.memory


def test_plan_of_a_mesh_has_the_memory_and_the_bytes_sent_of_one_device(capsys: Any) -> None:
    mesh = "replicate=8 shard=4"
    found = planned(capsys, "mini", "--vocab", "64", "--device", "h100", "--batch", "2", "--mesh", mesh)
    count = parameters(decoder_of("mini", 64))
    device = f"one device of mesh {mesh}"
    assert found[f"{device}: optimizer"] == 2 * count
    assert found[f"{device}: windows of a step"] == 2 * 32
    assert found[f"{device}: sent along replicate"] == pytest.approx(2 * 7 / 8 * count)
    assert found["speed: training"] == pytest.approx(32 * found[f"{device}: tokens per second"])


@pytest.mark.long
def test_plan_of_a_pipeline_has_the_memory_of_each_stage_and_the_bubble(capsys: Any) -> None:
    mesh = "pipeline=3 replicate=2"
    found = planned(capsys, "mini", "--vocab", "64", "--device", "h100", "--batch", "2", "--mesh", mesh)
    device = f"one device of mesh {mesh}"
    peaks = [found[f"{device}: peak in stage {stage}"] for stage in range(3)]
    assert found[f"{device}: peak"] == max(peaks)
    assert found[f"{device}: bubble"] == pytest.approx(2 / 5)
    assert found[f"{device}: windows of a step"] == 2 * 2 * 3
    hidden_states = 4 * 3 * 2 * decoder_of("mini", 64).context_length * decoder_of("mini", 64).d_model
    assert hidden_states <= found[f"{device}: sent along pipeline"] < 3 * hidden_states
    assert found["speed: training"] == pytest.approx(6 * found[f"{device}: tokens per second"])


def test_plan_of_devices_proposes_the_fastest_mesh_that_fits(capsys: Any) -> None:
    words = "llama-3.1-8b", "--context", "8192"
    found = planned(capsys, *words, "--devices", "64xh100")
    meshes = {name: speed for name, speed in found.items() if name.startswith("meshes of 64 h100: ")}
    chosen = next(iter(meshes)).partition(": ")[2]
    assert found["speed: training"] == meshes[f"meshes of 64 h100: {chosen}"]
    by_hand = planned(capsys, *words, "--device", "h100", "--mesh", chosen)
    assert by_hand.items() <= found.items()
    assert by_hand[f"one device of mesh {chosen}: peak"] < 0.9 * 80e9
    assert "one device of mesh replicate=64: peak" not in found


LIMITS = [("128", "4", "network"), pytest.param("1024", "16", "arithmetic", marks=pytest.mark.long)]


@pytest.mark.long
@pytest.mark.parametrize(("context", "batch", "limit"), LIMITS)
def test_plan_proposes_a_pipeline_if_the_network_limits(context: str, batch: str, limit: str, capsys: Any) -> None:
    found = planned(capsys, "gpt2", "--context", context, "--batch", batch, "--devices", "16xh100")
    meshes = [name for name in found if name.startswith("meshes of ")]
    assert ["pipeline" in name for name in meshes if "pipeline" in name or name == meshes[0]] == [limit == "network"]


@pytest.mark.long
def test_plan_of_too_few_devices_takes_the_mesh_that_needs_least(capsys: Any) -> None:
    found = planned(capsys, "llama-3.1-70b", "--devices", "2xh100", "--context", "512")
    chosen = next(name for name in found if name.startswith("meshes of ")).partition(": ")[2]
    over = found[f"one device of mesh {chosen}: does not fit, exceeds memory by"]
    assert over == found[f"one device of mesh {chosen}: peak"] - 80e9 > 0
    assert chosen != "replicate=2"


@pytest.mark.long
def test_plan_of_a_long_window_recomputes_and_divides_it(capsys: Any) -> None:
    words = "gpt2", "--context", "1024", "--batch", "64", "--memory", "2.5GB"
    found = planned(capsys, *words, "--devices", "4xh100")
    chosen = next(name for name in found if name.startswith("meshes of ")).partition(": ")[2]
    assert "context" in chosen
    by_hand = planned(capsys, *words, "--device", "h100", "--mesh", chosen, "--recompute")
    assert by_hand.items() <= found.items()
    assert by_hand[f"one device of mesh {chosen}: peak"] <= 0.9 * 2.5e9


REFUSED = {
    "gpt2 --device t4 --mesh 8x4": "--mesh '8x4' has no axis '8x4'",
    "gpt2 --device t4 --mesh tensor=5": "5 does not divide n_heads 12: choose tensor among 1, 2, 3, 4, 6, 12",
    "gpt2 --device t4 --mesh shard=2 --count 3": "Cannot combine --count with --mesh",
    "gpt2 --devices 8": "--devices is '8': write a number and a device, such as 64xh100",
    "gpt2 --devices 8xh10": "did you mean h100",
    "gpt2 --devices 8xh100 --mesh shard=8": "Cannot combine --devices with --mesh: leave out the second",
    "gpt3 --device t4": "onward models gpt3 lists its releases",
    "smal --device t4": "did you mean small?",
    "gpt2 --device cuda:99": "--device is 'cuda:99'",
    "gpt2 --device h10": "--device is 'h10': did you mean h100",
    "gpt2 --context 2000": "--context is 2,000: it must be at most the model's 1,024 tokens",
    "gpt2 --memory 10x": "--memory is '10x': write a positive number of bytes, such as 24GiB",
    "gpt2 --device t4 --flops fast": "--flops is 'fast': write operations per second",
    "gpt2 --device t4 --tokens -3": "tokens is '-3': write a positive number",
    "gpt2 --device t4 --price 3": "--price is used only with --tokens: give that as well",
    "nowhere/config.json": "there is no file nowhere/config.json",
    "nowhere.gguf": "there is no file nowhere.gguf",
    "gpt2 --batch 0": "--batch is 0",
}


@pytest.mark.parametrize("words", REFUSED)
def test_mistakes_are_one_sentence(words: str, capsys: Any) -> None:
    assert main(["plan", *words.split()]) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("onward: ")
    assert REFUSED[words] in message
