"""Each key of a config.json is used, harmless, or named in one warning; a changed model gets a new config.json."""

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config, LlamaConfig, PreTrainedConfig, Qwen3Config

import onward
from onward import DecoderConfig, RMSNorm, SelfAttention
from onward.base.files import read_json, write_json
from onward.checkpoint.huggingface.save import describe, save_model
from onward.checkpoint.load import load_model
from onward.cli import main
from onward.families import express, read

from support.decoders import DECODERS, decoder

LLAMA, GPT2 = DECODERS["llama"], DECODERS["gpt2"]


def warned_of(hf: dict[str, Any]) -> list[str]:
    """The keys that the warning names, if there is one, when a config.json is read."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        read(hf)
    assert len(caught) <= 1
    return str(caught[0].message).split(": ")[1].split(", ") if caught else []


HARMLESS: list[dict[str, Any]] = [
    {"architectures": ["X"], "torch_dtype": "float16", "transformers_version": "4.0", "_name_or_path": "a/b"},
    {"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 0, "use_cache": True, "output_attentions": True},
    {"initializer_range": 0.02, "hidden_dropout": 0.1, "embd_pdrop": 0.1, "router_aux_loss_coef": 0.01},
    {"unsloth_version": "2025", "pretraining_tp": 1, "task_specific_params": {"a": 1}, "id2label": {"0": "A"}},
    {"new_key": None, "another": False, "third": [], "fourth": {}, "fifth": 0},
]


@pytest.mark.parametrize("keys", HARMLESS)
def test_harmless_keys_are_not_mentioned(keys: dict[str, Any]) -> None:
    assert warned_of(express(LLAMA) | keys) == []


@pytest.mark.parametrize("hf", [LlamaConfig(), GPT2Config(), Qwen3Config()], ids=lambda hf: hf.model_type)
def test_all_that_transformers_writes_is_honored_or_harmless(hf: PreTrainedConfig) -> None:
    assert warned_of(hf.to_dict()) == []


def test_missing_model_type_is_named_as_missing() -> None:
    with pytest.raises(onward.UserError, match=r"config\.json: model_type is missing: add it"):
        read({"hidden_size": 64})


def test_unread_keys_are_named_in_one_warning() -> None:
    assert warned_of(express(LLAMA) | {"mystery": 8.0, "enigma": 0.2}) == ["'mystery'", "'enigma'"]


def test_commands_warn_in_one_line_and_once(tmp_path: Path, tiny_run: Path, capsys) -> None:
    lm = onward.load(tiny_run)
    onward.save(lm, tmp_path)
    write_json(tmp_path / "config.json", read_json(tmp_path / "config.json") | {"mystery": 8.0})
    assert main(["generate", str(tmp_path), "The", "A", "--max-new-tokens", "2"]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "mystery" in line]
    assert said == ["onward: config.json has keys that Onward does not know and ignores: 'mystery'"]


def saved_again(config: DecoderConfig, original: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The config.json written for a decoder that was loaded with `original` and then changed."""
    save_model(decoder(config), folder, original)
    assert load_model(folder)[0].config == config
    return json.loads((folder / "config.json").read_text())


def test_changed_model_stays_in_its_family_where_possible(tmp_path: Path) -> None:
    original = json.loads(Qwen3Config(**SMALL).to_json_string(use_diff=False)) | {"prefix": "kept", "bos_token_id": 1}
    told = saved_again(replace(read(original)[1], d_ff=24), original, tmp_path)
    assert told["intermediate_size"] == 24
    assert {k: v for k, v in original.items() if told[k] != v}.keys() == {"intermediate_size", "dtype"}


SMALL = {
    "vocab_size": 13,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 12,
}


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (GPT2, "gpt2"),
        (replace(LLAMA, norm=RMSNorm(), attention=SelfAttention(qk_norm="width")), None),
        (DECODERS["vaswani"], "onward"),
    ],
)
def test_change_of_family_keeps_only_token_ids_and_labels(
    config: DecoderConfig, kind: str | None, tmp_path: Path
) -> None:
    original = json.loads(LlamaConfig(**SMALL).to_json_string(use_diff=False))
    original |= {"prefix": "old", "bos_token_id": 5, "eos_token_id": [6, 7]}
    told = saved_again(config, original, tmp_path)
    assert told == express(config) | {"dtype": "float32"} | {
        key: value for key, value in original.items() if key.endswith("_token_id") or "label" in key
    }
    assert kind in (None, told["model_type"])


def test_torch_dtype_follows_the_weights(tmp_path: Path) -> None:
    original = express(LLAMA) | {"torch_dtype": "float16"}
    save_model(decoder(LLAMA), tmp_path, original)
    told = read_json(tmp_path / "config.json")
    assert (told["dtype"], told["torch_dtype"]) == ("float32", "float32")


def test_quantization_config_is_dropped_for_plain_weights() -> None:
    assert "quantization_config" not in describe(LLAMA, express(LLAMA) | {"quantization_config": {"quant_method": "x"}})
