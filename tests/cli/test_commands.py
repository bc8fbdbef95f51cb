"""The command line, as a user types it."""

import io
import json
import math
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

from onward import Alibi, Rotary, RunConfig
from onward.base.fields import text
from onward.cli import main
from onward.cli.commands.completion import tables
from onward.cli.commands.train import configure
from onward.cli.overview import COMMANDS, GROUPS, SYNONYMS
from onward.cli.shared.output import print_table
from onward.cli.shared.training import in_words
from onward.training.config import seconds

SMALL = "--tokenizer char --steps 6 --batch-size 2 --precision fp32 --device cpu --model.d-model 16 --model.n-layers 1"
SMALL += " --model.n-heads 2 --model.context-length 16"


def onward(*words: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that succeeds; return its standard output."""
    assert main(words) == 0
    return capsys.readouterr().out


def config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def test_onward_alone_prints_the_way_of_the_data_and_a_command_for_each_step(capsys) -> None:
    out = onward(capsys=capsys)
    assert "text -> tokens -> windows -> logits -> loss -> weights" in out
    assert all(f"  {name}" in out or f"onward {name}" in out for name in COMMANDS)
    assert all(f"\n{group}\n  {next(iter(commands))} " in out for group, commands in GROUPS.items())
    assert onward("--help", capsys=capsys) == out
    assert onward("--version", capsys=capsys).startswith("onward 0.")


MISTAKEN = {  # the typed command, and the expected suggestion
    "server": "did you mean serve?",
    "export": "did you mean convert?",
    "generate RUN The --tokens 4": "did you mean --max-new-tokens?",
    "generate RUN The --bits 4": "did you mean --quantize?",
    "train STORY --context 64": "did you mean --model.context-length?",
    "train STORY --tokens 1B": "did you mean --steps?",
    "train STORY --bits 16": "did you mean --precision?",
    "train STORY --head 4": "did you mean --model.n-heads?",
    "quantize RUN new --bits 4": "did you mean --to?",
    "convert RUN x.gguf --bits 4": "did you mean --dtype?",
    "finetune RUN a.jsonl --context 3": "did you mean --length?",
    "bench RUN --tokens 3": "did you mean --new?",
    "evaluate RUN --context 3": "see onward evaluate --help",
    "explain RUN The --head 1": "see onward explain --help",
    "generate ROMEO: RUN": "'ROMEO:' is not a model, but RUN is: did you mean onward generate RUN ROMEO:?",
    "inspect The RUN next": "did you mean onward inspect RUN The next?",
    "explain The RUN": "did you mean onward explain RUN The?",
    "evaluate STORY RUN": "did you mean onward evaluate RUN STORY?",
    "train STORY RUN": "RUN is a run, not a text: --resume RUN continues it",
    "sweep STORY RUN --steps 4": "RUN is a run, not a text",
    "train STORY --field body": "--field is 'body', but STORY has no fields",
    "train embedded --field body": "--field is 'body', but embedded has no fields",
    "evaluate RUN STORY --field body": "--field is 'body', but STORY has no fields",
    "tokenizer train STORY --out x --field body": "--field is 'body', but STORY has no fields",
    "data prepare STORY --out x --field body": "--field is 'body', but STORY has no fields",
    "train STORY runs/new": "runs/new does not exist: to name the run's folder, write --out runs/new",
}


@pytest.mark.parametrize("words", MISTAKEN)
def test_a_mistaken_command_is_answered_with_what_was_meant(
    words: str, tiny_run: Path, story_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = lambda text: text.replace("RUN", str(tiny_run)).replace("STORY", str(story_file))
    assert main([named(word) for word in words.split()]) == 2
    assert named(MISTAKEN[words]) in capsys.readouterr().err


def test_commands_that_are_meant_exist() -> None:
    assert {*SYNONYMS.values()} <= {*COMMANDS}
    assert not SYNONYMS.keys() & COMMANDS.keys()


@pytest.mark.parametrize(("loss", "said"), [(1.25, "3.49"), (23.0, "9,744,803,446.25"), (699.0, "3.731e+303")])
def test_a_huge_perplexity_is_written_with_its_power_of_ten(
    loss: float, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    perplexity = math.exp(loss)
    assert in_words({"loss": loss, "perplexity": perplexity}) == [f"loss {loss:.4f}", f"perplexity {said}"]
    print_table([{"perplexity": perplexity}])
    assert len(capsys.readouterr().out.splitlines()[-1]) < 30
    assert len(text(perplexity)) < 30


HELP = {"train": ["--help-all"], "serve": ["--help-all"]}


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_examples_and_a_default_or_meaning_for_each_option(name: str, capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        main([name, *HELP.get(name, ["--help"])])
    assert not caught.value.code
    out = capsys.readouterr().out
    assert f"examples:\n  onward {name}" in out
    assert "--resume" in out or name != "train"
    assert "--model.position.theta" in out or name != "train"


def test_examples_of_the_help_have_options_of_their_command() -> None:
    known = {
        name: {flag for one in table for flag in (one.flag, one.flag.replace("--", "--no-", 1))}
        for name, table in tables().items()
    }
    for name in COMMANDS:
        about = import_module(f"onward.cli.commands.{name}").ABOUT
        for command, words in re.findall(r"^  onward (\w+)(.*)", about, re.MULTILINE):
            flags = set(re.findall(r"(?<= )--[a-z][\w.-]*", words)) - {"--help", "--help-all"}
            if "--method" not in flags and not words.startswith(" run "):  # these have options of their own
                assert flags <= known[command], (command, flags - known[command])


def test_help_answers_without_importing_torch() -> None:
    program = f"""
import sys
from onward.cli import main
for words in [[], ["--help"], *([name, "--help"] for name in {[*COMMANDS]!r}), ["nonsense"]]:
    try:
        main(words)
    except SystemExit:
        pass
    assert not {{"torch", "numpy", "transformers"}} & set(sys.modules), words
"""
    subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)


def test_train_evaluate_and_generate_follow_one_another(story_file: Path, tmp_path: Path, capsys) -> None:
    run = str(tmp_path / "run")
    assert main(["train", str(story_file), "--out", run, *SMALL.split()]) == 0
    said = capsys.readouterr().err
    assert "6 of 6" in said
    assert "bits per byte" in said
    assert f"onward generate {run} " in said
    assert f"onward evaluate {run}" in said
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert result["perplexity"] == pytest.approx(math.exp(result["loss"]))
    assert f"over all {result['tokens']:,} validation tokens in fp32; during the run over about" in said
    assert main(["evaluate", run, str(story_file)]) == 0
    table = capsys.readouterr()
    assert "bits per byte" in table.out
    assert "onward generate" in table.err
    assert onward("generate", run, "The cat", "--max-new-tokens", "5", capsys=capsys).startswith("The cat")


def test_json_outputs_parse(tiny_run: Path, story_file: Path, capsys) -> None:
    read = lambda *words: json.loads(onward(*words, "--json", capsys=capsys))
    evaluation = read("evaluate", str(tiny_run), str(story_file))
    assert {"loss", "perplexity", "bits_per_byte", "tokens", "stride"} <= set(evaluation)
    assert read("evaluate", str(tiny_run), str(story_file), "--stride", "4")["loss"] < evaluation["loss"] + 0.05
    assert "tinyshakespeare" in {row["name"] for row in read("data", "list")}


@pytest.mark.parametrize("validation", ["", "0.25", "other.txt"])
def test_evaluating_a_run_gives_the_figures_of_its_last_evaluation(
    validation: str,
    story_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("other.txt").write_text("The qüick brown fox jumped over it. " * 9, encoding="utf-8")
    words = ["--validation", validation] if validation else []
    onward("train", str(story_file), "--out", "run", *SMALL.split(), *words, capsys=capsys)
    result = json.loads(Path("run/result.json").read_text())
    found = json.loads(onward("evaluate", "run", "--json", capsys=capsys))
    tasks = {row["task"]: row for row in found.pop("tasks")}
    assert found.items() <= result.items()
    assert {"copying", "brackets", "arithmetic", "mapping, 8 examples"} <= tasks.keys()
    assert all(0 <= row["score"] <= 1 and row["error"] >= 0 for row in tasks.values())
    if validation == "other.txt":
        assert result["bytes"] == Path("other.txt").stat().st_size - 1  # the first character is not scored
        named = json.loads(onward("evaluate", "run", validation, "--json", capsys=capsys))
        assert (named["stride"], named["tokens"]) == (result["stride"], result["tokens"])
    assert json.loads(onward("evaluate", "run", "--stride", "8", "--json", capsys=capsys))["loss"] != result["loss"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", {"model_type": "qwen3", "tie_word_embeddings": True}),
        ("--model.position.theta 5e5", {"rope_theta": 5e5}),
        ("--model.n-kv-heads 1 --model.dropout 0.1", {"num_key_value_heads": 1, "attention_dropout": 0.1}),
        ("--model.position learned", {"model_type": "onward"}),
        ("--model.attention (self(window=4),self)", {"model_type": "qwen3", "sliding_window": 4}),
    ],
)
def test_every_field_of_the_model_can_be_set(
    words: str, expected: dict, story_file: Path, tmp_path: Path, capsys
) -> None:
    onward("train", str(story_file), "--out", str(tmp_path / "run"), *SMALL.split(), *words.split(), capsys=capsys)
    found = config(tmp_path / "run")
    assert {key: found.get(key) for key in expected} == expected


def test_a_toml_file_holds_the_same_options_and_the_command_line_counts_before_it(
    story_file: Path, tmp_path: Path, capsys
) -> None:
    (tmp_path / "my.toml").write_text(
        f"""
sources = ["{story_file}"]
tokenizer = "char"
steps = 4
batch_size = 2
precision = "fp32"
learning_rate = 1e-3
[model]
d_model = 16
n_layers = 1
n_heads = 2
context_length = 16
[model.position]
kind = "rotary"
theta = 12345.0
"""
    )
    words = ["train", "--config", str(tmp_path / "my.toml"), "--steps", "3", "--model.n-layers", "2"]
    onward(*words, "--out", str(tmp_path / "run"), capsys=capsys)
    run = json.loads((tmp_path / "run/run.json").read_text())
    assert (run["steps"], run["learning_rate"]) == (3, 1e-3)
    found = config(tmp_path / "run")
    assert (found["rope_theta"], found["num_hidden_layers"], found["hidden_size"]) == (12345.0, 2, 16)


@pytest.mark.parametrize(
    ("toml", "words", "expected"),
    [
        ("validation = 0.2", "", {"validation": "0.2"}),
        ("time = 100", "", {"time": "100"}),
        ('sources = "book.txt"', "", {"sources": ("book.txt",)}),
        ('sources = ["a.txt", "b.txt"]', "", {"sources": ("a.txt", "b.txt")}),
        ("seed = 3", "", {"seed": 3}),
        ("[model]\nposition = 'rotary(theta=5.0)'", "--model.position.fraction 0.5", {"position": Rotary(5.0, 0.5)}),
        ("[model]\nposition = 'rotary(theta=5.0)'", "--model.position alibi", {"position": Alibi()}),
        ("preset = 'gpt2'", "--model.d-model 24", {"d_head": 2, "tied": True}),
    ],
)
def test_command_line_takes_precedence_over_a_toml_file(toml: str, words: str, expected: dict, tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text(toml)
    sources = [] if "sources" in toml else ["x.txt"]
    config, *_ = configure([*sources, "--config", str(tmp_path / "my.toml"), *words.split()])
    assert isinstance(config, RunConfig)
    found = vars(config) | vars(config.decoder(300))
    assert {name: found[name] for name in expected} == expected


def test_a_published_release_is_trained_in_a_smaller_size(story_file: Path, tmp_path: Path, capsys) -> None:
    sizes = "--model.n-layers 2 --model.d-model 32 --model.context-length 16"
    words = f"--preset pythia-14m {sizes} --tokenizer char --steps 2 --batch-size 2 --precision fp32 --device cpu"
    onward("train", str(story_file), "--out", str(tmp_path / "run"), *words.split(), capsys=capsys)
    found = config(tmp_path / "run")
    assert (found["model_type"], found["num_hidden_layers"], found["hidden_size"]) == ("gpt_neox", 2, 32)
    assert (found["num_attention_heads"], found["intermediate_size"]) == (4, 128)


def test_tokens_of_standard_input_are_stored_in_the_run_so_that_it_can_be_resumed(
    story: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(story.encode())))
    onward("train", "-", "--out", str(tmp_path / "run"), *SMALL.split(), capsys=capsys)
    (source,) = json.loads((tmp_path / "run/data/data.json").read_text())["sources"]
    assert (source["name"], source["bytes"]) == ("-", len(story.encode()))
    assert not (tmp_path / "run/.streams").exists()


@pytest.mark.parametrize(
    ("source", "name"),
    [
        *[("book.txt", "book"), ("book.txt.gz", "book"), ("notes/", "notes"), ("notes/*.md", "notes"), ("-", "stdin")],
        *[("embedded", "embedded"), ("*.txt", "run"), ("notes/**/*.md", "notes"), (".", "run"), ("my[1].txt", "my[1]")],
    ],
)
def test_a_run_is_named_after_its_first_source(source: str, name: str) -> None:
    from onward.cli.shared.run_options import default_name

    assert default_name(source) == name


def test_a_reader_that_goes_away_is_no_error(tiny_run: Path) -> None:
    program = "import sys; from onward.cli import main; sys.exit(main(sys.argv[1:]))"
    words = ["generate", str(tiny_run), "The", "--max-new-tokens", "300", "--context-overflow", "slide"]
    with subprocess.Popen(
        [sys.executable, "-c", program, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 0


@pytest.mark.long
def test_train_in_a_folder_skips_its_own_runs_and_says_so(
    story: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:

    monkeypatch.chdir(tmp_path)
    (tmp_path / "story.txt").write_text(story)
    tokens = []
    for name in "first", "second":
        assert main(["train", ".", "--out", f"runs/{name}", *SMALL.split()]) == 0
        printed = capsys.readouterr().err
        tokens.append(json.loads((tmp_path / f"runs/{name}/data/data.json").read_text())["sources"][0])
    assert tokens[0] == tokens[1]
    assert ".: skipped folders of runs or tokens: 1, such as runs/first\n" in printed


@pytest.mark.parametrize("words", ["--time 2 seconds", "--time 2 sec", "--time 2s"])
def test_a_duration_is_read_in_one_word_or_two(words: str) -> None:
    from onward.cli.shared.run_options import join_duration

    assert seconds(join_duration(["a.txt", *words.split(), "--steps"])[2]) == 2


def test_missing_library_of_a_tracker_is_refused_before_anything_is_made(
    story_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", str(story_file), "--out", str(tmp_path / "run"), *SMALL.split()]
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert main([*words, "--track", "wandb"]) == 2
    assert "pip install 'onward[track]'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert main(words) == 0, "the refused run left nothing in the way"
