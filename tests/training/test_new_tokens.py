"""New tokens of a chat template in runs with adapters: their embeddings are trained, saved, resumed, loaded and
merged."""

from pathlib import Path
from typing import Any

import pytest
import torch

import onward
from onward import Run, UserError
from onward.checkpoint.weights import read_tensors

from support.finetuning import base_model, config, pairs, sums, write_rows
from support.runs import assert_same_adapters

OPTIONS: dict[str, Any] = {"template": "chatml", "validation": "none", "steps": 4, "validate_every": 2}
FULL = "lora(rank=2, targets=(attn,), full=(embed, head))"


def logits(folder: Path) -> torch.Tensor:
    model = onward.load(folder).model.eval()
    with torch.no_grad():
        return model(torch.arange(1, model.config.vocab_size)[None, -40:])


@pytest.mark.parametrize("tied", [False, True])
def test_rows_of_new_tokens_are_trained_saved_and_loaded(tied: bool, tmp_path: Path) -> None:
    base = base_model(tmp_path / "base", tied=tied)
    data = write_rows(tmp_path / "rows.jsonl", sums(8))
    run = Run.start(config(base, data, tmp_path / "run", lora=FULL, **OPTIONS))
    model, size = run.model, onward.load(base).config.vocab_size
    assert model.config.vocab_size == size + 2
    before = [module.weight.detach().clone() for module in (model.embed, model.head)]
    assert not model.config.tied
    list(run.train(stop=lambda: run.step == 2))
    list(Run.resume(tmp_path / "run").train())
    list(Run.start(config(base, data, tmp_path / "whole", lora=FULL, **OPTIONS)).train())
    assert_same_adapters(tmp_path / "run", tmp_path / "whole")
    tensors = read_tensors(tmp_path / "run" / "adapter_model.safetensors")
    trained = [tensors[f"base_model.model.{name}.weight"] for name in ("model.embed_tokens", "lm_head")]
    for old, new in zip(before, trained):
        assert new.shape == (size + 2, 16)
        assert ((new[size:] - old[size:]).abs().amax(1) > 1e-4).all(), "each new row has learned"
    loaded = onward.load(tmp_path / "run")
    assert loaded.config.vocab_size == loaded.tokenizer.vocab_size == size + 2
    assert (loaded.model.embed.num_embeddings, loaded.model.head.out_features) == (size + 2, size + 2)
    for name, new in zip(("embed.weight", "head.weight"), trained):
        assert torch.equal(loaded.model.get_parameter(name).cpu(), new)
    onward.merge(tmp_path / "run", tmp_path / "merged")
    torch.testing.assert_close(logits(tmp_path / "merged"), logits(tmp_path / "run"), rtol=1e-4, atol=1e-4)
    assert isinstance(loaded.chat("2 + 3?", max_new_tokens=4), str)


@pytest.mark.parametrize(
    ("lora", "more"),
    [("2", {}), ("lora(rank=2, full=(embed,))", {}), ("lora(rank=2, full=(head,))", {}), (FULL, {"quantize": "int8"})],
)
def test_new_tokens_are_refused_where_they_are_not_trained(lora: str, more: dict[str, Any], tmp_path: Path) -> None:
    base = base_model(tmp_path / "base", d_model=32)
    data = write_rows(tmp_path / "rows.jsonl", sums(4))
    with pytest.raises(UserError, match=r"adds 2 tokens to the vocabulary, .*full=\(embed, head\)"):
        Run.start(config(base, data, tmp_path / "run", lora=lora, **OPTIONS | more))
    assert not (tmp_path / "run").exists()


def test_preferences_start_from_the_base_with_new_tokens(tmp_path: Path) -> None:
    base, rows = base_model(tmp_path / "base"), pairs()
    talks = [{name: [{"role": role, "content": row[name]}] for name, role in ROLES.items()} for row in rows]
    data = write_rows(tmp_path / "pairs.jsonl", talks)
    run = Run.start(config(base, data, tmp_path / "run", lora=FULL, method="dpo", **OPTIONS))
    losses = [step.loss for step in run.train() if hasattr(step, "loss")]
    assert losses[0] == pytest.approx(0.693147, abs=1e-5)
    assert losses[-1] < 0.69


ROLES = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
