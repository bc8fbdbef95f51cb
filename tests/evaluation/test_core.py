"""CORE on a small bundle in nanochat's format: scores by the formulas, and bundles that are damaged."""

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import onward
from onward import LanguageModel, UserError
from onward.cli import main
from onward.evaluation.tasks import tasks_of
from onward.evaluation.tasks.core import core_metric

WORDS = ["cat", "dog", "mat", "sun", "red", "box", "sat", "ran", "big", "old", "a", "the"]
YAML = """\
icl_tasks:
- {label: pick, dataset_uri: small/pick.jsonl, num_fewshot: [2], icl_task_type: multiple_choice, extra: 1}
-
  label: who
  dataset_uri: small/who.jsonl
  num_fewshot: [0]
  icl_task_type: schema
- {label: next, dataset_uri: next.jsonl, num_fewshot: [1, 5], icl_task_type: language_modeling,
   continuation_delimiter: "\\nAnswer: "}
"""
CSV = "Eval Task,Task Category,Random baseline\npick,x,33.5\nwho,x,50\nnext,x,0.0\n"


def items_of(kind: str) -> list[dict[str, Any]]:
    rng = random.Random(kind)
    some = lambda count: " ".join(rng.choice(WORDS) for _ in range(count))
    if kind == "pick":
        return [
            {"query": some(3), "choices": [some(k) for k in (1, 2, 3)], "gold": rng.randrange(3)} for _ in range(12)
        ]
    if kind == "who":
        return [
            {"context_options": [some(2), some(3)], "continuation": some(2), "gold": rng.randrange(2)}
            for _ in range(11)
        ]
    return [{"context": f" {some(2)}  ", "continuation": rng.choice(WORDS)} for _ in range(10)]


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    folder = tmp_path / "eval_bundle"
    (folder / "eval_data/small").mkdir(parents=True)
    (folder / "core.yaml").write_text(YAML)
    (folder / "eval_meta_data.csv").write_text(CSV)
    for name in "small/pick", "small/who", "next":
        rows = items_of(name.rpartition("/")[2])
        (folder / f"eval_data/{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def random_model(kind: str) -> LanguageModel:
    torch.manual_seed(0)
    text = " ".join(random.Random(1).choices(WORDS, k=2000)) + "\nAnswer: "
    tokenizer = onward.train_tokenizer(kind, [text])
    sizes: dict[str, Any] = {"d_model": 32, "n_layers": 2, "n_heads": 2, "context_length": 48}
    model = onward.Decoder(onward.DecoderConfig(tokenizer.vocab_size, **sizes))
    model.head.weight.data *= 30  # makes probabilities differ clearly
    return LanguageModel(model.double(), tokenizer)


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return random_model("bpe:290")


@torch.no_grad()
def losses(lm: LanguageModel, text: str) -> tuple[list[int], list[float], list[bool]]:
    """The last 48 tokens of a text, and for each token except the first, its loss and whether it is the likeliest."""
    ids = [lm.text().eos_id, *lm.text().encode(text, special=False)]
    ids = ids[-48:]
    logits = lm.model(torch.tensor([ids]))[0, :-1]
    targets = torch.tensor(ids[1:])
    each = F.cross_entropy(logits, targets, reduction="none").tolist()
    return ids, [math.nan, *each], [False, *(logits.argmax(-1) == targets).tolist()]


def expected(lm: LanguageModel, name: str, shots: int, delimiter: str) -> list[bool]:
    """The expected answers, computed one item at a time."""
    items, result = items_of(name), []
    random.Random(1337).shuffle(items)
    for i, item in enumerate(items):
        others = [j for j in range(len(items)) if j != i]
        examples = [items[j] for j in random.Random(1234 + i).sample(others, shots)]
        if name == "pick":
            before = "".join(f"{e['query']}{delimiter}{e['choices'][e['gold']]}\n\n" for e in examples)
            runs = [losses(lm, f"{before}{item['query']}{delimiter}{choice}") for choice in item["choices"]]
            same = 0
            while len({run[0][same] for run in runs}) == 1:
                same += 1
            means = [sum(run[1][same:]) / len(run[1][same:]) for run in runs]
            result.append(means.index(min(means)) == item["gold"])
        elif name == "who":
            runs = [losses(lm, f"{context}{delimiter}{item['continuation']}") for context in item["context_options"]]
            same = 0
            while len({run[0][-1 - same] for run in runs}) == 1:
                same += 1
            means = [sum(run[1][-same:]) / same for run in runs]
            result.append(means.index(min(means)) == item["gold"])
        else:
            before = "".join(f"{e['context'].strip()}{delimiter}{e['continuation']}\n\n" for e in examples)
            question = f"{before}{item['context'].strip()}{delimiter}"
            without, whole = (losses(lm, text) for text in (question.strip(), question + item["continuation"]))
            result.append(all(whole[2][len(without[0]) :]))
    return result


TASKS = {"pick": (2, " ", 0.335), "who": (0, " ", 0.5), "next": (1, "\nAnswer: ", 0.0)}


@pytest.mark.parametrize("name", TASKS)
def test_items_are_scored_as_the_formulas_say(name: str, lm: LanguageModel, bundle: Path) -> None:
    shots, delimiter, baseline = TASKS[name]
    (found,) = lm.evaluate_tasks(f"core(folder='{bundle}', task='{name}')")
    right = expected(lm, name, shots, delimiter)
    assert list(found.right) == right
    assert 0 < sum(right) < len(right) or name == "next"
    assert (found.task, found.examples) == (name, shots)
    assert found.chance == pytest.approx(baseline)


def test_greedy_continuations_are_right(bundle: Path) -> None:
    lm, items = random_model("char"), items_of("next")
    for i, item in enumerate(items):  # in every other item, the continuation is the likeliest character
        tokens = lm.text().encode(f"{item['context'].strip()}\nAnswer:", special=False)
        tokens = tokens if lm.text().eos_id is None else [lm.text().eos_id, *tokens]
        order = lm.model(torch.tensor([tokens]))[0, -1].argsort(descending=True).tolist()
        letters = [token for token in order if len(lm.text().decode([token])) == 1]
        assert letters[0] == order[0]
        item["continuation"] = lm.text().decode([letters[i % 2]])
    (bundle / "core.yaml").write_text(YAML.replace("[1, 5]", "[0]").replace("Answer: ", "Answer:"))
    (bundle / "eval_data/next.jsonl").write_text("".join(json.dumps(row) + "\n" for row in items))
    (found,) = lm.evaluate_tasks(f"core(folder='{bundle}', task='next')")
    order = list(range(len(items)))
    random.Random(1337).shuffle(order)
    assert list(found.right) == [i % 2 == 0 for i in order]


def test_the_command_prints_the_centered_mean(tiny_run: Path, bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (bundle / "core.yaml").write_text(YAML.replace("[2]", "[0]").replace("[1, 5]", "[0]"))
    assert main(["evaluate", str(tiny_run), "--tasks", f"core:{bundle}", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    rows = printed["results"]
    assert [row["task"] for row in rows] == ["pick", "who", "next"]
    baselines = 33.5, 50, 0.0
    centered = [(row["score"] - 0.01 * b) / (1.0 - 0.01 * b) for row, b in zip(rows, baselines)]
    (core,) = printed["core"]
    assert core["core"] == pytest.approx(sum(centered) / 3)
    errors = [row["error"] / (1.0 - 0.01 * b) for row, b in zip(rows, baselines)]
    assert core["error"] == pytest.approx(math.sqrt(sum(e * e for e in errors)) / 3)
    assert main(["evaluate", str(tiny_run), "--tasks", f"core:{bundle}", "--limit", "5"]) == 0
    assert "CORE" in capsys.readouterr().out


def test_other_line_breaks_are_part_of_a_text(bundle: Path) -> None:
    path = bundle / "eval_data/small/pick.jsonl"
    path.write_text('{"query": "a\u2028b", "choices": ["c\x85d"], "gold": 0}\n', encoding="utf-8")
    (task,) = tasks_of(f"core(folder='{bundle}', task='pick')")
    assert task.texts(9) == ["a\u2028b c\x85d"]


def test_guessing_is_0_and_all_right_is_1() -> None:
    assert core_metric([(0.25, 0.1, 0.25), (0.0, 0.0, 0.0)]) == pytest.approx((0, 0.1 / 0.75 / 2))
    assert core_metric([(1.0, 0.0, 0.25), (1.0, 0.0, 0.0)]) == (1, 0)


DAMAGE: dict[str, tuple[str, Callable[[str], str], str]] = {  # file, change, message
    "no YAML": ("core.yaml", lambda text: text + "}", "is not YAML"),
    "no list": ("core.yaml", lambda text: "a: 1", "has no list icl_tasks"),
    "another type": ("core.yaml", lambda text: text.replace("schema", "scheme"), "icl_task_type is 'scheme'"),
    "no examples": ("core.yaml", lambda text: text.replace("[0]", "[]"), "num_fewshot is empty"),
    "more examples than items": (
        "core.yaml",
        lambda text: text.replace("[2]", "[12]"),
        "needs 12 examples, but has only 12 items",
    ),
    "no baseline": ("eval_meta_data.csv", lambda text: text.replace("pick", "peck"), "baseline"),
    "a baseline of 100": ("eval_meta_data.csv", lambda text: text.replace("33.5", "100"), "baseline is"),
    "a missing file": ("core.yaml", lambda text: text.replace("small/pick", "big/pick"), "big/pick.jsonl"),
    "no JSON": ("eval_data/small/pick.jsonl", lambda text: text + "{", "line 13 is not JSON"),
    "no query": ("eval_data/small/pick.jsonl", lambda text: text.replace("query", "q", 1), "line 1 has no query"),
    "no such choice": (
        "eval_data/small/pick.jsonl",
        lambda text: '{"query": "a", "choices": ["a", "b"], "gold": 2}\n' + text,
        "line 1: gold is 2",
    ),
    "a list as an item": ("eval_data/small/pick.jsonl", lambda text: "[1]\n" + text, "line 1 has no query"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_bundle_is_one_sentence(name: str, bundle: Path, lm: LanguageModel) -> None:
    file, change, message = DAMAGE[name]
    (bundle / file).write_text(change((bundle / file).read_text()))
    with pytest.raises(UserError, match=message):
        lm.evaluate_tasks(tasks_of(f"core:{bundle}"))


WRONG = {
    "core:{absent}": "core.yaml",
    "core(folder='{bundle}', task='pik')": "did you mean pick",
    "core": "folder is missing",
}


@pytest.mark.parametrize("tasks", WRONG)
def test_a_wrong_bundle_is_named(tasks: str, bundle: Path, lm: LanguageModel) -> None:
    with pytest.raises(UserError, match=WRONG[tasks]):
        lm.evaluate_tasks(tasks.format(bundle=bundle, absent=bundle / "absent"))


def test_examples_and_short_contexts_are_refused(bundle: Path, lm: LanguageModel) -> None:
    with pytest.raises(UserError, match="has its own"):
        lm.evaluate_tasks(f"core:{bundle}", examples=3)
    path = bundle / "eval_data/next.jsonl"
    path.write_text('{"context": "a", "continuation": "' + "the cat " * 60 + '"}\n' + path.read_text())
    with pytest.raises(UserError, match="context of 48"):
        lm.evaluate_tasks(f"core(folder='{bundle}', task='next')")
