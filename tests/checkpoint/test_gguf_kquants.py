"""K-quants: quantized blocks are close to the original values, the errors of files are at most 2 % above llama.cpp's,
and an importance matrix helps."""

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

import onward
from onward import Decoder, DecoderConfig, LanguageModel, UserError
from onward.checkpoint.gguf.blocks import CODES, TYPES
from onward.checkpoint.gguf.header import read_header
from onward.checkpoint.gguf.importance import importance
from onward.checkpoint.load import load_model
from onward.cli import main

from support.gguf_files import tensor
from support.llama_cpp import quantize

KINDS = {"Q4_K": 0.08, "Q5_K": 0.04, "Q6_K": 0.021}  # maximum root mean square error for normally distributed numbers
DTYPES: tuple[Literal["q4_k_m", "q5_k_m", "q6_k"], ...] = ("q4_k_m", "q5_k_m", "q6_k")


def error_of(kind: str, x: np.ndarray, columns: np.ndarray | None = None) -> np.ndarray:
    own = TYPES[CODES[kind]]
    raw = own.encode(torch.from_numpy(x), columns)
    assert raw.shape == (x.size // 256, own.bytes)
    return (own.decode(raw.reshape(-1)).numpy().reshape(x.shape) - x) ** 2


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_near_their_numbers(kind: str) -> None:
    draw = np.random.default_rng(0)
    x = draw.standard_normal((200, 256), dtype=np.float32)
    assert error_of(kind, x).mean() ** 0.5 < KINDS[kind]
    for scale, shift in (1e-2, 0.0), (100.0, 0.0), (0.1, 3.0), (0.1, -3.0):
        spread = float(np.sqrt(((x * scale + shift) ** 2).mean()))
        assert error_of(kind, x * scale + np.float32(shift)).mean() ** 0.5 < KINDS[kind] * spread * 2
    assert error_of(kind, np.zeros((2, 256), np.float32)).max() == 0


@pytest.mark.parametrize("kind", KINDS)
def test_important_columns_keep_more_precision(kind: str) -> None:
    x = np.random.default_rng(1).standard_normal((200, 256), dtype=np.float32)
    columns = np.ones((200, 256), np.float32)
    columns[:, ::8] = 50.0
    plain, weighted = error_of(kind, x), error_of(kind, x, columns)
    assert (weighted * columns).mean() < 0.97 * (plain * columns).mean()


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    config = DecoderConfig(257, d_model=256, n_layers=4, n_heads=4, n_kv_heads=2, d_ff=512, context_length=64)
    torch.manual_seed(0)
    return LanguageModel(Decoder(config), onward.train_tokenizer("byte", []))


def error_of_file(lm: LanguageModel, path: Path) -> float:
    """The mean squared error of a file's matrices, relative to their mean square."""
    model, _ = load_model(path, torch.float32)
    pairs = [(p, q) for p, q in zip(model.parameters(), lm.model.parameters()) if p.ndim > 1]
    return sum(float((p - q).square().sum() / q.square().sum()) for p, q in pairs) / len(pairs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_files_are_as_large_as_those_of_llama_cpp_and_no_worse(dtype: Any, lm: LanguageModel, tmp_path: Path) -> None:
    onward.save(lm, tmp_path / "f32.gguf", dtype="f32")
    onward.save(lm, tmp_path / "ours.gguf", dtype=dtype)
    quantize(tmp_path / "f32.gguf", tmp_path / "theirs.gguf", dtype)
    ours, theirs = (read_header(tmp_path / f"{whose}.gguf") for whose in ("ours", "theirs"))
    types = [{name: info.type.name for name, info in header.tensors.items()} for header in (ours, theirs)]
    assert types[0] == types[1]
    assert ours.keys["general.file_type"] == theirs.keys["general.file_type"]
    errors = [error_of_file(lm, tmp_path / f"{whose}.gguf") for whose in ("ours", "theirs")]
    assert errors[0] < 1.02 * errors[1]


def test_importance_is_the_mean_square_of_inputs(lm: LanguageModel) -> None:
    tokens = lm.text().encode("Once upon a time" * 8)
    found = importance(lm.model, tokens)
    inputs: list[torch.Tensor] = []
    handle = lm.model.get_submodule("blocks.1.attn.out").register_forward_pre_hook(lambda m, x: inputs.append(x[0]))
    with torch.inference_mode():
        for start in range(0, len(tokens), 64):
            lm.model(torch.tensor([tokens[start : start + 64]]))
    handle.remove()
    wanted = torch.cat([x[0] for x in inputs]).square().mean(0)
    torch.testing.assert_close(found["blocks.1.attn.out.weight"], wanted)
    with pytest.raises(UserError, match="at least two tokens"):
        importance(lm.model, tokens[:1])


def test_importance_changes_the_codes_and_not_the_head(lm: LanguageModel, tmp_path: Path) -> None:
    onward.save(lm, tmp_path / "plain.gguf", dtype="q4_k_m")
    onward.save(lm, tmp_path / "text.gguf", dtype="q4_k_m", importance="Once upon a time, there was a fox. " * 20)
    paths = [tmp_path / f"{name}.gguf" for name in ("plain", "text")]
    files = [{name: tensor(path, name) for name in read_header(path).tensors} for path in paths]
    differ = {name for name, one in files[0].items() if not torch.equal(one, files[1][name])}
    assert {"blk.0.ffn_down.weight", "blk.3.attn_q.weight"} <= differ
    assert "token_embd.weight" not in differ


def test_rows_that_do_not_divide_are_finer(tmp_path: Path) -> None:
    config = DecoderConfig(257, d_model=64, n_layers=1, n_heads=2, d_ff=256, context_length=64)
    onward.save(LanguageModel(Decoder(config), onward.train_tokenizer("byte", [])), tmp_path / "x.gguf", dtype="q4_k_m")
    types = {name: info.type.name for name, info in read_header(tmp_path / "x.gguf").tensors.items()}
    assert (types["blk.0.attn_q.weight"], types["blk.0.ffn_down.weight"]) == ("Q8_0", "Q6_K")


def test_convert_takes_a_text_for_importance(lm: LanguageModel, tmp_path: Path, capsys) -> None:
    onward.save(lm, tmp_path / "folder")
    (tmp_path / "text.txt").write_text("Once upon a time. " * 20)
    words = ["convert", str(tmp_path / "folder"), str(tmp_path / "x.gguf"), "--dtype", "q5_k_m", "--importance"]
    assert main([*words, str(tmp_path / "text.txt")]) == 0
    assert read_header(tmp_path / "x.gguf").keys["general.file_type"] == 17
    assert main([*words, str(tmp_path / "missing.txt")]) == 2
    assert "Cannot read the text" in capsys.readouterr().err
