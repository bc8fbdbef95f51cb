"""onward verify: models keep the promises, and the checks find models that do not."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import onward
from onward import Decoder, UserError, verify
from onward.cli import main
from onward.inspection.references import from_transformers, llama_cpp_reference
from onward.inspection.verify import VerifiedModel, against

from support.decoders import DECODERS, config, decoder


def failing(model: Decoder, **options: Any) -> set[str]:
    return {finding.promise for finding in verify(model, **options) if not finding.holds}


@pytest.mark.parametrize("name", ["llama", "gpt2", "alibi in windows", "gemma2"])
def test_promises_hold_for(name: str) -> None:
    assert failing(decoder(DECODERS[name])) == set()


WRONG: dict[str, tuple[Callable[[Tensor], Tensor], set[str]]] = {
    "the length": (
        lambda x: x * (1 + 0.1 * x.size(1)) + 1,
        {"cached = plain", "chunked = whole", "paged = contiguous"},
    ),
    "other rows": (lambda x: x + x.mean(0), {"batched = alone"}),
    "nothing": (lambda x: x, set()),
}


@pytest.mark.parametrize("on", WRONG)
def test_model_is_found_that_depends_on(on: str) -> None:
    change, promises = WRONG[on]
    model = decoder(DECODERS["llama"])
    model.blocks[0].attn.register_forward_hook(lambda module, args, result: change(result))
    assert failing(model) - {"saved = loaded"} >= promises
    assert promises or not failing(model)


def test_a_token_without_a_row_is_found() -> None:
    model, tokenizer = decoder(DECODERS["llama"]), onward.train_tokenizer("byte", [])
    rows = model.config.vocab_size
    assert rows < tokenizer.vocab_size
    assert "token ids have rows" in failing(model, tokenizer=tokenizer)
    wide = decoder(replace(DECODERS["llama"], vocab_size=tokenizer.vocab_size))
    assert failing(wide, tokenizer=tokenizer) == set()


def test_weight_that_is_not_saved_is_found() -> None:
    model = decoder(DECODERS["llama"])
    model.blocks[0].attn_norm.register_forward_hook(lambda module, args, result: result * 1.1)
    assert failing(model) == {"saved = loaded"}


def test_first_layer_that_differs_from_transformers_is_named(tiny_run: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tiny_run).eval()
    with torch.inference_mode():
        subject = VerifiedModel(onward.load(tiny_run).model.eval(), None, {})
        assert against(subject, from_transformers(theirs)).holds
        for layer in 1, 0:
            theirs.model.layers[layer].mlp.up_proj.weight.add_(0.1)
            assert not (finding := against(subject, from_transformers(theirs))).holds
            assert f"first differs beyond rounding after block {layer}" in finding.note


@pytest.mark.parametrize("dtype", ["f32", "q8_0"])
def test_first_layer_that_differs_from_llama_cpp_is_named(dtype: Any, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed: nothing is compared with llama.cpp")
    tokenizer, path = onward.train_tokenizer("byte", []), tmp_path / "small.gguf"
    model = decoder(config(vocab_size=tokenizer.vocab_size, d_model=32, n_kv_heads=2))
    onward.save(onward.LanguageModel(model, tokenizer), path, dtype=dtype)
    with torch.inference_mode():
        finding = against(VerifiedModel(model, None, {}), llama_cpp_reference(path, model))
        assert finding.holds, finding
        for layer in 1, 0:
            model.blocks[layer].mlp.up.weight.add_(1.0)  # type: ignore[operator, union-attr]
            finding = against(VerifiedModel(model, None, {}), llama_cpp_reference(path, model))
            assert not finding.holds
            assert f"first differs beyond rounding after block {layer}" in finding.note
    with pytest.raises(UserError, match=r"holds another model: its vocabulary and width are \(257, 32\) instead"):
        llama_cpp_reference(path, decoder(DECODERS["llama"])).compute(torch.tensor([[1, 2]]))


AGAINST = {"tests.gguf": "there is no file tests.gguf", "llama": "give transformers, or a file that ends in .gguf"}


@pytest.mark.parametrize("reference", [*AGAINST, "FILE.gguf"])
def test_reference_that_is_not_there_is_one_sentence(
    reference: str,
    tiny_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    (tmp_path / "FILE.gguf").touch()
    given = str(tmp_path / reference) if reference == "FILE.gguf" else reference
    assert main(["verify", str(tiny_run), "--against", given]) == 2
    assert AGAINST.get(reference, "needs llama.cpp: pip install llama-cpp-python") in capsys.readouterr().err


def test_command_prints_the_findings(tiny_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(tiny_run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert all(row["holds"] for row in found)
    assert {"saved = loaded", "speculated = target", "streamed = whole text"} <= {row["promise"] for row in found}


def test_model_that_is_not_finite_is_one_sentence() -> None:
    model = decoder(DECODERS["llama"])
    torch.nn.init.constant_(model.embed.weight, torch.nan)
    with pytest.raises(UserError, match="Cannot compare logits, because the model's logits are NaN or infinite"):
        failing(model)
