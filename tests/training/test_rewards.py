"""Rewards: the built-in ones, sums, and user-defined functions in processes."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onward import Run, UserError
from onward.base.fields import notation
from onward.text import regular
from onward.training import Completion, OpenReward, Reward, reward_of

from support.finetuning import base_model, config, write_rows
from support.runs import metrics

THINK = "format(template='<think>{}</think> <answer>{}</answer>')"
MESSY = r"```python" + "\ndef f(x): return 1/0\n```\nNo:\n```py\ndef f(x):\n    return x + 1\n```\nThat is it."
SCORES: list[tuple[str, str, dict[str, Any], float]] = [  # a reward, a completion, its record, the expected score
    ("exact", " 12 ", {"answer": "12"}, 1.0),
    ("exact", "12.", {"answer": "12"}, 0.0),
    ("number", "so 3 + 4 is 7.0", {"answer": "7"}, 1.0),
    ("number", "1,200", {"answer": "= 1200"}, 1.0),
    ("number", "none", {"answer": "7"}, 0.0),
    ("number", "7", {"answer": "none"}, 0.0),
    ("contains", "It is an oak.", {"answer": " oak"}, 1.0),
    ("contains", "It is a fish.", {"answer": "oak"}, 0.0),
    ("contains(text=fish)", "It is a fish.", {"answer": "oak"}, 1.0),
    (r"regex(pattern='\\d+')", " 42\n", {}, 1.0),
    (r"regex(pattern='\\d+')", "42!", {}, 0.0),
    ("regex(pattern='a.b')", "a\nb", {}, 1.0),
    ("regex(pattern='(a|aa)+')", "a" * 60 + "b", {}, 0.0),  # a pattern on which backtracking takes exponential time
    ("length(characters=4)", "abc", {}, 0.75),
    ("length(characters=4)", "a" * 20, {}, 0.0),
    ("length(tokens=4)", "four tokens", {"tokens": [5, 6, 7, 8]}, 1.0),
    ("length(tokens=4)", "two tokens", {"tokens": [5, 6]}, 0.5),
    (THINK, "<think>2 and 2</think>\n<answer>4</answer>\n", {}, 1.0),
    (THINK, "<think>2\n2</think><answer>4</answer>", {}, 1.0),
    (THINK, "<think></think><answer>4</answer>", {}, 0.0),
    (THINK, "<think>2</think><answer>4</answer> and more", {}, 0.0),
    (THINK, "<think>2</think><think>3</think><answer>4</answer>", {}, 0.0),
    (THINK, "<answer>4</answer><think>2</think>", {}, 0.0),
    ("format(template='Q: {} A: {}a')", "Q: banana A: aa", {}, 1.0),
    ("json_schema(file='schema.json')", '{"a": 1}', {}, 1.0),
    ("json_schema(file='schema.json')", "{}", {}, 0.1),
    ("json_schema(file='schema.json')", "no", {}, 0.0),
    ("json_schema(file='schema.json')", "[" * 100_000, {}, 0.0),
    ("json_schema(file='slow.json')", f'"{"a" * 60}b"', {}, 0.1),
    ("json_schema(file='slow.json')", '"no"', {}, 0.1),
    ("json_schema(file='slow.json')", '"b aaa"', {}, 1.0),
    ("json_schema(file='nested.json')", "[" * 300 + "]" * 300, {}, 0.1),
    ("code", "def f(x): return x + 1", {"tests": ["assert f(1) == 2", "assert f(1) == 3"]}, 0.5),
    ("code(tests=check)", MESSY, {"check": "assert f(1) == 2"}, 1.0),
    ("code", "not Python", {"tests": "assert True"}, 0.0),
    ("exact + 0.5 * length(characters=4)", "ab", {"answer": "ab"}, 1.25),
    ("2 * exact - 0.5 * contains(text=a)", "ab", {"answer": "ab"}, 1.5),
    ("mine.py:count", "abc", {}, 3.0),
    ("0.5 * ./mine.py:count + exact", "abc", {"answer": "abc"}, 2.5),
]
MINE = """
import asyncio, os, pathlib, time
import helper

def count(prompts, completions, answers): return list(map(len, completions))
def by_position(p, c, a): return [float(x + y == z) for x, y, z in zip(p, c, a)]
def by_name(completions, level): return [len(c) * n for c, n in zip(completions, level)]
def third_is_a_column(prompts, completions, level): return by_name(completions, level)
def named(p, c, a, level=None): return level
def every(completions, **columns): return [len(columns)] * len(completions)
def rest(p, c, a, **columns): return [sorted(columns) == ["answer", "level", "rare"]] * len(c)
def rare(completions, rare): return [0.0 if one is None else one for one in rare]
async def waits(p, c, a):
    await asyncio.sleep(0)
    return [1.0] * len(c)
def each_waits(p, c, a): return [waits_one(x) for x in c]
async def waits_one(text):
    await asyncio.sleep(0)
    return len(text)
def process(p, c, a): return [os.getpid()] * len(c)
def prints(p, c, a):
    print("printed by the reward")
    return [helper.ONE] * len(c)
def once(ends):
    if not pathlib.Path("hung").exists():
        pathlib.Path("hung").touch()
        ends()
def hangs_once(p, c, a):
    once(lambda: time.sleep(600))
    return [1.0] * len(c)
def dies_once(p, c, a):
    once(lambda: os._exit(3))
    return [1.0] * len(c)
def dies(p, c, a): os._exit(3)
def hangs(p, c, a): time.sleep(600)
def few(p, c, a): return [1.0]
def nan(p, c, a): return [float("nan")] * len(c)
def text(p, c, a): return ["x"] * len(c)
def none(p, c, a): return [None] * len(c)
def nothing(p, c, a): pass
def raises(p, c, a): return [1 / 0]
def says_much(p, c, a): raise ValueError("two\\nlines " + "a" * 10_000)
def star(*texts): return [float(len(texts))] * len(texts[1])
def asks(p, c, a, height): return [1.0] * len(c)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(regular, "SECONDS", 0.1)
    Path("mine.py").write_text(MINE)
    Path("helper.py").write_text("ONE = 1.0\n")
    Path("broken.py").write_text("1 / 0\n")
    Path("schema.json").write_text('{"type": "object", "required": ["a"]}')
    Path("wrong.json").write_text('{"type": 5}')
    Path("slow.json").write_text('{"pattern": "(a|aa)+$"}')
    Path("nested.json").write_text('{"items": {"$ref": "#"}}')
    Path("away.json").write_text('{"$ref": "http://127.0.0.1:9/schema"}')
    return tmp_path


def completion(text: str, record: dict[str, Any]) -> Completion:
    columns = {name: value for name, value in record.items() if name != "tokens"}
    return Completion("a prompt", text, str(record.get("answer", "")), columns, (), record.get("tokens", ()))


@pytest.mark.parametrize(("name", "text", "record", "wanted"), SCORES)
def test_rewards_score_as_documented(name: str, text: str, record: dict[str, Any], wanted: float) -> None:
    reward = reward_of(name)
    assert OpenReward(reward)([completion(text, record)]) == [wanted]
    assert reward_of(notation(reward)) == reward
    assert reward.needs <= record.keys()


@given(st.integers() | st.floats(allow_nan=False, allow_infinity=False), st.sampled_from([",", ".4f", ".17g", ".6e"]))
def test_number_reads_every_notation_of_a_number(value: float, form: str) -> None:
    written = format(value, form if form == "," or abs(value) < 1e300 else ".17g")
    score = reward_of("number").score
    assert score(Completion("", f"It is 3, no: {written}!", f"= {written}")) == 1
    assert score(Completion("", written, str(float(written.replace(",", "")) * 2 + 1))) == 0


PIECES = st.text(st.characters(exclude_characters="<>", exclude_categories=["C", "Z"]), min_size=1)


@given(PIECES, PIECES, st.sampled_from(["", " ", "\n\n"]), st.sampled_from(["<think>", "</think>", "<answer>"]))
def test_format_holds_for_all_texts_between_the_tags(thought: str, answer: str, space: str, tag: str) -> None:
    score = reward_of(THINK).score
    text = f"<think>{thought}</think>{space}<answer>{answer}</answer>"
    assert score(Completion("", text)) == 1
    for other in text + tag, tag + text, text.replace(tag, ""), text.replace(answer + "</", answer + tag + "</"):
        assert score(Completion("", other)) == 0


WEIGHTS = st.floats(-1e3, 1e3)
TERMS = st.sampled_from(["exact", "number", "contains", "length(characters=3)", "regex(pattern='a+')"])


@settings(max_examples=25)
@given(st.dictionaries(TERMS, WEIGHTS, min_size=1), st.lists(st.text(), min_size=1), st.text())
def test_a_sum_scores_the_weighted_sum_of_its_terms(weights: dict[str, float], texts: list[str], answer: str) -> None:
    completions = [Completion("", text, answer) for text in texts]
    reward = reward_of(" + ".join(f"{weight!r} * {term}" for term, weight in weights.items()))
    assert reward_of(notation(reward)) == reward
    alone = [OpenReward(reward_of(term))(completions) for term in weights]
    wanted = [sum(w * score for w, score in zip(weights.values(), scores)) for scores in zip(*alone)]
    assert OpenReward(reward)(completions) == pytest.approx(wanted, rel=1e-9, abs=1e-9)


WRONG = {  # wrong notations, and their error messages
    "arithmetic": "did you mean number",
    "regex:a+": "options are in parentheses.*did you mean regex",
    "length:5": "options are in parentheses.*did you mean length",
    "json:schema.json": "did you mean json_schema",
    "exakt": "did you mean exact",
    "": "write it as name",
    "length": "either characters or tokens",
    "length(characters=5, tokens=5)": "either characters or tokens",
    "length(characters=-5)": "must be a whole number from 0",
    "length(words=5)": "words is not a known option",
    "regex": "regex.pattern is missing",
    "regex(pattern='(')": "not a regular expression: missing",
    "regex(pattern='(a{2000}){1000}')": "repeats a part more than 1,000,000 times",
    "format(template='a')": "write {} in the place of the text",
    "2 * (exact + number)": "write it as name",
    "exact + exact": "has the term exact twice",
    "code(seconds=0)": "must be a number from 0.001",
    "judge(url='localhost', model=m)": "give an address such as http",
    "judge(url='file:///etc', model=m)": "give an address such as http",
    "judge(url='http://a', model=m, prompt='Rate it')": "write {completion} where",
    "pairwise(url='http://a', model=m, prompt='{first}')": "write {second} where",
    "judge(url='http://a', model=m, key_env='sk-123')": "not the name of an environment variable",
    "json_schema(file='none.json')": "there is no file none.json",
    "json_schema(file='wrong.json')": "wrong.json is not a JSON schema",
    "json_schema(file='away.json')": "away.json is not a JSON schema .Unresolvable: http://127",
    "none.py:f": "there is no file none.py",
    "broken.py:f": "broken.py cannot be run: ZeroDivisionError: division by zero",
    "mine.py:cuont": "has no function 'cuont': did you mean count",
    "mine.py:few": "the reward few returned 1 values for 2 completions",
    "mine.py:nan": "the reward nan returned nan for 'a'",
    "mine.py:text": "the reward text returned 'x' for 'a'",
    "mine.py:none": "the reward none returned None for 'a'",
    "mine.py:nothing": "the reward nothing failed: TypeError",
    "mine.py:raises": "the reward raises failed: ZeroDivisionError: division by zero; let it return",
    "mine.py:says_much": "the reward says_much failed: ValueError: two lines a+; let it return",
    "mine.py:asks": "the reward asks failed: TypeError: .*'height'",
    "mine.py:dies": "the reward dies ended its process with status 3",
    "function(file='mine.py', name=hangs, seconds=0.2)": "the reward hangs has not returned after 0.2 s",
    "code": "the record of the prompt 'a prompt' has no tests, which the reward code needs",
    "code(tests=level)": "level is 5: give a text or a list of texts",
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_reward_is_one_sentence(name: str) -> None:
    with pytest.raises(UserError, match=WRONG[name]) as caught:
        OpenReward(reward_of(name))([completion(text, {"level": 5}) for text in ("a", "bc")])
    assert "\n" not in str(caught.value)
    assert "sk-123" not in str(caught.value)


def test_functions_get_the_columns_that_they_name(capfd: pytest.CaptureFixture[str]) -> None:
    rows = [("a", "b", {"answer": "ab", "level": 2}), ("c", "de", {"answer": "x", "level": 3, "rare": 7})]
    completions = [Completion(prompt, text, str(row["answer"]), row) for prompt, text, row in rows]
    for name, wanted in {
        "by_position": [1.0, 0.0],
        "by_name": [2.0, 6.0],
        "third_is_a_column": [2.0, 6.0],
        "named": [2.0, 3.0],
        "every": [5.0, 5.0],
        "rest": [1.0, 1.0],
        "rare": [0.0, 7.0],
        "waits": [1.0, 1.0],
        "each_waits": [1.0, 2.0],
        "star": [3.0, 3.0],
        "prints": [1.0, 1.0],
    }.items():
        assert OpenReward(reward_of(f"mine.py:{name}"))(completions) == wanted, name
    out, err = capfd.readouterr()
    assert "printed" not in out
    assert "printed by the reward" in err


def test_a_function_is_called_again_after_its_process_hung_or_ended() -> None:
    for name in "hangs_once", "dies_once":
        Path("hung").unlink(missing_ok=True)
        reward = OpenReward(reward_of(f"function(file='mine.py', name={name}, seconds=1)"))
        assert reward([Completion("", "a")]) == [1.0]
        assert Path("hung").exists()


def test_a_class_of_the_user_is_a_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reward, "kinds", dict(Reward.kinds))

    @dataclass(frozen=True)
    class Vowels(Reward, kind="vowels"):
        most: int = 3  # maximum number of vowels that count

        def score(self, completion: Completion) -> float:
            return min(self.most, sum(map(completion.text.count, "aeiou")))

    completions = [Completion("", text) for text in ("tree", "automata")]
    assert OpenReward(reward_of("2 * vowels + vowels(most=1)"))(completions) == [5.0, 7.0]
    assert OpenReward(reward_of("vowels + vowels(most=1)")).names == ["vowels", "vowels(most=1)"]


def test_several_processes_share_the_completions_in_order() -> None:
    completions = [Completion("", "a" * length) for length in range(5)]
    assert OpenReward(reward_of("function(file='mine.py', name=count, processes=2)"))(completions) == [0, 1, 2, 3, 4]
    reward = OpenReward(reward_of("function(file='mine.py', name=process, processes=2)"))
    assert len({*reward(completions)}) == 2
    assert reward(completions) == reward(completions), "processes stay"


def test_a_run_logs_each_reward_and_gives_functions_their_columns(folder: Path) -> None:
    base = base_model(folder / "base")
    rows = [{"prompt": f"{i} + {i % 7}?", "answer": str(i + i % 7), "level": i} for i in range(8)]
    data = write_rows(folder / "sums.jsonl", rows)
    options = {"method": "grpo", "samples": 2, "completion_length": 4, "steps": 2, "validation": "none"}
    reward = "exact + 0.1 * mine.py:named - 0.5 * length(characters=3)"
    list(Run.start(config(base, data, folder / "run", reward=reward, **options)).train())
    names = {"exact": 1.0, "named": 0.1, "length": -0.5}
    logged = metrics(folder / "run")[-1]
    assert logged["reward"] == pytest.approx(sum(logged[f"reward/{name}"] * w for name, w in names.items()), abs=1e-5)
    for line in (folder / "run/samples.jsonl").read_text().splitlines():
        row = json.loads(line)
        level = int(row["prompt"].split()[0])
        assert row["rewards"].keys() == names.keys()
        assert row["rewards"]["named"] == level
        assert row["reward"] == pytest.approx(sum(row["rewards"][name] * w for name, w in names.items()), abs=1e-5)
    for options["reward"], sentence in (
        ("code", "sums.jsonl line 1: it has no tests, which the reward code needs"),
        ("json_schema(file=none)", "there is no file none"),
    ):
        with pytest.raises(UserError, match=sentence):
            Run.start(config(base, data, folder / "none", **options))
        assert not (folder / "none").exists()


def test_rewards_import_no_torch() -> None:
    import subprocess

    code = "import sys, onward.training.rewards; assert not {'torch', 'numpy', 'asyncio'} & {*sys.modules}"
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}).returncode == 0
