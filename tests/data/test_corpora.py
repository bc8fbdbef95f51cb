"""The corpus that is part of Python, and corpora that are downloaded."""

import hashlib
import pwd
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from onward.data import corpora
from onward.errors import UserError

CONTENT = b"".join(b"line %d of a corpus\n" % i for i in range(20_000))


def test_embedded_corpus_is_large_and_reproducible_and_imports_nothing() -> None:
    program = """
import sys
from onward.data.corpora import embedded
before = set(sys.modules)
first = embedded()
new = {name for name in set(sys.modules) - before if not name.startswith("_sysconfigdata")}
assert not new, new
print(first.sha256, sum(map(len, first.documents)))
"""
    runs = [subprocess.run([sys.executable, "-c", program], capture_output=True, text=True) for _ in range(2)]
    assert [r.stderr for r in runs] == ["", ""]
    (digest, size), (again, _) = (r.stdout.split() for r in runs)
    assert digest == again
    assert int(size) > 1_500_000


class Server(SimpleNamespace):
    """How the server of CONTENT behaves, and the ranges of bytes that clients have requested."""

    content: bytes = CONTENT
    resumes: bool = True  # whether it honors a range
    cut: int | None = None  # bytes after which it closes the connection
    ranges: list[str | None]
    corpus: corpora.Download


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server(ranges=[])

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = self.headers.get("Range")
            state.ranges.append(asked)
            start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and state.resumes else 0
            body = state.content[start:]
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: state.cut])

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True).start()
        url = f"http://127.0.0.1:{http.server_port}/local.txt"
        state.corpus = corpora.Download(url, len(CONTENT), hashlib.sha256(CONTENT).hexdigest(), "lines", "none")
        yield state
        http.shutdown()


def test_corpus_is_downloaded_once(server: Server, tmp_path: Path) -> None:
    for _ in range(2):
        assert corpora.fetch(server.corpus, tmp_path / "local.txt").read_bytes() == CONTENT
    assert server.ranges == [None]
    assert [p.name for p in tmp_path.iterdir()] == ["local.txt"]


@pytest.mark.parametrize("resumes", [True, False])
def test_interrupted_download_is_continued(resumes: bool, server: Server, tmp_path: Path) -> None:
    server.resumes = resumes
    (tmp_path / "local.part").write_bytes(CONTENT[:1000])
    assert corpora.fetch(server.corpus, tmp_path / "local.txt").read_bytes() == CONTENT
    assert server.ranges == ["bytes=1000-"]


def test_broken_connection_is_a_user_error_and_keeps_what_arrived(server: Server, tmp_path: Path) -> None:
    server.cut = 70_000
    with pytest.raises(UserError, match="cannot be downloaded"):
        corpora.fetch(server.corpus, tmp_path / "local.txt")
    server.cut = None
    assert corpora.fetch(server.corpus, tmp_path / "local.txt").read_bytes() == CONTENT
    assert server.ranges == [None, "bytes=70000-"]


def test_file_with_another_checksum_is_refused(server: Server, tmp_path: Path) -> None:
    server.content = CONTENT[:-1] + b"!"
    with pytest.raises(UserError, match="checksum differs"):
        corpora.fetch(server.corpus, tmp_path / "local.txt")
    assert not list(tmp_path.iterdir())


def test_unreachable_server_is_a_user_error_that_names_the_embedded_corpus(tmp_path: Path) -> None:
    unreachable = corpora.Download("http://127.0.0.1:9/x", 3, "0" * 64, "nothing", "none")
    with pytest.raises(UserError, match=r"cannot be downloaded.*`embedded`"):
        corpora.fetch(unreachable, tmp_path / "unreachable.txt")
    assert not list(tmp_path.iterdir())


def test_unknown_corpus_names_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean tinyshakespeare"):
        corpora.get("tinyshakespear")


def test_a_user_without_a_home_is_told_to_name_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("ONWARD_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])
    with pytest.raises(UserError, match="set ONWARD_HOME"):
        corpora.cache_folder()


def test_cache_folder_that_cannot_be_made_is_a_user_error(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file"):
        corpora.fetch(server.corpus, tmp_path / "file" / "cache" / "local.txt")


def test_download_reports_its_progress_to_the_caller_alone(server: Server, tmp_path: Path, capsys) -> None:
    calls: list[tuple[str, int, int]] = []
    corpora.fetch(server.corpus, tmp_path / "local.txt", progress=lambda *call: calls.append(call))
    assert calls[-1] == ("downloading local", len(CONTENT), len(CONTENT))
    assert [done for _, done, _ in calls] == sorted({done for _, done, _ in calls})
    assert capsys.readouterr() == ("", "")
