"""Every option that is given is read by the view of a command, or refused.

The fuzzer runs a seeded sample by default and many more cases with `-m long`.
"""

import importlib
import io
import random
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest

from onward.base import fields as typed
from onward.cli import main
from onward.cli.overview import COMMANDS
from onward.cli.shared.arguments import Argument, arguments
from onward.reports.pictures import views

REFUSED = {
    "inspect RUN The attention --corrupted foo": "--corrupted is used only by patch, and not by attention",
    "inspect RUN The next --layer 1": "--layer is used only by attention, arrows and neurons, and not by next",
    "inspect RUN The neurons --head 1": "--head is used only by attention and arrows",
    "inspect RUN The lens --time 3s": "--time is used only by features and --tuned, and not by lens",
    "inspect RUN The lens --theme dark": "--theme is used only with --out: give that as well",
    "inspect RUN heads --top-k 3": "--top-k is used only by next",
    "inspect RUN names --out x.svg": "--out is not used by onward inspect names",
    "inspect RUN The atention --layer 1": "'atention' is not a view: did you mean attention?",
    "data list STORY": "STORY is one argument too many: onward data list takes no sources",
    "data list --no-exact": "exact is used only by prepare",
    "data get tinyshakespeare --workers 2": "--workers is used only by prepare and join, and not by get",
    "tokenizer show RUN The --out x": "--out is used only by train",
    "tokenizer train STORY --out x --ids": "--ids is used only by show",
    "tokenizer train STORY --out x --kind char --vocab-size 9": "--vocab-size is 9, but applies to bpe, not to char",
    "tokenizer compare byte --field body": "--field is used only by train and --data",
    "tokenizer show RUN The --ids --json": "Cannot combine --ids with --json",
    "scaling fit RUNS --flops 1e9": "--flops is used only by optimum",
    "scaling optimum --flops 1e20 --device a100": "--device is used only with --hours",
    "scaling optimum RUNS --flops 1e20": "RUNS is one argument too many: onward scaling optimum takes no runs",
    "doctor STORY --kwargs {}": "--kwargs is used only by a class or function, and not by texts",
    "doctor RUN --validation STORY": "--validation is used only by texts, and not by the folder of a model",
    "doctor model.py:GPT --text STORY": "--text is used only by the folder of a model",
    "doctor RUN --text STORY --batches b.py:x": "Cannot combine --text and --batches",
    "explain RUN The --theme dark": "--theme is used only with --out",
    "draw mask --logits 1,2,3,4": "--logits is used only by samplers, and not by mask",
    "draw mask --theme dark": "--theme is used only with --out",
    "plan gpt2 --device h100 --vocab 99": "--vocab is used only by a preset of training",
    "plan gpt2 --devices 8xh100 --count 2": "Cannot combine --devices with --count",
    "bench RUN --context 5": "--context is used only by training, and not by decoding",
    "bench RUN --train --new 8": "--new is used only by decoding, and not by training",
    "bench gpt2 --revision v1": "Cannot load revision 'v1' of gpt2, which gets random weights",
    "generate RUN The --beams 2 --seed 3": "--seed is used only by sampling, and not by search",
    "generate RUN The --beams 2 --compile": "--compile is used only by sampling",
    "generate RUN The --field text": "--field is used only with --prompts",
    "serve RUN --prompt-cache-size 1GB": "--prompt-cache-size is used only with --prompt-cache",
    "evaluate RUN --encoding utf-8": "--encoding is used only with sources",
    "convert RUN folder --accept gelu": "--accept is used only by gguf, and not by hf",
    "convert RUN x.gguf --shard-bytes 3e3": "--shard-bytes is used only by hf",
    "convert RUN x.gguf --importance STORY": "importance is used only by q4_k_m, q5_k_m and q6_k",
    "convert RUN x.gguf --importance STORY --dtype q8_0": "and not by q8_0",
    "chat RUN --logprobs 2": "--logprobs is not an option of onward chat",
}


@pytest.fixture
def where(tiny_run: Path, story_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The placeholders and their paths; the working directory is empty."""
    monkeypatch.chdir(tmp_path)
    return {"RUN": str(tiny_run), "STORY": str(story_file), "RUNS": str(tiny_run.parent)}


def filled(text: str, where: dict[str, str]) -> str:
    return " ".join(where.get(word, word) for word in text.split(" "))


@pytest.mark.parametrize("words", REFUSED)
def test_an_option_of_another_view_is_refused(
    words: str, where: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(filled(words, where).split()) == 2
    out, err = capsys.readouterr()
    assert not out
    assert filled(REFUSED[words], where) in err
    assert err.splitlines()[-1].startswith("onward: ")
    assert not [*tmp_path.iterdir()]


def test_each_view_of_inspect_declares_its_options() -> None:
    inspect = importlib.import_module("onward.cli.commands.inspect")
    assert inspect.VIEWS.keys() == {*views.VIEWS, "features", "names"}


@pytest.mark.parametrize("command", COMMANDS)
def test_declared_options_exist(command: str) -> None:
    options = importlib.import_module(f"onward.cli.commands.{command}").Options
    names = typed.hints(options).keys()
    declared = {name for own in getattr(options, "reads", {}).values() for name in own}
    assert declared <= names


CASES = [  # commands for each view, which succeed without further options
    *(f"inspect RUN The_cat_sat {view}" for view in ("attention", "next", "lens", "tokens", "positions", "neurons")),
    "inspect RUN The_cat_sat patch --corrupted The_dog_sat",
    "inspect RUN heads",
    "inspect RUN names",
    "data prepare STORY --out prepared --tokenizer char --workers 1",
    "data list",
    "tokenizer train STORY --out tok --vocab-size 300",
    "tokenizer compare byte",
    "tokenizer compare byte --data STORY",
    "tokenizer show RUN The_cat",
    "scaling optimum --flops 1e20",
    "scaling optimum --hours 3",
    "doctor STORY",
    "doctor RUN",
    "doctor model.py:GPT",
    "explain RUN The_cat",
    "draw",
    "draw mask",
    "draw samplers --logits 5,2.9,2.3,1.1",
    "draw block gpt2",
    "plan gpt2 --device h100",
    "plan tiny --device h100 --tokens 1B",
    "generate RUN The_cat --max-new-tokens 2",
    "generate RUN The_cat --max-new-tokens 2 --beams 2",
    "generate RUN --prompts STORY --max-new-tokens 1",
    "evaluate RUN",
    "evaluate RUN STORY",
    "convert RUN model.gguf",
    "convert RUN folder",
    "models gpt2",
    "runs RUNS",
    "report RUN --out page.html --text The_cat_sat_on_the_mat",
    "card RUN --out card.md",
]
VALUES = {  # by option, if a generic value of its type would be refused
    "out": "made/x.svg",
    "theme": "dark",
    "corrupted": "The_dog_sat",
    "right": "a",
    "wrong": "e",
    "tuned": "STORY",
    "time": "1s",
    "data": "STORY",
    "near": "0.8",
    "tokenizer": "byte",
    "text": "The_cat_sat_on_the_mat",
    "prompts": "STORY",
    "json_schema": '{"type":"integer"}',
    "regex": "[a-z]+",
    "requests": "1e12",
    "flops": "1e20",
    "params": "7B",
    "tokens": "1B",
    "hours": "2",
    "mesh": "shard=2",
    "devices": "2xh100",
    "memory": "24GiB",
    "bandwidth": "1TB/s",
    "batches": "model.py:BATCHES",
    "validation": "STORY",
    "kwargs": "{}",
    "device": "cpu",
    "logit_bias": "{5: 1}",
    "prompt_cache": "cache",
    "compare": "RUN",
    "draft": "RUN",
    "name": "me/x",
    "rope": "linear:2",
}
# options that take seconds each, or need files that do not exist here
SLOW = {"compile", "imports", "adapter_folder", "revision", "tuned", "near", "gopher"}


@dataclass
class Reads:
    """The names of the options that a command has read."""

    names: set[str]


def recording(cls: type, reads: Reads) -> type:
    """A dataclass like `cls` that records which of its fields are read, except when it is copied."""
    own = {field.name for field in fields(cls)}

    def get(self: Any, name: str) -> Any:
        caller = sys._getframe(1).f_code
        if name == "__dict__" and caller.co_name == "main":
            reads.names |= own
        if name in own and caller.co_name not in ("__post_init__", "replace", "_replace", "made", "view", "<setcomp>"):
            reads.names.add(name)
        return object.__getattribute__(self, name)

    made = type(cls.__name__, (cls,), {"__getattribute__": get, "__doc__": cls.__doc__})
    made.__module__ = cls.__module__
    return made


def options_of(command: str) -> list[Argument]:
    table = arguments(importlib.import_module(f"onward.cli.commands.{command}").Options)
    return [one for one in table if not one.positional and one.name not in SLOW]


def value_of(option: Argument) -> list[str]:
    """Command-line words that set an option to a value other than its default."""
    if option.is_switch:
        return [option.flag if not option.default else f"--no-{option.flag[2:]}"]
    kind = option.kind.args[0] if option.many else option.kind
    if option.name in VALUES:
        return [option.flag, VALUES[option.name]]
    if option.choices:
        return [option.flag, next(choice for choice in reversed(option.choices) if choice != option.default)]
    numbers = {int, float} & kind.classes
    return [option.flag, "1" if numbers and option.default != 1 else "2" if numbers else "x"]


@pytest.fixture
def fast_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the doctor's checks, which run in another process, by an empty result."""
    from onward.inspection.doctor import isolated

    monkeypatch.setattr(isolated, "examine_apart", lambda *_: [])


@pytest.mark.fuzzer
@pytest.mark.usefixtures("fast_doctor")
@pytest.mark.parametrize("count", [20, pytest.param(600, marks=pytest.mark.long)])
def test_given_options_are_read_or_refused(
    count: int,
    where: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    failures = list[tuple[object, ...]]()
    for seed in range(count):
        choose = random.Random(seed)
        case = choose.choice(CASES)
        command = case.split()[0]
        option = choose.choice(options_of(command))
        words = [where.get(word, word).replace("_", " ") if word[0] != "-" else word for word in case.split()]
        given = [where.get(word, word) for word in value_of(option)]
        (place := tmp_path / str(seed) / "made").mkdir(parents=True)
        monkeypatch.chdir(place.parent)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"The cat\n")))
        module = importlib.import_module(f"onward.cli.commands.{command}")
        with monkeypatch.context() as patch:
            reads = Reads(set())
            patch.setattr(module, "Options", recording(module.Options, reads))
            try:
                status = main([*words, *given])
            except SystemExit as error:
                status = int(error.code or 0)
        err = capsys.readouterr().err
        refused = status == 2 and err.rstrip("\n").rpartition("\n")[2].startswith("onward: ")
        if "Traceback" in err or not (refused or option.name in reads.names):
            failures.append((seed, " ".join(words[:1] + words[2:]), given, status, err[-200:]))
    assert not failures, "\n".join(map(str, [len(failures), *failures]))
