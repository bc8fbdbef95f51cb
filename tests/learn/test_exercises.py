"""Exercises of the course: answers pass, and each typical mistake is recognized."""

import re
from itertools import islice
from textwrap import indent

import pytest

from onward.learn.chapters import chapters
from onward.learn.checking import examine
from onward.learn.exercise import HEADER, Exercise
from onward.learn.exercises import exercises


def test_there_are_exercises_with_different_names_for_most_chapters() -> None:
    assert len({exercise.name for exercise in exercises()}) == len(exercises()) >= 20
    assert {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 16} <= {exercise.chapter for exercise in exercises()}


@pytest.mark.parametrize("exercise", exercises(), ids=lambda exercise: exercise.name)
def test_an_answer_passes_with_the_header_alone(exercise: Exercise) -> None:
    names: dict[str, object] = {}
    exec(HEADER + exercise.source, names)
    assert examine(exercise, names[exercise.name], "").status == "passed"
    exec(HEADER + exercise.starter, names)
    assert examine(exercise, names[exercise.name], "").status == "not written"


@pytest.mark.parametrize("exercise", exercises(), ids=lambda exercise: exercise.name)
def test_each_mistake_is_recognized_as_itself(exercise: Exercise) -> None:
    code = exercise.source.removeprefix(exercise.head)
    assert all(code.count(mistake.old) == 1 for mistake in exercise.mistakes)
    variants = [*islice(exercise.variants(), len(exercise.mistakes))]
    found = [examine(exercise, variant, "") for _, variant in variants]
    assert [verdict.mistake for verdict in found] == [mistake.what for mistake in exercise.mistakes]
    assert all(re.fullmatch(r".+: .+[^.]", mistake.what) for mistake in exercise.mistakes)


MASK = "q @ k.mT / math.sqrt(q.shape[-1]) + torch.ones(q.shape[2], q.shape[2]).triu(1)"
WRONG = {  # code as readers write it, which no edit of the answer makes -> the mistake, by its first words
    "rms_norm": [
        ("return x / (x.std(-1, keepdim=True) + eps) * weight", "eps is outside of the root: add it before; and x.std"),
        ("return x / torch.sqrt(x.std(-1, keepdim=True) ** 2 + eps) * weight", "x.std or x.var is used"),
    ],
    "top_k": [
        (
            "values, index = logits.topk(k)\nreturn torch.zeros_like(logits).scatter(-1, index, values)",
            "dropped logits",
        ),
        ("return torch.where(logits < logits.topk(k).values[..., -1:], 0, logits)", "dropped logits are 0"),
    ],
    "top_p": [
        (  # the numbers that both rows keep are right
            "ordered, order = logits.sort(descending=True)\n"
            "kept = int((ordered.softmax(-1).cumsum(-1) < p).sum(-1).max())\n"
            "return logits.masked_fill(order.argsort(-1) > kept, -torch.inf)",
            "",
        ),
        (
            "probabilities, order = logits.softmax(-1).sort(-1)\ndrop = probabilities.cumsum(-1) <= p\n"
            "return logits.masked_fill(drop.scatter(-1, order, drop), -math.inf)",
            "the least likely tokens are dropped until their sum exceeds p",
        ),
    ],
    "layer_norm": [
        ("return (x - x.mean()) / (x.var(correction=0) + eps).sqrt() * weight + bias", "one mean and variance"),
        ("return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + eps) * weight + bias", "the variance div"),
    ],
    "merge": [
        ("return [new if token in pair else token for token in tokens]", "the list is too long or too short"),
        (
            "merged = []\nfor token in tokens:\n    merged.append(token)\n"
            "    if merged[-2:] == pair:\n        merged[-2:] = [new]\nreturn merged",
            "nothing is merged: a list never equals a tuple",
        ),
    ],
    "frequent_pair": [
        (
            "from collections import Counter\ncounts = Counter()\nfor pieces, times in words.items():\n"
            "    for pair in zip(pieces, pieces[1:]):\n        counts[pair] += times\nreturn max(counts)",
            "the last pair of the alphabet",
        ),
    ],
    "causal_mask": [
        ("return torch.ones(length, length).tril().triu(1 - window)", "the result holds numbers"),
        ("return torch.full((length, length), -1e9).triu(1)", "the result holds numbers"),
    ],
    "attention": [
        (f"return ({MASK} * -torch.inf).softmax(-1) @ v", "the result has NaN"),
        (f"return ({MASK} * -1e9).bfloat16().softmax(-1) @ v.bfloat16()", "the numbers are rounded to 16 bits"),
    ],
    "quantize": [
        (
            "scales = weight.abs().amax(-1) / 127\nreturn (weight / scales[:, None]).round(), scales",
            "only value 2 of 2 is wrong; the shape",
        ),
    ],
    "beam_step": [
        (
            "V = logprobs.shape[1]\nbest, i = (scores[:, None] + logprobs).flatten().topk(len(scores))\n"
            "return i // V, i % V, best",
            "the values are in the wrong order",
        ),
        ("return (scores[:, None] + logprobs).flatten().topk(len(scores))", "the number of values is wrong: return 3"),
    ],
    "swiglu": [
        (
            "F = torch.nn.functional\nreturn F.linear(F.silu(F.linear(x, gate)) * F.silu(F.linear(x, up)), down)",
            "silu is",
        ),
    ],
}


@pytest.mark.parametrize(("name", "body", "words"), [(name, *row) for name, rows in WRONG.items() for row in rows])
def test_the_mistake_in_readers_own_code_is_named(name: str, body: str, words: str) -> None:
    exercise = next(exercise for exercise in exercises() if exercise.name == name)
    names: dict[str, object] = {}
    exec(HEADER + exercise.head + indent(f"{body}\n", "    "), names)
    mistake = examine(exercise, names[name], "").mistake
    assert mistake.startswith(words)
    assert bool(mistake) == bool(words)


@pytest.mark.parametrize("exercise", exercises(), ids=lambda exercise: exercise.name)
def test_the_page_of_the_chapter_shows_the_exercise(exercise: Exercise) -> None:
    page = next(chapter.text for chapter in chapters() if chapter.number == exercise.chapter)
    assert f"{exercise.shown}\n" in page
    assert exercise.source.removeprefix(exercise.head) not in page
