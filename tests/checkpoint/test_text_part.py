"""The text decoder of a multimodal model loads from each known layout of tensor names."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, LlamaConfig

from onward import Decoder
from onward.base.files import read_json, write_json
from onward.checkpoint.huggingface.save import save_model
from onward.checkpoint.load import load_model
from onward.checkpoint.names import LeftOut
from onward.families import read
from onward.families._wrappers import TEXT_TYPES
from onward.transforms.quantize import quantize_model

from support.decoders import decoder

LLAMA = LlamaConfig(
    vocab_size=13,
    num_hidden_layers=2,
    hidden_size=16,
    intermediate_size=24,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=12,
).to_dict()
OLD, NEW = "language_model.model.", "model.language_model."
LAYOUTS = {  # prefixes of the names of the decoder's and the head's tensors
    "before transformers 4.52": (OLD, "language_model.lm_head."),
    "after": (NEW, "lm_head."),
    "written twice": ("model.language_model.model.", "lm_head."),
    "as text_model": ("model.text_model.", "lm_head."),
    "text_model, older": ("text_model.model.", "text_model.lm_head."),
    "as llm": ("llm.model.", "llm.lm_head."),
    "as language": ("language.model.", "language.lm_head."),
    "a thinker beside a talker": ("thinker.model.", "thinker.lm_head."),
    "a thinker, newer": ("thinker.model.language_model.", "thinker.lm_head."),
}
OTHERS = [
    "visual.blocks.0.attn.qkv.weight",
    "model.visual.norm.weight",
    "audio_tower.layers.0.fc1.weight",
    "talker.model.layers.0.mlp.up_proj.weight",
    "mtp.layers.0.norm.weight",
    "model.vision_tower.x.bias",
]


def wrapped(
    folder: Path, beginning: str = OLD, head: str = "lm_head.", text: dict[str, Any] | None = None, **outer: Any
) -> Decoder:
    """Write a small Llama inside a model with encoders, whose tensors must not be read; return the Llama."""
    text = {**LLAMA, **(text or {})}
    model = decoder(read(text)[1])
    save_model(model, folder, text)
    write_json(folder / "config.json", {"model_type": "any_vision", "text_config": text, "vision_config": {}} | outer)
    rename = lambda name: head + name[8:] if name.startswith("lm_head.") else beginning + name.removeprefix("model.")
    rewrite(folder, lambda old: {rename(name): t for name, t in old.items()})
    rewrite(folder, lambda old: old | {name: torch.full((3,), torch.nan) for name in OTHERS})
    return model


def rewrite(folder: Path, change: Any) -> None:
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    path.unlink()
    save_file({name: t.contiguous() for name, t in change(tensors).items()}, path)


def assert_same(got: Decoder, wanted: Decoder) -> None:
    pairs = zip(got.named_parameters(), wanted.named_parameters(), strict=True)
    assert all(name == other and torch.equal(one, two) for (name, one), (other, two) in pairs)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_text_decoder_is_read_from_any_layout_and_saved_as_its_family(layout: str, tmp_path: Path) -> None:
    wanted = wrapped(tmp_path, *LAYOUTS[layout], image_token_index=5, eos_token_id=[2, 3])
    with pytest.warns(LeftOut, match="Only the text decoder") as said:
        model, hf = load_model(tmp_path)
    assert len(said) == 1
    assert_same(model, wanted)
    save_model(model, tmp_path / "saved", hf)
    keys = read_json(tmp_path / "saved/config.json")
    assert (keys["model_type"], keys["architectures"]) == ("llama", ["LlamaForCausalLM"])
    assert (keys["image_token_id"], keys["eos_token_id"]) == (5, [2, 3])
    assert_same(load_model(tmp_path / "saved")[0], wanted)


def with_adapters(old: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as in Phi-4-multimodal: each matrix, and its adapter for images."""
    new = {}
    for name, tensor in old.items():
        if "_proj." in name:
            start, _, leaf = name.rpartition(".")
            factors = {f"{start}.lora_{half}.{kind}.weight": torch.ones(2, 2) for half in "AB" for kind in ("vision",)}
            new |= factors | {f"{start}.base_layer.{leaf}": tensor}
        else:
            new[name] = tensor
    return new


@pytest.mark.filterwarnings("ignore::onward.checkpoint.names.LeftOut")
def test_factors_that_adapt_the_decoder_to_images_are_left_out(tmp_path: Path) -> None:
    wanted = wrapped(tmp_path, OLD, "language_model.lm_head.")
    rewrite(tmp_path, with_adapters)
    assert_same(load_model(tmp_path)[0], wanted)


TIED: list[tuple[bool | None, bool | None, bool, bool]] = [  # config, text_config, head stored, expected
    (True, None, False, True),
    (None, True, False, True),
    (False, None, True, False),
    (False, True, True, False),
    (True, False, False, True),
    (None, None, False, True),
    (None, None, True, False),
]


@pytest.mark.filterwarnings("ignore::onward.checkpoint.names.LeftOut")
@pytest.mark.parametrize(("outer", "inner", "stored", "tied"), TIED)
def test_tying_is_inherited_and_a_contradiction_is_settled_by_the_tensors(
    outer: bool | None, inner: bool | None, stored: bool, tied: bool, tmp_path: Path
) -> None:
    wanted = wrapped(tmp_path, text={"tie_word_embeddings": not stored})
    keys = read_json(tmp_path / "config.json") | {"tie_word_embeddings": outer}
    keys["text_config"]["tie_word_embeddings"] = inner
    write_json(tmp_path / "config.json", keys)
    model, _ = load_model(tmp_path)
    assert model.config.tied == tied
    assert_same(model, wanted)


@pytest.mark.filterwarnings("ignore::onward.checkpoint.names.LeftOut")
def test_quantization_is_inherited(tmp_path: Path) -> None:
    model = decoder(read(LLAMA | {"hidden_size": 64, "intermediate_size": 64})[1])
    quantize_model(model, "int8")
    save_model(model, tmp_path, LLAMA)
    text = read_json(tmp_path / "config.json")
    outer = {"model_type": "any_vision", "quantization_config": text.pop("quantization_config"), "text_config": text}
    write_json(tmp_path / "config.json", outer)
    rewrite(tmp_path, lambda old: {f"language_model.{name}": t for name, t in old.items()})
    tokens = torch.arange(9)[None]
    with torch.inference_mode():
        torch.testing.assert_close(load_model(tmp_path)[0](tokens), model.eval()(tokens))


HEADS = {  # with transformers' defaults, the number of heads does not divide the width
    "qwen3_omni_moe_text": {"num_attention_heads": 32},
    "glm4v_moe_text": {"num_attention_heads": 64},
}


@pytest.mark.parametrize("kind", [kind for kind in TEXT_TYPES if kind in CONFIG_MAPPING and kind.endswith("text")])
def test_keys_that_a_text_config_lacks_mean_its_own_defaults(kind: str) -> None:
    changes = {"tie_word_embeddings": False} | HEADS.get(kind, {})
    full, bare = CONFIG_MAPPING[kind](**changes).to_dict() | changes, {"model_type": kind} | changes
    configs = [read({"model_type": "any_vision", "text_config": one})[1] for one in (full, bare)]
    assert configs[0] == configs[1]
