"""Any JSON schema is enforced while an answer is written, checked at its end, or refused in one sentence."""

import json
import re
from collections import Counter
from random import Random
from typing import Any

import jsonschema
import pytest

from onward import UserError
from onward.generation.schemas import prepared

from support.schemas import ENFORCED, Draw, is_allowed, problems, random_answer, random_value

INNER = re.compile(r"\n|unimplemented|coerce|lenient|llguidance|%json|regex|unsatisfiable schema", re.IGNORECASE)


def judge(validator: Any, value: Any) -> bool | None:
    """Whether a value conforms to a schema, by an independent validator; None if the validator cannot tell."""
    if "inf" in repr(value):  # a number beyond the range of floating point
        return None
    try:
        return validator.is_valid(value)
    except (RecursionError, ArithmeticError):
        return None


def faults_of(schema: dict[str, Any], random: Random, counts: Counter[str]) -> list[str]:
    """The reasons why a schema is handled incorrectly; empty if it is handled correctly."""
    validator, faults = jsonschema.Draft202012Validator(schema), list[str]()
    values = [random_value(random) for _ in range(12)]
    try:
        ready = prepared(schema)
    except UserError as error:
        counts["refused"] += 1
        if not str(error).startswith("json_schema ") or " #" not in str(error) or INNER.search(str(error)):
            faults.append(f"wrong words: {error}")
        # $defs and $ref may concern only a part of the schema
        if "no value conforms" in str(error) and "$" not in str(error):
            faults += [f"{value} conforms: {error}" for value in values if judge(validator, value)]
        return faults
    counts["checked" if ready.later else "enforced"] += 1
    for value in (value for value in values if judge(validator, value)):
        if found := problems(ready, json.dumps(value)):
            faults.append(f"{value} conforms: {found}")
        if not ENFORCED & set(re.findall(r"\w+", json.dumps(schema))) and not is_allowed(schema, value):
            faults.append(f"{value} conforms and cannot be written")
    for _ in range(3):
        answer = random_answer(schema, random)
        conforms = answer and judge(validator, json.loads(answer))
        if answer is not None and conforms is not None and conforms == bool(problems(ready, answer)):
            faults.append(f"{answer} {'conforms' if conforms else 'does not conform'}: {problems(ready, answer)}")
    return faults


@pytest.mark.fuzzer
@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.long)])
def test_any_schema_is_enforced_checked_or_refused_by_path(count: int) -> None:
    counts = Counter[str]()
    failures = []
    for seed in range(count):
        random = Random(seed)
        schema = Draw(random).document()
        failures += [(seed, schema, fault) for fault in faults_of(schema, random, counts)]
    assert not failures, failures[:3]
    assert min(counts["enforced"], counts["checked"], counts["refused"]) > count / 50
