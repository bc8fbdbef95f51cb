"""From texts to shards: complete, the same whoever did what, and never done twice."""

import gzip
import json
import random
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from onward.data import prepare as module
from onward.data import sources
from onward.data.prepare import Cleaning, prepare
from onward.data.sources import documents
from onward.errors import UserError
from onward.text.tokenizer import Tokenizer, train_tokenizer

from support.disk import with_room_for

BYTE = train_tokenizer("byte", [])
ALL = Cleaning(exact=False)  # keeps all documents


def texts(folder: Path) -> list[list[str]]:
    """The documents of each source, from their tokens."""
    data, found = module.load_tokens(folder, verify="sha256"), []
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
def corpus(tmp_path: Path, story: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Sources of every kind, read as if a piece were small, and prepared as if they were large."""
    monkeypatch.setattr(sources, "PIECE", 3000)
    monkeypatch.setattr(sources, "BLOCK", 500)
    monkeypatch.setattr(module, "PIECE", 3000)
    monkeypatch.setattr(module, "SMALL", 0)
    place = tmp_path / "corpus"
    (place / "many").mkdir(parents=True)
    for i in range(40):
        (place / f"many/{i:02}.txt").write_text(story[i * 150 : i * 170 + 30])
    (place / "one.txt").write_text(story)
    (place / "packed.txt.gz").write_bytes(gzip.compress(story[::-1].encode()))
    lines(place / "rows.jsonl", *(story[i * 70 : (i + 1) * 70] for i in range(100)))
    return [str(place / name) for name in ("many", "one.txt", "packed.txt.gz", "rows.jsonl")]


@pytest.mark.parametrize("cleaning", [ALL, Cleaning(), Cleaning(near=0.7, min_words=9)])
def test_who_did_what_makes_no_difference(cleaning: Cleaning, corpus: list[str], tmp_path: Path) -> None:
    for workers in 1, 3:
        prepare(corpus, BYTE, tmp_path / str(workers), cleaning=cleaning, workers=workers)
    assert content(tmp_path / "1") == content(tmp_path / "3")
    assert len(list((tmp_path / "1").glob("*.bin"))) > 10
    if cleaning == ALL:
        assert texts(tmp_path / "1") == [list(documents([source])) for source in corpus]


def test_the_tokens_are_those_of_the_documents(corpus: list[str], tmp_path: Path) -> None:
    data = prepare(corpus, "bpe:300", tmp_path / "out", cleaning=ALL)
    tokenizer = Tokenizer.load(tmp_path / "out")
    for source, tokens in zip(corpus, data.sources):
        ids = [i for text in documents([source]) for i in [*tokenizer.encode(text), tokenizer.eos_id]]
        assert tokens[:].tolist() == ids


KILLED = """
import sys
from pathlib import Path
from onward.data import prepare, sources
prepare.PIECE = sources.PIECE = 3000
sources.BLOCK = 500
prepare.SMALL = 0
prepare.prepare(sys.argv[2:], "bpe:300", Path(sys.argv[1]), workers=2)
"""


def test_what_was_killed_goes_on_and_nothing_is_done_twice(corpus: list[str], tmp_path: Path) -> None:
    choose, out, work = random.Random(0), tmp_path / "out", tmp_path / "out.unfinished"
    command = [sys.executable, "-c", KILLED, str(out), *corpus]
    done: dict[Path, int] = {}
    kills, pause = 0, 0.4
    while True:
        process = subprocess.Popen(command)
        try:
            process.wait(pause)
            break
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
        kills += 1
        pause += choose.random() / 4
        if out.exists():  # whole
            continue
        for path, written in done.items():
            assert path.stat().st_mtime_ns == written, "a unit that was done is left alone"
        time.sleep(0.3)  # until its workers have noticed
        parts = [path for path in (work / "parts").glob("[0-9]*") if path.suffix in (".npz", ".json")]
        done = {path: path.stat().st_mtime_ns for path in parts}
    assert kills > 1
    assert process.returncode == 0
    prepare(corpus, "bpe:300", tmp_path / "at once", workers=1)
    assert content(out) == content(tmp_path / "at once")


def test_workers_end_with_the_process_that_started_them(corpus: list[str], tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path / "out"), *corpus])
    tasks = Path(f"/proc/{process.pid}/task")
    while not (workers := [int(pid) for file in tasks.glob("*/children") for pid in file.read_text().split()]):
        assert process.poll() is None
    process.kill()
    process.wait()
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_what_is_complete_is_left_as_it_is(corpus: list[str], tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    corpus = [*corpus, f"hf://json?data_files={corpus[3]}&cache_dir={tmp_path / 'cache'}"]
    prepare(corpus, BYTE, tmp_path / "out", cleaning=ALL)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    sources.dataset.cache_clear()
    prepare(corpus, BYTE, tmp_path / "out", cleaning=ALL, workers=1)
    assert texts(tmp_path / "out")[3] == texts(tmp_path / "out")[4]
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before


OTHERS: dict[str, dict[str, Any]] = {
    "tokenizer": {"tokenizer": "bpe:300"},
    "field": {"field": "body"},
    "sources, content of": {"sources": ["one.txt"]},
    "min_words, exact": {"cleaning": Cleaning(min_words=3, exact=False)},
}


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("said", OTHERS)
def test_other_sources_or_settings_are_named(said: str, stopped: bool, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in "one.txt", "two.txt":
        Path(name).write_text(f"text {name}")
    asked: dict[str, Any] = {"sources": ["two.txt"], "tokenizer": BYTE, "folder": Path("out")}
    if stopped:
        monkeypatch.setattr(module.Preparation, "index", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare(**asked)
    else:
        prepare(**asked)
    with pytest.raises(UserError, match=rf"out(\.unfinished)? was made from something else \({said}"):
        prepare(**asked | OTHERS[said])
    Path("two.txt").write_text("other text")
    with pytest.raises(UserError, match=r"was made from something else \(content of two\.txt differ\)"):
        prepare(**asked)


def test_duplicates_are_left_out_wherever_they_are(corpus: list[str], tmp_path: Path) -> None:
    long = Path(corpus[1]).read_text()
    copy = lines(tmp_path / "copies.jsonl", long[70:140], "new", long[:70], "new", "new\n")
    (tmp_path / "copy.txt").write_text(long)
    (tmp_path / "longer.txt").write_text(long + "more")
    more = [str(tmp_path / name) for name in ("copy.txt", "longer.txt")]
    data = prepare([*corpus, copy, *more], BYTE, tmp_path / "out", workers=2)
    assert texts(tmp_path / "out") == [*(list(documents([s])) for s in corpus), ["new", "new\n"], [], [long + "more"]]
    dropped = data.info["report"]["dropped"]["duplicate"]
    samples = [(copy, long[70:140]), (copy, long[:70]), (copy, "new")]
    assert dropped == {"documents": 4, "samples": [{"file": file, "text": text} for file, text in samples]}


def test_near_duplicates_are_left_out(tmp_path: Path, story: str) -> None:
    pytest.importorskip("datasketch")
    words = [f"{word}{i % 97}" for i, word in enumerate(story.split())]
    first, other = " ".join(words[:300]), " ".join(words[300:600])
    near = first.replace(words[150], "changed")
    half = " ".join(words[150:450])
    path = lines(tmp_path / "t.jsonl", first, other, near, half, first, "")
    data = prepare([path], BYTE, tmp_path / "out", cleaning=Cleaning(near=0.8))
    assert texts(tmp_path / "out") == [[first, other, half, ""]]
    dropped = data.info["report"]["dropped"]
    assert {reason: entry["documents"] for reason, entry in dropped.items()} == {"duplicate": 1, "near_duplicate": 1}
    assert near.startswith(dropped["near_duplicate"]["samples"][0]["text"])


def test_the_report_tells_what_was_made_and_what_was_left_out(tmp_path: Path) -> None:
    path = lines(tmp_path / "t.jsonl", "one", *["two words"] * 5, "ä longer text", "three", "four", "five")
    (tmp_path / "x.txt").write_text("x y z")
    data = prepare([path, str(tmp_path / "x.txt")], BYTE, tmp_path / "out", cleaning=Cleaning(min_words=2))
    report = data.info["report"]
    assert (report["documents"], report["tokens"], report["bytes"]) == (3, 31, 28)
    assert report["bytes_per_token"] == pytest.approx(28 / 31)
    assert report["longest"] == {"tokens": 15, "file": path, "text": "ä longer text"}
    dropped = report["dropped"]
    assert {reason: entry["documents"] for reason, entry in dropped.items()} == {"duplicate": 4, "min_words": 4}
    assert [sample["text"] for sample in dropped["min_words"]["samples"]] == ["one", "three", "four"]
    named = [(source["name"], source["documents"], source["tokens"]) for source in data.info["sources"]]
    assert named == [(path, 2, 25), (str(tmp_path / "x.txt"), 1, 6)]


def test_the_longest_document_may_lie_in_several_pieces(corpus: list[str], tmp_path: Path) -> None:
    report = prepare(corpus[1:], BYTE, tmp_path / "out").info["report"]
    assert report["longest"]["tokens"] == len(next(documents([corpus[1]])).encode()) + 1
    assert report["longest"]["file"] == corpus[1]


def test_standard_input_is_prepared_like_a_file(tmp_path: Path, story: str) -> None:
    program = "from onward.cli import main; main(['data', 'prepare', '-', '--tokenizer', 'byte', '--out', 'out'])"
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, input=story.encode(), check=True, capture_output=True)
    assert texts(tmp_path / "out") == [[story]]
    with pytest.raises(UserError, match="out is there already"):
        prepare(["-"], BYTE, tmp_path / "out")


WRONG = {
    "gone.txt": "gone.txt does not exist",
    "latin.txt": "latin.txt is not utf-8 at byte offset 3",
    "bad.jsonl": r"bad.jsonl line 2 has no text under 'text' \(it has 'body'\)",
    "short.jsonl": r"no document is left \(1 as min_words\)",
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_source_is_one_sentence_and_nothing_is_left_behind(
    name: str, workers: int, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(module, "SMALL", 0)
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"body": "b"}')
    (tmp_path / "short.jsonl").write_text('{"text": "a"}')
    with pytest.raises(UserError, match=WRONG[name]):
        prepare([str(tmp_path / name)], BYTE, tmp_path / "o", cleaning=Cleaning(min_words=2), workers=workers)
    assert not list(tmp_path.glob("o*"))


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path: Path, story_file: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="is there already"):
        prepare([str(story_file)], BYTE, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_worker_that_is_killed_is_one_sentence_and_the_work_goes_on_later(
    corpus: list[str], tmp_path: Path, monkeypatch
) -> None:
    from onward.data import workers

    with monkeypatch.context() as patch:
        patch.setattr(workers, "COMMAND", [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
        with pytest.raises(UserError, match="a worker was killed"):
            prepare(corpus, BYTE, tmp_path / "out", workers=2)
    prepare(corpus, BYTE, tmp_path / "out", workers=2)
    assert texts(tmp_path / "out")[1] == [Path(corpus[1]).read_text()]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk_is_one_sentence_and_the_work_goes_on_later(
    workers: int, corpus: list[str], tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(module, "PIECE", 12_000)
    asked: dict[str, Any] = {
        "sources": corpus,
        "tokenizer": BYTE,
        "folder": tmp_path / "out",
        "cleaning": ALL,
        "workers": workers,
    }
    with with_room_for(20_000), pytest.raises(UserError, match=r"cannot write .*\.bin"):
        prepare(**asked)
    prepare(**asked)
    assert not list((tmp_path / "out").glob(".*"))
    assert texts(tmp_path / "out")[:2] == [list(documents([source])) for source in corpus[:2]]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["txt", "jsonl", "gz"])
def test_a_gigabyte_is_prepared_within_a_gigabyte(kind: str) -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "benchmarks.prepare", "--size", "1024", "--kind", kind]
    told = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    peak = int(told.split(" MiB of memory")[0].split()[-1].replace(",", ""))
    assert peak < 1024, told
