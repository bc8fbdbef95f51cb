"""Checks a reader's functions against the answers of exercises, in a process with limits of time and memory.

`python -m onward.learn.checking ROWS ARGUMENTS` is that process.
"""

import json
import runpy
import sys
import traceback
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from inspect import signature
from pathlib import Path
from typing import Any

from onward.base.apart import run_apart
from onward.base.errors import UserError
from onward.base.function_worker import described
from onward.base.limits import limit_memory
from onward.learn.comparison import difference, numbers, same, short
from onward.learn.exercise import Exercise
from onward.learn.exercises import exercises

MEMORY = 4 << 30  # bytes
STDERR = 2  # file descriptor


@dataclass(frozen=True)
class Verdict:
    """The result of checking one exercise. `call`, `expected` and `got` describe the failing case with the shortest
    call."""

    exercise: str
    chapter: int
    status: str  # passed, failed, or not written
    what: str = ""  # what happened, one line
    call: str = ""
    expected: str = ""
    got: str = ""
    mistake: str = ""  # the likely mistake, if it is known


def check_file(file: Path, checked: Sequence[Exercise], seconds: float) -> list[Verdict]:
    """Check the functions of a Python file. The output of the file goes to standard error; a function that takes longer
    than `seconds`, or ends the process, fails. Raises a UserError if the file cannot be run or has no exercise."""
    if file.suffix != ".py":
        raise UserError(f"{file} is not a Python file: write the functions into a file such as mine.py")
    if not file.is_file():
        raise UserError(f"there is no file {file}: --starter in place of --check writes one with the exercises")
    verdicts: list[Verdict] = []
    while left := checked[len(verdicts) :]:
        arguments = {"file": str(file), "names": [exercise.name for exercise in left]}
        rows, status = run_apart("onward.learn.checking", arguments, seconds, output=STDERR)
        ended = f"has ended its process with status {status}: remove the call that ends it, such as sys.exit()"
        why = f"has not returned after {seconds:g} s: look for a loop without end" if status is None else ended
        loaded, *done = rows or [{"error": f"{file} {why}"}]
        if "error" in loaded:
            raise UserError(loaded["error"])
        verdicts += [Verdict(**row) for row in done]
        # after a timeout, an exercise that was not the first gets the full time in the next process
        if len(done) < len(left) and (status is not None or not done):
            verdicts.append(Verdict(left[len(done)].name, left[len(done)].chapter, "failed", why))
    if all(verdict.status == "not written" for verdict in verdicts):
        raise UserError(f"{file} has no exercise yet: write one of {', '.join(one.exercise for one in verdicts)}")
    return verdicts


def examine(exercise: Exercise, function: Any, file: str) -> Verdict:
    """Compare a reader's function, defined in `file`, with the exercise's answer on random inputs."""
    cases = exercise.cases()
    got = [outcome(function, case) for case in cases] if callable(function) else [NotImplementedError()]
    if isinstance(got[0], NotImplementedError) and not got[0].args:  # torch's own, for some dtypes, has arguments
        return Verdict(exercise.name, exercise.chapter, "not written")
    expected = [outcome(exercise.answer, case) for case in cases]
    failing = [i for i in range(len(cases)) if not same(expected[i], got[i])]
    if not failing:
        return Verdict(exercise.name, exercise.chapter, "passed", f"{len(cases)} cases")
    calls = [called(exercise, case) for case in cases]
    shown = min(failing, key=lambda i: len(calls[i]))
    error = got[shown] if isinstance(got[shown], Exception) else None
    wrong = [i for i in failing if not isinstance(got[i], Exception)]
    raised = f", with an error in {len(failing) - len(wrong)}" if 0 < len(wrong) < len(failing) else ""
    return Verdict(
        exercise.name,
        exercise.chapter,
        "failed",
        f"fails in {len(failing)} of {len(cases)} cases{raised}",
        calls[shown],
        short(expected[shown]),
        located(error, file) if error else short(got[shown]),
        likely(exercise, cases, expected, got) if wrong else "",
    )


def outcome(function: Callable[..., Any], case: Sequence[Any]) -> Any:
    """The result of a function, or the exception that it raises; the function gets a copy of `case`."""
    try:
        return function(*deepcopy(case))
    except Exception as error:
        return error


def likely(exercise: Exercise, cases: Sequence[Any], expected: Sequence[Any], got: Sequence[Any]) -> str:
    """The mistake that explains all results, or an empty text; cases that raise an error are left out."""
    kept = [i for i, one in enumerate(got) if not isinstance(one, Exception)]
    cases, expected, got = ([values[i] for i in kept] for values in (cases, expected, got))
    informative = not all((found := numbers(one)) is not None and found.isnan().all() for one in got)
    for what, variant in exercise.variants() if informative else ():  # many mistakes make all numbers NaN
        if all(same(outcome(variant, case), one) for case, one in zip(cases, got)):
            return what
    return difference(expected, got)


def called(exercise: Exercise, case: Sequence[Any]) -> str:
    arguments = (f"{name}={short(value)}" for name, value in zip(signature(exercise.answer).parameters, case))
    return f"{exercise.name}({', '.join(arguments)})"


def located(error: Exception, file: str) -> str:
    """An error in one line, with the line of the file in which it was raised."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f"{described(error)} (line {lines[-1]})" if lines else described(error)


def main(rows: str, arguments: str) -> None:
    """Write a first line, {} or the error of loading the file, and one line for each exercise."""
    options = json.loads(arguments)
    file, named = options["file"], {exercise.name: exercise for exercise in exercises()}
    with open(rows, "a", encoding="utf-8", buffering=1) as out:
        limit_memory(MEMORY)
        sys.path.append(str(Path(file).resolve().parent))
        try:
            functions = runpy.run_path(file)
        except Exception as error:
            print(json.dumps({"error": f"{file} cannot be run: {located(error, file)}"}), file=out)
            return
        print(json.dumps({}), file=out)
        for name in options["names"]:
            print(json.dumps(asdict(examine(named[name], functions.get(name), file))), file=out)


if __name__ == "__main__":
    main(*sys.argv[1:])
