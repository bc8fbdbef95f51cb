"""onward doctor: its targets, its error messages, and its output."""

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from onward import Block, Decoder, LanguageModel, UserError, doctor, save, train_tokenizer
from onward.cli import main
from onward.inspection.doctor.isolated import examine_apart
from onward.inspection.doctor.target import subjects_of

from support.decoders import config
from support.pages import Page
from support.planted import EXAMPLE, GPT, model_of

# ---------------------------------------------------------------- the command

WRONG: dict[str, tuple[str, str]] = {  # target and options, expected message
    "no file": ("nowhere.py:GPT", "there is no file nowhere.py"),
    "no module": ("nowhere:GPT", "Cannot import nowhere"),
    "no such class": ("FILE:GTP", "Cannot find 'GTP', which the target names, in .*: choose from .*Raises"),
    "arguments that are no JSON": ("FILE:Raises {", "--kwargs is not JSON"),
    "unknown arguments": ('FILE:Raises {"x": 1}', "Cannot create .*unexpected keyword argument 'x'.*--kwargs"),
    "no model": ("FILE:number", "which is int: name a torch.nn.Module"),
    "a model that raises": ("FILE:Raises", "Cannot call the model with token ids .*no tokens, please.*--adapter"),
    "a model of vectors": ("FILE:vectors", "Cannot call the model with token ids .*--adapter"),
    "no logits": ("FILE:Flat", r"returns \(1, 2\) instead of logits"),
    "more logits than token ids": ("FILE:Wide", "token ids of up to .*--vocab-size if it has fewer"),
}
FILE = """
import sys
import torch

class Raises(torch.nn.Module):
    def forward(self, x): raise TypeError("no tokens, please")

class Flat(torch.nn.Module):
    def forward(self, x): return x

class Wide(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(5, 4), torch.nn.Linear(4, 90)
    def forward(self, x): return self.head(self.embed(x))

class Hangs(torch.nn.Module):
    def forward(self, x):
        while True: pass

class Grows(torch.nn.Module):
    def forward(self, x):
        print("noise")
        kept = []
        while True: kept.append(bytearray(1 << 26))

class Leaves(torch.nn.Module):
    def forward(self, x): sys.exit(0)

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
        subjects_of(target, kwargs)
    assert "\n" not in str(caught.value)


BATCH = torch.zeros(2, 3, dtype=torch.long)


@pytest.mark.parametrize("batch", [BATCH, (BATCH, BATCH[:1]), (BATCH.float(), BATCH), (BATCH + 99, BATCH)])
def test_batch_that_is_none_is_one_sentence(batch: Any) -> None:
    with pytest.raises(UserError, match=r"use a batch of|a batch has|batches is"):
        doctor(model_of(GPT), batches=[batch])


def test_model_without_end_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file.py").write_text(FILE)
    with pytest.raises(UserError, match=r"the model took longer than 0\.1 s, before the first check"):
        examine_apart({"target": f"{tmp_path}/file.py:Hangs"}, seconds=0.1, gigabytes=1)


def test_command_finds_the_planted_bug(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "<page>.html"
    assert main(["doctor", f"{EXAMPLE}:GPT", "--json", "--html", str(page)]) == 1
    rows = json.loads(capfd.readouterr().out)
    failed = {row["check"]: row for row in rows if row["status"] == "failed"}
    assert failed.keys() == {"causal", "cached"}
    assert failed["causal"]["where"].startswith("first in blocks.0.attention")
    written = Page(page.read_text(encoding="utf-8"))
    assert not written.open
    assert all(row["what"] in written.text and row["how"] in written.text for row in rows)
    assert all(row["mend"] in written.text and row["where"] in written.text for row in failed.values())


OWN = """
from dataclasses import dataclass
import onward
from onward.model import PreNormModule, build_branches

class Module(PreNormModule):
    def forward(self, x, context):
        return super().forward(x + x.roll(1, 1) * (x.size(1) > 1), context)

@dataclass(frozen=True)
class Rolled(onward.Block, kind="rolled"):
    def build(self, config, layer):
        return Module(*build_branches(config, layer))
"""


@pytest.mark.long
def test_process_of_the_checks_imports_the_parts_of_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Block, "kinds", dict(Block.kinds))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rolled_parts.py").write_text(OWN)
    tokenizer = train_tokenizer("byte", [])
    block = importlib.import_module("rolled_parts").Rolled()
    model = Decoder(config(vocab_size=tokenizer.vocab_size, block=block))
    save(LanguageModel(model, tokenizer), tmp_path / "saved")
    rows = examine_apart({"target": "saved", "imports": ["rolled_parts"]}, seconds=120, gigabytes=16)
    (cached,) = (row for row in rows if row["check"] == "cached")
    assert cached["status"] == "failed"
    assert "Cannot generate with Rolled, because" in cached["what"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "message"),
    [("Grows", "Cannot call the model with token ids .*MemoryError"), ("Leaves", "ended with status 0, .*sys.exit")],
)
def test_command_bounds_what_a_model_does(
    name: str, message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file.py").write_text(FILE)
    assert main(["doctor", f"{tmp_path}/file.py:{name}", "--gigabytes", "1"]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert re.search(message, err)
