"""The tables of llama.cpp's architectures, and architectures that need special treatment."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import onward
from onward.base.errors import UserError
from onward.checkpoint.gguf.architectures import ARCHITECTURES, SEEING
from onward.checkpoint.gguf.header import read_header
from onward.checkpoint.gguf.rope import fraction
from onward.checkpoint.gguf.unread import FAMILIES_WITHOUT, UNREAD
from onward.checkpoint.gguf.writer import TensorOutline, write_gguf
from onward.families import families
from onward.families.phimoe import SparseMixer

from support.decoders import decoder, token_ids
from support.gguf import COMPUTED, LENGTH, small
from support.gguf_files import tensor
from support.gguf_layered import FOLDED
from support.llama_cpp import logprobs


def rewritten(path: Path, architecture: str, **keys: object) -> Path:
    """A copy of a file with the name of another architecture and additional keys."""
    header = read_header(path)
    renamed = {
        re.sub(rf"^{re.escape(header.architecture)}\.", f"{architecture}.", k): v for k, v in header.keys.items()
    }
    outlines = {name: TensorOutline(info.shape, info.type) for name, info in header.tensors.items()}
    new = path.with_name(f"{architecture}.gguf")
    tensors = [(name, tensor(path, name)) for name in outlines]
    own = {f"{architecture}.{key.replace('__', '.')}": value for key, value in keys.items()}
    write_gguf(new, renamed | own | {"general.architecture": architecture}, outlines, tensors)
    return new


def test_every_family_is_in_a_table_of_gguf() -> None:
    written = {model_type for kind in ARCHITECTURES.values() for model_type in kind.families}
    assert written | FAMILIES_WITHOUT == families().keys()
    assert not written & FAMILIES_WITHOUT


def test_every_architecture_of_llama_cpp_is_read_or_has_a_reason() -> None:
    assert not UNREAD.keys() & (ARCHITECTURES.keys() | SEEING.keys())
    source = Path(os.environ.get("LLAMA_CPP_SOURCE", "")) / "src" / "llama-arch.cpp"
    if not source.exists():
        pytest.skip("LLAMA_CPP_SOURCE is not the folder of llama.cpp's sources: the architectures are not compared")
    listed = re.findall(r'\{ LLM_ARCH_\w+,\s+"([a-z0-9_.-]+)"', source.read_text())
    assert {*listed} == UNREAD.keys() | ARCHITECTURES.keys() | SEEING.keys()


@pytest.mark.parametrize("case", ["step35", "muse-glimmer", "gemma3n: few layers"])
def test_a_model_without_its_family_goes_to_gguf_and_to_a_folder_of_its_family(case: str, tmp_path: Path) -> None:
    onward.save(onward.LanguageModel(decoder(COMPUTED[case])), tmp_path / "x.gguf")
    name = case.split(":")[0]
    assert read_header(tmp_path / "x.gguf").architecture == name
    onward.save(onward.load(tmp_path / "x.gguf"), tmp_path / "folder")
    kind = json.loads((tmp_path / "folder" / "config.json").read_text())["model_type"]
    assert kind in ARCHITECTURES[name].families


def test_a_reason_is_given_for_an_architecture_that_is_not_read(tmp_path: Path) -> None:
    onward.save(onward.LanguageModel(decoder(COMPUTED["llama"])), tmp_path / "x.gguf")
    for name, reason in (
        ("rwkv7", "it has recurrent layers that Onward does not have"),
        ("lama", "did you mean llama"),
    ):
        with pytest.raises(UserError, match=f"is of architecture '{name}', which Onward does not read.*{reason}"):
            onward.load(rewritten(tmp_path / "x.gguf", name))


@pytest.mark.parametrize("name", SEEING)
@torch.inference_mode()
def test_a_model_that_also_sees_is_read_as_its_decoder(name: str, tmp_path: Path) -> None:
    model = decoder(COMPUTED[SEEING[name]])
    onward.save(onward.LanguageModel(model, None, {"model_type": SEEING[name]}), tmp_path / "x.gguf")
    sections = [*((model.config.d_head // 2 + 2 - i) // 3 for i in range(3)), 0]
    path = rewritten(tmp_path / "x.gguf", name, rope__dimension_sections=sections, n_deepstack_layers=0)
    [tokens] = token_ids(model.config, 1, LENGTH).tolist()
    wanted = onward.load(path).model(torch.tensor([tokens]))[0].log_softmax(-1)
    without_epsilon = name == "qwen2vl"  # llama.cpp ignores the epsilon of this architecture
    assert (logprobs(path, tokens, LENGTH) - wanted).abs().max() < (5e-3 if without_epsilon else 2e-5)


@torch.inference_mode()
def test_the_factors_of_falcon_h1_are_in_the_weights_of_its_file(tmp_path: Path) -> None:
    model = decoder(FOLDED)
    onward.save(onward.LanguageModel(model), tmp_path / "x.gguf")
    [tokens] = token_ids(model.config, 1, LENGTH).tolist()
    wanted = model(torch.tensor([tokens]))[0].log_softmax(-1)
    back = onward.load(tmp_path / "x.gguf").model
    assert (back(torch.tensor([tokens]))[0].log_softmax(-1) - wanted).abs().max() < 1e-5
    assert (logprobs(tmp_path / "x.gguf", tokens, LENGTH) - wanted).abs().max() < 2e-5


def test_phi_3_5_moe_is_read_as_published_and_written_where_the_difference_is_accepted(tmp_path: Path) -> None:
    model = decoder(
        small(
            norm=onward.LayerNorm(),
            attention=onward.SelfAttention(bias=True, out_bias=True),
            mlp=onward.Experts(6, 2, router=SparseMixer()),
            head_bias=True,
        )
    )
    lm = onward.LanguageModel(model, None, {"model_type": "phimoe"})
    with pytest.raises(UserError, match=r"phimoe differs in norm .layer_norm here.*accept phimoe$"):
        onward.save(lm, tmp_path / "x.gguf")
    onward.save(lm, tmp_path / "x.gguf", accept=["phimoe"])
    back = onward.load(tmp_path / "x.gguf").model
    assert back.config == model.config
    assert all(torch.equal(a, b) for a, b in zip(back.parameters(), model.parameters()))


def test_the_tensors_of_kimi_linear_may_have_four_axes(tmp_path: Path) -> None:
    model = decoder(COMPUTED["kimi-linear"])
    onward.save(onward.LanguageModel(model), tmp_path / "x.gguf")
    header = read_header(tmp_path / "x.gguf")

    def four(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        if "ssm_conv1d" in name:
            return (1, *shape)
        return (1, 1, *shape) if name.endswith("ssm_a") else shape

    outlines = {name: TensorOutline(four(name, info.shape), info.type) for name, info in header.tensors.items()}
    tensors = [(name, tensor(tmp_path / "x.gguf", name).view(own.shape)) for name, own in outlines.items()]
    write_gguf(tmp_path / "y.gguf", header.keys, outlines, tensors)
    one, other = (onward.load(tmp_path / f"{name}.gguf").model for name in "xy")
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters()))


def test_a_part_of_a_head_has_as_many_elements_as_the_file_says() -> None:
    odd = [(width, part) for width in range(2, 260, 2) for part in range(2, width + 1, 2)]
    assert all(onward.Rotary(fraction=fraction(part, width)).rope_dim(width) == part for width, part in odd)


def test_architectures_without_a_windowed_layer_are_refused_where_llama_cpp_needs_one() -> None:
    attention: Any = COMPUTED["mimo2"].attention
    full = tuple(replace(part, window=0) for part in attention)
    with pytest.raises(UserError, match=r"no architecture of llama.cpp computes the same"):
        onward.save(onward.LanguageModel(decoder(replace(COMPUTED["mimo2"], attention=full))), "never.gguf")
