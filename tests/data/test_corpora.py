"""The corpus every Python brings along, and those that are fetched."""

import hashlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from onward.data import corpora
from onward.errors import UserError

CONTENT = b"".join(b"line %d of a corpus\n" % i for i in range(20_000))


def test_the_embedded_corpus_is_large_the_same_and_imports_nothing() -> None:
    program = """
import sys, time
from onward.data.corpora import embedded
before, start = set(sys.modules), time.perf_counter()
first = embedded()
seconds = time.perf_counter() - start
new = {name for name in set(sys.modules) - before if not name.startswith("_sysconfigdata")}
assert not new, new
print(first.sha256, sum(map(len, first.documents)), seconds)
"""
    runs = [subprocess.run([sys.executable, "-c", program], capture_output=True, text=True) for _ in range(2)]
    assert [r.stderr for r in runs] == ["", ""]
    (digest, size, seconds), (again, *_) = (r.stdout.split() for r in runs)
    assert digest == again
    assert int(size) > 1_500_000
    assert float(seconds) < 20


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict]:
    """A server of CONTENT as the corpus `local`; what it returns says how to behave, and what was asked."""
    state: dict[str, Any] = {"ranges": [], "content": CONTENT, "resumes": True, "cut": None}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = self.headers.get("Range")
            state["ranges"].append(asked)
            start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and state["resumes"] else 0
            body = state["content"][start:]
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: state["cut"]])

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True).start()
        url = f"http://127.0.0.1:{http.server_port}/local.txt"
        known = corpora.Known(url, len(CONTENT), hashlib.sha256(CONTENT).hexdigest(), "lines", "none")
        monkeypatch.setitem(corpora.KNOWN, "local", known)
        yield state
        http.shutdown()


def test_a_corpus_is_fetched_once(server: dict, tmp_path: Path) -> None:
    for _ in range(2):
        assert corpora.get("local", tmp_path).read_bytes() == CONTENT
    assert server["ranges"] == [None]
    assert [p.name for p in tmp_path.iterdir()] == ["local.txt"]


@pytest.mark.parametrize("resumes", [True, False])
def test_half_a_download_goes_on_where_it_stopped(resumes: bool, server: dict, tmp_path: Path) -> None:
    server["resumes"] = resumes
    (tmp_path / "local.part").write_bytes(CONTENT[:1000])
    assert corpora.get("local", tmp_path).read_bytes() == CONTENT
    assert server["ranges"] == ["bytes=1000-"]


def test_a_connection_that_breaks_is_one_sentence_and_the_download_goes_on_later(server: dict, tmp_path: Path) -> None:
    server["cut"] = 70_000
    with pytest.raises(UserError, match="cannot be fetched"):
        corpora.get("local", tmp_path)
    server["cut"] = None
    assert corpora.get("local", tmp_path).read_bytes() == CONTENT
    assert server["ranges"] == [None, "bytes=70000-"]


def test_another_file_is_refused(server: dict, tmp_path: Path) -> None:
    server["content"] = CONTENT[:-1] + b"!"
    with pytest.raises(UserError, match="checksum differs"):
        corpora.get("local", tmp_path)
    assert not list(tmp_path.iterdir())


def test_without_a_network_a_sentence_points_to_the_embedded_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = corpora.Known("http://127.0.0.1:9/x", 3, "0" * 64, "nothing", "none")
    monkeypatch.setitem(corpora.KNOWN, "unreachable", known)
    with pytest.raises(UserError, match=r"cannot be fetched.*`embedded`"):
        corpora.get("unreachable", tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_unknown_corpus_names_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean tinyshakespeare"):
        corpora.get("tinyshakespear")


def test_a_cache_folder_that_cannot_be_made_is_one_sentence(server: dict, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file"):
        corpora.get("local", tmp_path / "file" / "cache")


def test_a_download_writes_nothing_to_standard_output(server: dict, tmp_path: Path, capsys) -> None:
    corpora.get("local", tmp_path)
    assert capsys.readouterr().out == ""
