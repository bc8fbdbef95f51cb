"""Rewards: functions of prompts, completions and answers. Their results are checked, and a call that hangs is
abandoned."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from onward.errors import UserError
from onward.suggestions import nearest

Reward = Callable[[Sequence[str], Sequence[str], Sequence[str]], Sequence[float]]
SECONDS = 60.0  # that a call of a reward may take
COMPARING = "exact", "arithmetic"  # rewards that compare with the answer of a record
NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


def exact_match(completion: str, answer: str) -> float:
    """1 if the completion is the answer, up to surrounding spaces; else 0."""
    return float(completion.strip() == answer.strip())


def arithmetic(completion: str, answer: str) -> float:
    """1 if the last number in the completion is the last number in the answer; else 0."""
    last_numbers, wanted = (NUMBER.findall(text) for text in (completion, answer))
    if not last_numbers or not wanted:
        return 0.0
    value, right = (float(numbers[-1].replace(",", "")) for numbers in (last_numbers, wanted))
    return float(math.isclose(value, right, rel_tol=1e-9, abs_tol=1e-9))


def regex(pattern: re.Pattern[str], completion: str, answer: str) -> float:
    """1 if the pattern matches the whole completion, up to surrounding spaces; else 0."""
    return float(pattern.fullmatch(completion.strip()) is not None)


def length(wanted: int, completion: str, answer: str) -> float:
    """1 for a completion of `wanted` characters, falling to 0 for an empty one and for one twice as long."""
    return max(0.0, 1 - abs(len(completion) - wanted) / wanted)


def json_schema(schema: Any, completion: str, answer: str) -> float:
    """1 for JSON that conforms to the schema, 0.1 for other JSON, else 0."""
    import jsonschema

    try:
        value = json.loads(completion)
    except (ValueError, RecursionError):
        return 0.0
    return 1.0 if jsonschema.Draft202012Validator(schema).is_valid(value) else 0.1


def each(score: Callable[[str, str], float]) -> Reward:
    """A reward from a function of one completion and its answer."""
    return lambda prompts, completions, answers: list(map(score, completions, answers))


def reward_of(name: str) -> Reward:
    """The reward for a name: exact, arithmetic, regex:PATTERN, length:CHARACTERS, json:FILE, or FILE.py:FUNCTION, a
    function of (prompts, completions, answers) that returns one number per completion."""
    kind, _, rest = name.partition(":")
    if kind == "exact" and not rest:
        return each(exact_match)
    if kind == "arithmetic" and not rest:
        return each(arithmetic)
    if kind == "regex" and rest:
        try:
            return each(partial(regex, re.compile(rest, re.DOTALL)))
        except re.error as error:
            raise UserError(f"reward is {name!r}, and {rest!r} is no regular expression: {error}") from None
    if kind == "length" and rest.isdecimal() and int(rest):
        return each(partial(length, int(rest)))
    if kind == "json" and rest:
        from onward.files import read_json

        if not Path(rest).is_file():
            raise UserError(f"there is no file {rest}: give --reward json:FILE, a JSON schema")
        return each(partial(json_schema, read_json(Path(rest))))
    file, _, function = name.rpartition(":")
    if file.endswith(".py"):
        return function_of(Path(file), function)
    known = ["exact", "arithmetic", "regex:PATTERN", "length:CHARACTERS", "json:FILE", "FILE.py:FUNCTION"]
    raise UserError(f"reward is {name!r}: {nearest(kind, known)}")


def function_of(file: Path, name: str) -> Reward:
    """A function in a Python file. The file is executed."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if not file.exists() or spec is None or spec.loader is None:
        raise UserError(f"there is no file {file}: give --reward FILE.py:FUNCTION")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(f"{file} cannot be run: {type(error).__name__}: {error}") from None
    functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    if name not in functions:
        raise UserError(f"{file} has no function {name!r}: {nearest(name, functions)}")
    function: Reward = getattr(module, name)
    return function


def rewarded(
    reward: Reward, prompts: Sequence[str], completions: Sequence[str], answers: Sequence[str], seconds: float = SECONDS
) -> list[float]:
    """The reward of each completion.

    A UserError if the function raises, does not return within `seconds`, returns another number of values than
    completions, or returns a value that is not a finite number.
    """
    name = getattr(reward, "__name__", type(reward).__name__)
    results: list[Any] = []

    def call() -> None:
        try:
            results.append(list(reward(prompts, completions, answers)))
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=call, daemon=True)  # one that hangs cannot be ended, and must not be waited for
    thread.start()
    thread.join(seconds)
    if not results:
        raise UserError(f"the reward {name} has not returned after {seconds:g} s: make it faster, or it hangs")
    [values] = results
    if isinstance(values, BaseException):
        what = f"{type(values).__name__}: {values}" if str(values) else type(values).__name__
        raise UserError(f"the reward {name} failed: {what}; let it return a number for every completion") from values
    if len(values) != len(completions):
        raise UserError(f"the reward {name} returned {len(values)} values for {len(completions)} completions")
    for value, completion in zip(values, completions):
        try:
            finite = math.isfinite(value)
        except TypeError:
            finite = False
        if not finite:
            raise UserError(f"the reward {name} returned {value!r} for {completion!r:.60}: return a finite number")
    return [float(value) for value in values]
