"""Preparation of texts into shards: complete, independent of the number of workers, and with no unit prepared twice."""

import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from onward import Tokenizer, UserError, train_tokenizer
from onward.data import documents, load_tokens, sources
from onward.data.formats import PieceSizes
from onward.data.prepare import Cleaning, prepare
from onward.data.reading import Reading
from onward.data.tokens import Longest

from support.disk import with_room_for
from support.grids import first

BYTE = train_tokenizer("byte", [])
ALL = Cleaning(exact=False)  # keeps all documents
# many pieces, and worker processes even for little text
SMALL = PieceSizes(piece_chars=3000, block_bytes=500, serial_bytes=0)


def texts(folder: Path) -> list[list[str]]:
    """The documents of each source, decoded from their tokens."""
    data, found = load_tokens(folder, verify="sha256"), []
    for tokens in data.sources:
        starts = [*tokens.starts(0, len(tokens)).tolist(), len(tokens)]
        found.append([BYTE.decode(tokens[a : b - 1].tolist()) for a, b in pairwise(starts)])
        assert all(tokens[b - 1 : b] == BYTE.eos_id for b in starts[1:])
    return found


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def lines(path: Path, *texts: str) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


@pytest.fixture
def corpus(tmp_path: Path, story: str) -> list[str]:
    """Sources of several kinds, each with several pieces of the sizes in SMALL."""
    place = tmp_path / "corpus"
    (place / "many").mkdir(parents=True)
    for i in range(40):
        (place / f"many/{i:02}.txt").write_text(story[i * 150 : i * 170 + 30])
    (place / "one.txt").write_text(story)
    (place / "packed.txt.gz").write_bytes(gzip.compress(story[::-1].encode()))
    lines(place / "rows.jsonl", *(story[i * 70 : (i + 1) * 70] for i in range(100)))
    return [str(place / name) for name in ("many", "one.txt", "packed.txt.gz", "rows.jsonl")]


@pytest.mark.long
@pytest.mark.parametrize("cleaning", first(1, [Cleaning(near=0.7, min_words=9), ALL, Cleaning()]))
def test_shards_do_not_depend_on_the_number_of_workers(cleaning: Cleaning, corpus: list[str], tmp_path: Path) -> None:
    for workers in 1, 3:
        prepare(corpus, BYTE, tmp_path / str(workers), cleaning=cleaning, workers=workers, sizes=SMALL)
    assert content(tmp_path / "1") == content(tmp_path / "3")
    assert len(list((tmp_path / "1").glob("*.bin"))) > 10
    if cleaning == ALL:
        assert texts(tmp_path / "1") == [list(documents([source])) for source in corpus]


def test_tokens_decode_to_the_documents(corpus: list[str], tmp_path: Path) -> None:
    data = prepare(corpus, "bpe:300", tmp_path / "out", cleaning=ALL, sizes=SMALL)
    tokenizer = Tokenizer.load(tmp_path / "out")
    for source, tokens in zip(corpus, data.sources):
        ids = [i for text in documents([source]) for i in [*tokenizer.encode(text), tokenizer.eos_id]]
        assert tokens[:].tolist() == ids


PROGRAM = """
import os, signal, sys
from pathlib import Path
from onward.data.prepare import prepare
from onward.data.formats import PieceSizes

def progress(task, done, total):
    last, share = sys.argv[2].split()
    if task == last and done > float(share) * total:
        os.kill(os.getpid(), signal.SIGKILL)

sizes = PieceSizes(piece_chars=3000, block_bytes=500, serial_bytes=0)
prepare(sys.argv[3:], "bpe:300", Path(sys.argv[1]), workers=2, sizes=sizes, progress=progress)
"""


def test_killed_preparation_continues_without_redoing_a_unit(corpus: list[str], tmp_path: Path) -> None:
    out, parts = tmp_path / "out", tmp_path / "out.unfinished" / "parts"
    command = [sys.executable, "-c", PROGRAM, str(out)]
    done: dict[Path, int] = {}
    for until in "inspecting 0.3", "inspecting 0.8", "encoding 0.3", "encoding 0.8":
        assert subprocess.run([*command, until, *corpus]).returncode == -signal.SIGKILL
        time.sleep(0.3)  # wait until the workers have exited
        written = [path for path in parts.glob("[0-9]*") if path.suffix in (".npz", ".json")]
        now = {path: path.stat().st_mtime_ns for path in written}
        assert done.items() < now.items(), "a finished unit was written again"
        done = now
    subprocess.run([*command, "never 0", *corpus], check=True)
    prepare(corpus, "bpe:300", tmp_path / "at once", workers=1, sizes=SMALL)
    assert content(out) == content(tmp_path / "at once")


def worker_ids(process: int) -> list[int]:
    """The ids of the worker processes that a process has started."""
    found = []
    for thread in Path(f"/proc/{process}/task").iterdir():
        with suppress(OSError):  # the thread or the worker may have exited
            for pid in (thread / "children").read_text().split():
                if b"onward.base.workers" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(int(pid))
    return found


def test_workers_exit_with_the_process_that_started_them(corpus: list[str], tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path / "out"), "never 0", *corpus])
    while not (workers := worker_ids(process.pid)):
        assert process.poll() is None
    process.kill()
    process.wait()
    deadline = time.monotonic() + 120
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_complete_preparation_is_not_repeated(corpus: list[str], tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    corpus = [*corpus, f"hf://json?data_files={corpus[3]}&cache_dir={tmp_path / 'cache'}"]
    prepare(corpus, BYTE, tmp_path / "out", cleaning=ALL, sizes=SMALL)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    sources.dataset.cache_clear()
    prepare(corpus, BYTE, tmp_path / "out", cleaning=ALL, workers=1, sizes=SMALL)
    assert texts(tmp_path / "out")[3] == texts(tmp_path / "out")[4]
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before


CHANGES: dict[str, dict[str, Any]] = {
    "tokenizer": {"tokenizer": "bpe:300"},
    "raw": {"reading": Reading(raw=True)},
    "sources, content of": {"sources": ["one.txt"]},
    "min_words, exact": {"cleaning": Cleaning(min_words=3, exact=False)},
}


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("interrupted", [False, True])
@pytest.mark.parametrize("names", CHANGES)
def test_changed_sources_or_settings_are_named(names: str, interrupted: bool, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in "one.txt", "two.txt":
        Path(name).write_text(f"text {name}")
    options: dict[str, Any] = {"sources": ["two.txt"], "tokenizer": BYTE, "folder": Path("out")}
    if interrupted:
        with pytest.raises(KeyboardInterrupt):
            prepare(**options, progress=interrupt)
    else:
        prepare(**options)
    with pytest.raises(UserError, match=rf"out(\.unfinished)? was prepared from other sources or settings \({names}"):
        prepare(**options | CHANGES[names])
    Path("two.txt").write_text("other text")
    with pytest.raises(UserError, match=r"was prepared from other .* \(content of two\.txt differ\)"):
        prepare(**options)


def test_duplicates_are_dropped_in_all_sources(corpus: list[str], tmp_path: Path) -> None:
    long = Path(corpus[1]).read_text()
    copy = lines(tmp_path / "copies.jsonl", long[70:140], "new", long[:70], "new", "new\n")
    (tmp_path / "copy.txt").write_text(long)
    (tmp_path / "longer.txt").write_text(long + "more")
    more = [str(tmp_path / name) for name in ("copy.txt", "longer.txt")]
    data = prepare([*corpus, copy, *more], BYTE, tmp_path / "out", workers=2, sizes=SMALL)
    assert texts(tmp_path / "out") == [*(list(documents([s])) for s in corpus), ["new", "new\n"], [], [long + "more"]]
    dropped = data.index.report.dropped["duplicate"]
    samples = [(copy, long[70:140]), (copy, long[:70]), (copy, "new")]
    assert dropped.documents == 4
    assert [(sample.file, sample.text) for sample in dropped.samples] == samples


def test_near_duplicates_are_dropped(tmp_path: Path, story: str) -> None:
    pytest.importorskip("datasketch")
    words = [f"{word}{i % 97}" for i, word in enumerate(story.split())]
    first, other = " ".join(words[:300]), " ".join(words[300:600])
    near = first.replace(words[150], "changed")
    half = " ".join(words[150:450])
    path = lines(tmp_path / "t.jsonl", first, other, near, half, first, "")
    data = prepare([path], BYTE, tmp_path / "out", cleaning=Cleaning(near=0.8))
    assert texts(tmp_path / "out") == [[first, other, half, ""]]
    dropped = data.index.report.dropped
    assert {reason: entry.documents for reason, entry in dropped.items()} == {"duplicate": 1, "near_duplicate": 1}
    assert near.startswith(dropped["near_duplicate"].samples[0].text)


def test_report_counts_kept_and_dropped_documents(tmp_path: Path) -> None:
    path = lines(tmp_path / "t.jsonl", "one", *["two words"] * 5, "ä longer text", "three", "four", "five")
    (tmp_path / "x.txt").write_text("x y z")
    data = prepare([path, str(tmp_path / "x.txt")], BYTE, tmp_path / "out", cleaning=Cleaning(min_words=2))
    report = data.index.report
    assert (report.documents, report.tokens, report.bytes) == (3, 31, 28)
    assert report.bytes_per_token == pytest.approx(28 / 31)
    assert report.longest == Longest(path, "ä longer text", 15)
    dropped = report.dropped
    assert {reason: entry.documents for reason, entry in dropped.items()} == {"duplicate": 4, "min_words": 4}
    assert [sample.text for sample in dropped["min_words"].samples] == ["one", "three", "four"]
    named = [(source.name, source.documents, source.tokens) for source in data.records]
    assert named == [(path, 2, 25), (str(tmp_path / "x.txt"), 1, 6)]


def test_longest_document_may_span_several_pieces(corpus: list[str], tmp_path: Path) -> None:
    report = prepare(corpus[1:], BYTE, tmp_path / "out", sizes=SMALL).index.report
    assert report.longest.tokens == len(next(documents([corpus[1]])).encode()) + 1
    assert report.longest.file == corpus[1]


def test_standard_input_is_prepared_like_a_file(tmp_path: Path, story: str) -> None:
    program = "from onward.cli import main; main(['data', 'prepare', '-', '--tokenizer', 'byte', '--out', 'out'])"
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, input=story.encode(), check=True, capture_output=True)
    assert texts(tmp_path / "out") == [[story]]
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".json", ".bin", ".ends"}
    with pytest.raises(UserError, match="out exists already"):
        prepare(["-"], BYTE, tmp_path / "out")


WRONG = {
    "gone.txt": "gone.txt does not exist",
    "latin.txt": "latin.txt is not utf-8 at byte offset 3",
    "bad.jsonl": r"bad.jsonl line 2 has no text under 'text' \(it has 'body'\)",
    "short.jsonl": r"all documents are dropped \(1 as min_words\)",
    "blank.jsonl": r"blank\.jsonl has no text, because all its documents are empty",
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("workers", [1, 2])
def test_bad_source_is_a_user_error_and_leaves_no_files(name: str, workers: int, tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"body": "b"}')
    (tmp_path / "short.jsonl").write_text('{"text": "a"}')
    lines(tmp_path / "blank.jsonl", *["", " "] * 90)
    cleaning = Cleaning(min_words=2)
    with pytest.raises(UserError, match=WRONG[name]):
        prepare([str(tmp_path / name)], BYTE, tmp_path / "o", cleaning=cleaning, workers=workers, sizes=SMALL)
    assert not list(tmp_path.glob("o*"))


@pytest.mark.parametrize("workers", [1, 2])
def test_pipe_is_read_once_and_its_preparation_continues_with_the_same_content(workers: int, tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "rows.jsonl")
    rows = [f"row {i} " * 50 for i in range(100)]

    def prepared(rows: list[str], **options: Any) -> None:
        content = "".join(json.dumps({"text": row}) + "\n" for row in rows)
        threading.Thread(target=pipe.write_text, args=[content], daemon=True).start()
        prepare([str(pipe)], "bpe:300", tmp_path / "out", workers=workers, sizes=SMALL, **options)

    with pytest.raises(KeyboardInterrupt):
        prepared(rows, progress=lambda task, done, total: interrupt() if 0 < total < 2 * done else None)
    with pytest.raises(UserError, match=rf"\(content of {pipe} differ\)"):
        prepared([*rows, "one more"])
    prepared(rows)
    tokenizer = Tokenizer.load(tmp_path / "out")
    ids = load_tokens(tmp_path / "out").sources[0][:].tolist()
    assert ids == [i for row in rows for i in [*tokenizer.encode(row), tokenizer.eos_id]]
    assert not (tmp_path / "out.unfinished").exists()


def test_interrupt_while_a_pipe_is_read_leaves_nothing(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    threading.Thread(target=pipe.write_text, args=["text"], daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        prepare([str(pipe)], BYTE, tmp_path / "out", progress=interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_folder_with_other_files_is_not_touched(tmp_path: Path, story_file: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="exists already"):
        prepare([str(story_file)], BYTE, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_killed_worker_is_a_user_error_and_the_work_continues_later(corpus: list[str], tmp_path: Path) -> None:
    def kill_workers(*_: object) -> None:
        for pid in worker_ids(os.getpid()):
            os.kill(pid, signal.SIGKILL)

    with pytest.raises(UserError, match="a worker process was killed"):
        prepare(corpus, BYTE, tmp_path / "out", workers=2, sizes=SMALL, progress=kill_workers)
    prepare(corpus, BYTE, tmp_path / "out", workers=2, sizes=SMALL)
    assert texts(tmp_path / "out")[1] == [Path(corpus[1]).read_text()]


@pytest.mark.parametrize("workers", [1, 2])
def test_full_disk_is_a_user_error_and_the_work_continues_later(
    workers: int, corpus: list[str], tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        "sources": corpus,
        "tokenizer": BYTE,
        "folder": tmp_path / "out",
        "cleaning": ALL,
        "workers": workers,
        "sizes": replace(SMALL, piece_chars=12_000),
    }
    with with_room_for(20_000), pytest.raises(UserError, match=r"cannot write .*\.bin: File too large"):
        prepare(**options)
    assert not list(tmp_path.rglob(".*")), "nothing is left half-written"
    prepare(**options)
    assert not list((tmp_path / "out").glob(".*"))
    assert texts(tmp_path / "out")[:2] == [list(documents([source])) for source in corpus[:2]]


def test_progress_is_reported_for_each_pass_up_to_the_total(corpus: list[str], tmp_path: Path, capfd) -> None:
    calls: list[tuple[str, int, int]] = []
    prepare(corpus, "bpe:300", tmp_path / "out", workers=2, sizes=SMALL, progress=lambda *call: calls.append(call))
    total = sum(path.stat().st_size for path in (tmp_path / "corpus").rglob("*") if path.is_file())
    assert list(dict.fromkeys(task for task, _, _ in calls)) == [
        "learning the tokenizer",
        "inspecting",
        "encoding",
    ]
    for task in "inspecting", "encoding":
        done = [amount for name, amount, _ in calls if name == task]
        assert done == sorted(done)
        assert done[-1] == total
    assert capfd.readouterr() == ("", "")


@pytest.mark.long
@pytest.mark.parametrize("kind", ["txt", "jsonl", "gz"])
def test_gigabyte_is_prepared_in_less_than_a_gigabyte(kind: str) -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "benchmarks.prepare", "--size", "1024", "--kind", kind]
    printed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    peak = int(printed.split(" MiB of memory")[0].split()[-1].replace(",", ""))
    assert peak < 1024, printed
