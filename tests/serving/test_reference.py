"""/docs shows the content of /openapi.json; no random body gets status 500."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.server import Running, serving

WILD = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(-3, 20)
    | st.floats(allow_nan=True)
    | st.text(max_size=6)
    | st.sampled_from(["user", "text", "json_schema", "(", "a" * 5000, "\ud800"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "role", "content", "text", "function", "name", "json", "regex", "0", "schema"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=6,
)
NEEDED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "The cat", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 2},
    "/v1/embeddings": {"input": "The cat"},
    "/tokenize": {"prompt": "The cat"},
    "/detokenize": {"tokens": [1, 2]},
    "/api/distribution": {"tokens": [1, 2]},
    "/api/lens": {"tokens": [1, 2]},
    "/api/attention": {"tokens": [1, 2]},
    "/api/attribution": {"tokens": [1, 2]},
}


@pytest.fixture(scope="module")
def server(tiny_run: Path) -> Iterator[Running]:
    with serving(tiny_run, rows=4) as running:
        yield running
        assert running.idle(10)


@pytest.fixture(scope="module")
def schema(server: Running) -> dict[str, Any]:
    read: dict[str, Any] = httpx.get(f"{server.url}/openapi.json").json()
    return read


def fields(schema: dict[str, Any], path: str) -> list[str]:
    reference = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    return list(schema["components"]["schemas"][reference.rpartition("/")[2]]["properties"])


def test_docs_show_each_path_and_field_without_a_network(server: Running, schema: dict[str, Any]) -> None:
    reply = httpx.get(f"{server.url}/docs")
    page = reply.text
    assert "script" not in page
    assert not re.findall(r"https?://", page)
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    for path in schema["paths"]:
        assert f" {path}</code>" in page
    for path in NEEDED:
        for name in fields(schema, path):  # a name breaks only after an underscore
            assert f"<th>{name.replace('_', '_<wbr>')}</th>" in page


def test_each_post_path_is_fuzzed_but_those_of_an_admin(schema: dict[str, Any]) -> None:
    # fuzzed in test_added_models
    admin = {"/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/models/load", "/models/unload"}
    assert {path for path, methods in schema["paths"].items() if "post" in methods} == {*NEEDED} | admin


@pytest.mark.parametrize("path", NEEDED)
def test_no_body_gets_status_500(path: str, server: Running, schema: dict[str, Any]) -> None:
    names = st.sampled_from(fields(schema, path))

    @settings(max_examples=40, deadline=None)
    @given(st.dictionaries(names, WILD, max_size=3))
    def check(wild: dict[str, Any]) -> None:
        body = json.dumps(NEEDED[path] | wild)
        reply = httpx.post(server.url + path, content=body, headers={"Content-Type": "application/json"}, timeout=60)
        assert reply.status_code in (200, 400, 404, 413, 429), (body, reply.text)
        if reply.status_code != 200:
            assert reply.json()["error"]["message"]

    check()
