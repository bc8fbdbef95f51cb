"""Models and adapters that an administrator adds and removes while the server answers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import onward
from onward.serving import EngineOptions, load_served
from onward.serving.keys import Key

from support.adapters import stirred
from support.server import Running, serving

KEYS = [Key(key="root", name="root", admin=True), Key(key="user", name="user")]
PROMPT, LENGTH = "The cat", 24


@pytest.fixture(scope="module")
def adapters(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("added")
    lm = onward.load(tiny_run)
    stirred(lm.model, "polite", "terse")
    for name in "polite", "terse":
        onward.save_adapter(lm, folder / name, tiny_run, name=name)
    return [folder / "polite", folder / "terse"]


@pytest.fixture(scope="module")
def expected(tiny_run: Path, adapters: list[Path]) -> list[str]:
    """The answers of the model without an adapter, and with each adapter."""
    options: dict[str, Any] = {"temperature": 0, "max_new_tokens": LENGTH, "stop_token_ids": ()}
    models = [onward.load(tiny_run), *(onward.load(tiny_run, adapter_folder=one) for one in adapters)]
    return [lm.generate(PROMPT, **options) for lm in models]


@pytest.fixture
def server(tiny_run: Path) -> Iterator[Running]:
    load = lambda name, folders: onward.load(name)
    more = lambda name: load_served([name], (), EngineOptions(rows=2), load)
    with serving(tiny_run, rows=2, keys=KEYS, load_more=more) as running:
        yield running


def ask(server: Running, model: str) -> str:
    reply = post(server, "/v1/completions", "user", model=model, prompt=PROMPT, max_tokens=LENGTH, temperature=0)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["text"]


def post(server: Running, path: str, key: str = "root", **body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body, headers={"X-Api-Key": key}, timeout=60)


def names(server: Running) -> list[str]:
    return [one["id"] for one in httpx.get(f"{server.url}/v1/models", headers={"X-Api-Key": "user"}).json()["data"]]


def test_adapters_come_and_go_under_one_name_and_answer_as_if_loaded_at_the_start(
    server: Running, adapters: list[Path], expected: list[str]
) -> None:
    assert len({*expected}) == 3
    for _ in range(2):
        for folder, answer in zip(adapters, expected[1:]):
            assert ask(server, "tiny") == expected[0]
            reply = post(server, "/v1/load_lora_adapter", lora_name="style", lora_path=str(folder))
            assert (reply.status_code, reply.text) == (200, "Success: LoRA adapter 'style' added successfully.")
            assert names(server) == ["tiny", "style"]
            reply = post(server, "/models/unload", model="style")  # must not remove the adapter's base
            assert (reply.status_code, "because it is an adapter" in reply.text) == (400, True)
            assert [ask(server, "style"), ask(server, "tiny"), ask(server, "style")] == [answer, expected[0], answer]
            assert post(server, "/v1/unload_lora_adapter", lora_name="style").status_code == 200
            assert post(server, "/v1/completions", "user", model="style", prompt="a").status_code == 404
    assert not onward.attached(server.served[0].lm.model)


def test_an_adapter_is_removed_after_its_running_answers(server: Running, adapters: list[Path]) -> None:
    post(server, "/v1/load_lora_adapter", lora_name="style", lora_path=str(adapters[0]))
    url, asked = f"{server.url}/v1/completions", {"model": "style", "prompt": PROMPT, "ignore_eos": True}
    whole = ask(server, "style")
    asked |= {"max_tokens": LENGTH, "temperature": 0, "stream": True}
    with httpx.stream("POST", url, json=asked, headers={"X-Api-Key": "user"}, timeout=60) as reply:
        lines = reply.iter_lines()
        first = next(lines)
        assert post(server, "/v1/unload_lora_adapter", lora_name="style").status_code == 200
        rest = [line for line in lines if line]
    assert first.startswith("data: ")
    assert rest[-1] == "data: [DONE]"
    assert '"error"' not in "".join(rest)
    assert whole


MISTAKES = {
    ("/v1/load_lora_adapter", "user"): ({"lora_name": "a", "lora_path": "{0}"}, 403, "needs a key with admin = true"),
    ("/models/unload", "user"): ({"model": "tiny"}, 403, "needs a key with admin = true"),
    ("/v1/load_lora_adapter", "missing"): ({"lora_name": "a", "lora_path": "/nowhere"}, 400, "adapter_config.json"),
    ("/v1/load_lora_adapter", "served"): ({"lora_name": "tiny", "lora_path": "{0}"}, 400, "this name is served"),
    ("/v1/load_lora_adapter", "field"): ({"lora_name": "a"}, 400, "lora_path"),
    ("/v1/unload_lora_adapter", "unknown"): ({"lora_name": "b"}, 404, "there is no model 'b' here"),
    ("/v1/unload_lora_adapter", "a model"): ({"lora_name": "tiny"}, 400, "because it is a model"),
    ("/models/unload", "only"): ({"model": "tiny"}, 400, "Cannot remove the only model"),
    ("/v1/load_lora_adapter", "empty"): (
        {"lora_name": "", "lora_path": "{0}"},
        400,
        'lora_name is "": it must be a text that is not empty',
    ),
    ("/models/load", "served"): ({"model": "{1}"}, 400, "this name is served"),
    ("/models/load", "missing"): ({"model": "/nowhere"}, 400, "/nowhere"),
}


def test_mistakes_are_refused_and_change_nothing(server: Running, adapters: list[Path], tiny_run: Path) -> None:
    before = ask(server, "tiny")
    for (path, case), (body, status, message) in MISTAKES.items():
        given = {name: value.format(adapters[0], tiny_run) for name, value in body.items()}
        reply = post(server, path, case if case == "user" else "root", **given)
        assert (reply.status_code, message in reply.json()["error"]["message"]) == (status, True), (case, reply.text)
    assert names(server) == ["tiny"]
    assert ask(server, "tiny") == before


def test_models_come_and_go(server: Running, tiny_run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    onward.save(onward.load(tiny_run), other)
    assert post(server, "/models/load", model=str(other)).json() == {"success": True}
    assert names(server) == ["tiny", "other"]
    assert ask(server, "other") == ask(server, "tiny")
    assert post(server, "/models/unload", model="tiny").json() == {"success": True}
    assert names(server) == ["other"]
    assert ask(server, "other")
    assert len(server.service.worker.engines) == 1
