"""Operating a server: a log line for each request, request ids, readiness, API keys with names and limits, traces."""

import json
import logging
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from onward import UserError
from onward.serving import Listening
from onward.serving.keys import Key, Keys, read_keys
from onward.serving.logs import logged
from onward.serving.request_log import RequestRecord, log_request
from onward.serving.server_options import check_listening

from support.server import Running, serving, started

KEYS = [
    Key(key="sk-alice", name="alice"),
    Key(key="sk-few", name="few", requests_per_minute=2),
    Key(key="sk-short", name="short", tokens_per_minute=10),
    Key(key="sk-one", name="one", concurrent=1),
    Key(key="Schlüssel", name="umlaut"),
]
ASKED: dict[str, Any] = {"prompt": "The secret cat", "max_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def records() -> list[RequestRecord]:
    return []


@pytest.fixture(scope="module")
def server(tiny_run: Path, records: list[RequestRecord]) -> Iterator[Running]:
    with serving(tiny_run, rows=2, keys=KEYS, observers=[records.append]) as running:
        yield running


def post(server: Running, key: str, path: str = "/v1/completions", **more: Any) -> httpx.Response:
    headers = {**({"X-Api-Key": key.encode()} if key else {}), **more.pop("headers", {})}
    body = more if path == "/v1/embeddings" else {**ASKED, **more}
    return httpx.post(server.url + path, json=body, headers=headers, timeout=60)


def last(records: list[RequestRecord]) -> RequestRecord:
    """Return the newest record, after a pause, since the record is made after the client has its answer."""
    time.sleep(0.05)
    return records[-1]


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_has_a_record_of_what_it_cost(server: Running, records: list[RequestRecord], stream: bool) -> None:
    reply = post(server, "sk-alice", headers={"X-Request-Id": "mine-7"}, stream=stream, n=2)
    assert reply.headers["X-Request-Id"] == "mine-7"
    found = last(records)
    fields = found.fields()
    prompt = len(server.served[0].lm.text().encode(ASKED["prompt"]))
    assert (fields["id"], fields["key"], fields["model"], fields["status"]) == ("mine-7", "alice", "tiny", 200)
    assert (fields["prompt_tokens"], fields["new_tokens"], fields["finish"]) == (prompt, 16, "length")
    assert 0 < fields["first_token"] <= fields["seconds"]
    assert "secret" not in json.dumps(fields)
    assert found.texts()["prompts"] == [ASKED["prompt"]]


IDS = {"abc-1": True, "a b": False, "x" * 129: False, "é": False, "": False, "a;b": False}


@pytest.mark.parametrize("sent", IDS)
def test_an_id_of_a_client_is_kept_if_it_is_one_word(server: Running, sent: str) -> None:
    reply = httpx.get(f"{server.url}/v1/models", headers={b"X-Request-Id": sent.encode()})
    assert reply.status_code == 401
    assert (reply.headers["X-Request-Id"] == sent) == IDS[sent]
    assert len(reply.headers["X-Request-Id"]) > 4


def test_failures_of_keys_are_logged_with_their_address(server: Running, caplog: Any) -> None:
    with caplog.at_level(logging.INFO, "onward.serving.requests"):
        for key in "sk-wrong", "":
            assert post(server, key).status_code == 401
        time.sleep(0.05)
    lines = [record.getMessage() for record in caplog.records]
    assert [note in line for line, note in zip(lines, ('note="wrong key"', 'note="no key"'))] == [True, True]
    assert all("client=127.0.0.1" in line and "sk-wrong" not in line for line in lines)


def test_embeddings_and_errors_have_records(server: Running, records: list[RequestRecord]) -> None:
    assert post(server, "Schlüssel", "/v1/embeddings", input="The cat").status_code == 200
    assert (last(records).key, last(records).prompt_tokens > 0) == ("umlaut", True)
    assert post(server, "sk-alice", temperature=-1).status_code == 400
    assert last(records).fields()["status"] == 400


def test_a_path_cannot_forge_a_line_and_probes_are_quiet(caplog: Any) -> None:
    with caplog.at_level(logging.INFO, "onward.serving.requests"):
        log_request(RequestRecord("1", "GET", '/a"\nrequest id=2 status=200', status=404))
        log_request(RequestRecord("3", "GET", "/health", status=200))
    assert [record.getMessage().count("\n") for record in caplog.records] == [0]


def test_limits_of_a_key_are_those_of_its_name(server: Running) -> None:
    assert [post(server, "sk-few").status_code for _ in range(3)] == [200, 200, 429]
    first, second = post(server, "sk-short"), post(server, "sk-short")
    assert (first.status_code, second.status_code) == (200, 429)
    assert 1 <= int(second.headers["Retry-After"]) <= 60
    assert "the key 'short' has used its 10 tokens per minute" in second.json()["error"]["message"]
    with ThreadPoolExecutor(8) as threads:
        found = sorted(threads.map(lambda _: post(server, "sk-one").status_code, range(8)))
    assert found[0] == 200
    assert found[-1] == 429
    assert [post(server, "sk-one").status_code, post(server, "sk-alice").status_code] == [200, 200]


def test_an_allowance_grows_back_within_a_minute(monkeypatch: Any) -> None:
    now = 100.0
    monkeypatch.setattr("onward.serving.keys.monotonic", lambda: now)
    key = Key(key="k", name="a", requests_per_minute=6, tokens_per_minute=600)
    keys = Keys([key])
    assert [keys.begin(key) is None for _ in range(7)] == [True] * 6 + [False]
    now += 10
    assert keys.begin(key) is None
    keys.charge("a", 1000)
    now += 39
    refusal = keys.begin(key)
    assert refusal
    assert refusal[1] == 2, "600 tokens less 1000, plus 390 that have grown back, are -10"
    keys.replace([Key(key="k", name="a", requests_per_minute=6, tokens_per_minute=10**6)])
    now += 2
    assert keys.begin(keys.known["a"]) is None, "a higher limit counts at once"


FILES = {
    "[alice]\nkey = 'a'\nrequests_per_minut = 3": "alice.requests_per_minut is not a known option: did you mean",
    "[alice]\nkey = 'a'\nconcurrent = -1": "alice.concurrent",
    "[alice]\nrequests_per_minute = 3": "alice.key is missing",
    "[alice]\nkey = 3": "alice.key",
    "[alice]\nkey = 'a'\n[bob]\nkey = 'a'": "api_key 'bob' is the same as that of 'alice'",
    "[alice]\nkey = ' '": "api_key is empty",
    "key = 'a'": "has key outside of a table",
    "[alice": "is not TOML",
    "": "is empty",
}


@pytest.mark.parametrize("text", FILES)
def test_a_file_of_keys_is_read_or_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(UserError, match="api_key") as error:
        Listening(api_key_file=str(path)).keys()
    assert FILES[text] in str(error.value)


def test_a_key_does_not_show_itself(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text("[alice]\nkey = 'sk-1'\nadmin = true")
    [key] = read_keys(path)
    assert (key.key, key.name, key.admin) == ("sk-1", "alice", True)
    assert "sk-1" not in repr(key)


def test_keys_are_read_again_on_sighup_and_the_log_is_json(tiny_run: Path, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text("[alice]\nkey = 'one'")
    process, url = started(str(tiny_run), "--api-key-file", str(path), "--log-format", "json")
    try:
        status = lambda key: httpx.get(f"{url}/v1/models", headers={"X-Api-Key": key}).status_code
        for text, expected in [("[bob]\nkey = 'two'", [401, 200]), ("[damaged", [401, 200])]:
            path.write_text(text)
            process.send_signal(signal.SIGHUP)
            end = time.monotonic() + 10
            while [status("one"), status("two")] != expected and time.monotonic() < end:
                time.sleep(0.05)
            assert [status("one"), status("two")] == expected
        assert process.poll() is None
    finally:
        process.kill()


def test_a_line_of_json_has_the_fields_of_a_line_of_text(capsys: Any) -> None:
    record = RequestRecord("7", "POST", "/v1/completions", key="alice", model="tiny", status=200)
    for form in "json", "text":
        with logged(form, "info"):
            log_request(record)
    as_json, as_text = capsys.readouterr().err.splitlines()
    found = json.loads(as_json)
    assert {*record.fields().items()} <= {*found.items()}
    assert (found["level"], found["message"]) == ("info", "request")
    assert " info request id=7 key=alice " in as_text


def test_warnings_are_lines_of_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    with logged("json", "info"):
        warnings.warn("the prompt is not saved", stacklevel=1)
    line = json.loads(capsys.readouterr().err)
    assert (line["level"], line["message"]) == ("warning", "the prompt is not saved")


@pytest.mark.parametrize("name", ["example.org", "https://example.org/", "https://example.org/page"])
def test_a_website_that_no_browser_names_so_is_refused(name: str) -> None:
    check_listening(Listening(allow_origin=("*", "https://example.org", "http://localhost:3000")))
    with pytest.raises(UserError, match=f"allow_origin is '{name}': write scheme and host only"):
        check_listening(Listening(allow_origin=(name,)))


def test_a_collector_without_a_scheme_is_refused() -> None:
    check_listening(Listening(otlp_traces_endpoint="http://127.0.0.1:4318/v1/traces"))
    with pytest.raises(UserError, match=r"otlp_traces_endpoint is '127\.0\.0\.1:4318': write an address"):
        check_listening(Listening(otlp_traces_endpoint="127.0.0.1:4318"))


@pytest.mark.parametrize("name", ["max_body", "constraint_memory"])
def test_a_size_that_is_none_is_refused_before_the_server_starts(name: str) -> None:
    with pytest.raises(UserError, match=f"{name} is '0': write a positive number of bytes"):
        check_listening(Listening(**{name: "0"}))  # type: ignore[arg-type]


def test_liveness_and_readiness_differ_while_models_load_and_the_server_drains(server: Running) -> None:
    states: dict[Any, int] = {"loading": 503, "ready": 200, "draining": 503}
    try:
        for server.service.state, ready in states.items():
            assert httpx.get(f"{server.url}/health").status_code == 200
            assert httpx.get(f"{server.url}/ready").status_code == ready
    finally:
        server.service.state = "ready"


def test_a_span_of_each_request_reaches_the_collector(tiny_run: Path) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    from onward.serving.spans import Spans

    bodies: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    collector = HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    spans = Spans(f"http://127.0.0.1:{collector.server_port}/v1/traces")
    with serving(tiny_run, rows=2, observers=[spans]) as running:
        parent = f"00-{'a' * 32}-{'b' * 16}-01"
        httpx.post(f"{running.url}/v1/completions", json=ASKED, headers={"traceparent": parent}, timeout=60)
        httpx.get(f"{running.url}/health")
    spans.close()
    collector.shutdown()
    collector.server_close()
    found = [
        span
        for body in bodies
        for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in of_resource.scope_spans
        for span in scope.spans
    ]
    assert [span.name for span in found] == ["POST /v1/completions"], "probes have none"
    [span] = found
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == ("a" * 32, "b" * 16)
    values = {one.key: one.value.int_value or one.value.string_value for one in span.attributes}
    assert (values["gen_ai.usage.output_tokens"], values["gen_ai.request.model"]) == (8, "tiny")
    [event] = span.events
    assert span.start_time_unix_nano < event.time_unix_nano < span.end_time_unix_nano
    assert b"secret" not in b"".join(bodies)
