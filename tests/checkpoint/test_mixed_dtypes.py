"""Weights of several dtypes are loaded in the dtype of most elements, with a warning that names the other tensors."""

import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from onward.checkpoint.huggingface.save import save_model
from onward.checkpoint.load import load_model
from onward.checkpoint.names import MixedDtypes
from onward.checkpoint.weights import read_tensors
from onward.families import read

from support.decoders import DECODERS, decoder, token_ids
from support.families import CASES
from support.parity import assert_same_logits, publish

Q = "model.layers.1.self_attn.q_proj.weight"


def cast(folder: Path, name: str, dtype: torch.dtype) -> None:
    """Store one tensor of a folder in another dtype."""
    path = folder / "model.safetensors"
    stored = {key: tensor.clone() for key, tensor in read_tensors(path).items()}
    save_file(stored | {name: stored[name].to(dtype)}, path)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_one_tensor_of_another_dtype_is_loaded_as_the_others(dtype: torch.dtype, tmp_path: Path) -> None:
    publish(CASES["llama: grouped"], tmp_path)
    cast(tmp_path, Q, dtype)
    with pytest.warns(MixedDtypes, match=f"1 of the .* not F32 like the others: {Q}"):
        model, _ = load_model(tmp_path)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert_same_logits(model, AutoModelForCausalLM.from_pretrained(tmp_path))


@torch.inference_mode()
def test_named_dtype_is_taken_without_a_warning(tmp_path: Path) -> None:
    save_model(decoder(DECODERS["llama"]), tmp_path)
    cast(tmp_path, Q, torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, _ = load_model(tmp_path, torch.float64)
    assert model(token_ids(model.config)).dtype == torch.float64


def test_routing_bias_keeps_the_dtype_of_its_file(tmp_path: Path) -> None:
    hf = CASES[next(name for name in CASES if name.startswith("deepseek_v3"))].to_dict()
    model = decoder(read(hf)[1], torch.bfloat16)
    save_model(model, tmp_path, hf)
    bias = next(name for name in read_tensors(tmp_path / "model.safetensors") if name.endswith("correction_bias"))
    cast(tmp_path, bias, torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, _ = load_model(tmp_path)
    found = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert {dtype for name, dtype in found.items() if "routing_bias" not in name} == {torch.bfloat16}
    assert torch.float32 in {dtype for name, dtype in found.items() if "routing_bias" in name}
