"""Requests that would block a server for all clients: each is bounded, and a short concurrent request is answered
soon."""

import json
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.forked import Forked
from support.server import started

SOON = 5.0  # maximum seconds for a short request, even if the machine also runs other tests
GRAMMAR = "start: T\nT: /(.|\\n)*a(.|\\n){20}/ & ~/(.|\\n)*b(.|\\n){21}/ & ~/(.|\\n)*c(.|\\n){22}/"
DEEP = "start: T\nT: /(.|\\n)*[xyz]/ | (/(.|\\n)*a(.|\\n){18}/ & ~/(.|\\n)*b(.|\\n){19}/ & ~/(.|\\n)*c(.|\\n){20}/)"


def resident(process: int) -> int:
    """The resident memory of a process, in bytes."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@dataclass
class Attacked:
    """A server in a separate process with a low limit on the number of open files."""

    url: str
    process: Forked

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    def short(self) -> float:
        """Send a short request; return its duration in seconds."""
        start = time.perf_counter()
        reply = httpx.post(f"{self.url}/v1/completions", json={"prompt": "a", "max_tokens": 1}, timeout=60)
        assert reply.status_code == 200, reply.text
        return time.perf_counter() - start

    def own_memory(self) -> int:
        """The resident memory of the server without its child processes, in bytes."""
        return resident(self.process.pid)

    def memory(self) -> int:
        """The resident memory of the server and its child processes, in bytes."""
        tree = {self.process.pid}
        for path in sorted(Path("/proc").glob("[0-9]*/stat"), key=lambda path: int(path.parts[2])):
            with suppress(OSError):
                parent = int(path.read_text().rpartition(")")[2].split()[1])
                if parent in tree:
                    tree.add(int(path.parts[2]))
        total = 0
        for one in tree:
            with suppress(OSError):
                total += resident(one)
        return total

    def beside(self, attack: Callable[[], Any], times: int = 8) -> float:
        """Return the maximum time of a short request while an attack runs, and wait for the end of the attack."""
        thread = threading.Thread(target=attack)
        thread.start()
        worst = 0.0
        for _ in range(times):
            worst = max(worst, self.short())
            time.sleep(0.05)
        thread.join(60)
        assert not thread.is_alive()
        return worst

    def open(self, text: bytes) -> socket.socket:
        """Open a connection and send this text."""
        one = socket.create_connection(self.address, timeout=30)
        one.sendall(text)
        return one

    def http(self, path: str, body: Any) -> bytes:
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data

    @contextmanager
    def left(self, path: str, body: Any, count: int = 1) -> Iterator[None]:
        """Start clients that send a request, and close their connections at the end of the block."""
        with ExitStack() as opened:
            for _ in range(count):
                opened.enter_context(self.open(self.http(path, body)))
            yield


@pytest.fixture(scope="module")
def server(tiny_run: Path) -> Iterator[Attacked]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    options = ("--rows", "4", "--max-queue", "12", "--constraint-time", "1", "--max-connections", "300")
    times = ("--receive-timeout", "1.5", "--send-timeout", "1.5", "--max-values", "20000")
    log: list[str] = []
    try:
        process, url = started(str(tiny_run), *options, *times, "--log-level", "warning", log=log)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    attacked = Attacked(url, process)
    attacked.short()
    yield attacked
    assert process.poll() is None, "the server still runs"
    process.terminate()
    process.wait(30)
    assert len("".join(log)) < 5_000
    assert "Traceback" not in "".join(log)


CONSTRAINTS: dict[str, dict[str, Any]] = {
    "a grammar": {"grammar": GRAMMAR},
    "a grammar that grows later": {"grammar": DEEP},
    "structured outputs": {"structured_outputs": {"grammar": GRAMMAR.replace("20", "19")}},
}


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_a_constraint_without_end_holds_up_nobody_and_is_refused_as_too_large(name: str, server: Attacked) -> None:
    body = {"prompt": "a", "max_tokens": 30, **CONSTRAINTS[name]}
    before = server.memory()

    def attack() -> None:
        with server.left("/v1/completions", body, 2):
            time.sleep(0.3)  # then the clients disconnect

    assert server.beside(attack) < SOON
    reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    if reply.status_code != 200:
        assert "too large" in reply.json()["error"]["message"]
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            again = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
            assert again.json() == reply.json()
            seconds.append(time.perf_counter() - start)
        assert min(seconds) < 0.8, "a failed constraint is not prepared again"
    assert server.memory() - before < 400 << 20


LOOKS: dict[str, tuple[str, dict[str, Any]]] = {
    "embeddings": ("/v1/embeddings", {"input": [[5] * 31] * 500}),
    "attention": ("/api/attention", {"tokens": [5] * 31}),
    "the lens": ("/api/lens", {"tokens": [5] * 31}),
    "echo": ("/v1/completions", {"prompt": [5] * 31, "echo": True, "logprobs": 5, "max_tokens": 1}),
}


@pytest.mark.parametrize("name", LOOKS)
def test_work_of_clients_that_hang_up_is_counted_and_cancelled(name: str, server: Attacked) -> None:
    path, body = LOOKS[name]

    def attack() -> None:
        with server.left(path, body, 12):
            time.sleep(0.2)

    assert server.beside(attack, 4) < SOON


def test_embeddings_beyond_the_queue_are_asked_to_retry(server: Attacked) -> None:
    with server.left("/v1/embeddings", {"input": [[5] * 31] * 500}, 64):
        end = time.monotonic() + 30  # deadline for the server to read the requests
        ask = lambda: httpx.post(f"{server.url}/v1/embeddings", json={"input": "a"}, timeout=60)
        while (reply := ask()).status_code != 429 and time.monotonic() < end:
            pass
        assert reply.status_code == 429
        assert reply.headers["Retry-After"]
    server.short()


@pytest.mark.long
def test_unfinished_headers_beyond_the_descriptors_hold_up_nobody(server: Attacked) -> None:
    with ExitStack() as opened:
        for number in range(400):
            with suppress(OSError):
                opened.enter_context(server.open(f"POST /v1/completions HTTP/1.1\r\nX-{number}: ".encode()))
        assert server.short() < SOON
        time.sleep(2)
        assert server.short() < SOON


BODIES: dict[str, tuple[str, Any, int]] = {
    "a text": ("/v1/completions", {"prompt": "word " * 1_500_000}, 400),
    "a chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 1_500_000}]}, 400),
    "reasoning": ("/v1/responses", {"input": "a " * 3_000_000}, 400),
    "an embedding": ("/v1/embeddings", {"input": ["b" * 7_000_000]}, 400),
    "tokenize": ("/tokenize", {"prompt": "word " * 1_500_000, "with_pieces": True}, 400),
    "token ids": ("/v1/completions", {"prompt": [5] * 1_000_000}, 413),
    "a bias": ("/v1/completions", {"prompt": "a", "logit_bias": {str(i): 1 for i in range(300_000)}}, 413),
    "a smaller bias": ("/v1/completions", {"prompt": "a", "logit_bias": {str(i): 1 for i in range(18_000)}}, 400),
    "stop ids": ("/v1/completions", {"prompt": "a", "stop_token_ids": [1] * 1_000_000}, 413),
    "prompts": ("/v1/completions", {"prompt": [[1]] * 500_000}, 413),
    "tools": ("/v1/chat/completions", {"messages": [], "tools": [{"type": "function"}] * 19_000}, 413),
    "messages": ("/v1/chat/completions", {"messages": [{"role": "user"}] * 19_000}, 413),
    "items": ("/v1/responses", {"input": [{"role": "user"}] * 19_000}, 413),
    "edits": ("/v1/completions", {"prompt": "a", "edits": {"layers": [0] * 19_000}}, 400),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_large_body_is_refused_before_it_is_read_whole(name: str, server: Attacked) -> None:
    path, body, status = BODIES[name]
    data, replies = json.dumps(body).encode(), []
    headers = {"Content-Type": "application/json"}

    def attack() -> None:
        for _ in range(2):
            start = time.perf_counter()
            reply = httpx.post(server.url + path, content=data, headers=headers, timeout=60)
            replies.append((reply.status_code, time.perf_counter() - start, reply.text))

    assert server.beside(attack, 4) < SOON
    assert {code for code, _, _ in replies} == {status}, replies
    assert max(seconds for _, seconds, _ in replies) < SOON


def test_deep_json_is_refused(server: Attacked) -> None:
    data = b'{"prompt": ' + b"[" * 1_000_000
    headers = {"Content-Type": "application/json"}
    assert httpx.post(f"{server.url}/v1/completions", content=data, headers=headers, timeout=60).status_code == 400
    assert server.short() < SOON


def test_a_stream_that_nobody_reads_waits_and_ends(server: Attacked) -> None:
    body = {"prompt": "a", "max_tokens": 30, "n": 4, "stream": True, "logprobs": 100, "ignore_eos": True}
    httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)  # compiles the steps of four rows
    before = server.own_memory()  # child processes may still prepare constraints of earlier tests
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    one.connect(server.address)
    one.sendall(server.http("/v1/completions", body))
    time.sleep(1)
    assert server.short() < SOON
    assert server.own_memory() - before < 50 << 20
    one.close()


def test_slow_bodies_end_with_a_status(server: Attacked) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"
    with server.open(head) as one:
        assert one.recv(100).startswith(b"HTTP/1.1 408 ")
