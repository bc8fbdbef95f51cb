"""Runs that train adapters: only the adapters are saved, the base model is verified, and a killed run resumes
exactly."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import onward
from onward import Experts, FeedForward, Gated, Notice, Run, UserError, mean_loss
from onward.checkpoint.saves.folder import saves
from onward.checkpoint.weights import read_tensors
from onward.cli import main
from onward.reports.runs.write import write_reports
from onward.transforms.quantize import QuantizedLinear

from support.finetuning import base_model, config
from support.runs import assert_same_adapters, metrics

LORA: dict[str, Any] = {"lora": "lora(rank=4, dropout=0.1)", "learning_rate": 1e-2, "template": "plain"}


@pytest.fixture(scope="module")
def whole(base: Path, chats: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never stopped."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    list(Run.start(config(base, chats, folder, **LORA)).train())
    return folder


def test_a_run_of_adapters_saves_only_these_and_is_used_like_a_model(whole: Path, base: Path) -> None:
    steps = [row for row in metrics(whole) if "loss" in row]
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert not list(whole.rglob("model.safetensors"))
    assert not list(whole.rglob("config.json"))
    names = read_tensors(saves(whole)[-1] / "state.safetensors")
    assert all("_lora." in name or name.startswith("number/") for name in names)
    lm = onward.load(whole)
    assert isinstance(lm.chat("2 + 3?", 5), str)
    frozen = dict(onward.load(base).model.named_parameters())
    assert all(torch.equal(p, frozen[n]) for n, p in lm.model.named_parameters() if "_lora." not in n)


@pytest.mark.long
def test_a_killed_run_of_adapters_resumes_exactly(whole: Path, base: Path, chats: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    Run.start(config(base, chats, run, **LORA))
    program = (
        "import os, signal; from pathlib import Path; from onward.training.run.run import Run\n"
        f"run = Run.resume(Path({str(run)!r}))\n"
        "for event in run.train():\n"
        "    if run.step == 4: os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == -signal.SIGKILL
    list(Run.resume(run).train())
    assert_same_adapters(run, whole)


@pytest.mark.parametrize(
    ("part", "quantize", "init"),
    [
        (Gated(), "int8", "none"),
        (Gated(), "int4", "pissa"),
        (Experts(count=4, d_ff=8, backend="loop"), "", "olora"),
    ],
    ids=["int8", "int4", "experts"],
)
def test_a_base_of_each_kind_is_trained_on_and_resumed(
    part: FeedForward, quantize: str, init: str, chats: Path, tmp_path: Path
) -> None:
    base = base_model(tmp_path / "base", d_model=32, d_ff=64, mlp=part)
    settings = LORA | {"quantize": quantize, "steps": 4, "lora": f"lora(rank=4, dropout=0.1, init={init})"}
    list(Run.start(config(base, chats, tmp_path / "whole", **settings)).train())
    run = Run.start(config(base, chats, tmp_path / "run", **settings))
    for _ in run.train(stop=lambda: run.step == 2):
        pass
    list(Run.resume(tmp_path / "run").train())
    assert_same_adapters(tmp_path / "run", tmp_path / "whole")
    assert isinstance(onward.load(tmp_path / "run").chat("2 + 3?", 5), str)


@pytest.mark.parametrize("init", ["pissa(iterations=4)", "olora", "eva(rho=4)"])
def test_each_initialization_begins_as_the_base_and_resumes_exactly(
    init: str, base: Path, chats: Path, tmp_path: Path
) -> None:
    settings = LORA | {"lora": f"lora(rank=3, dropout=0.1, init={init})", "steps": 4}
    list(Run.start(config(base, chats, tmp_path / "whole", **settings)).train())
    run = Run.start(config(base, chats, tmp_path / "run", **settings))
    tokens = torch.arange(1, 40)[None]
    with torch.no_grad():
        torch.testing.assert_close(run.model.eval()(tokens), onward.load(base).model(tokens), rtol=1e-5, atol=1e-5)
    list(run.train(stop=lambda: run.step == 2))
    list(Run.resume(tmp_path / "run").train())
    assert_same_adapters(tmp_path / "run", tmp_path / "whole")
    lora = json.loads((tmp_path / "run" / "run.json").read_text())["lora"]
    assert bool(lora["ranks"]) == init.startswith("eva")
    steps = [row["loss"] for row in metrics(tmp_path / "run") if "loss" in row]
    assert steps[-1] < steps[0]


def test_eva_of_a_run_is_that_of_peft_on_its_batches(base: Path, chats: Path, tmp_path: Path) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    settings = LORA | {"lora": "lora(rank=3, init=eva)", "packed": False}
    run = Run.start(config(base, chats, tmp_path / "run", **settings))
    windows, batches = run.inputs.windows(run.config, 96), []
    for start in range(0, 2 * len(windows), 4):
        batch = windows.read(range(start, start + 4))
        trained = torch.nn.functional.pad(batch.targets[:, :-1] >= 0, (1, 0))
        batches.append({"input_ids": batch.tokens, "labels": batch.tokens.masked_fill(~trained, -100)})
    made = peft.LoraConfig(r=3, lora_alpha=6, target_modules="all-linear", init_lora_weights="eva")
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    theirs = peft.get_peft_model(model, made)
    peft.initialize_lora_eva_weights(theirs, batches, show_progress_bar=False)
    theirs.save_pretrained(tmp_path / "theirs")
    wanted, ours = (read_tensors(tmp_path / name / "adapter_model.safetensors") for name in ("theirs", "run"))
    assert ours.keys() == wanted.keys()
    for name, tensor in wanted.items():
        # two layers with the same inputs explain the same variance, so either may get the last rank
        if "lora_A" in name:
            rank = min(len(tensor), len(ours[name]))
            assert max(len(tensor), len(ours[name])) <= rank + name.endswith(
                ("k_proj.lora_A.weight", "v_proj.lora_A.weight")
            )
            torch.testing.assert_close(ours[name][:rank].abs(), tensor[:rank].abs(), rtol=1e-3, atol=1e-3)


def test_a_run_says_the_error_of_its_quantized_base(chats: Path, tmp_path: Path) -> None:
    base = base_model(tmp_path / "base", d_model=32, d_ff=64)
    settings = LORA | {"quantize": "int4", "steps": 1, "validation": "none"}
    run = Run.start(config(base, chats, tmp_path / "run", **settings))
    error = json.loads((tmp_path / "run" / "inputs.json").read_text())["quantization"]
    models = [onward.load(base, quantize=precision).model for precision in ("int4", None)]
    layers = [name for name, module in models[0].named_modules() if isinstance(module, QuantizedLinear)]
    weights = [torch.cat([m.get_submodule(name).weight.flatten() for name in layers]) for m in models]  # type: ignore[arg-type]
    assert error["weights"] == pytest.approx(float((weights[0] - weights[1]).norm() / weights[1].norm()), rel=1e-5)
    assert 0.02 < error["weights"] < error["greatest"] < 0.2
    rows = run.inputs.windows(run.config, 96).read(range(5))
    assert error["tokens"] == rows.num_targets
    assert [error["loss"], error["plain_loss"]] == pytest.approx([mean_loss(m, [rows])[0] for m in models], rel=1e-5)
    notices = [event.sentence for event in run.train() if isinstance(event, Notice)]
    assert any(
        f"the loss on {rows.num_targets} tokens is {error['loss']:.4f}, with unquantized" in one for one in notices
    )
    write_reports(tmp_path / "run")
    assert "int4 weights differ from the unquantized weights by" in (tmp_path / "run" / "report.html").read_text()


def test_another_base_under_a_run_is_refused_with_both_checksums(base: Path, chats: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "base")
    run = Run.start(config(tmp_path / "base", chats, tmp_path / "run", **LORA))
    for _ in run.train(stop=lambda: run.step == 1):
        pass
    lm = onward.load(tmp_path / "base")
    with torch.no_grad():
        lm.model.head.weight += 1
    onward.save(lm, tmp_path / "base")
    recorded = json.loads((tmp_path / "run" / "base.json").read_text())["checksum"]
    with pytest.raises(UserError, match=f"made for another base: .* {recorded}, but .* has checksum"):
        Run.resume(tmp_path / "run")


def test_options_of_adapters_that_contradict_are_one_sentence(base: Path, chats: Path, tmp_path: Path) -> None:
    for changes, message in (
        ({"lora": "lora(dropout=0.1)", "method": "dpo"}, "no effect in dpo, which uses no dropout: leave it out"),
        ({"quantize": "int8"}, "quantize is 'int8' without adapters to train: give lora"),
        ({"lora": 4, "balance_bias": 0.1}, "which leave routers unchanged"),
        ({"lora": 4, "average": 0.9}, "leave it out"),
        ({"lora": "lora(targets=('attn.qq',))"}, "did you mean attn.q?"),
        ({"lora": 4, "template": "chatml"}, "tokens to the vocabulary"),
        ({"lora": "lora(init=pisa)"}, "lora.init is 'pisa', .* did you mean pissa?"),
        ({"lora": "lora(init=pissa(iteration=4))"}, "did you mean iterations?"),
        (
            {"lora": "lora(rank=17, init=olora)"},
            "with olora and rank .*, because it has at most rank 16: choose",
        ),
        (
            {"lora": "lora(rank=17, init=eva)"},
            "attn.q with eva and rank .*, because it has 16 inputs: choose",
        ),
        ({"lora": "lora(rank=2, ranks={'attn.q': 1}, init=eva)"}, "eva chooses the ranks: leave them out"),
        ({"lora": "lora(ranks={'attn.qq': 1})"}, "ranks 'attn.qq' matches nothing .* did you mean attn.q?"),
        ({"lora": "lora(b_rate=0)"}, "b_rate is 0"),
        ({"lora": "lora(b_rate=16)", "optimizer": "muon"}, "b_rate is given with muon"),
    ):
        with pytest.raises(UserError, match=message):
            Run.start(config(base, chats, tmp_path / "run", **{"template": "plain"} | changes))
    assert not (tmp_path / "run").exists()


def test_the_command_trains_adapters(base: Path, chats: Path, tmp_path: Path) -> None:
    words = ["--lora", "lora(rank=2, targets=(attn,))", "--steps", "1", "--template", "plain", "--precision", "fp32"]
    assert main(["finetune", str(base), str(chats), "--out", str(tmp_path / "run"), *words]) == 0
    assert main(["merge", str(tmp_path / "run"), str(tmp_path / "merged")]) == 0
    assert onward.load(tmp_path / "merged").tokenizer.templates
