"""Random answers under a JSON schema, random schemas, and random values."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import islice, permutations, product
from random import Random
from typing import Any

from onward.generation.constraint import Language, State, Vocabulary
from onward.generation.schemas import Prepared

ASCII = [*range(0x20, 0x7F)]
ENDS = [ord(c) for c in '"}],:']


@cache
def byte_vocabulary() -> Vocabulary:
    return Vocabulary([bytes([b]) for b in range(256)])


def state_of(schema: Any) -> State:
    """The grammar state of an empty answer under a schema, with the bytes as vocabulary."""
    return Language("json_schema", json.dumps(schema)).start(byte_vocabulary())


def random_answer(schema: Any, random: Random, limit: int = 400) -> str | None:
    """A random answer that the grammar of a schema allows; None if it would be longer than `limit` bytes."""
    state, answer = state_of(schema), bytearray()
    while len(answer) < limit:
        allowed = set(state.allowed().nonzero()[0].tolist())
        if state.complete and (not allowed or random.random() < 0.5):
            return answer.decode()
        ends = [b for b in ENDS if b in allowed]
        likely = [b for b in ASCII if b in allowed] or sorted(allowed)
        byte = random.choice(ends if ends and random.random() < 0.2 + len(answer) / limit else likely)
        answer.append(byte)
        state.consume(byte)
    return None


def is_allowed(schema: Any, value: Any) -> bool:
    """Whether the grammar of a schema allows a value with some order of its properties."""
    state = state_of(schema)
    for text in orders(value):
        tokens, copy = list(text.encode()), state.copy()
        if copy.matcher.try_consume_tokens(tokens) == len(tokens) and copy.complete:
            return True
    return False


def orders(value: Any) -> Iterator[str]:
    """The JSON of a value, with its properties in several orders."""
    if isinstance(value, dict):
        for names in permutations(value):
            yield from joined(
                "{}",
                [[f"{json.dumps(name, ensure_ascii=False)}:{text}" for text in orders(value[name])] for name in names],
            )
    elif isinstance(value, list):
        yield from joined("[]", [[*orders(item)] for item in value])
    else:
        yield json.dumps(value, ensure_ascii=False)


def joined(brackets: str, parts: Sequence[Sequence[str]]) -> Iterator[str]:
    return (brackets[0] + ",".join(chosen) + brackets[1] for chosen in islice(product(*parts), 240))


PATTERNS = ["^a", "b$", "^[ab]{1,3}$", r"^(?=.*b)[ab]{2,4}$", r"^(?!a)[ab]+$", r"\bab\b", r"^(a|b)\1$", r"^\d+$"]
PATTERNS += [r"^[\s\S]{2}$", "^(?:a(?=b)|b)+$"]
FORMATS = ["date", "uuid", "password", "int32", "binary", "email", "ipv4", "color", "uuid4", "duration"]
ENFORCED = {"date", "uuid", "uuid4", "email", "ipv4", "duration"}
NAMES: list[Any] = [{"type": "string"}, {"enum": ["a", "b"]}, {"pattern": "^[ab]"}, {"minLength": 1}, {"maxLength": 2}]
NAMES += [True, {"const": "a"}, {"format": "color"}, {"not": {"const": "a"}}]
VALUES = [1, 2, "a", "b", None, True, [1], {"a": 1}, 1.5, "ab"]


class Draw:
    """Random schemas of draft 2020-12, of all types and with most keywords, with references to each other."""

    def __init__(self, random: Random) -> None:
        self.random, self.names = random, ["X", "Y"] if random.random() < 0.4 else list[str]()

    def document(self) -> dict[str, Any]:
        root = self.schema(0)
        definitions = {"$defs": {name: self.schema(1) for name in self.names}} if self.names else {}
        return (root if isinstance(root, dict) else {}) | definitions

    def schema(self, depth: int) -> Any:
        kinds = ["string", "number", "boolean", "null", "enum", "const", "any"]
        if depth < 3:
            kinds += ["object", "object", "array", "array", "combined", "combined", "not", "condition", "mixed"]
        kinds += ["reference"] * 2 * bool(self.names)
        return getattr(self, f"of_{self.random.choice(kinds)}")(depth)

    def some(self, **keywords: Callable[[], Any]) -> dict[str, Any]:
        return {name: value() for name, value in keywords.items() if self.random.random() < 0.35}

    def of_string(self, depth: int) -> Any:
        draw = self.random
        return {"type": "string"} | self.some(
            minLength=lambda: draw.randint(0, 2),
            maxLength=lambda: draw.randint(1, 4),
            pattern=lambda: draw.choice(PATTERNS),
            format=lambda: draw.choice(FORMATS),
        )

    def of_number(self, depth: int) -> Any:
        draw = self.random
        return {"type": draw.choice(["integer", "number"])} | self.some(
            minimum=lambda: draw.randint(-5, 3),
            maximum=lambda: draw.randint(2, 30),
            multipleOf=lambda: draw.choice([2, 3, 0.5]),
            exclusiveMinimum=lambda: draw.choice([0, -1.5]),
            exclusiveMaximum=lambda: draw.choice([10, 1e40]),
        )

    def of_boolean(self, depth: int) -> Any:
        return {"type": "boolean"}

    def of_null(self, depth: int) -> Any:
        return {"type": "null"}

    def of_enum(self, depth: int) -> Any:
        return {"enum": self.random.sample(VALUES, self.random.randint(1, 4))}

    def of_const(self, depth: int) -> Any:
        return {"const": self.random.choice(VALUES)}

    def of_any(self, depth: int) -> Any:
        return self.random.choice([{}, True, {"title": "any", "examples": [1]}])

    def of_object(self, depth: int) -> Any:
        draw, inner = self.random, lambda: self.schema(depth + 1)
        keywords = {"type": "object"} | self.some(
            required=lambda: draw.sample("abc", draw.randint(0, 2)),
            properties=lambda: {name: inner() for name in draw.sample("abc", draw.randint(1, 3))},
            additionalProperties=lambda: draw.choice([False, False, inner()]),
            minProperties=lambda: draw.randint(0, 2),
            maxProperties=lambda: draw.randint(1, 3),
            propertyNames=lambda: draw.choice(NAMES),
            dependentRequired=lambda: {"a": ["b"]},
            dependentSchemas=lambda: {"a": inner()},
            patternProperties=lambda: {name: inner() for name in draw.sample(["^a", "b$", "^[cd]", "^(?!a)"], 2)},
        )
        return keywords | ({} if "patternProperties" in keywords else self.some(unevaluatedProperties=lambda: False))

    def of_array(self, depth: int) -> Any:
        draw, inner = self.random, lambda: self.schema(depth + 1)
        return {"type": "array"} | self.some(
            items=inner,
            prefixItems=lambda: [inner() for _ in range(draw.randint(1, 2))],
            minItems=lambda: draw.randint(0, 2),
            maxItems=lambda: draw.randint(1, 3),
            uniqueItems=lambda: True,
            contains=inner,
            minContains=lambda: draw.randint(0, 2),
            maxContains=lambda: draw.randint(1, 2),
            unevaluatedItems=lambda: False,
        )

    def of_combined(self, depth: int) -> Any:
        draw = self.random
        parts = [self.schema(depth + 1) for _ in range(draw.randint(1, 3))]
        kinds = ["object", "string", ["string", "null"]]
        return {draw.choice(["anyOf", "oneOf", "allOf"]): parts} | self.some(type=lambda: draw.choice(kinds))

    def of_not(self, depth: int) -> Any:
        return {"not": self.schema(depth + 1)} | self.some(type=lambda: self.random.choice(["object", "string"]))

    def of_condition(self, depth: int) -> Any:
        inner = lambda: self.schema(depth + 1)
        return {"if": inner()} | self.some(**{"then": inner, "else": inner, "type": lambda: "string"})

    def of_mixed(self, depth: int) -> Any:
        kinds = ["string", "integer", "array", "object", "null"]
        return self.some(
            type=lambda: self.random.sample(kinds, 2),
            minimum=lambda: 2,
            minLength=lambda: 2,
            minItems=lambda: 1,
            required=lambda: ["a"],
            properties=lambda: {"a": self.schema(depth + 1)},
        )

    def of_reference(self, depth: int) -> Any:
        siblings = self.some(description=lambda: "text", minLength=lambda: 1, required=lambda: ["a"])
        return {"$ref": f"#/$defs/{self.random.choice(self.names)}"} | siblings


def random_value(random: Random, depth: int = 0) -> Any:
    """A random JSON value, small enough to conform to many of the random schemas."""
    match random.randint(0, 8 if depth < 3 else 5):
        case 0:
            return random.choice(["", "a", "b", "ab", "aa", "bb", "bab", "12", "1990-01-01"])
        case 1:
            return random.choice([0, 1, 2, 3, 6, -1, 10, 100])
        case 2:
            return random.choice([0.5, 1.5, -0.1, 2.5])
        case 3 | 4:
            return random.choice([True, False, None])
        case 5:
            return random.choice(["a", "ab", "b", 1, 2])
        case 6 | 7:
            names = random.sample(["a", "b", "c", "ab", "d"], random.randint(0, 3))
            return {name: random_value(random, depth + 1) for name in names}
        case _:
            return [random_value(random, depth + 1) for _ in range(random.randint(0, 3))]


def problems(ready: Prepared, text: str) -> list[str]:
    """The reasons, one sentence each, why a complete answer does not conform to a schema."""
    return [problem for claim in ready.claims(text) if (problem := claim.problem())]
