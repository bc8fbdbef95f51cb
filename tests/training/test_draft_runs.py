"""Runs that train a draft head: the head learns its model's own answers, and belongs to that model alone."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import onward
from onward import Run, UserError
from onward.base.files import file_sha256
from onward.checkpoint.draft_heads import ForeignDraft
from onward.generation.drafts import paced
from onward.generation.drafts.head_draft import PacedHead
from onward.model.draft_head import embedded
from onward.training.losses.drafting import DraftingLoss
from onward.transforms.draft_head import add_draft_head, draft_head_of

from support.decoders import DECODERS, decoder, token_ids
from support.finetuning import base_model, config, sums, tokenizer, write_rows
from support.runs import assert_same_run, metrics

OPTIONS = {"method": "draft", "completion_length": 12, "depth": 3, "steps": 6, "units": 24}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a draft head in the subfolder draft."""
    folder = base_model(tmp_path_factory.mktemp("with_draft") / "model")
    data = write_rows(folder.parent / "chats.jsonl", sums(12))
    before = file_sha256(folder / "model.safetensors")
    list(Run.start(config(folder, data, folder / "draft", **OPTIONS)).train())
    assert file_sha256(folder / "model.safetensors") == before
    return folder


@pytest.fixture(autouse=True)
def small_models_draft_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paced, "SMALLEST", 0)


def test_a_draft_head_learns_its_model(model: Path) -> None:
    steps = [row for row in metrics(model / "draft") if "loss" in row]
    assert steps[-1]["loss"] < 0.9 * steps[0]["loss"]
    assert 1 < steps[-1]["tokens_per_step"] <= 4
    assert 0 < steps[-1]["accepted"] <= 1


def test_muon_trains_the_matrices_of_a_draft_head(model: Path, tmp_path: Path) -> None:
    options = OPTIONS | {"optimizer": "muon", "steps": 2}
    list(Run.start(config(model, model.parent / "chats.jsonl", tmp_path / "run", **options)).train())
    assert len([row for row in metrics(tmp_path / "run") if "loss" in row]) == 2


def test_a_run_of_a_draft_head_resumes_exactly(model: Path, tmp_path: Path) -> None:
    options = config(model, model.parent / "chats.jsonl", tmp_path / "run", **OPTIONS)
    run = Run.start(options)
    for _ in run.train(stop=lambda: run.step == 2):
        pass
    list(Run.resume(tmp_path / "run").train())
    assert_same_run(tmp_path / "run", model / "draft")


def test_a_model_loads_with_its_draft_head_which_changes_no_text(model: Path) -> None:
    lm = onward.load(model)
    assert isinstance(lm.engine().draft, PacedHead)
    assert lm.engine(lookup=0).draft is None
    for temperature in 0.0, 1.0:
        texts = [lm.generate("2 + 3?", 20, temperature=temperature, seed=3, lookup=lookup) for lookup in (None, 0)]
        assert texts[0] == texts[1]


def test_a_small_model_leaves_its_draft_head_out_where_it_would_save_no_time(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    assert onward.load(model).engine().draft is None


@pytest.mark.parametrize("changed", ["weights", "tokenizer", "sizes"])
def test_a_draft_head_of_another_model_is_left_out_with_a_sentence(changed: str, model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    if changed == "tokenizer":
        shutil.copytree(model, other)
        (other / "tokenizer.json").write_text((model / "tokenizer.json").read_text() + "\n")
    else:
        onward.save(onward.load(model), other)
        tuned = onward.load(other)
        with torch.no_grad():
            tuned.model.blocks[1].mlp.down.weight.mul_(1.5)
        onward.save(tuned if changed == "weights" else onward.load(base_model(tmp_path / "wide", d_model=32)), other)
        shutil.copytree(model / "draft", other / "draft")
    with pytest.warns(ForeignDraft, match=f"made for another model than {other}"):
        lm = onward.load(other)
    assert lm.draft_head is None


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"lora": 4}, "lora is given with draft, which does not train the model"),
        ({"template": "chatml"}, "choose a template"),
    ],
)
def test_options_that_change_the_model_are_refused(
    options: dict[str, object], sentence: str, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=sentence):
        Run.start(config(model, model.parent / "chats.jsonl", tmp_path / "run", **OPTIONS | options))


def test_the_loss_of_a_draft_head_is_its_formula_in_fp64() -> None:
    model = decoder(DECODERS["llama"]).double()
    add_draft_head(model, 24)
    head = draft_head_of(model).double()
    tokens = token_ids(model.config)
    targets = tokens[:, 1:].masked_fill(tokens[:, 1:] < 3, -100)
    result: Any = DraftingLoss(2, 0.5, 1.0, 8, tokenizer())(model, onward.Batch(tokens[:, :-1], targets))
    loss, reported, shares = result
    with torch.no_grad():
        hidden, wanted, shared = model.hidden(tokens[:, :-1]), 0.0, [0.0, 0.0]
        for row in range(len(tokens)):
            for t in range(tokens.size(1) - 1):
                state = hidden[row, t]
                for k, weight in enumerate([2 / 3, 1 / 3], 1):
                    if t + k >= tokens.size(1) - 1:
                        break
                    state = head(state, embedded(model, tokens[row, t + k]))
                    if targets[row, t + k] == -100:
                        continue
                    p = model.logits(hidden[row, t + k]).softmax(-1).numpy()
                    q = model.logits(head.norm(state)).softmax(-1).numpy()
                    wanted += weight * float((p * np.log(p / q)).sum())
                    shared[k - 1] += float(np.minimum(p, q).sum())
    assert loss.item() == reported.item() == pytest.approx(wanted, rel=1e-5)
    assert [shares["accepted_1"].item(), shares["accepted_2"].item()] == pytest.approx(shared, rel=1e-5)
