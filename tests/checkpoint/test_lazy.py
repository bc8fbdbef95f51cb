"""Weights that are read one at a time equal those of the loaded model."""

from pathlib import Path

import pytest
import torch

from onward import Batch, Decoder, RunConfig, StepPlan, UserError
from onward.checkpoint.huggingface.save import save_model
from onward.checkpoint.lazy import load_outline
from onward.checkpoint.load import load_model
from onward.checkpoint.saves.newest import newest_state
from onward.checkpoint.saves.saver import Saver
from onward.checkpoint.saves.state import restore
from onward.model.deferred import values
from onward.parallel.parts import allocate
from onward.training.step.build import build_trainer
from onward.transforms import quantize_model

from support.decoders import DECODERS
from support.grids import first

DTYPES = {"as stored": None, "bf16": torch.bfloat16}


@pytest.mark.parametrize("name", first(8, DECODERS))
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_weights_read_one_at_a_time_are_those_loaded(name: str, dtype: torch.dtype | None, tmp_path: Path) -> None:
    save_model(Decoder(DECODERS[name]), tmp_path)
    whole, _ = load_model(tmp_path, dtype)
    outline, _ = load_outline(tmp_path, dtype)
    assert outline.config == whole.config
    for (name, wanted), (same, parameter) in zip(whole.named_parameters(), outline.named_parameters(), strict=True):
        assert (name, wanted.dtype, wanted.shape) == (same, parameter.dtype, parameter.shape)
        assert parameter.is_meta
        assert torch.equal(wanted, values(parameter))


def test_quantized_weights_are_not_read_one_at_a_time(tmp_path: Path) -> None:
    model = Decoder(DECODERS["llama"])
    quantize_model(model, "int8")
    save_model(model, tmp_path)
    with pytest.raises(UserError, match="has quantized weights"):
        load_outline(tmp_path)


@pytest.mark.parametrize("average", [0.0, 0.5])
@pytest.mark.parametrize("name", first(1, ["deepseek", "gpt2", "llama"]))
def test_lazy_state_is_the_state(name: str, average: float, tmp_path: Path) -> None:
    """One matrix is frozen, `deepseek` has an untrained routing bias, and averages have a higher precision than
    weights."""
    model = Decoder(DECODERS[name]).bfloat16()
    model.blocks[0].attn.out.weight.requires_grad_(False)
    trainer = build_trainer(RunConfig(steps=3, warmup=0, precision="fp32", average=average), model)
    tokens = torch.randint(model.config.vocab_size, (2, 9))
    trainer.train_step(StepPlan([Batch(tokens[:, :-1], tokens[:, 1:])]))
    saver = Saver(tmp_path, keep=1)
    saver.save(model, trainer.state_dict(), {})
    saver.finish()
    eager, lazy = (newest_state(tmp_path, torch.device("cpu"), lazy=is_lazy) for is_lazy in (False, True))
    assert lazy.progress == eager.progress
    assert {*eager.tensors} <= {*lazy.tensors}
    assert all(torch.equal(eager.tensors[key], lazy.tensors[key]) for key in eager.tensors)
    allocate(lazy.model, "cpu")
    restore(lazy.tensors, lazy.model, [])
    for (name, one), other in zip(eager.model.named_parameters(), lazy.model.parameters(), strict=True):
        assert (one.dtype, one.requires_grad) == (other.dtype, other.requires_grad), name
        assert torch.equal(one, other), name
