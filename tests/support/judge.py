"""A server that acts as a judge: it answers chat completions with given replies."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from onward.evaluation import judging


class Server(ThreadingHTTPServer):
    """A server that answers with the next of the given replies, repeats the last one, and records the requests."""

    replies: list[tuple[int, Any]]
    requests: list[tuple[str, dict[str, str], dict[str, Any]]]

    def handle_error(self, *_: Any) -> None:
        pass  # the client has disconnected


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, dict(self.headers), body))
        status, reply = self.server.replies.pop(0) if len(self.server.replies) > 1 else self.server.replies[0]
        content = reply(body["messages"][0]["content"]) if callable(reply) else reply
        if isinstance(content, str):
            content = json.dumps({"choices": [{"message": {"content": content}}]}).encode()
        self.send_response(status)
        for name, value in {"Retry-After": "0", "Location": "/v2", "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def judge_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name in "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "OPENAI_API_KEY":
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(judging, "WAIT", 0.0)
    server = Server(("127.0.0.1", 0), Handler)
    server.requests = []
    thread = threading.Thread(target=server.serve_forever, args=[0.01])
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()
