"""Standard streams that are closed, full, broken or ASCII: one sentence, no traceback, and no exit status 0 if output
was lost."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = f"{sys.executable} -m onward"
SMALL = "--tokenizer char --steps 2 --batch-size 2 --precision fp32 --model.d-model 16 --model.n-layers 1"
SMALL += " --model.n-heads 2 --model.context-length 16 --validate-every 100"


def shell(line: str, tiny_run: Path, story_file: Path, place: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a line of bash in which `onward` is the command, and MODEL and STORY are paths of a model and a text."""
    where = {"MODEL": str(tiny_run), "STORY": str(story_file)}
    script = f'onward() {{ {COMMAND} "$@"; }}\n{line}'
    environment = os.environ | where | more
    return subprocess.run(
        ["bash", "-c", script], cwd=place, env=environment, capture_output=True, encoding="utf-8", errors="replace"
    )


CLOSED_INPUT, CLOSED_OUTPUT = "standard input is closed", "standard output is closed"
LINES = {
    "onward evaluate $MODEL - <&-": (2, CLOSED_INPUT),
    "onward generate $MODEL --prompts - <&-": (2, CLOSED_INPUT),
    "onward generate $MODEL - <&-": (2, CLOSED_INPUT),
    "onward chat $MODEL <&-": (2, CLOSED_INPUT),
    f"onward train - {SMALL} --out r <&-": (2, CLOSED_INPUT),
    "onward evaluate $MODEL $STORY >&-": (2, CLOSED_OUTPUT),
    "onward generate $MODEL The --max-new-tokens 3 >&-": (2, CLOSED_OUTPUT),
    "echo a | onward chat $MODEL --max-new-tokens 3 >&-": (2, CLOSED_OUTPUT),
    "onward generate --help >&-": (2, CLOSED_OUTPUT),
    "onward --help >/dev/full": (2, "No space left on device"),
    "onward generate --help >/dev/full": (2, "No space left on device"),
    "printf 'caf\\351\\n' | onward chat $MODEL": (2, "standard input is not UTF-8 text"),
    "onward generate $MODEL $(printf 'caf\\351')": (2, "argument 3 is not UTF-8 text (byte 3)"),
    "onward models gpt2 | head -1; exit ${PIPESTATUS[0]}": (0, ""),
    "onward generate nowhere The 2>&-": (2, ""),
    "onward generate nowhere - </dev/full": (2, "standard input is longer than 16 MiB"),
    f"onward train - {SMALL} --out r </dev/full": (2, "standard input is binary (1,048,576 zero bytes at offset 0)"),
    "onward chat $MODEL </dev/full": (2, "standard input is longer than 16 MiB"),
    "onward generate nowhere --prompts - </dev/null": (2, "standard input is empty"),
}


QUICK = [  # the other cases are marked `long`
    "onward evaluate $MODEL - <&-",
    "onward evaluate $MODEL $STORY >&-",
    "onward chat $MODEL <&-",
    "onward generate --help >/dev/full",
    "onward generate nowhere - </dev/full",
]


@pytest.mark.parametrize(
    "line", [line if line in QUICK else pytest.param(line, marks=pytest.mark.long) for line in LINES]
)
def test_odd_stream(line: str, tiny_run: Path, story_file: Path, tmp_path: Path) -> None:
    status, said = LINES[line]
    found = shell(line, tiny_run, story_file, tmp_path)
    errors = [text for text in found.stderr.splitlines() if "no chat template" not in text]
    assert (found.returncode, len(errors)) == (status, bool(said)), found.stderr
    assert said in "".join(errors)


def test_output_in_ascii_writes_other_characters_as_escapes(tiny_run: Path, story_file: Path, tmp_path: Path) -> None:
    line = "onward generate $MODEL é --max-new-tokens 1"
    found = shell(line, tiny_run, story_file, tmp_path, PYTHONIOENCODING="ascii")
    assert (found.returncode, found.stdout[:4]) == (0, "\\xe9")
    assert "Traceback" not in found.stderr


INTERRUPTED = """\
import atexit, os, runpy, signal, sys

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)

class Interrupt:
    def find_spec(self, name, *_):
        if name == place:
            interrupt()

place = sys.argv.pop()
sys.meta_path.insert(0, Interrupt())
if place == "the end":
    atexit.register(interrupt)
runpy.run_module("onward", run_name="__main__")
"""


@pytest.mark.parametrize("place", ["onward.cli", "torch._utils", "the end"])
def test_ctrl_c_while_the_program_starts_or_ends_is_one_line(place: str) -> None:
    words = ["generate", "nowhere", "The"] if place.startswith("torch") else ["--version"]
    found = subprocess.run([sys.executable, "-c", INTERRUPTED, *words, place], capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (130, "\nonward: interrupted\n")


COMMANDS = [
    "--help",
    "--version",
    "generate --help",
    "models gpt2",
    "models --json",
    "generate $MODEL é --max-new-tokens 3 --seed 1",
    "generate $MODEL - --max-new-tokens 3 --json",
    "generate $MODEL --prompts - --max-new-tokens 3 --logprobs 2",
    "evaluate $MODEL $STORY",
    "evaluate $MODEL -",
    "chat $MODEL --max-new-tokens 3",
    f"train - {SMALL} --out r",
    "tokenizer compare byte --text é",
    "completion bash",
    "gen\\\\udcff $MODEL",
]
INPUTS = ["<&-", "</dev/null", "<<< é", "<<< $'caf\\xe9'", "<<< $'a\\0b'", "< $STORY", "</dev/full"]
OUTPUTS = [">&-", ">/dev/null", ">/dev/full", "| head -c 3", "| true", "> out"]
ERRORS = ["", "", "2>&-", "2>/dev/full"]
ENCODINGS = ["utf-8", "ascii", "latin-1", "ascii:strict"]


def outcome(seed: int, tiny_run: Path, story_file: Path, folder: Path) -> tuple[str, int, str, bool]:
    """Run a random command line; return it, its exit status, its standard error, and whether it ended correctly."""
    some = random.Random(seed)
    command, source, target, errors = (some.choice(choices) for choices in (COMMANDS, INPUTS, OUTPUTS, ERRORS))
    line = f"onward {command} {source} {errors} {target}; exit ${{PIPESTATUS[0]}}"
    (place := folder / str(seed)).mkdir()
    found = shell(line, tiny_run, story_file, place, PYTHONIOENCODING=some.choice(ENCODINGS))
    silent = "Traceback" not in found.stderr and "Exception ignored" not in found.stderr
    # train and chat may end without output
    lost = target in (">&-", ">/dev/full") and not command.startswith(("train", "chat"))
    said = bool(errors) or any(text.startswith("onward: ") for text in found.stderr.splitlines())
    ended = {0: not lost, 2: said}.get(found.returncode, False)
    return line, found.returncode, found.stderr, silent and ended


@pytest.mark.fuzzer
@pytest.mark.parametrize("count", [1, pytest.param(200, marks=pytest.mark.long)])
def test_random_line_with_odd_streams(count: int, tiny_run: Path, story_file: Path, tmp_path: Path) -> None:
    outcomes = [(seed, *outcome(seed, tiny_run, story_file, tmp_path)) for seed in range(count)]
    failures = [found for found in outcomes if not found[-1]]
    assert not failures, "\n".join(map(str, [len(failures), *failures]))
