"""Keys and tensors of a GGUF header that change the model: used as in llama.cpp, refused, or named in a warning."""

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from onward import LinearScaling, LongRoPEScaling, Rotary, UserError, YaRNScaling
from onward.checkpoint.gguf.architectures import ARCHITECTURES
from onward.checkpoint.gguf.convert import infos, plan, write_model
from onward.checkpoint.gguf.header import Header
from onward.checkpoint.gguf.keys import Keys
from onward.checkpoint.load import load_model
from onward.config.decoder import at
from onward.families._keys import UnreadKeys

from support.decoders import decoder, token_ids
from support.gguf import COMPUTED, LENGTH
from support.gguf_files import rewritten
from support.llama_cpp import logprobs

FACTORS = {"rope_freqs.weight": torch.tensor([1.0, 1.5, 2.0, 4.0])}
ONES = (1.0,) * 4
LISTED = (1.0, 1.5, 2.0, 4.0)


def written(case: str, path: Path) -> Path:
    model = decoder(COMPUTED[case])
    write_model(model, plan(model, None, family=ARCHITECTURES[case.split(":")[0]].families[0]), path)
    return path


SCALED: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor], Any]] = {  # keys, tensors, expected scaling
    "linear": ({"rope.scaling.factor": 2.0}, {}, LinearScaling(2.0)),
    "none, with a factor": ({"rope.scaling.type": "none", "rope.scaling.factor": 2.0}, {}, None),
    "a magnitude alone": (
        {"rope.scaling.attn_factor": 1.25},
        {},
        LongRoPEScaling((1.0,) * 4, (1.0,) * 4, LENGTH, 1.25),
    ),
    "a magnitude beside linear": (
        {"rope.scaling.attn_factor": 1.25, "rope.scaling.factor": 2.0},
        {},
        LongRoPEScaling((2.0,) * 4, (2.0,) * 4, LENGTH, 1.25),
    ),
    "factors": ({}, FACTORS, LongRoPEScaling(LISTED, LISTED, LENGTH)),
    "factors beside linear": (
        {"rope.scaling.factor": 2.0},
        FACTORS,
        LongRoPEScaling((2.0, 3.0, 4.0, 8.0), (2.0, 3.0, 4.0, 8.0), LENGTH),
    ),
    "factors beside a magnitude": (
        {"rope.scaling.attn_factor": 1.25},
        FACTORS,
        LongRoPEScaling(LISTED, LISTED, LENGTH, 1.25),
    ),
    "YaRN with a magnitude": (
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.attn_factor": 0.5},
        {},
        YaRNScaling(4.0, LENGTH, attention_factor=0.5 * YaRNScaling(4.0).magnitude),
    ),
}


@pytest.mark.parametrize("case", SCALED)
@torch.inference_mode()
def test_scaling_of_a_file_is_that_of_llama_cpp(case: str, tmp_path: Path) -> None:
    keys, tensors, wanted = SCALED[case]
    path = rewritten(written("llama", tmp_path / "x.gguf"), tmp_path / "y.gguf", keys, tensors)
    model, _ = load_model(path)
    position = at(model.config.position, 0)
    assert isinstance(position, Rotary)
    assert position.scaling == wanted
    [tokens] = token_ids(model.config, 1, LENGTH).tolist()
    ours = model(torch.tensor([tokens]))[0].log_softmax(-1)
    assert (logprobs(path, tokens, LENGTH) - ours).abs().max() < 2e-5


# case, keys, tensors, expected message
REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, torch.Tensor], str]] = {
    "YaRN beside factors": (
        "llama",
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0},
        FACTORS,
        "rope.scaling.type is yarn and the file has rope_freqs.weight",
    ),
    "factors that nothing reads": ("qwen2", {}, FACTORS, "reads no rope_freqs.weight in the architecture qwen2"),
    "attention to the future": ("qwen3", {"attention.causal": False}, {}, "qwen3.attention.causal is False"),
    "groups of experts": ("llama: experts", {"expert_group_count": 2}, {}, "llama.expert_group_count is 2"),
    "another cap than the fixed one": (
        "gemma3n: few layers",
        {"final_logit_softcapping": 20.0},
        {},
        "final_logit_softcapping is 20.0, but llama.cpp always computes this architecture with 30.0",
    ),
    "a magnitude in layers without scaling": (
        "step35",
        {"rope.scaling.attn_factor": 1.5},
        {},
        "rope.scaling.attn_factor is 1.5, by which llama.cpp also multiplies layers with a window",
    ),
    "factors of elements": (
        "muse-glimmer",
        {},
        {"blk.1.attn_k_norm.weight": torch.arange(16.0)},
        "blk.1.attn_k_norm.weight has different numbers",
    ),
    "heads of another width": ("olmo2", {"attention.key_length_swa": 4}, {}, "olmo2.attention.key_length_swa is 4"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_llama_cpp_honors_and_onward_cannot_is_refused(case: str, tmp_path: Path) -> None:
    model, keys, tensors, message = REFUSED[case]
    path = rewritten(written(model, tmp_path / "x.gguf"), tmp_path / "y.gguf", keys, tensors)
    with pytest.raises(UserError, match=re.escape(message)):
        load_model(path)


NAMED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "unknown": ({"attention.spiral": 3}, ["llama.attention.spiral"]),
    "of another architecture": ({"attention.sliding_window": 8}, ["llama.attention.sliding_window"]),
    "a scale that llama.cpp does not read here": ({"attn_logit_softcapping": 5.0}, ["llama.attn_logit_softcapping"]),
    "another ramp": ({"rope.scaling.yarn_beta_fast": 4.0}, ["llama.rope.scaling.yarn_beta_fast"]),
    "without effect": (
        {"attention.sliding_window": 0, "expert_weights_scale": 1.0, "attention.causal": True, "vocab_size": 37},
        [],
    ),
}


@pytest.mark.parametrize("case", NAMED)
def test_keys_that_were_not_read_are_named(case: str, tmp_path: Path) -> None:
    keys, wanted = NAMED[case]
    path = rewritten(written("llama", tmp_path / "x.gguf"), tmp_path / "y.gguf", keys)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        load_model(path)
    said = [str(notice.message) for notice in found if notice.category is UnreadKeys]
    assert said == [f"y.gguf has keys that Onward does not know and ignores: {key!r}" for key in wanted]


@pytest.mark.parametrize("case", COMPUTED)
def test_keys_that_onward_writes_are_all_read(case: str) -> None:
    model = decoder(COMPUTED[case])
    own = plan(model, None, family=ARCHITECTURES[case.split(":")[0]].families[0])
    keys = Keys(Header(Path("x.gguf"), own.keys, infos(own), own.constants))
    own.architecture.config(keys)
    assert keys.unread() == {}


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    file = written("glm4moe", tmp_path / "x.gguf")
    more = {"blk.2.nextn.eh_proj.weight": torch.ones(32, 64), "blk.2.attn_norm.weight": torch.ones(32)}
    path = rewritten(file, tmp_path / "y.gguf", {"block_count": 3, "nextn_predict_layers": 1}, more)
    one, other = load_model(file)[0], load_model(path)[0]
    assert one.config == other.config
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters()))
