"""A config.json key that changes the model is used or refused, never ignored. The tests change keys of transformers'
classes, and add keys of other families."""

import json
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig

from onward import DecoderConfig, SelfAttention, UserError
from onward.checkpoint.huggingface.save import describe
from onward.families import express, read
from onward.families._keys import HARMLESS

from support.families import CASES
from support.parity import LENGTH, stir

FIRST = {hf.model_type: hf for hf in reversed(CASES.values())}
OF_ALL = PreTrainedConfig().to_dict().keys() - {"tie_word_embeddings"}
# test_rope_keys.py covers the keys of rotary positions
OWN = {"model_type", "vocab_size", "rope_parameters", "rope_scaling"}


def changes(table: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (key, copy of a dict with another value for this key)."""
    for key, value in table.items():
        if key in OF_ALL | OWN:
            continue
        values: list[Any] = [not value]
        match value:
            case bool():
                pass
            case int():
                values = [value + 1, max(value - 1, 0)]
            case float():
                values = [value * 1.5 + 0.25]
            case str():
                values = ["relu", "none"]
            case None:
                values = [True, 3, 0.5, [0]]
            case list():
                values = [value[1:], value[::-1], [1] * len(value)]
            case dict():
                values = [inner for _, inner in changes(value)]
        yield from ((key, {**table, key: other}) for other in values)


def decoder(hf: dict[str, Any]) -> DecoderConfig | None:
    try:
        return read(hf)[1]
    except UserError:
        return None


@torch.inference_mode()
def logits(hf: dict[str, Any], weights: dict[str, torch.Tensor] | None = None) -> Any:
    """transformers' model and its logits; None and the exception if transformers has no such model."""
    try:
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[hf["model_type"]].from_dict(dict(hf))).eval()
        if weights is None:
            stir(model)
        else:
            model.load_state_dict(weights)
        tokens = torch.randint(hf["vocab_size"], (2, LENGTH), generator=torch.Generator().manual_seed(0))
        return model, model(tokens).logits
    except Exception as error:  # each class raises its own kind of error for wrong values
        return None, error


def ignored(case: PreTrainedConfig, *, harmless: bool) -> list[str]:
    """The changes that Onward ignores although they change transformers' logits; with `harmless`, keys that Onward
    lists as harmless are changed, too."""
    hf = json.loads(json.dumps(case.to_dict()))
    config, found = decoder(hf), []
    model, plain = logits(hf)
    for key, other in changes(hf):
        if (harmless or not HARMLESS.fullmatch(key)) and decoder(other) == config:
            changed = logits(other, model.state_dict())[1]
            if isinstance(changed, torch.Tensor) and not torch.allclose(changed, plain, rtol=0, atol=1e-6):
                found.append(f"{key} {hf[key]!r} -> {other[key]!r}")
    return found


@pytest.mark.parametrize("model_type", FIRST)
@pytest.mark.filterwarnings("ignore")
def test_no_key_of_transformers_is_ignored(model_type: str) -> None:
    assert ignored(FIRST[model_type], harmless=False) == []


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore")
def test_no_key_of_any_case_is_ignored(case: str) -> None:
    assert ignored(CASES[case], harmless=True) == []


LAYERS = 4
MIXED, FULL = ["sliding_attention", "full_attention"] * 2, ["full_attention"] * LAYERS
FOREIGN: list[tuple[str, str, Any]] = [
    ("llama", "layer_types", MIXED),
    ("mixtral", "layer_types", MIXED),
    ("llama", "sliding_window", 512),
    ("qwen2", "no_rope_layers", [1, 0, 1, 0]),
    ("llama", "residual_multiplier", 0.2),
    ("llama", "attn_logit_softcapping", 50.0),
    ("qwen3", "final_logit_softcapping", 30.0),
    ("olmo2", "use_qk_norm", True),
    ("llama", "num_local_experts", 8),
    ("llama", "rotary_dim", 32),
    ("llama", "use_bidirectional_attention", True),
    ("qwen3_moe", "scoring_func", "sigmoid"),
    ("deepseek_v3", "head_dim", 80),
]
# keys in published files, and other families' names for features that every family has
UNUSED: list[tuple[str, str, Any]] = [
    ("llama", "layer_types", FULL),
    ("llama", "embedding_multiplier", 1.0),
    ("llama", "layer_norm_eps", 1e-5),
    ("smollm3", "max_window_layers", 28),
    ("starcoder2", "activation_function", "gelu"),
    ("starcoder2", "scale_attention_softmax_in_fp32", True),
    ("bloom", "offset_alibi", 100),
    ("llama", "is_llama_config", True),
]


def published(model_type: str) -> dict[str, Any]:
    hf = json.loads(FIRST[model_type].to_json_string(use_diff=False))
    few = {key: (value * LAYERS)[:LAYERS] for key, value in hf.items() if isinstance(value, list)}
    layers = "n_layer" if "n_layer" in hf else "num_hidden_layers"
    return hf | few | {layers: LAYERS} | ({"sliding_window": 512} if model_type == "mixtral" else {})


@pytest.mark.parametrize(("model_type", "key", "value"), FOREIGN)
def test_keys_of_other_families_are_refused_by_name(model_type: str, key: str, value: Any) -> None:
    with pytest.raises(UserError, match=f"^config.json has {key} "):
        read(published(model_type) | {key: value})


@pytest.mark.parametrize(("model_type", "key", "value"), UNUSED)
def test_keys_without_an_effect_are_no_error(model_type: str, key: str, value: Any) -> None:
    with warnings.catch_warnings(action="ignore"):
        assert read(published(model_type) | {key: value})[1] == read(published(model_type))[1]


@pytest.mark.filterwarnings("ignore")
def test_mistral_with_layer_types_is_ministral() -> None:
    hf = published("mistral")
    told = hf | {"layer_types": MIXED, "sliding_window": 5}
    assert read(told)[1] == replace(read(hf)[1], attention=(SelfAttention(window=5), SelfAttention()))
    assert express(read(told)[1])["model_type"] == "ministral"
    assert describe(read(told)[1], told) == told
