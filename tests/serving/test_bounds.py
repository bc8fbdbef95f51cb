"""Requests that the server refuses before computing, and its behavior when clients disconnect or the process is
stopped."""

import asyncio
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from onward.cli import main
from onward.serving import Listening, RequestLimits, serve

from support.server import Running, serving, started

LONG = {"prompt": "The cat", "max_tokens": 24, "temperature": 0.9, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tiny_run: Path) -> Iterator[Running]:
    limits = RequestLimits(max_queue=3, max_body="10KB", max_messages=4)
    with serving(tiny_run, rows=2, limits=limits, keys=["secret", "schlüssel"], hosts=["api.example.org"]) as running:
        yield running
        assert running.idle()


def post(server: Running, headers: dict[str, Any] | None = None, **body: Any) -> httpx.Response:
    given = {"Authorization": "Bearer secret", **(headers or {})}
    return httpx.post(f"{server.url}/v1/completions", json=body, headers=given, timeout=60)


KEYS: dict[str, tuple[dict[str, Any], int]] = {
    "bearer": ({"Authorization": "Bearer secret"}, 200),
    "lower case": ({"Authorization": "bearer secret"}, 200),
    "x-api-key": ({"X-Api-Key": "secret"}, 200),
    "UTF-8": ({"Authorization": "Bearer schlüssel".encode()}, 200),
    "wrong": ({"Authorization": "Bearer secrets"}, 401),
    "another scheme": ({"Authorization": "Basic secret"}, 401),
    "none": ({}, 401),
}


@pytest.mark.parametrize("name", KEYS)
def test_models_are_listed_only_with_a_key(name: str, server: Running) -> None:
    headers, status = KEYS[name]
    reply = httpx.get(f"{server.url}/v1/models", headers=headers)
    assert reply.status_code == status
    assert "secret" not in reply.text


def test_answers_without_tokens_are_never_too_long(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onward.serving.service.TOKENS", 4)
    reply = post(server, prompt=["The", "A"], max_tokens=0, echo=True)
    assert [choice["text"] for choice in reply.json()["choices"]] == ["The", "A"]
    refused = post(server, prompt=["The", "A"], max_tokens=3)
    assert (refused.status_code, "3, so that 2 answers" in refused.text) == (400, True)


def test_health_needs_no_key(server: Running) -> None:
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}


HOSTS = {
    "127.0.0.1": 200,
    "localhost:8000": 200,
    "[::1]:8000": 200,
    "api.example.org": 200,
    "evil.example.org": 403,
    "127.0.0.1.example.org": 403,
    "": 403,
}


@pytest.mark.parametrize("host", HOSTS)
def test_only_known_hosts_are_answered(host: str, server: Running) -> None:
    assert httpx.get(f"{server.url}/health", headers={"Host": host}).status_code == HOSTS[host]


def test_a_health_check_of_http_1_0_needs_no_host(server: Running) -> None:
    address = httpx.URL(server.url)
    with socket.create_connection((address.host, address.port)) as client:
        client.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert client.makefile("rb").readline().split()[1] == b"200"


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_beyond_the_limit_is_refused(chunked: bool, server: Running) -> None:
    body = b'{"prompt": "' + b"a" * 20_000 + b'"}'
    content = iter([body[:5000], body[5000:]]) if chunked else body
    headers = {"Authorization": "Bearer secret", "Content-Type": "application/json"}
    reply = httpx.post(f"{server.url}/v1/completions", content=content, headers=headers)
    assert reply.status_code == 413
    assert "10,000 bytes" in reply.json()["error"]["message"]


def test_too_many_pending_answers_are_asked_to_retry(server: Running) -> None:
    async def ask() -> list[httpx.Response]:
        async with httpx.AsyncClient(headers={"Authorization": "Bearer secret"}, timeout=60) as client:
            requests = [client.post(f"{server.url}/v1/completions", json=LONG) for _ in range(12)]
            return await asyncio.gather(*requests)

    replies = asyncio.run(ask())
    refused = [reply for reply in replies if reply.status_code == 429]
    assert {reply.status_code for reply in replies} == {200, 429}
    assert all(reply.headers["Retry-After"] for reply in refused)
    assert server.idle()


GONE: dict[str, dict[str, Any]] = {
    "while streaming": {"stream": True},
    "not streaming": {},
    "with two answers": {"n": 2},
    "while queued": {"n": 5},
}


def leave_early(server: Running, **body: Any) -> None:
    """Send a request, and close the connection after the first bytes of a stream or after 0.3 s."""
    wait = httpx.Timeout(5, read=5 if body.get("stream") else 0.3)
    headers = {"Authorization": "Bearer secret"}
    url = f"{server.url}/v1/completions"
    with (
        suppress(httpx.ReadTimeout),
        httpx.stream("POST", url, json=body, headers=headers, timeout=wait) as reply,
    ):
        pieces = reply.iter_bytes()  # the connection closes when this generator is garbage-collected
        next(pieces)
        assert not server.is_idle()


@pytest.mark.parametrize("name", GONE)
def test_a_client_that_goes_away_frees_its_rows(name: str, server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = server.served[0].engine
    step = engine.step

    def slow() -> Any:
        time.sleep(0.3)  # 24 tokens then take longer than the client waits, even on a busy machine
        return step()

    monkeypatch.setattr(engine, "step", slow)
    leave_early(server, **LONG, **GONE[name])
    assert server.idle(within=1.0)  # the complete answer would take 7.2 s


def test_a_client_that_goes_away_while_its_prompt_is_read_frees_its_row(
    tiny_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tiny_run, rows=2, prefill_budget=1) as running:
        step, scheduler = running.served[0].engine.step, running.served[0].engine.scheduler
        sizes = list[int]()  # number of rows in use at each step

        def slow() -> Any:
            sizes.append(len(scheduler.active))
            time.sleep(0.05)  # the prompt of 31 pieces takes 1.5 s
            return step()

        monkeypatch.setattr(running.served[0].engine, "step", slow)
        url = f"{running.url}/v1/completions"
        with httpx.stream("POST", url, json={**LONG, "max_tokens": 30, "stream": True}, timeout=30) as reply:
            lines = reply.iter_lines()
            next(lines)
            with suppress(httpx.ReadTimeout):
                httpx.post(url, json={"prompt": [5] * 31, "max_tokens": 1}, timeout=httpx.Timeout(5, read=0.4))
            assert scheduler.num_decoding == 1
            time.sleep(0.3)
            assert 2 in sizes
            assert sizes[-1] == 1
            assert next(lines) == "", "the other stream goes on"


def test_answers_are_refused_while_the_server_loads_and_drains(server: Running) -> None:
    states: list[Any] = ["loading", "draining"]
    try:
        for state in states:
            server.service.state = state
            reply = post(server, prompt="a")
            assert reply.status_code == 503
            assert reply.headers["Retry-After"]
            assert httpx.get(f"{server.url}/ready").status_code == 503
    finally:
        server.service.state = "ready"


def test_sigterm_lets_a_running_stream_finish(tiny_run: Path) -> None:
    process, url = started(str(tiny_run), "--drain", "20")
    with httpx.stream("POST", f"{url}/v1/completions", json={**LONG, "stream": True}, timeout=30) as reply:
        lines = reply.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert process.wait(20) == 0


@pytest.mark.long
def test_a_stream_that_outlasts_the_drain_ends_with_a_sentence(tiny_run: Path) -> None:
    log: list[str] = []
    process, url = started(str(tiny_run), "--drain", "1", "--rows", "1", log=log)
    # typical_p is not supported by kernels, which makes steps slow
    body = {**LONG, "max_tokens": 30, "n": 64, "stream": True, "typical_p": 0.9}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as reply:
        lines = reply.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        *_, failure, done = [line for line in lines if line]
    assert process.wait(20) == 0
    assert "has shut down" in failure
    assert done == "data: [DONE]"
    assert "Traceback" not in "".join(log)


@pytest.mark.long
def test_a_second_sigterm_ends_the_server_at_once(tiny_run: Path) -> None:
    process, url = started(str(tiny_run), "--drain", "60", "--rows", "1")
    with (
        suppress(httpx.RemoteProtocolError),  # the answers are cut off
        httpx.stream("POST", f"{url}/v1/completions", json={**LONG, "n": 64, "stream": True}, timeout=30) as reply,
    ):
        lines = reply.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(1) == 128 + signal.SIGTERM
        assert "data: [DONE]" not in lines


def test_sigterm_while_models_load_ends_the_server_without_an_error() -> None:
    def load() -> list[Any]:
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.3)
        return []

    serve(Listening(port=0), load, lambda address, served: pytest.fail("the server opened"))


def test_only_named_sites_may_call_from_a_browser(tiny_run: Path) -> None:
    with serving(tiny_run, origins=["https://good.example"]) as running:
        for site, allowed in ("https://good.example", "https://good.example"), ("https://evil.example", None):
            reply = httpx.get(f"{running.url}/v1/models", headers={"Origin": site})
            assert reply.headers.get("Access-Control-Allow-Origin") == allowed


def test_no_site_may_call_from_a_browser_unless_named(server: Running) -> None:
    reply = httpx.get(f"{server.url}/health", headers={"Origin": "https://good.example"})
    assert not [name for name in reply.headers if name.startswith("access-control")]


WRONG: dict[str, tuple[list[str], str]] = {
    "no model": ([], "no model to serve"),
    "an absent model": (["nowhere/at-all"], "nowhere/at-all"),
    "an empty key file": (["{run}", "--api-key-file", "{empty}"], "is empty"),
    "an absent key file": (["{run}", "--api-key-file", "absent.txt"], "Cannot read api_key_file absent.txt"),
    "an empty key": (["{run}", "--api-key", ""], "api-key is empty"),
    "a port in use": (["{run}", "--port", "{port}"], "Cannot listen on port"),
    "a wrong host": (["{run}", "--host", "no.such.host.invalid"], "not an address of this machine"),
    "a long context": (["{run}", "--port", "0", "--context", "9999"], "the model's 32 tokens"),
    "a small cache": (["{run}", "--port", "0", "--cache-memory", "1KB"], "in a cache of"),
    "a wrong size": (["{run}", "--port", "0", "--cache-memory", "much"], "write a positive number of bytes"),
    "two of a name": (["{run}", "{run}", "--port", "0"], "two models with the name"),
    "no rows": (["{run}", "--rows", "0"], "rows is 0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_command_is_one_sentence(
    name: str, tiny_run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words, message = WRONG[name]
    empty = tmp_path / "keys.txt"
    empty.write_text("\n")
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        used.listen()
        given = [word.format(run=tiny_run, empty=empty, port=used.getsockname()[1]) for word in words]
        assert main(["serve", *given]) == 2
    last = capfd.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("onward: ")
    assert message in last
