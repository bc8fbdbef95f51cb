"""onward generate, as a user types it."""

import io
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from onward import Engine, LanguageModel, Request
from onward.cli import main
from onward.cli.commands.generate import Options, sample

SEEDED = ["--seed", "1", "--max-new-tokens", "9"]
OPTIONS = Options(model="", seed=1, max_new_tokens=9)


@pytest.fixture
def said(tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the command on the tiny model in an empty folder; return its standard output and standard error."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str, status: int = 0) -> tuple[str, str]:
        assert main(["generate", str(tiny_run), *words]) == status
        return capsys.readouterr()

    return run


def numbered(answers: Iterable[str]) -> str:
    """The expected output for several answers, each with its prompt."""
    texts = list(answers)
    return "".join(f"[{i}/{len(texts)}]\n{text}\n" for i, text in enumerate(texts, 1))


def rows(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


def test_streamed_text_equals_the_text_in_json(said) -> None:
    words = ["The", "A dog", "--seed", "1", "--max-new-tokens", "40", "--context-overflow", "slide"]
    streamed, _ = said(*words)
    found = rows(said(*words, "--json")[0])
    assert streamed == numbered(row["prompt"] + row["text"] for row in found)
    assert [row["prompt"] for row in found] == ["The", "A dog"]
    assert [len(row["tokens"]) for row in found] == [40, 40]
    assert {row["finish_reason"] for row in found} == {"length"}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def piped(text: str) -> Any:
    return io.TextIOWrapper(io.BytesIO(text.encode()), encoding="utf-8")


@pytest.mark.parametrize("stdin", [Terminal("The"), piped(""), None], ids=["terminal", "nothing", "closed"])
def test_without_a_prompt_an_answer_starts_from_the_beginning_token(
    stdin: Any, said, lm: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", stdin)
    assert said(*SEEDED)[0] == lm.generate("", 9, seed=1) + "\n"


@pytest.mark.parametrize(
    ("words", "prompts"), [([], ["The\ncat"]), (["-"], ["The\ncat"]), (["A dog", "-"], ["A dog", "The\ncat"])], ids=str
)
def test_a_prompt_comes_from_standard_input(
    words: list[str], prompts: list[str], said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", piped("The\ncat\n"))
    assert [row["prompt"] for row in rows(said(*words, *SEEDED, "--json")[0])] == prompts


def test_a_prompt_on_standard_input_is_utf_8(said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9")))
    assert said(status=2) == ("", "onward: standard input is not UTF-8 text (byte 3): convert it\n")


FILES = {
    "lines": ("many.txt", "The cat\r\n\nA dog\nThe old king", ["The cat", "A dog", "The old king"]),
    "lines that break elsewhere too": ("many.txt", "The\u2028cat\nA dog", ["The\u2028cat", "A dog"]),
    "JSON lines": ("many.jsonl", '{"prompt": "The\\ncat"}\n\n{"prompt": "A dog"}\n', ["The\ncat", "A dog"]),
    "no line break at the end": ("many", "The cat", ["The cat"]),
}


@pytest.mark.parametrize("kind", FILES)
def test_prompts_come_from_files(kind: str, said) -> None:
    name, content, expected = FILES[kind]
    Path(name).write_text(content, encoding="utf-8", newline="")
    assert [row["prompt"] for row in rows(said("--prompts", name, *SEEDED, "--json")[0])] == expected
    both = rows(said("Before", "--prompts", name, *SEEDED, "--json")[0])
    assert [row["prompt"] for row in both] == ["Before", *expected]


def test_prompts_come_from_standard_input_and_from_another_field(said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO("The café\nA dog\n".encode())))
    assert [row["prompt"] for row in rows(said("--prompts", "-", *SEEDED, "--json")[0])] == ["The café", "A dog"]
    Path("many.jsonl").write_text('{"question": "The"}')
    assert rows(said("--prompts", "many.jsonl", "--field", "question", *SEEDED, "--json")[0])[0]["prompt"] == "The"
    Path("many.csv").write_text("question\nThe\n")
    assert "many.csv has no fields" in said("--prompts", "many.csv", "--field", "question", status=2)[1]


class Watched(Engine):
    """An engine that calls a function before each step."""

    def __init__(self, lm: LanguageModel, watch: Callable[[Engine], object]) -> None:
        super().__init__(lm.model, stop_token_ids=lm.stop_token_ids, allowed=lm.allowed())
        self.watch = watch

    def advance(self) -> list[tuple[Request, int]]:
        self.watch(self)
        return super().advance()


def test_prompts_are_computed_together(lm: LanguageModel, capsys: pytest.CaptureFixture[str]) -> None:
    active: list[int] = []
    engine = Watched(lm, lambda engine: active.append(len(engine.scheduler.active)))
    prompts = [f"{who} {does}" for who in ("The cat", "A dog", "The old king") for does in ("sat", "slept", "sang")]
    sample(lm, prompts, OPTIONS, engine)
    assert max(active) == len(prompts)
    assert capsys.readouterr().out == numbered(p + text for p, text in zip(prompts, lm.generate(prompts, 9, seed=1)))


def test_several_answers_for_each_prompt_follow_it(said, lm: LanguageModel) -> None:
    found = rows(said("The", "A dog", "--n", "2", *SEEDED, "--json")[0])
    places = [(row["prompt_index"], row["index"], row["prompt"], row["seed"]) for row in found]
    assert places == [(0, 0, "The", 1), (0, 1, "The", 2), (1, 0, "A dog", 3), (1, 1, "A dog", 4)]
    assert [row["text"] for row in found] == [
        text for of in lm.generate(["The", "A dog"], 9, n=2, seed=1) for text in of
    ]


def test_the_seed_of_an_answer_gives_it_again(said) -> None:
    words = "--max-new-tokens", "9", "--json"
    for row in rows(said("The", "--n", "3", *words)[0]):
        assert rows(said("The", "--seed", str(row["seed"]), *words)[0])[0]["tokens"] == row["tokens"]


def test_an_answer_that_its_length_ends_is_named_on_standard_error(said, lm: LanguageModel) -> None:
    assert said("The", *SEEDED)[1] == "the answer was cut after 9 tokens: see --max-new-tokens\n"
    text = lm.generate("The", 9, seed=1)
    _, err = said("The", "The", *SEEDED, "--stop", text[2:5])
    assert err == "1 of 2 answers were cut after 9 tokens: see --max-new-tokens\n"
    assert said("The", *SEEDED, "--stop", text[2:5])[1] == ""
    assert said("The", *SEEDED, "--json")[1] == ""


@pytest.mark.parametrize(
    ("words", "stop"),
    [
        (["--stop", ".", "--stop", "sat", "The"], [".", "sat"]),
        (["--stop", ".", "The"], ["."]),
        (["The", "--stop", "\\n"], ["\n"]),
    ],
    ids=str,
)
def test_stop_takes_one_text_and_may_be_repeated(words: list[str], stop: list[str], said, lm: LanguageModel) -> None:
    text = lm.generate("The", 25, temperature=0, stop=stop)
    assert said(*words, "--temperature", "0", "--max-new-tokens", "25")[0] == f"The{text}\n"
    assert len(text) < len(lm.generate("The", 25, temperature=0))


def test_logprobs_are_a_table_and_exact_in_json(said, lm: LanguageModel) -> None:
    words = ["The cat", "--logprobs", "2", "--temperature", "0", "--max-new-tokens", "3"]
    [[answer]] = lm.complete("The cat", 3, temperature=0, logprobs=2)
    out, _ = said(*words)
    head, *lines = out.removeprefix("The cat" + answer.text + "\n").splitlines()
    assert head.split() == ["token", "logprob", "likeliest"]
    for line, chance in zip(lines, answer.logprobs, strict=True):
        others = ", ".join(f"{lm.tokenizer.piece(t)!r} {value:.2f}" for t, value in chance.alternatives)
        assert line.split() == f"{lm.tokenizer.piece(chance.token)!r} {chance.logprob:.4f} {others}".split()
    [row] = rows(said(*words, "--json")[0])
    assert [one["token"] for one in row["logprobs"]] == row["tokens"] == answer.tokens
    for one, chance in zip(row["logprobs"], answer.logprobs):
        near = lambda value: pytest.approx(value, abs=1e-5)  # perhaps only one of the two calls runs compiled steps
        assert one["logprob"] == near(chance.logprob)
        assert [a["token"] for a in one["alternatives"]] == [token for token, _ in chance.alternatives]
        assert [a["logprob"] for a in one["alternatives"]] == near([value for _, value in chance.alternatives])
        assert one["text"] == lm.tokenizer.piece(chance.token)


def test_a_draft_that_is_the_model_is_always_accepted(said, tiny_run: Path) -> None:
    words = ["The cat", "A dog", "--temperature", "0", "--max-new-tokens", "21"]
    plain, cut = said(*words)
    out, figures = said(*words, "--draft", str(tiny_run))
    assert out == plain
    assert figures.startswith(cut)
    assert re.fullmatch(
        r"accepted 100\.0% of 32 draft tokens; tokens per step: 4\.20 measured, 5\.00 expected .* 4 draft .*\n"
        r"(speculation gives .*\n)?",
        figures.removeprefix(cut),
    )
    for row in rows(said(*words, "--draft", str(tiny_run), "--json")[0]):
        assert (row["steps"], row["num_drafted"], row["num_accepted"]) == (5, 16, 16)


def test_lookup_prints_the_figures_of_speculation(said) -> None:
    words = ["The cat sat on the mat.\nThe cat sat", "--temperature", "0", "--max-new-tokens", "8"]
    out, figures = said(*words, "--lookup", "3")
    assert out == said(*words)[0]
    assert "with 3 draft tokens each time" in figures
    assert said("The", "--max-new-tokens", "1", "--lookup", "3")[1].endswith("\nno tokens were drafted\n")


SEARCHES = {
    "--beams 4 --n 2": lambda lm, p: lm.beam_search(p, 9, beams=4, n=2),
    "--beams 4 --n 4 --groups 2 --diversity 3 --length-penalty 0.5 --early-stopping never": lambda lm, p: (
        lm.beam_search(p, 9, beams=4, n=4, groups=2, diversity=3.0, length_penalty=0.5, early_stopping="never")
    ),
    "--beams 2 --early-stopping true --temperature 0.8": lambda lm, p: lm.beam_search(
        p, 9, beams=2, early_stopping=True, temperature=0.8
    ),
}


@pytest.mark.parametrize("words", SEARCHES)
def test_a_search_prints_the_results_of_the_language_model(words: str, said, lm: LanguageModel) -> None:
    prompts = ["The cat", "A dog"]
    expected = [(p, one) for p, of in zip(prompts, SEARCHES[words](lm, prompts)) for one in of]
    out, _ = said(*prompts, "--max-new-tokens", "9", *words.split())
    assert out == numbered(f"{prompt}{one.text}" for prompt, one in expected)
    found = rows(said(*prompts, "--max-new-tokens", "9", *words.split(), "--json")[0])
    assert [(row["prompt"], row["tokens"]) for row in found] == [(prompt, one.tokens) for prompt, one in expected]
    assert [row.get("score") for row in found] == [one.score for _, one in expected]
    assert (found[-1]["prompt_index"], found[-1]["index"]) == (1, len(found) // 2 - 1)


def test_an_answer_has_the_form_of_regex_and_json_schema(said) -> None:
    out, _ = said("The", "--regex", " [0-9]{3}", "--seed", "1")
    assert re.fullmatch("The [0-9]{3}\n", out)
    Path("schema.json").write_text('{"enum": ["cat", "dog"]}')
    for schema in "@schema.json", '{"enum": ["cat", "dog"]}':
        assert said("The", "--json-schema", schema, "--seed", "1")[0] in ('The"cat"\n', 'The"dog"\n')


@pytest.mark.parametrize(("temperature", "warned"), [("70", True), ("2.5", True), ("2", False), ("0.7", False)])
def test_a_temperature_that_leaves_the_model_no_say_is_told(temperature: str, warned: bool, said) -> None:
    err = said("The", "--max-new-tokens", "2", "--temperature", temperature, "--seed", "1")[1]
    assert (f"the temperature is {temperature}: above 2, tokens are drawn almost at random" in err) == warned


BAD = {
    "The --draft x --lookup 3": "Cannot combine --draft and --lookup: choose one",
    "The --beams 2 --lookup 3": "--lookup is used only by sampling, and not by search",
    "The --groups 2": "--groups is used only with --beams: give that as well",
    "The --beams 2 --n 3": "--n is 3: it must be from 1 to beams, 2",
    "The --beams 2 --stop x": "--stop is used only by sampling",
    "The --regex [": "regex cannot be used",
    "The --beams 2 --context-overflow slide": "--context-overflow is used only by sampling",
    "The --context-overflow wrap": "choose from error, slide",
    "The --prompts gone.txt": "gone.txt does not exist",
    "--prompts empty.txt": "empty.txt is empty",
    "--prompts rows.jsonl": "rows.jsonl line 1 has no text under 'prompt' (it has 'body')",
    "The --draft nowhere": "there is no folder nowhere",
    "The --json-schema @gone.json": "gone.json: No such file",
    "The --json-schema nope.json": "write @nope.json for a file",
    "The --logprobs -1": "logprobs is -1",
    "The --n 0": "--n is 0",
    "The --stop": "--stop",
}


@pytest.mark.parametrize("words", BAD)
def test_a_mistake_is_one_sentence_and_nothing_else_is_printed(words: str, said) -> None:
    Path("empty.txt").write_text("")
    Path("rows.jsonl").write_text('{"body": "x"}\n')
    out, err = said(*words.split(), status=2)
    assert out == ""
    assert BAD[words] in err
    assert err.startswith("onward: ")
    assert err.count("\n") == 1


def test_a_prompt_whose_answer_fails_is_not_printed(said, lm: LanguageModel) -> None:
    words = [word for i in range(lm.config.vocab_size) for word in ("--suppress-tokens", str(i))]
    out, err = said("The cat", *words, status=2)
    assert out == ""
    assert "no token may come next" in err


def test_finished_answers_are_printed_before_an_interruption(
    lm: LanguageModel, capsys: pytest.CaptureFixture[str]
) -> None:
    def break_off(engine: Engine) -> None:
        if not engine.scheduler.waiting and len(engine.scheduler.active) == 1:
            raise KeyboardInterrupt

    prompts = ["The"] * 17  # one more prompt than the engine has rows
    with pytest.raises(KeyboardInterrupt):
        sample(lm, prompts, replace(OPTIONS, json=True), Watched(lm, break_off))
    assert [row["text"] for row in rows(capsys.readouterr().out)] == lm.generate(prompts[:16], 9, seed=1)


def test_progress_is_shown_on_a_terminal_when_the_answers_go_elsewhere(said, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["The", "A dog", *SEEDED, "--json"]
    plain, nothing = said(*words)
    assert nothing == ""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    assert said(*words)[0] == plain
    assert "2/2" in terminal.getvalue()


def test_help_is_in_groups_and_shows_no_empty_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "--help-all"])
    said = capsys.readouterr().out
    assert said.startswith("usage: onward generate model [prompt ...] [options]\n")
    assert re.findall(r"^\w.*:$", said, re.MULTILINE) == [
        "positional arguments:",
        "common options:",
        "options:",
        "Options of generation: sampling, and the length, end, format and number of answers:",
        "Sampling: how logits become the distribution of the next token:",
        "Search for likely answers instead of sampling:",
        "Speculative decoding: the same distribution, often faster:",
        "When to compile decoding steps:",
        "How the model is loaded:",
        "examples:",
    ]
    assert "--suppress-tokens N " in said
    assert "--logit-bias {N: X}" in said
    assert "()" not in said


def test_a_prompt_that_cannot_be_continued_fails_alone(said, lm: LanguageModel) -> None:
    out, err = said("The cat", "The " * 40, *SEEDED, status=2)
    assert out.startswith(f"[1/2]\nThe cat{lm.generate('The cat', 9, seed=1)}\n")
    assert "prompt 2: " in err
    assert "context" in err
