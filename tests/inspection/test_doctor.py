"""The doctor finds each planted bug by its check, and nothing in healthy models."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onward
from onward.cli import main
from onward.errors import UserError
from onward.inspection.doctor import doctor
from onward.inspection.doctor.checks import CHECKS
from onward.inspection.doctor.isolated import examine_apart
from onward.inspection.doctor.target import subject_of

from support.decoders import DECODERS, decoder

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/planted_bug.py"
HEALTHY_SOURCE = EXAMPLE.read_text(encoding="utf-8").replace("key > query + 1", "key > query")
MASK = 'scores = scores.masked_fill(key > query, float("-inf"))'
MUTANTS: dict[str, tuple[str, str, str, str]] = {  # the line, what stands there instead, the check, and where
    "no mask": (MASK, "pass", "causal", "first in blocks.0.attention"),
    "mask off by one": ("key > query", "key > query + 1", "causal", "first in blocks.0.attention"),
    "mask that hides the query's own key": ("key > query", "key >= query", "finite", "blocks.0.attention"),
    "mask with the wrong offset in a cached chunk": ("arange(past, past + T)[:", "arange(T)[:", "cached", "token"),
    "no mask for cached chunks": ("key > query", "(key > query) & (past == 0)", "cached", "in chunks of 5"),
    "mask of the queries": ("key > query", "key < query", "causal", "blocks.0.attention"),
    "softmax over the queries": ("scores.softmax(-1)", "scores.softmax(-2)", "causal", "blocks.0.attention"),
    "targets shifted twice": (
        "logits.flatten(0, 1), targets.flatten()",
        "logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten()",
        "loss",
        "targets 1 ahead",
    ),
    "loss over the wrong axis": (
        "logits.flatten(0, 1), targets.flatten()",
        "logits.reshape(len(tokens), -1, tokens.size(1)), targets",
        "loss",
        "is that over the wrong axis",
    ),
    "sum instead of mean": ("targets.flatten())", 'targets.flatten(), reduction="sum")', "loss", ""),
    "positions not advanced with the cache": (
        "torch.arange(past, past + tokens.size(1))",
        "torch.arange(tokens.size(1))",
        "cached",
        "first at token",
    ),
    "cache that forgets": ('torch.cat([memory["k"], k], 2)', 'torch.cat([memory["k"] * 0, k], 2)', "cached", ""),
    "untied head that claims to be tied": ("self.head.weight = self.embed.weight", "pass", "tied", ""),
    "dropout in eval": ("self.dropout, self.training)", "0.1)", "repeatable", "F.dropout"),
    "detached layer": ("x + self.mlp(self.norm2(x))", "x + self.mlp(self.norm2(x)).detach()", "gradients", "mlp"),
    "attention that is never added": (
        "x = x + self.attention(self.norm1(x), memory)",
        "self.attention(self.norm1(x), memory)",
        "context",
        "",
    ),
    "batch and heads mixed": (".transpose(1, 2).reshape(B, T, D)", ".transpose(0, 1).reshape(B, T, D)", "rows", ""),
    "mean over the batch": ("self.head(self.norm(x))", "self.head(self.norm(x + x.mean(0)))", "rows", ""),
    "initialization far too large": ("std=0.02", "std=1.0", "first loss", ""),
    "table of positions too short": ("nn.Embedding(context_length,", "nn.Embedding(context_length - 4,", "length", ""),
    "residual stream cut": ("return x + self.mlp(self.norm2(x))", "return 0 * x", "overfit", ""),
    "logarithm of what is negative": ("self.head(self.norm(x))", "self.head(self.norm(x).log())", "finite", "head"),
}


def model_of(source: str) -> nn.Module:
    """The model in the source of a file."""
    names: dict[str, Any] = {"__name__": "patient"}
    exec(compile(source, "patient.py", "exec"), names)
    model: nn.Module = names["GPT"]()
    return model


def failures(model: nn.Module, **options: Any) -> dict[str, str]:
    """The checks that fail, each with what is said."""
    found = doctor(model, **options)
    return {f.check: f"{f.what}; {f.where}; {f.why}; {f.mend}" for f in found if f.status == "failed"}


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_bug_is_found_and_named(name: str) -> None:
    line, instead, check, where = MUTANTS[name]
    assert HEALTHY_SOURCE.count(line) == 1
    torch.manual_seed(0)
    found = failures(model_of(HEALTHY_SOURCE.replace(line, instead)), fresh=True)
    assert check in found, found
    assert where in found[check]


HEALTHY: dict[str, Callable[[], nn.Module]] = {
    "a GPT in one file": lambda: model_of(HEALTHY_SOURCE),
    **{name: lambda name=name: decoder(DECODERS[name]) for name in DECODERS},  # type: ignore[misc]
}


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_found_in(name: str) -> None:
    torch.manual_seed(0)
    assert failures(HEALTHY[name](), fresh=name == "a GPT in one file") == {}


@pytest.mark.long
@pytest.mark.parametrize("kind", ["GPT2", "Llama", "GPTNeoX", "Mistral", "Qwen2", "Gemma2"])
def test_nothing_is_found_in_transformers(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 64, "max_position_embeddings": 64, "num_key_value_heads": 2, "head_dim": 8}
    if kind == "GPT2":
        sizes = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**sizes, bos_token_id=0, eos_token_id=0)
    assert failures(transformers.AutoModelForCausalLM.from_config(config), fresh=True) == {}


def test_nothing_is_found_in_a_trained_model(tiny_run: Path) -> None:
    assert failures(onward.load(tiny_run).model) == {}


WRONG: dict[str, tuple[str, str]] = {  # the target and its options, and the sentence
    "no file": ("nowhere.py:GPT", "there is no file nowhere.py"),
    "no module": ("nowhere:GPT", "nowhere cannot be imported"),
    "no such class": ("FILE:GTP", "the target names 'GTP', which .* does not have: choose from .*Raises"),
    "arguments that are no JSON": ("FILE:Raises {", "--kwargs is no JSON"),
    "unknown arguments": ('FILE:Raises {"x": 1}', "cannot be made .*unexpected keyword argument 'x'.*--kwargs"),
    "no model": ("FILE:number", "gives int: name a torch.nn.Module"),
    "a model that raises": ("FILE:Raises", "cannot be called with token ids .*no tokens, please.*--adapter"),
    "a model of vectors": ("FILE:vectors", "cannot be called with token ids .*--adapter"),
    "no logits": ("FILE:Flat", r"returns \(1, 2\) instead of logits"),
}
FILE = """
import torch

class Raises(torch.nn.Module):
    def forward(self, x): raise TypeError("no tokens, please")

class Flat(torch.nn.Module):
    def forward(self, x): return x

class Hangs(torch.nn.Module):
    def forward(self, x):
        while True: pass

class Prints(torch.nn.Module):
    def forward(self, x):
        print("noise"); torch.empty(1 << 50)

vectors = lambda: torch.nn.Linear(3, 3)
number = lambda: 5
"""


@pytest.mark.parametrize("case", WRONG)
def test_target_that_cannot_be_examined_is_one_sentence(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "file.py").write_text(FILE)
    given, message = WRONG[case]
    target, _, kwargs = given.replace("FILE", str(tmp_path / "file.py")).partition(" ")
    with pytest.raises(UserError, match=message) as caught:
        subject_of(target, kwargs)
    assert "\n" not in str(caught.value)


def test_model_without_end_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file.py").write_text(FILE)
    with pytest.raises(UserError, match=r"the model took longer than 0\.1 s, before the first check"):
        examine_apart({"target": f"{tmp_path}/file.py:Hangs"}, seconds=0.1, gigabytes=1)


def test_command_finds_the_planted_bug(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", f"{EXAMPLE}:GPT", "--json"]) == 1
    failed = {row["check"]: row for row in json.loads(capfd.readouterr().out) if row["status"] == "failed"}
    assert failed.keys() == {"causal", "cached"}
    assert failed["causal"]["where"].startswith("first in blocks.0.attention")


@pytest.mark.long
def test_command_drops_what_a_model_prints_and_bounds_its_memory(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file.py").write_text(FILE)
    assert main(["doctor", f"{tmp_path}/file.py:Prints", "--gigabytes", "1"]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert re.search("cannot be called with token ids .*memory", err)


def test_page_lists_every_check_and_every_mutant() -> None:
    page = (ROOT / "docs/doctor.md").read_text(encoding="utf-8")
    assert [name for name in CHECKS if f"| {name} |" not in page] == []
    assert [name for name in MUTANTS if name not in page] == []


def test_adapter_says_how_a_model_is_called() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model_of(HEALTHY_SOURCE)

        def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {"out": self.inner(batch["ids"])}

    assert failures(Named(), adapter=lambda model, tokens: model({"ids": tokens})["out"]) == {}
