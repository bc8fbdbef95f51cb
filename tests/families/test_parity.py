"""Published families: our logits are those of transformers, whichever of the two wrote the folder."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from decoders import DECODERS, assert_close, decoder
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedConfig, Qwen3Config

from onward.checkpoint.folder import load_model, save_model
from onward.errors import UserError
from onward.families import express, families, read
from onward.model.config import DecoderConfig, Experts, Gated, LayerNorm, Learned, Plain, RMSNorm, SelfAttention

SMALL = {"vocab_size": 31, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
LLAMA = {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16}
GPT2 = {"vocab_size": 31, "n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 16}

CASES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**LLAMA),
    "llama, multi-query, wide heads": LlamaConfig(**{**LLAMA, "num_key_value_heads": 1, "head_dim": 10}),
    "llama, tied, biases": LlamaConfig(**LLAMA, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "llama, gelu, far turns": LlamaConfig(
        **LLAMA,
        hidden_act="gelu_pytorch_tanh",
        rms_norm_eps=0.01,
        rope_parameters={"rope_type": "default", "rope_theta": 300.0},
    ),
    "qwen3": Qwen3Config(**LLAMA, head_dim=6),
    "qwen3, tied, biases, odd head": Qwen3Config(**LLAMA, head_dim=14, tie_word_embeddings=True, attention_bias=True),
    "gpt2": GPT2Config(**GPT2),
    "gpt2, untied, narrow, relu": GPT2Config(
        **GPT2, n_inner=20, activation_function="relu", tie_word_embeddings=False, layer_norm_epsilon=0.01
    ),
    "gpt2, exact gelu": GPT2Config(**GPT2, activation_function="gelu"),
}


@torch.inference_mode()
def assert_same_logits(ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    tokens = torch.randint(31, (3, 16), generator=torch.Generator().manual_seed(0))
    assert_close(ours(tokens), theirs(tokens).logits, 2e-5)


@torch.no_grad()
def stir(model: torch.nn.Module) -> torch.nn.Module:
    """Biases and norms random too."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.15)
    return model.eval()


@pytest.mark.parametrize("hf", CASES.values(), ids=CASES.keys())
def test_a_folder_of_transformers_and_one_of_ours_give_the_same_logits_in_both(
    hf: PreTrainedConfig, tmp_path: Path
) -> None:
    theirs = stir(AutoModelForCausalLM.from_config(hf))
    theirs.save_pretrained(tmp_path / "theirs")
    ours, original = load_model(tmp_path / "theirs")
    assert_same_logits(ours, theirs)

    for name, extra in ("fresh", {}), ("kept", original):
        folder = tmp_path / name
        save_model(ours, folder, extra)
        back, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not any(report.values()), report
        assert type(back) is type(theirs)
        assert_same_logits(ours, back)
        assert json.loads((folder / "config.json").read_text())["model_type"] == hf.model_type
        assert load_model(folder)[0].config == ours.config
    assert {k: v for k, v in original.items() if k != "dtype"}.items() <= json.loads(
        (tmp_path / "kept" / "config.json").read_text()
    ).items()


def test_the_proof_notices_another_turn(tmp_path: Path) -> None:
    theirs = stir(AutoModelForCausalLM.from_config(CASES["llama"]))
    theirs.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 9_000.0
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(AssertionError):
        assert_same_logits(load_model(tmp_path)[0], theirs)


SIZES: dict[str, Any] = {"vocab_size": 31, "d_model": 24, "n_layers": 2, "n_heads": 4}
GPT2_PARTS: dict[str, Any] = {
    "position": Learned(),
    "norm": LayerNorm(),
    "attention": SelfAttention(bias=True, out_bias=True),
    "mlp": Plain(bias=True),
}
EXPRESSED = {
    "llama": [
        DecoderConfig(**SIZES),
        DecoderConfig(**SIZES, n_kv_heads=1, tied=True, mlp=Gated(act="gelu_tanh", bias=True), dropout=0.1),
    ],
    "qwen3": [DecoderConfig(**SIZES, attention=SelfAttention(qk_norm="head"), d_head=10)],
    "gpt2": [DecoderConfig(**SIZES, **GPT2_PARTS), DecoderConfig(**SIZES, **GPT2_PARTS, d_ff=7, tied=True)],
    "onward": [
        DecoderConfig(**SIZES, **GPT2_PARTS, n_kv_heads=2),
        DecoderConfig(**SIZES, **{**GPT2_PARTS, "position": Learned(offset=2)}),
        DecoderConfig(**SIZES, head_bias=True),
        DecoderConfig(**SIZES, attention=SelfAttention(window=4)),
        DecoderConfig(**SIZES, attention=SelfAttention(bias=True)),
        DecoderConfig(**SIZES, attention=(SelfAttention(), SelfAttention(qk_norm="head"))),
        DecoderConfig(**SIZES, norm=RMSNorm(offset=1.0)),
        DecoderConfig(**SIZES, mlp=Experts()),
        DecoderConfig(**SIZES, final_norm=LayerNorm()),
        DecoderConfig(**SIZES, logit_cap=30.0),
        *(c for name, c in DECODERS.items() if name not in ("llama", "gpt2")),
    ],
}


@pytest.mark.parametrize(("kind", "config"), [(k, c) for k, configs in EXPRESSED.items() for c in configs])
def test_a_decoder_is_told_in_the_words_of_the_family_that_can_say_all_of_it(kind: str, config: DecoderConfig) -> None:
    hf = express(config)
    assert hf["model_type"] == kind
    assert read(json.loads(json.dumps(hf)))[1] == config


@pytest.mark.parametrize("config", [c for kind in EXPRESSED if kind != "onward" for c in EXPRESSED[kind]], ids=str)
def test_what_we_express_loads_in_transformers(config: DecoderConfig, tmp_path: Path) -> None:
    model = decoder(config)
    save_model(model, tmp_path)
    theirs, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    assert_same_logits(model, theirs)


@pytest.mark.parametrize(
    ("cls", "changes"),
    [
        (LlamaConfig, {}),
        (LlamaConfig, {"num_attention_heads": 64}),
        (Qwen3Config, {}),
        (Qwen3Config, {"num_attention_heads": 64}),
        (Qwen3Config, {"num_key_value_heads": None, "num_attention_heads": 16}),
        (GPT2Config, {}),
    ],
)
def test_missing_keys_mean_what_transformers_takes(cls: type[PreTrainedConfig], changes: dict[str, Any]) -> None:
    full = cls(**changes).to_dict()
    assert read({"model_type": cls.model_type, **changes})[1] == read(full)[1]


def test_the_turn_of_rotary_positions_is_read_in_old_and_new_words() -> None:
    old = {"model_type": "llama", "rope_theta": 5e5, "rope_scaling": None}
    new = {"model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    assert read(old)[1] == read(new)[1]
    assert read(old)[1].position.theta == 5e5  # type: ignore[union-attr]


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "lama"}, "did you mean llama"),
    ({}, "model_type"),
    ({"model_type": ["llama"]}, "model_type"),
    ({"model_type": "llama", "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "llama3"),
    ({"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 8.0}}, "linear"),
    ({"model_type": "qwen3", "use_sliding_window": True}, "use_sliding_window"),
    ({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    ({"model_type": "llama", "hidden_act": "mish"}, "mish"),
    ({"model_type": "llama", "hidden_act": []}, "config.json"),
    ({"model_type": "llama", "hidden_size": "many"}, "config.json"),
    ({"model_type": "llama", "hidden_size": 64.5}, "64.5"),
    ({"model_type": "llama", "num_attention_heads": 0}, "n_heads is 0"),
    ({"model_type": "llama", "num_attention_heads": 3, "num_key_value_heads": 2}, "n_heads 3"),
    ({"model_type": "llama", "vocab_size": None}, "config.json"),
    ({"model_type": "llama", "rope_parameters": 5}, "config.json"),
    ({"model_type": "gpt2", "activation_function": "mish"}, "mish"),
    ({"model_type": "onward"}, "decoder"),
    ({"model_type": "onward", "decoder": {"vocab": 3}}, "vocab_size"),
]


@pytest.mark.parametrize(("hf", "word"), BROKEN, ids=str)
def test_a_config_that_cannot_be_is_refused_in_one_sentence(hf: dict[str, Any], word: str) -> None:
    with pytest.raises(UserError) as error:
        read(hf)
    assert word in str(error.value)
    assert "\n" not in str(error.value)


def test_onward_is_the_last_family_asked() -> None:
    assert list(families())[-1] == "onward"


@torch.inference_mode()
def test_a_published_model_continues_as_in_transformers(shared: Path) -> None:
    ours, _ = load_model(shared / "stories260K")
    theirs = AutoModelForCausalLM.from_pretrained(shared / "stories260K")
    tokens = torch.tensor([[1]])
    for _ in range(50):
        tokens = torch.cat([tokens, ours(tokens)[:, -1:].argmax(-1)], 1)
    wanted = theirs.generate(torch.tensor([[1]]), do_sample=False, max_new_tokens=50, eos_token_id=None)
    assert tokens.tolist() == wanted.tolist()
    assert len(set(tokens[0].tolist())) > 20
    assert_close(ours(tokens), theirs(tokens).logits, 2e-5)
