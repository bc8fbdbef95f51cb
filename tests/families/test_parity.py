"""Published families: Onward's logits equal those of transformers, whichever of the two wrote the folder."""

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from torch.nn import functional as F
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig

from onward import (
    DecoderConfig,
    Engine,
    Experts,
    Gated,
    LatentAttention,
    LayerNorm,
    Learned,
    NoPosition,
    Plain,
    PreNorm,
    Request,
    RMSNorm,
    Rotary,
    Sampling,
    SelfAttention,
    SigmoidRouting,
    SoftmaxRouting,
    UserError,
)
from onward.checkpoint.huggingface.save import save_model
from onward.checkpoint.load import load_model
from onward.families import express, families, read
from onward.model import AttentionContext
from onward.model.attention import Attend
from onward.model.layer_cache import Keys
from onward.model.reference import reference
from onward.tracing.sites import attend_modules

from support.decoders import DECODERS, assert_close, decoder, token_ids
from support.families import CASES
from support.grids import thinned
from support.parity import LENGTH, assert_same_logits, publish, tensors
from support.ways import WAYS, assert_equals_the_plain_run

every_case = pytest.mark.parametrize("hf", CASES.values(), ids=CASES.keys())


@every_case
def test_a_folder_of_transformers_and_one_of_ours_give_the_same_logits_in_both(
    hf: PreTrainedConfig, tmp_path: Path
) -> None:
    folder = tmp_path / "published"
    theirs = publish(hf, folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours, original = load_model(folder)
    assert_same_logits(ours, theirs)

    for name, extra in ("fresh", {}), ("kept", original):
        saved = tmp_path / name
        save_model(ours, saved, extra)
        back, report = AutoModelForCausalLM.from_pretrained(saved, output_loading_info=True)
        assert not any(report.values()), report
        assert_same_logits(ours, back)
        assert load_model(saved)[0].config == ours.config
    assert type(back) is type(theirs)
    rewritten = json.loads((tmp_path / "kept" / "config.json").read_text())
    assert {k: v for k, v in original.items() if k != "dtype"}.items() <= rewritten.items()
    before, after = tensors(folder), tensors(tmp_path / "kept")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n], after[n]) and before[n].dtype == after[n].dtype for n in before)


@every_case
def test_a_key_that_is_absent_means_the_default_of_transformers(hf: PreTrainedConfig) -> None:
    full, default = hf.to_dict(), type(hf)().to_dict()
    bare = {k: v for k, v in full.items() if k == "model_type" or k not in default or default[k] != v}
    assert len(bare) < len(full)
    assert read(bare)[1] == read(full)[1]


@every_case
def test_rotary_positions_are_read_in_the_words_of_transformers_4(hf: PreTrainedConfig) -> None:
    new = hf.to_dict()
    parameters = new.get("rope_parameters")
    if not parameters or "rope_type" not in parameters:
        pytest.skip("has no rotary positions, or different ones in each kind of layer")
    turning = {k: v for k, v in parameters.items() if k in ("rope_theta", "partial_rotary_factor")}
    scaling = {k: v for k, v in parameters.items() if k not in turning}
    for word in "rope_type", "type":
        old = {k: v for k, v in new.items() if k != "rope_parameters"} | turning
        if scaling["rope_type"] != "default":
            old["rope_scaling"] = {word if k == "rope_type" else k: v for k, v in scaling.items()}
        assert read(old)[1] == read(new)[1]


@pytest.mark.parametrize(("hf", "way"), thinned(CASES, list(WAYS)))
def test_every_way_to_run_a_family_gives_the_logits_of_the_plain_run(hf: PreTrainedConfig, way: str) -> None:
    assert_equals_the_plain_run(read(hf.to_dict())[1], way)


def by_reference(attend: Attend, inputs: tuple[Tensor, Keys, Keys, AttentionContext], _: Tensor) -> Tensor:
    """A forward hook that replaces the output of an Attend module."""
    q, k, v, context = inputs
    return reference(
        attend.scaled(q, context), k, v, context.mask, scale=attend.scale, softcap=attend.softcap, sinks=attend.sinks
    )


@every_case
@torch.inference_mode()
def test_the_fast_paths_of_a_family_equal_the_written_out_one(hf: PreTrainedConfig) -> None:
    config = read(hf.to_dict())[1]
    model, tokens = decoder(config, torch.float64), token_ids(config)
    fast = model(tokens)
    for attend in attend_modules(model).values():
        attend.register_forward_hook(by_reference)
    assert_close(fast, model(tokens), 1e-10)


def one_of_each() -> dict[str, PreTrainedConfig]:
    """The first case of every file in the table of cases."""
    firsts = {name.split(":")[0]: hf for name, hf in reversed(CASES.items())}
    return dict(sorted(firsts.items()))


@pytest.mark.parametrize("hf", one_of_each().values(), ids=one_of_each().keys())
def test_every_family_trains_and_is_read_by_transformers_afterwards(hf: PreTrainedConfig, tmp_path: Path) -> None:
    publish(hf, tmp_path)
    ours, original = load_model(tmp_path)
    ours.train()
    tokens = token_ids(ours.config, rows=4, length=LENGTH)
    optimizer = torch.optim.AdamW(ours.parameters(), lr=3e-3)
    losses = []
    for _ in range(20):
        loss = F.cross_entropy(ours(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.95 * losses[0]
    save_model(ours.eval(), tmp_path, original)
    assert_same_logits(ours, AutoModelForCausalLM.from_pretrained(tmp_path))


def test_other_pairs_of_rotation_fail_the_comparison(tmp_path: Path) -> None:
    theirs = publish(CASES["llama: grouped"], tmp_path)
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
SHARED = Experts(d_ff=8, d_shared=16, router=SoftmaxRouting(renormalize=False))
EXPRESSED = {
    "llama": [
        DecoderConfig(**SIZES),
        DecoderConfig(**SIZES, n_kv_heads=1, tied=True, mlp=Gated(act="gelu_tanh", bias=True), dropout=0.1),
    ],
    "qwen3": [DecoderConfig(**SIZES, attention=SelfAttention(qk_norm="head"), d_head=10)],
    "gpt2": [DecoderConfig(**SIZES, **GPT2_PARTS), DecoderConfig(**SIZES, **GPT2_PARTS, d_ff=7, tied=True)],
    "mistral": [
        DecoderConfig(**SIZES, attention=SelfAttention(window=4)),
        DecoderConfig(**{**SIZES, "d_model": 26}, d_head=6),  # a Llama's width is a multiple of its heads
    ],
    "mixtral": [DecoderConfig(**SIZES, mlp=Experts())],
    "qwen2": [
        DecoderConfig(**SIZES, attention=SelfAttention(bias=True)),
        DecoderConfig(**SIZES, attention=(SelfAttention(bias=True), SelfAttention(bias=True, window=4))),
    ],
    "qwen3_moe": [
        DecoderConfig(**SIZES, attention=SelfAttention(qk_norm="head"), mlp=(Gated(), Experts(d_ff=16)), d_ff=32)
    ],
    "smollm3": [DecoderConfig(**SIZES, position=(NoPosition(), Rotary()))],
    "granite": [DecoderConfig(**SIZES, block=PreNorm(residual_scale=0.5))],
    "phi3": [DecoderConfig(**SIZES, position=Rotary(fraction=0.5), d_head=8)],  # a Llama rotates whole heads
    "opt": [DecoderConfig(**SIZES, **{**GPT2_PARTS, "position": Learned(offset=2)})],
    "deepseek_v2": [
        DecoderConfig(**SIZES, attention=LatentAttention(d_latent=8)),
        DecoderConfig(**SIZES, attention=LatentAttention(d_latent=8), mlp=(Gated(), SHARED)),
        DecoderConfig(**SIZES, attention=LatentAttention(d_latent=8), mlp=replace(SHARED, d_ff=64, d_shared=64)),
    ],
    "deepseek_v3": [
        DecoderConfig(
            **SIZES, attention=LatentAttention(d_latent=8), mlp=Experts(d_ff=8, d_shared=8, router=SigmoidRouting())
        ),
    ],
    "mimo_v2_flash": [DecoderConfig(**SIZES, attention=SelfAttention(d_value=4))],
    "llama4_text": [DECODERS["chunks"]],
    "onward": [
        DecoderConfig(**SIZES, **GPT2_PARTS, n_kv_heads=2),
        DecoderConfig(**SIZES, head_bias=True),
        DecoderConfig(**SIZES, attention=(SelfAttention(), SelfAttention(qk_norm="head"))),
        DecoderConfig(**SIZES, attention=(SelfAttention(), SelfAttention(n_heads=8))),
        DecoderConfig(**SIZES, mlp=Gated(d_ff=12)),
        DecoderConfig(**SIZES, norm=RMSNorm(offset=1.0)),
        DecoderConfig(**SIZES, final_norm=LayerNorm()),
        DecoderConfig(**SIZES, logit_softcap=30.0),
        *(c for name, c in DECODERS.items() if name not in ("llama", "gpt2", "granite", "chunks")),
    ],
}


@pytest.mark.parametrize(("kind", "config"), [(k, c) for k, configs in EXPRESSED.items() for c in configs])
def test_decoder_is_expressed_by_the_first_family_that_can(kind: str, config: DecoderConfig) -> None:
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


NEEDED: dict[str, dict[str, Any]] = {  # transformers itself cannot run without these
    "bitnet": {"num_key_value_heads": 4},
    "cohere_compass_text": {"rope_parameters": {"full_attention": None}},
    "deepseek_ocr2_text": {"num_experts_per_tok": 2},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "glm4_moe": {"head_dim": 128},
    "helium": {"num_key_value_heads": 4},
    "nemotron_h": {"layers_block_type": ["linear_attention", "full_attention", "mlp"]},
}


@pytest.mark.parametrize("model_type", [name for name in families() if name in CONFIG_MAPPING])
@pytest.mark.parametrize("changes", [{}, {"num_attention_heads": 64}, {"num_key_value_heads": None}], ids=str)
def test_missing_keys_mean_the_defaults_of_transformers(model_type: str, changes: dict[str, Any]) -> None:
    try:
        default = CONFIG_MAPPING[model_type]()
        changes = {k: v for k, v in changes.items() if k in default.to_dict()} | NEEDED.get(model_type, {})
        full = type(default)(**changes).to_dict()
    except (ValueError, StrictDataclassError):  # this family does not support these heads
        pytest.skip("transformers refuses it")
    assert read({"model_type": model_type, **changes})[1] == read(full)[1]


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "lama"}, "did you mean llama"),
    ({}, "model_type"),
    ({"model_type": ["llama"]}, "model_type"),
    ({"model_type": "llama", "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
    ({"model_type": "llama", "rope_scaling": {"type": "linea", "factor": 8.0}}, "did you mean linear"),
    ({"model_type": "qwen3", "layer_types": ["sliding_attention"]}, "layer_types"),
    ({"model_type": "llama", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"model_type": "gpt2", "add_cross_attention": True}, "add_cross_attention"),
    ({"model_type": "llama", "hidden_act": "mish"}, "mish"),
    ({"model_type": "llama", "hidden_act": []}, "config.json"),
    ({"model_type": "llama", "hidden_size": "many"}, "config.json"),
    ({"model_type": "llama", "hidden_size": 64.5}, "64.5"),
    ({"model_type": "llama", "num_attention_heads": 0}, "config.json has num_attention_heads 0: it must"),
    ({"model_type": "llama", "num_attention_heads": 3, "num_key_value_heads": 2}, "n_heads 3"),
    ({"model_type": "llama", "vocab_size": None}, "config.json"),
    ({"model_type": "llama", "rope_parameters": 5}, "config.json"),
    ({"model_type": "gpt2", "activation_function": "mish"}, "mish"),
    ({"model_type": "bloom", "apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post"),
    ({"model_type": "mpt", "attn_config": {"qk_ln": True}}, "qk_ln"),
    ({"model_type": "gpt_neo", "attention_types": [[["global"], 10**15]]}, "for each of the 24 layers"),
    ({"model_type": "gpt_neo", "num_layers": 1, "attention_layers": ["near"]}, "near"),
    ({"model_type": "gptj", "rotary": False}, "rotary"),
    ({"model_type": "onward"}, "decoder"),
    ({"model_type": "onward", "decoder": {"vocab": 3}}, "vocab_size"),
]


@pytest.mark.parametrize(("hf", "word"), BROKEN, ids=str)
def test_invalid_config_is_refused_in_one_sentence(hf: dict[str, Any], word: str) -> None:
    with pytest.raises(UserError) as error:
        read(hf)
    assert word in str(error.value)
    assert "\n" not in str(error.value)


def test_onward_is_the_last_family_tried() -> None:
    assert list(families())[-1] == "onward"


@torch.inference_mode()
def test_a_published_model_continues_as_in_transformers(shared: Path) -> None:
    ours, _ = load_model(shared / "stories260K")
    theirs = AutoModelForCausalLM.from_pretrained(shared / "stories260K")
    request = Request([1], Sampling(temperature=0), 200)
    engine = Engine(ours)
    engine.add(request)
    engine.finish()
    wanted = theirs.generate(torch.tensor([[1]]), do_sample=False, max_new_tokens=200, eos_token_id=None)
    assert [1, *request.tokens] == wanted[0].tolist()
    assert len(set(request.tokens)) > 20
    assert_close(ours(wanted), theirs(wanted).logits, 2e-5)


@torch.inference_mode()
def test_a_published_model_finds_its_own_text_likely_and_the_same_tokens_shuffled_not(shared: Path) -> None:
    model, _ = load_model(shared / "stories260K")
    requests = [Request([1], Sampling(temperature=1), 200, seed=seed) for seed in range(4)]
    engine = Engine(model)
    for request in requests:
        engine.add(request)
    engine.finish()
    own = torch.tensor([[1, *request.tokens] for request in requests])
    order = torch.randperm(200, generator=torch.Generator().manual_seed(0))
    shuffled = torch.cat([own[:, :1], own[:, 1:][:, order]], 1)
    losses = [F.cross_entropy(model(t[:, :-1]).flatten(0, 1), t[:, 1:].flatten()).item() for t in (own, shuffled)]
    assert losses[0] < 2.5 < 6 < losses[1], losses
