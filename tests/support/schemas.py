"""Random answers under a JSON schema, random schemas and random values."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from itertools import permutations
from random import Random
from typing import Any

from onward.generation.constraint import Language, State, Vocabulary

BYTES = [bytes([b]) for b in range(256)]
PLAIN = [*range(0x20, 0x7F), 0xC3, 0xA9]  # ASCII and é
ENDS = [ord(c) for c in '"}],:']


@cache
def byte_vocabulary() -> Vocabulary:
    return Vocabulary(BYTES)


def state_of(schema: Any) -> State:
    """The grammar state of an empty answer under a schema, over all bytes."""
    return Language("json_schema", json.dumps(schema)).start(byte_vocabulary())


def random_answer(schema: Any, random: Random, limit: int = 400) -> str | None:
    """A random answer that the grammar of a schema allows; None if it would be longer than `limit` bytes."""
    state, answer = state_of(schema), bytearray()
    while len(answer) < limit:
        allowed = set(state.allowed().nonzero()[0].tolist())
        if state.complete and (not allowed or random.random() < 0.5):
            return answer.decode()
        likely = [b for b in PLAIN if b in allowed] or sorted(allowed)
        ends = [b for b in ENDS if b in allowed]
        byte = random.choice(ends if ends and random.random() < 0.2 + len(answer) / limit else likely)
        answer.append(byte)
        state.consume(byte)
    return None


def is_allowed(schema: Any, value: Any) -> bool:
    """Whether the grammar of a schema allows a value, in some order of its properties."""
    state = state_of(schema)
    for text in orders(value):
        tokens = list(text.encode())
        copy = state.copy()
        if copy.matcher.try_consume_tokens(tokens) == len(tokens) and copy.complete:
            return True
    return False


def orders(value: Any) -> Iterator[str]:
    """JSON of a value with each order of its properties."""
    if isinstance(value, dict):
        for names in permutations(value):
            parts = [[f"{json.dumps(name)}:{text}" for text in orders(value[name])] for name in names]
            yield from ("{" + ",".join(chosen) + "}" for chosen in product_of(parts))
    elif isinstance(value, list):
        yield from ("[" + ",".join(chosen) + "]" for chosen in product_of([[*orders(item)] for item in value]))
    else:
        yield json.dumps(value)


def product_of(parts: list[list[str]]) -> Iterator[tuple[str, ...]]:
    """The first combinations of alternatives."""
    from itertools import islice, product

    return islice(product(*parts), 24)
