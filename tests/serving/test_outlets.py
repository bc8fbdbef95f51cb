"""Tokens that the engine's thread writes directly to a connection: the client receives the same as from the event
loop."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from onward.serving.completions import CompletionReply
from onward.serving.connections import Outlet

from support.server import Running, serving

BODY = {"prompt": "The cat", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
ROOM = {"all": 1 << 20, "a piece": 7, "nothing": 0}  # bytes that the socket accepts at a time


@pytest.fixture(scope="module")
def server(tiny_run: Path) -> Iterator[Running]:
    with serving(tiny_run, rows=2) as running:
        yield running
        assert running.idle()


class Full:
    """A socket that accepts at most `room` bytes per call."""

    def __init__(self, own: socket.socket, room: int) -> None:
        self.own, self.room, self.written = own, room, 0

    def send(self, data: bytes) -> int:
        if not self.room:
            raise BlockingIOError
        self.written += 1
        return self.own.send(data[: self.room])

    def close(self) -> None:
        self.own.close()


@pytest.fixture(params=ROOM)
def sockets(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[Full]:
    made, begin = list[Full](), Outlet.__init__

    def init(self: Outlet, *given: Any) -> None:
        begin(self, *given)
        made.append(Full(self.socket, ROOM[request.param]))
        self.socket = made[-1]

    monkeypatch.setattr(Outlet, "__init__", init)
    return made


def streamed(server: Running, path: str = "completions", **more: Any) -> tuple[str, str]:
    """The text of a streamed answer, and its finish reason."""
    reply = httpx.post(f"{server.url}/v1/{path}", json={**BODY, "stream": True, **more}, timeout=60).text
    assert reply.endswith("data: [DONE]\n\n")
    choices = [json.loads(line[6:])["choices"][0] for line in reply.split("\n\n")[:-2]]
    texts = (one["delta"].get("content", "") if "delta" in one else one["text"] for one in choices)
    return "".join(texts), choices[-1]["finish_reason"]


def test_a_stream_is_the_whole_reply_however_much_a_socket_takes(server: Running, sockets: list[Full]) -> None:
    whole = server.post("/v1/completions", **BODY).json()["choices"][0]["text"]
    assert streamed(server) == (whole, "length")
    assert (sockets[0].written > 3) == (sockets[0].room > 0)  # the engine's thread has sent a part itself


def test_a_chat_whose_tokens_give_no_event_does_not_end(server: Running, sockets: list[Full]) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    body = {"messages": messages, "prompt": None, "stop": ["qqqq"], "max_tokens": 12}
    whole = server.post("/v1/chat/completions", **BODY | body).json()["choices"][0]["message"]["content"]
    assert streamed(server, "chat/completions", **body) == (whole, "length")


def test_a_client_of_http_1_0_gets_a_body_without_chunks(server: Running) -> None:
    content = json.dumps({**BODY, "stream": True}).encode()
    address = server.url.removeprefix("http://").split(":")
    with socket.create_connection((address[0], int(address[1]))) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\n")
        connection.sendall(b"Host: localhost\r\nContent-Length: %d\r\n\r\n%b" % (len(content), content))
        reply = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    body = reply.partition(b"\r\n\r\n")[2]
    assert body.startswith(b"data: {")
    assert body.endswith(b"data: [DONE]\n\n")
    assert b"\r\n" not in body


def test_an_event_that_cannot_be_made_ends_the_stream_with_an_error(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, growth = [], CompletionReply.growth

    def failing(self: CompletionReply, update: Any) -> Iterator[bytes]:
        made.append(update)
        if len(made) == 4:
            raise ZeroDivisionError
        return growth(self, update)

    monkeypatch.setattr(CompletionReply, "growth", failing)
    reply = server.post("/v1/completions", **BODY, stream=True).text
    assert "ZeroDivisionError" in reply
    assert reply.endswith("data: [DONE]\n\n")
    assert server.idle()
