"""Models written to GGUF load with the same weights, llama.cpp computes the same results, and models that llama.cpp
cannot compute are refused."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import onward
from onward import Decoder, Tokenizer, UserError
from onward.checkpoint.gguf.architectures import ARCHITECTURES
from onward.checkpoint.gguf.convert import comparable, differences, plan, write_model
from onward.checkpoint.gguf.header import TensorInfo, read_header
from onward.checkpoint.gguf.writer import TensorOutline, write_gguf
from onward.checkpoint.load import load_model
from onward.cli import main
from onward.families import family
from onward.kernels.operations import ACTIVATIONS

from support import disk
from support.decoders import decoder, token_ids
from support.gguf import COMPUTED, LENGTH, REFUSED
from support.gguf_files import tensor
from support.llama_cpp import PARTS, awkward_texts, logprobs, opened, quantize


def written(case: str, path: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    """Write the model of a case to a file, and return it."""
    model = decoder(COMPUTED[case], dtype)
    model_type = ARCHITECTURES[case.split(":")[0]].families[0]
    write_model(model, plan(model, None, family=model_type), path)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", COMPUTED)
def test_a_model_comes_back_bit_for_bit(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = written(case, tmp_path / "x.gguf", dtype)
    assert read_header(tmp_path / "x.gguf").architecture == case.split(":")[0]
    back, _ = load_model(tmp_path / "x.gguf")
    found = replace(back.config, tied=model.config.tied)  # some files store a copy of the embedding as head
    assert differences(comparable(model.config), comparable(found)) == []
    parameters = dict(back.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameters[name].dtype == dtype
        shifted = getattr(model.config.norm, "offset", 0.0) and name.endswith("norm.weight")  # stored with 1 added
        shifted = shifted or name.endswith("a_log")  # stored as an exponential
        torch.testing.assert_close(parameters[name], parameter, rtol=0, atol=2e-7 if shifted else 0)


def gelu_of_a_table(x: torch.Tensor) -> torch.Tensor:
    """GELU as llama.cpp computes it on a CPU, with a lookup table in fp16."""
    y = torch.nn.functional.gelu(x.half().float(), approximate="tanh").half().float()
    return torch.where(x <= -10, 0.0, torch.where(x >= 10, x, y))


@pytest.mark.parametrize("case", COMPUTED)
@torch.inference_mode()
def test_llama_cpp_computes_the_same_distributions(case: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(ACTIVATIONS, "gelu_tanh", gelu_of_a_table)
    model = written(case, tmp_path / "x.gguf")
    [tokens] = token_ids(model.config, 1, LENGTH).tolist()
    wanted = model(torch.tensor([tokens]))[0].log_softmax(-1)
    got = logprobs(tmp_path / "x.gguf", tokens, LENGTH)
    tanh = "gelu" in str(model.config.mlp)  # GELU is looked up in an fp16 table: rounding may differ
    stateful = "GatedDelta" in str(model.config.attention)
    assert (got - wanted).abs().max() < (5e-3 if tanh else 5e-5 if stateful else 2e-5)


@pytest.mark.parametrize("case", REFUSED)
def test_what_llama_cpp_cannot_compute_is_refused_by_name(case: str, tmp_path: Path) -> None:
    config, message = REFUSED[case]
    with pytest.raises(UserError) as error:
        onward.save(onward.LanguageModel(decoder(config)), tmp_path / "x.gguf")
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


ACCEPTED = {"gelu": "an exact GELU", "ramp": "YaRN's ramp, GPT-OSS", "step": "a least step", "window": "windows"}


@pytest.mark.parametrize("accept", ACCEPTED)
@torch.inference_mode()
def test_a_difference_that_is_accepted_is_named_and_small(accept: Any, tmp_path: Path) -> None:
    lm = onward.LanguageModel(decoder(REFUSED[ACCEPTED[accept]][0]))
    with pytest.raises(UserError, match=f"accept the difference with --accept {accept}$"):
        onward.save(lm, tmp_path / "x.gguf")
    onward.save(lm, tmp_path / "x.gguf", accept=[accept])
    [tokens] = token_ids(lm.model.config, 1, 8).tolist()  # as many tokens as the window
    wanted = lm.model(torch.tensor([tokens]))[0].log_softmax(-1)
    assert (logprobs(tmp_path / "x.gguf", tokens, LENGTH) - wanted).abs().max() < 1e-2
    other = onward.LanguageModel(decoder(REFUSED["ALiBi"][0]))
    with pytest.raises(UserError, match=r"keep the model as a folder$"):
        onward.save(other, tmp_path / "y.gguf", accept=["gelu", "ramp", "window"])


def test_stories260k_tells_the_same_story_in_llama_cpp(shared: Path, tmp_path: Path) -> None:
    lm = onward.load(shared / "stories260K")
    onward.save(lm, tmp_path / "x.gguf")
    back = onward.load(tmp_path / "x.gguf")
    assert back.model.config == lm.model.config
    assert all(torch.equal(a, b) for a, b in zip(back.model.parameters(), lm.model.parameters()))
    wanted = lm.generate("Once upon a time", max_new_tokens=200, temperature=0.0)
    assert back.generate("Once upon a time", max_new_tokens=200, temperature=0.0) == wanted
    with opened(tmp_path / "x.gguf", 512) as model:
        tokens = model.tokenize(b"Once upon a time")
        prompt = len(tokens)
        model.eval(tokens)
        for _ in range(200):
            tokens.append(int(np.argmax(model.scores[model.n_tokens - 1])))
            model.eval(tokens[-1:])
    assert lm.tokenizer.decode(tokens)[len("Once upon a time") :] == wanted
    assert len(tokens) == prompt + 200


@pytest.mark.parametrize("dtype", ["q8_0", "q4_0"])
@torch.inference_mode()
def test_quantized_weights_are_those_of_llama_cpp(dtype: str, shared: Path, tmp_path: Path) -> None:
    lm = onward.load(shared / "stories260K")
    onward.save(lm, tmp_path / "ours.gguf", dtype=dtype)  # type: ignore[arg-type]
    kinds = {info.type.name for info in read_header(tmp_path / "ours.gguf").tensors.values()}
    # F16 if the length of rows is not a multiple of a block; Q8_0 for the head
    assert kinds == {"F32", "F16", "Q8_0", dtype.upper()}
    back = onward.load(tmp_path / "ours.gguf", torch.float32)
    [tokens] = token_ids(lm.model.config, 1, LENGTH).tolist()
    wanted = lm.model(torch.tensor([tokens]))[0].log_softmax(-1)
    ours = back.model(torch.tensor([tokens]))[0].log_softmax(-1)
    divergence = lambda found: (wanted.exp() * (wanted - found)).sum(-1).mean().item()
    assert divergence(ours) < {"q8_0": 1e-3, "q4_0": 0.5}[dtype]
    theirs = logprobs(tmp_path / "ours.gguf", tokens, LENGTH)
    # llama.cpp quantizes activations to int8
    assert abs(divergence(theirs) - divergence(ours)) < 0.1 * divergence(ours) + 1e-3


@pytest.mark.parametrize("dtype", ["q8_0", "q4_0"])
def test_quantized_files_diverge_no_more_than_those_of_llama_cpp(dtype: str, shared: Path, tmp_path: Path) -> None:
    lm = onward.load(shared / "stories260K")
    onward.save(lm, tmp_path / "f32.gguf", dtype="f32")
    onward.save(lm, tmp_path / "ours.gguf", dtype=dtype)  # type: ignore[arg-type]
    quantize(tmp_path / "f32.gguf", tmp_path / "theirs.gguf", dtype)
    tokens = lm.tokenizer.encode(
        "Once upon a time, there was a little girl named Lily. She loved to play outside. " * 8
    )
    wanted, ours, theirs = (logprobs(tmp_path / f"{name}.gguf", tokens, 256) for name in ("f32", "ours", "theirs"))
    divergence = lambda found: (wanted.exp() * (wanted - found)).sum(-1).mean().item()
    assert 0 < divergence(ours) <= divergence(theirs) * 1.001


@pytest.fixture(scope="module")
def tokenizers(shared: Path) -> dict[str, Tokenizer]:
    text = " ".join(PARTS) * 3
    names = "bpe:400", "byte", "char"
    found = {name: onward.train_tokenizer(name, [text]) for name in names}
    found["stories260K"] = Tokenizer.load(shared / "stories260K")
    found["gpt2"] = Tokenizer.load(shared / "gpt2-tokenizer")
    return found


@pytest.mark.parametrize(
    "name", ["bpe:400", "byte", "char", "stories260K", pytest.param("gpt2", marks=pytest.mark.long)]
)
def test_tokens_of_awkward_texts_are_the_same_in_llama_cpp(name: str, tokenizers, tmp_path: Path) -> None:
    tokenizer, texts = tokenizers[name], awkward_texts()
    rows = tokenizer.vocab_size + 3  # three rows without a token
    model = Decoder(onward.DecoderConfig(rows, d_model=32, n_layers=1, n_heads=2, context_length=64))
    tokenizer.templates["default"] = "{{ messages }}"
    onward.save(onward.LanguageModel(model, tokenizer), tmp_path / "x.gguf")
    back = onward.load(tmp_path / "x.gguf").tokenizer
    wanted = [tokenizer.encode(text) for text in texts]
    assert [back.encode(text) for text in texts] == wanted
    assert [back.decode(ids) for ids in wanted] == [tokenizer.decode(ids) for ids in wanted]
    assert (back.bos_id, back.eos_id, back.templates) == (tokenizer.bos_id, tokenizer.eos_id, tokenizer.templates)
    with opened(tmp_path / "x.gguf", 64) as model:
        found = [model.tokenize(text.encode(), add_bos=True, special=False) for text in texts]
    if name == "char":  # llama.cpp drops characters that have no token
        wanted = [[i for i in ids if i != tokenizer.unknown_id] for ids in wanted]
    assert found == wanted


def test_convert_writes_a_file_and_a_modelfile_and_goes_back(
    tiny_run: Path, tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["convert", str(tiny_run), "tiny.gguf", "--dry-run"]) == 0
    assert "lost: nothing\n" in (said := capsys.readouterr().out)
    assert "tiny.gguf would have" in said
    assert main(["convert", str(tiny_run), "tiny.gguf", "--dtype", "q4_0", "--dry-run"]) == 0
    assert "lost: 1 tensor rounded from F32 to Q8_0; 14 tensors rounded from F32 to Q4_0\n" in capsys.readouterr().out
    assert main(["convert", str(tiny_run), "new", "--dtype", "bf16", "--dry-run"]) == 0
    assert "tensors rounded from F32 to BF16\n" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    assert main(["convert", str(tiny_run), "tiny.gguf", "--modelfile"]) == 0
    assert "llama.cpp" in capsys.readouterr().out
    lines = (tmp_path / "Modelfile").read_text().splitlines()
    assert lines == [
        "FROM ./tiny.gguf",
        "PARAMETER num_ctx 32",
        'PARAMETER stop "<|endoftext|>"',
        "TEMPLATE {{ .Prompt }}",
    ]
    assert main(["convert", "tiny.gguf", "back", "--to", "single"]) == 0
    one, other = onward.load(tiny_run), onward.load("back")
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), other.model.parameters()))
    assert one.model.config == other.model.config
    assert other.generate("The", max_new_tokens=5, seed=0) == one.generate("The", max_new_tokens=5, seed=0)


BAD = {
    "RUN folder": "folder exists already",
    "RUN new --to hf --dtype q8_0": "which only GGUF has",
    "RUN new --modelfile": "--modelfile is used only by gguf",
    "RUN folder --to gguf": "name the file to write",
    "RUN new.safetensors": "is the name of a file",
    "x.gguf ./x.gguf --dtype q8_0": "is the model itself",
    "x.gguf y.gguf": "is cut off or not a GGUF file",
    "RUN x.gguf --dtype q2_k": "--dtype is 'q2_k'",
}


@pytest.mark.parametrize("words", BAD)
def test_convert_refuses_in_a_sentence(words: str, tiny_run: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("x.gguf").write_bytes(b"no GGUF")
    assert main(["convert", *words.replace("RUN", str(tiny_run)).split()]) == 2
    error = capsys.readouterr().err
    assert BAD[words] in error
    assert error.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "x.gguf"]


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"old")
    with disk.with_room_for(4000), pytest.raises(UserError, match=r"cannot write .*x\.gguf"):
        written("llama", tmp_path / "x.gguf")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]


def test_a_vector_that_others_write_as_a_matrix_is_read(tmp_path: Path) -> None:
    model = written("qwen2moe", tmp_path / "x.gguf")
    header, vector = read_header(tmp_path / "x.gguf"), "blk.0.ffn_gate_inp_shexp.weight"
    assert header.tensors[vector].shape == (32,)
    shapes = {name: (1, 32) if name == vector else info.shape for name, info in header.tensors.items()}
    outlines = {name: TensorOutline(shape, header.tensors[name].type) for name, shape in shapes.items()}
    tensors = [(name, tensor(tmp_path / "x.gguf", name).view(shape)) for name, shape in shapes.items()]
    write_gguf(tmp_path / "y.gguf", header.keys, outlines, tensors)
    back, _ = load_model(tmp_path / "y.gguf")
    share = "blocks.0.mlp.shared.share.weight"
    assert torch.equal(back.get_parameter(share), model.get_parameter(share))


CONVERTED = (
    "gpt2",
    "qwen3",
    "falcon",
    "starcoder2",
    "stablelm",
    "olmo2",
    "phi2",
    "qwen3moe",
    "granite",
    "smollm3",
    "command-r",
    "gpt-oss",
)


@pytest.mark.long
@pytest.mark.parametrize("name", CONVERTED)
def test_tensors_equal_those_of_the_converter_of_llama_cpp(name: str, tokenizers, tmp_path: Path) -> None:
    source = Path(os.environ.get("LLAMA_CPP_SOURCE", "")) / "convert_hf_to_gguf.py"
    if not source.exists():
        pytest.skip("LLAMA_CPP_SOURCE is not the folder of llama.cpp's sources: its converter is not compared")
    family_name = ARCHITECTURES[name].families[0]
    hf = {"model_type": family_name, "architectures": [family(family_name).ARCHITECTURES[family_name]]}
    tokenizer = tokenizers["gpt2"]
    model = decoder(replace(COMPUTED[name], vocab_size=tokenizer.vocab_size))
    onward.save(onward.LanguageModel(model, tokenizer, hf), tmp_path / "folder")
    table = json.loads((tmp_path / "folder" / "config.json").read_text())
    # the converter reads GPT-2's old key
    (tmp_path / "folder" / "config.json").write_text(json.dumps({"n_ctx": LENGTH} | table))
    onward.save(onward.load(tmp_path / "folder"), tmp_path / "ours.gguf")
    words = [str(tmp_path / "folder"), "--outfile", str(tmp_path / "theirs.gguf"), "--outtype", "f32"]
    subprocess.run([sys.executable, str(source), *words], check=True, capture_output=True)
    ours, theirs = (read_header(tmp_path / f"{whose}.gguf") for whose in ("ours", "theirs"))
    # llama.cpp needs output.weight, but the converter omits it
    copied = {"output.weight"} if name == "olmo2" else set()
    assert ours.tensors.keys() - copied == theirs.tensors.keys()
    for its, info in theirs.tensors.items():
        own = ours.tensors[its]
        assert (own.shape, own.type) == (info.shape, info.type), its
        assert numbers_of(own) == numbers_of(info), its
    different = {key for key in ours.keys if key in theirs.keys and ours.keys[key] != theirs.keys[key]}
    known = {  # keys whose values may differ: the converter uses a constant context for Falcon, and assumes some widths
        *(f"{name}.{key}" for key in ("context_length", "feed_forward_length", "rope.dimension_count")),
        "general.name",
    }
    assert different <= known | ({"general.size_label"} if copied else set())
    assert theirs.keys.keys() <= ours.keys.keys()


def numbers_of(info: TensorInfo) -> bytes:
    return np.fromfile(info.path, np.uint8, info.nbytes, offset=info.offset).tobytes()


def test_quantized_layers_are_refused(tmp_path: Path) -> None:
    onward.save(onward.LanguageModel(decoder(COMPUTED["llama"])), tmp_path / "folder")
    with pytest.raises(UserError, match="has quantized layers"):
        onward.save(onward.load(tmp_path / "folder", quantize="int8"), tmp_path / "x.gguf")


def test_numbers_too_large_for_a_type_are_refused(tmp_path: Path) -> None:
    model = decoder(COMPUTED["llama"])
    with torch.no_grad():
        model.head.weight[0, 0] = 1e6
    with pytest.raises(UserError, match=r"output\.weight has a number as large as 1e\+06, which F16 cannot hold"):
        onward.save(onward.LanguageModel(model), tmp_path / "x.gguf", dtype="f16")
    assert not list(tmp_path.iterdir())
