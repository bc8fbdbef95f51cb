"""Command-line options: how they are read, listed, named in messages and completed."""

import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest

from onward import UserError
from onward.cli import main, module_of
from onward.cli.commands import completion
from onward.cli.overview import COMMANDS
from onward.cli.shared.arguments import arguments
from onward.cli.shared.mistakes import with_flags
from onward.cli.shared.options import parse, read
from onward.cli.shared.output import with_text
from onward.cli.shared.parser import ESCAPED, make_parser


@dataclass(frozen=True)
class Options:
    """A command with an option of each kind."""

    positional: ClassVar[tuple[str, ...]] = ("model", "prompt")
    model: str  # a folder
    prompt: tuple[str, ...] = ()  # texts
    stop: tuple[str, ...] = ()  # texts that end the answer
    weights: tuple[float, ...] = ()  # weights of the texts
    top_p: float = 1.0  # total probability of the kept tokens
    bias: Mapping[int, float] = field(default_factory=dict)  # numbers that are added to the logits of token ids


def options(*words: str) -> Options:
    return parse(Options, words, prog="onward test", about="A test.\n\nexamples:")


def test_options_that_repeat_take_one_value_each() -> None:
    got = options("run", "--stop", ".", "Return", "--weights", "0.5", "--stop", ",", "--weights", "2")
    assert got == Options("run", ("Return",), (".", ","), (0.5, 2.0))


def test_tables_of_an_option_given_several_times_are_merged() -> None:
    assert options("run", "--bias", "{5: 1}", "--bias", "{6: 2, 5: 3}").bias == {5: 3, 6: 2}


def test_text_after_two_dashes_may_begin_with_a_dash() -> None:
    assert options("run", "--top-p", "0.5", "--", "-5 degrees", "-x").prompt == ("-5 degrees", "-x")


@pytest.mark.parametrize("command", [name for name in COMMANDS if getattr(module_of(name).Options, "positional", ())])
def test_all_arguments_after_two_dashes_may_begin_with_a_dash(command: str) -> None:
    cls: Any = module_of(command).Options
    words = [f"-{name}" for name in cls.positional]
    for typed in (["--import", "json", "--", *words], ["--", *words]):
        values = read(cls, typed, prog=f"onward {command}", about="")
        given = [values[name] for name in cls.positional]
        assert [word if isinstance(word, str) else word[0] for word in given] == words


def test_surplus_argument_after_two_dashes_is_named() -> None:
    with pytest.raises(UserError, match=r"^-c is one argument too many: onward verify takes model$"):
        read(module_of("verify").Options, ["--import", "json", "--", "-b", "-c"], prog="onward verify", about="")


@pytest.mark.parametrize("text", ["hello", "-hello there", "--"])
def test_suggested_command_gives_the_text_again(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onward.cli.shared.output.given_imports", ["json"])
    _, _, *words = shlex.split(with_text("onward explain run", text, "--out explain.html"))
    assert parse(module_of("explain").Options, words, prog="onward explain", about="").text == text


@pytest.mark.parametrize(
    ("typed", "text"), [(r"\n", "\n"), (r"a\tb", "a\tb"), (r"\\n", r"\n"), (r"\d", r"\d"), ("\\", "\\")]
)
def test_escapes_in_stop_texts_are_read_and_in_prompts_are_not(typed: str, text: str) -> None:
    assert options("run", typed, "--stop", typed) == Options("run", (typed,), (text,))


SENTENCES = [
    ("top_p is 2: it must be at most 1", "--top-p 2", "--top-p is 2: it must be at most 1"),
    ("top_p is 2: it must be at most 1", "--top-p=2", "--top-p is 2: it must be at most 1"),
    ("top_p is 2: it must be at most 1", "", "top_p is 2: it must be at most 1"),
    ("weights[1] is 'x': it takes a number", "--weights 1 --weights x", "--weights is 'x': it takes a number"),
    ("d_model is -8: choose", "--model.d-model -8", "--model.d-model is -8: choose"),
    ("attention.self.window is -1", "--model.attention.window -1", "--model.attention.window is -1"),
    ("steps and time are both given", "--steps 3 --time 5s", "--steps and --time are both given"),
    ("run has finished its 3 steps", "--steps 3", "run has finished its 3 steps"),
]


@pytest.mark.parametrize(("sentence", "typed", "said"), SENTENCES)
def test_messages_name_the_option_that_was_typed(sentence: str, typed: str, said: str) -> None:
    assert with_flags(sentence, typed.split()) == said


WITH_COMMON = {name for name in COMMANDS if hasattr(module_of(name).Options, "common")}


def help_of(cls: type, prog: str, everything: bool) -> str:
    return make_parser(cls, prog, "About.\n\nexamples:", everything).format_help()


@pytest.mark.parametrize("command", sorted(WITH_COMMON))
def test_help_lists_common_options_and_help_all_every_option(command: str) -> None:
    table = completion.tables()[command]
    cls: Any = module_of(command).Options
    assert {*cls.common} <= {argument.name for argument in table}
    short, long = (help_of(cls, f"onward {command}", everything) for everything in (False, True))
    for argument in table:
        if not argument.positional:
            assert f"  {argument.flag}" in long
            assert (f"  {argument.flag} " in short or f"  {argument.flag}," in short) == (
                argument.of_part or argument.name in cls.common
            )
    assert long.index("common options:") < long.index("\noptions:")
    assert f"onward {command} --help-all lists" in short
    assert short.count("\n") < 100


def test_help_of_a_command_with_few_options_lists_them_all() -> None:
    assert all(argument.flag in help_of(Options, "onward test", False) for argument in [*arguments(Options)][2:])


def test_texts_with_escapes_say_so_in_their_help() -> None:
    assert {"stop"} == ESCAPED
    assert r"\n, \t and \\ stand for" in " ".join(help_of(Options, "onward test", False).split())


COMPLETED = [
    ("onward tra", "train"),
    ("onward train --learning-r", "--learning-rate"),
    ("onward train --model.position ro", "rotary"),
    ("onward data pre", "prepare"),
    ("onward generate --max-new", "--max-new-tokens"),
]


def test_bash_completes_commands_options_and_their_values(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    lines = [capsys.readouterr().out]
    for line, _ in COMPLETED:
        words = line.split()
        lines.append(f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _onward; echo ${{COMPREPLY[@]}}")
    done = subprocess.run(["bash", "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [wanted for _, wanted in COMPLETED]
    assert done.stderr == ""


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_scripts_of_other_shells_name_every_command_and_option(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for command, table in completion.tables().items():
        assert command in script
        assert all(argument.flag[2:] in script for argument in table if not argument.positional)


PART = """
from dataclasses import dataclass

from onward.config.decoder import Position


@dataclass(frozen=True)
class OwnPosition(Position, kind="own_position"):
    \"\"\"No position, by another name.\"\"\"

    strength: float = 0.5  # of nothing
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module in the working directory that defines a part."""
    from onward import Position

    monkeypatch.setattr(Position, "kinds", dict(Position.kinds))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "own_parts", raising=False)
    monkeypatch.chdir(tmp_path)
    Path("own_parts.py").write_text(PART)
    return "own_parts"


TINY = "--tokenizer char --steps 2 --batch-size 2 --precision fp32 --device cpu --preset tiny --model.context-length 16"


@pytest.mark.long
def test_a_folder_with_a_part_of_ones_own_names_the_import_that_it_needs(
    own_module: str, story_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from onward import Position

    words = ["--import", own_module, "--out", "run", *TINY.split(), "--model.position", "own_position"]
    assert main(["train", str(story_file), *words, "--model.position.strength", "0.25"]) == 0
    assert f"other.txt --import {own_module}" in capsys.readouterr().err, "the suggested commands import the module"
    Path("run/result.json").unlink()  # lets the run be resumed
    for command in "generate run The --n 1", "evaluate run", "report run", "models run", "train --resume run":
        del sys.modules[own_module], Position.kinds["own_position"]
        assert main(command.split()) == 2
        assert f"if you trust its code, give --import {own_module} (in Python," in capsys.readouterr().err
        assert own_module not in sys.modules, "a folder cannot run code"
        assert main([*command.split(), "--import", own_module]) == 0


def test_a_run_with_a_librarys_optimizer_is_resumed_only_with_its_import(
    own_module: str, story_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(f"{own_module}.py").write_text("from torch.optim import SGD as Mine")
    sys.path.append(str(Path.cwd()))
    assert main(["train", str(story_file), "--out", "run", *TINY.split(), "--optimizer", f"{own_module}:Mine"]) == 0
    Path("run/result.json").unlink()
    del sys.modules[own_module]
    capsys.readouterr()
    assert main(["train", "--resume", "run"]) == 2
    assert f"run was started with code from {own_module}: if you trust" in capsys.readouterr().err
    assert own_module not in sys.modules, "a folder cannot run code"
    assert main(["train", "--resume", "run", "--import", own_module]) == 0


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("no_such", "there is no module no_such"),
        ("own_parts.py", "there is no module own_parts.py"),
        ("", "not the name"),
    ],
)
def test_an_import_that_cannot_be_is_one_sentence(module: str, said: str, own_module: str) -> None:
    with pytest.raises(UserError, match=said):
        read(Options, ["run", "--import", module], prog="onward test", about="")


def test_an_import_that_a_module_of_ones_own_misses_is_shown_whole(own_module: str) -> None:
    Path("own_parts.py").write_text("import no_such_library")
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        read(Options, ["run", "--import", own_module], prog="onward test", about="")


@pytest.mark.long
def test_a_reader_that_goes_away_ends_a_table_in_silence() -> None:
    program = "import sys, onward.cli; sys.exit(onward.cli.main(['models', 'gpt2']))"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert b"Traceback" not in process.stderr.read()
        assert process.wait() == 0
