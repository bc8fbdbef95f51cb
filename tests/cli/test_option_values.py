"""Commands with an unusual value of one option: they work, or report the mistake in one sentence.

The fuzzer runs a seeded sample by default and many more cases with `-m long`.
"""

import importlib
import io
import random
import sys
from pathlib import Path

import pytest

from onward.cli import main
from onward.cli.shared.arguments import Argument, arguments

from support.limits import limited

SECONDS, ROOM = 10, 1 << 30
VALUES = [
    *("0", "-1", "2", "0.5", "1e39", "-1e39", "1e-46", "1e300", "-inf", "nan", "100000000", "9" * 400, "", "x", "none"),
    *("true", "{5: 1}", "{5.7: 1}", "{5: nan}", "{-1: 1}", "(", "[a-z", "a{1000000}", '{"type": "object"}', "@nowhere"),
    *("[" * 5000, "a" * 5000, "\udcff", "é", "bpe:9999999", "gpt2", "rotary(theta=0)", "(self(window=2), self)"),
]
SMALL = "--steps 1 --batch-size 2 --precision fp32 --tokenizer char --preset tiny --model.context-length 8"
COMMANDS = {
    "generate": "RUN The --max-new-tokens 2",
    "chat": "RUN --max-new-tokens 2",
    "evaluate": "RUN STORY",
    "report": "RUN --out page.html",
    "runs": "",
    "models": "gpt2",
    "tokenizer": "compare byte --data STORY",
    "data": "prepare STORY --out prepared",
    "train": f"STORY --out run {SMALL}",
}
SLOW = {"--compile", "--import"}  # `--compile` takes a minute; `--import` imports modules of this machine


def options(command: str) -> list[Argument]:
    table = arguments(importlib.import_module(f"onward.cli.commands.{command}").Options)
    return [argument for argument in table if not argument.positional and argument.flag not in SLOW]


@pytest.mark.fuzzer
@pytest.mark.parametrize("count", [40, pytest.param(500, marks=pytest.mark.long)])
def test_odd_value_of_an_option_works_or_is_refused(
    count: int,
    tiny_run: Path,
    story_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    where = {"RUN": str(tiny_run), "STORY": str(story_file)}
    failures = list[tuple[object, ...]]()
    for seed in range(count):
        choose = random.Random(seed)
        command = choose.choice([*COMMANDS])
        option, value = choose.choice(options(command)), choose.choice(VALUES)
        words = [command, *(where.get(word, word) for word in COMMANDS[command].split()), option.flag]
        (place := tmp_path / str(seed)).mkdir()
        monkeypatch.chdir(place)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"The cat\n")))
        try:
            with limited(SECONDS, ROOM):
                status = main(words if option.is_switch else [*words, value])
        except BaseException as error:  # includes SystemExit
            failures.append((seed, words[0], option.flag, value[:60], repr(error)))
            continue
        out, err = capsys.readouterr()
        last = err.rstrip("\n").rpartition("\n")[2]
        refused = status == 2 and last.startswith("onward: ") and len(last) < 1100
        if "Traceback" in err or not (refused or (status == 0 and "nan" not in out)):
            failures.append((seed, words[0], option.flag, value[:60], status, err[-300:]))
    assert not failures, "\n".join(map(str, [len(failures), *failures]))
