"""Tensors that no decoder needs, and tensors that files may lack."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, OlmoHybridConfig

from onward import UserError
from onward.base.files import read_json, write_json
from onward.checkpoint.huggingface.save import save_model
from onward.checkpoint.huggingface.tied import both_names
from onward.checkpoint.load import load_model
from onward.checkpoint.names import LeftOut
from onward.families import families, read

from support.families import CASES
from support.families.olmo_hybrid import SIZES as OLMO_HYBRID
from support.parity import assert_same_logits, publish, tensors

V3 = CASES["deepseek_v3: groups, a dense layer first"]
DEPTH = V3.num_hidden_layers
LATER = [
    [f"model.layers.{DEPTH}.eh_proj.weight", f"model.layers.{DEPTH + 1}.mlp.up_proj.weight"],
    ["mtp.norm.weight", "model.mtp_layers.0.norm.weight"],
]


@pytest.mark.parametrize("names", LATER)
def test_layers_for_multi_token_prediction_are_left_out_with_a_word(names: list[str], tmp_path: Path) -> None:
    theirs = publish(V3, tmp_path)
    more = {name: torch.full((4, 4), torch.nan) for name in names}
    save_file(tensors(tmp_path) | more, tmp_path / "model.safetensors")
    with pytest.warns(LeftOut, match=f"multi-token prediction are left out, with tensors such as {min(names)}") as said:
        ours, _ = load_model(tmp_path)
    assert len(said) == 1
    assert_same_logits(ours, theirs)


def test_layer_that_does_not_follow_the_others_is_refused(tmp_path: Path) -> None:
    publish(V3, tmp_path)
    name = f"model.layers.{DEPTH + 1}.eh_proj.weight"
    save_file(tensors(tmp_path) | {name: torch.zeros(4, 4)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=f"has a tensor {name} that"):
        load_model(tmp_path)


def test_layers_beyond_the_config_without_a_projection_are_not_for_prediction(tmp_path: Path) -> None:
    publish(V3, tmp_path)
    write_json(tmp_path / "config.json", read_json(tmp_path / "config.json") | {"num_hidden_layers": DEPTH - 1})
    with pytest.raises(UserError, match=rf"has a tensor model\.layers\.{DEPTH - 1}\.\S+ that the model"):
        load_model(tmp_path)


def test_absent_routing_biases_are_none(tmp_path: Path) -> None:
    publish(V3, tmp_path)
    kept = {name: t for name, t in tensors(tmp_path).items() if not name.endswith("e_score_correction_bias")}
    save_file(kept, tmp_path / "model.safetensors")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    for name, buffer in theirs.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.zero_()
    assert_same_logits(load_model(tmp_path)[0], theirs)


ONE_OF_EACH = {name.split(":")[0]: hf for name, hf in reversed(CASES.items())}


@pytest.mark.parametrize("family", sorted(ONE_OF_EACH.keys() - {"dbrx"}))  # dbrx cannot tie its head
def test_tied_matrix_may_have_the_name_of_the_head(family: str, tmp_path: Path) -> None:
    hf = ONE_OF_EACH[family]
    theirs = publish(type(hf).from_dict({**hf.to_dict(), "tie_word_embeddings": True}), tmp_path)
    kind, config = read(read_json(tmp_path / "config.json"))
    if not (config.tied and theirs._tied_weights_keys):
        pytest.skip("never ties")
    embedding, head = both_names(kind, config)
    found = tensors(tmp_path)
    found[head] = found.pop(embedding)
    save_file(found, tmp_path / "model.safetensors")
    ours, _ = load_model(tmp_path)
    assert ours.head.weight is ours.embed.weight
    assert_same_logits(ours, theirs)


def test_kimi_k2_is_deepseek_v3_and_saved_back_as_it_was(tmp_path: Path) -> None:
    theirs = publish(V3, tmp_path)
    keys = read_json(tmp_path / "config.json") | {"model_type": "kimi_k2"}
    assert families()["kimi_k2"] is families()["deepseek_v3"]
    write_json(tmp_path / "config.json", keys)
    ours, hf = load_model(tmp_path)
    assert_same_logits(ours, theirs)
    save_model(ours, tmp_path / "saved", hf)
    assert read_json(tmp_path / "saved/config.json")["model_type"] == "kimi_k2"


def test_convolutions_in_equal_parts_are_cut_into_those_of_the_layer(tmp_path: Path) -> None:
    # the ratio of the released models
    hf = OlmoHybridConfig(**OLMO_HYBRID, linear_key_head_dim=6, linear_value_head_dim=12)
    theirs = publish(hf, tmp_path / "theirs")
    ours, original = load_model(tmp_path / "theirs")
    assert_same_logits(ours, theirs)
    save_model(ours, tmp_path / "ours", original)
    assert_same_logits(ours, AutoModelForCausalLM.from_pretrained(tmp_path / "ours"))
    stored = tensors(tmp_path / "ours")
    widths = [len(stored[f"model.layers.0.linear_attn.{name}_conv1d.weight"]) for name in "qkv"]
    assert widths == [24, 24, 48]
