"""Exercises that `onward learn --check` checks, one file each. Files in this folder are discovered automatically."""

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from pathlib import Path

from onward.learn.exercise import Exercise


@cache
def exercises() -> Sequence[Exercise]:
    """Return all exercises in the order of the chapters, and within a chapter by the length of the answer."""
    files = sorted(Path(__file__).parent.glob("[a-z]*.py"))
    found: list[Exercise] = [import_module(f"{__name__}.{file.stem}").EXERCISE for file in files]
    return sorted(found, key=lambda exercise: (exercise.chapter, len(exercise.source)))
