"""The built-in corpora of Python's documentation and comments, and downloaded corpora."""

import hashlib
import pwd
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from onward import UserError
from onward.data import corpora
from onward.data.prose import paragraphs, runs, words

CONTENT = b"".join(b"line %d of a corpus\n" % i for i in range(20_000))


EMBEDDED = "4c6d5356b6a93d22370106724d7f5429545a7596dca2f941bf102240d5fc7afb"  # checksum for a build of Python 3.11.7
HELD_OUT = "224c89978dc70faa5f49c49b45ed5f635205cdc47168f5c5047d9e10b5648c6a"


@pytest.mark.long
def test_embedded_corpora_are_large_and_reproducible_and_import_nothing() -> None:
    program = """
import sys
from onward.data.corpora import embedded, embedded_train
before = set(sys.modules)
first, train = embedded(), embedded_train()
new = {name for name in set(sys.modules) - before if not name.startswith("_sysconfigdata")}
assert not new, new
print(first.sha256, train.sha256, *(sum(map(len, corpus.documents)) for corpus in (first, train)))
"""
    runs = [subprocess.run([sys.executable, "-c", program], capture_output=True, text=True) for _ in range(2)]
    assert [r.stderr for r in runs] == ["", ""]
    assert runs[0].stdout == runs[1].stdout
    size, train_size = map(int, runs[0].stdout.split()[2:])
    assert size > 1_500_000
    assert train_size > 2_000_000


def test_held_out_pages_are_the_last_tenth_of_the_embedded_corpus() -> None:
    pages, held_out = corpora.embedded().documents, corpora.embedded_validation().documents
    assert (*corpora.embedded_train().documents[: len(pages) - len(held_out)], *held_out) == pages
    share = sum(len(page.encode()) for page in held_out) / sum(len(page.encode()) for page in pages)
    assert share == pytest.approx(0.1, abs=0.01)
    if corpora.embedded().sha256 == EMBEDDED:
        assert corpora.embedded_validation().sha256 == HELD_OUT


def embedded_comments() -> tuple[str, ...]:
    """The documents of embedded-train that are not pages of the corpus embedded."""
    return corpora.embedded_train().documents[len(corpora.split_pages()[0]) :]


def test_comments_of_the_embedded_corpus_share_no_run_of_words_with_held_out_pages() -> None:
    held_out = {run for page in corpora.embedded_validation().documents for run in runs(page)}
    assert len(embedded_comments()) > 1000
    assert all(held_out.isdisjoint(runs(paragraph)) for text in embedded_comments() for paragraph in paragraphs(text))


def test_paragraphs_of_comments_occur_once_in_the_embedded_corpus() -> None:
    counts = Counter(words(p) for text in corpora.embedded_train().documents for p in paragraphs(text))
    assert {counts[words(p)] for text in embedded_comments() for p in paragraphs(text)} == {1}


def test_modules_are_read_without_tests_and_unreadable_files(tmp_path: Path) -> None:
    for name in "b.py", "a/c.py", "a/tests/d.py", "test/e.py", "site-packages/f.py", "a/g.txt":
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f'"Documentation of {name}."\n')
    (tmp_path / "h.py").write_bytes(b"# \xff")
    (tmp_path / "i.py").write_text("not a module")
    assert [name for name, _ in corpora.modules(tmp_path)] == ["b", "i", "c"]
    assert [name for name, _ in corpora.parsed_modules(tmp_path)] == ["b", "c"]
    assert [*corpora.docstrings(tmp_path)] == ["Documentation of b.py.", "Documentation of a/c.py."]


class Server(SimpleNamespace):
    """The behavior of the server of CONTENT, and the byte ranges that clients have requested."""

    content: bytes = CONTENT
    resumes: bool = True  # whether it supports range requests
    cut: int | None = None  # number of bytes after which it closes the connection
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
