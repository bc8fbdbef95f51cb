"""Each field of each request with random values of all JSON types: the request is answered, or refused with the field's
path."""

import json
import random
import re
from collections.abc import Iterator
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from onward.serving.chat import ChatRequest
from onward.serving.completions import CompletionRequest
from onward.serving.embeddings import EmbeddingRequest
from onward.serving.inside import LookAtSampling
from onward.serving.responses import ResponsesRequest
from onward.serving.shapes import accepts, alternatives, bare, declared, fields_of
from onward.serving.tokens import DetokenizeRequest, TokenizeRequest

from support.refusals import refusal
from support.server import Running, serving

ASK = [{"role": "user", "content": "a"}]
BODIES: dict[str, tuple[type, dict[str, Any]]] = {  # for each path: the class of its body, and a valid body
    "/v1/completions": (CompletionRequest, {"prompt": "a", "max_tokens": 1}),
    "/v1/chat/completions": (ChatRequest, {"messages": ASK, "max_tokens": 1}),
    "/v1/responses": (ResponsesRequest, {"input": "a", "max_output_tokens": 1}),
    "/v1/embeddings": (EmbeddingRequest, {"input": "a"}),
    "/tokenize": (TokenizeRequest, {"prompt": "a"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [1]}),
    "/api/distribution": (LookAtSampling, {"tokens": [1]}),
}


@pytest.fixture(scope="module")
def server(tiny_run: Path) -> Iterator[Running]:
    with serving(tiny_run, rows=4) as running:
        yield running
        assert running.idle()


def value_of(kind: str, rng: random.Random) -> Any:
    """A random JSON value of this type."""
    number, text = rng.choice([0, 1, -7, 2**70, 10**400]), rng.choice(["", "x", "é\ud800", "a" * 5000])
    match kind:
        case "null":
            return None
        case "boolean":
            return rng.random() < 0.5
        case "integer":
            return number
        case "fraction":
            return rng.choice([0.5, -2.25, 1e300])
        case "text":
            return text
        case "list":
            return rng.choice(
                [[], [number], [text], [None], [[0.5]], [{}], ["a", 5], [{"type": "text", "text": number}]]
            )
        case _:
            return rng.choice([{}, {text: number}, {"type": number}, {"name": [text]}, {"json": number}])


KINDS = "null", "boolean", "integer", "fraction", "text", "list", "object"


def places(kind: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """The path and type of each declared field of a class, including nested fields."""
    for name, (inner, _) in (fields_of(kind) or {}).items():
        here = f"{path}.{name}".lstrip(".")
        yield here, inner
        for one in alternatives(inner):
            items = bare(one).__args__[0] if getattr(bare(one), "__origin__", None) is list else None
            if items is not None:
                yield from places(items, f"{here}[0]", depth + 1)
            elif depth < 4:
                yield from places(one, here, depth + 1)


AROUND: dict[Any, dict[str, Any]] = {  # required fields of the objects nested in a field
    "messages": {"role": "user", "content": "a"},
    "tool_calls": {"function": {"name": "f"}},
    "function": {"name": "f"},
}


def placed(path: str, value: Any, body: dict[str, Any]) -> dict[str, Any]:
    """A copy of the request `body` with a value at a path such as `tools[0].function.name`."""
    result: Any = deepcopy(body)
    names = [int(name) if name.isdigit() else name for name in re.findall(r"\w+", path)]
    here = result
    for name, following in pairwise(names):
        around = deepcopy(AROUND.get(name, {}))
        if isinstance(here, dict) and not isinstance(here.get(name), list if isinstance(following, int) else dict):
            here[name] = [around] if isinstance(following, int) else around
        here = here[name]
    here[names[-1]] = value
    return result


CASES = [(url, path, kind) for url, (cls, _) in BODIES.items() for path, kind in places(cls)]


def test_every_field_is_tried() -> None:
    paths = {path for _, path, _ in CASES}
    assert {"prompt", "messages[0].tool_calls[0].function.arguments", "structured_outputs.json", "edits.heads"} <= paths
    assert all(name in paths for cls, _ in BODIES.values() for name in declared(cls))


@pytest.mark.fuzzer
@pytest.mark.parametrize("number", [500, pytest.param(10_000, marks=pytest.mark.long)])
def test_a_field_of_a_wrong_type_is_refused_by_its_path(number: int, server: Running) -> None:
    rng = random.Random(46)
    refused = 0
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for i in range(number):
            url, path, kind = CASES[i % len(CASES)] if number > len(CASES) else rng.choice(CASES)
            value = value_of(rng.choice(KINDS), rng)
            body = placed(path, value, BODIES[url][1])
            reply = client.post(url, content=json.dumps(body), headers={"Content-Type": "application/json"})
            if accepts(kind, value):
                assert reply.status_code < 500 or reply.status_code == 503, (body, reply.text)
                if reply.status_code == 400:
                    refusal(reply, body)
                continue
            error, refused = refusal(reply, body), refused + 1
            assert re.match(re.escape(path) + r"($|[.\[])", error["param"]), (body, error)
            assert error["message"].startswith(error["param"]), error
    assert refused > number / 3
