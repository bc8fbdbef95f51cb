"""Weights that are read one at a time are those of the loaded model."""

from pathlib import Path

import pytest
import torch

from onward.checkpoint.huggingface.save import save_model
from onward.checkpoint.lazy import load_outline
from onward.checkpoint.load import load_model
from onward.errors import UserError
from onward.model.decoder import Decoder
from onward.transforms.quantize import quantize_model

from support.decoders import DECODERS
from support.grids import first

DTYPES = {"as stored": None, "bf16": torch.bfloat16}


@pytest.mark.parametrize("name", first(8, DECODERS))
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_weights_read_one_at_a_time_are_those_loaded(name: str, dtype: torch.dtype | None, tmp_path: Path) -> None:
    save_model(Decoder(DECODERS[name]), tmp_path)
    whole, _ = load_model(tmp_path, dtype)
    outline, weights, _ = load_outline(tmp_path, dtype)
    assert outline.config == whole.config
    for (name, wanted), (same, parameter) in zip(whole.named_parameters(), outline.named_parameters(), strict=True):
        assert (name, wanted.dtype, wanted.shape) == (same, parameter.dtype, parameter.shape)
        assert parameter.is_meta
        assert torch.equal(wanted, weights[name])


def test_quantized_weights_are_not_read_one_at_a_time(tmp_path: Path) -> None:
    model = Decoder(DECODERS["llama"])
    quantize_model(model, "int8")
    save_model(model, tmp_path)
    with pytest.raises(UserError, match="has quantized weights"):
        load_outline(tmp_path)
