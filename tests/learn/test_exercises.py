"""Exercises of the course: answers pass, and each typical mistake is recognized."""

import re
from itertools import islice

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


@pytest.mark.parametrize("exercise", exercises(), ids=lambda exercise: exercise.name)
def test_the_page_of_the_chapter_shows_the_exercise(exercise: Exercise) -> None:
    page = next(chapter.text for chapter in chapters() if chapter.number == exercise.chapter)
    assert f"{exercise.shown}\n" in page
    assert exercise.source.removeprefix(exercise.head) not in page
