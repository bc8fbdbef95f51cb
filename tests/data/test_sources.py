"""Documents from every kind of source, and a UserError for every bad source."""

import bz2
import gzip
import io
import itertools
import json
import lzma
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward import UserError
from onward.data import documents
from onward.data.formats import PieceSizes, read, split
from onward.data.reading import Reading
from onward.data.sources import folder_files, pieces, store, stored_streams

TABLE = {"text": ["p", None, "q\r\n"], "body": ["b", "c", "d"], "number": [1, 2, 3]}


def zstd(content: bytes) -> bytes:
    return pyarrow.compress(content, codec="zstd", asbytes=True)


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstd,
}


def parquet(**columns: object) -> bytes:
    """The content of a .parquet file with these columns."""
    pyarrow.parquet.write_table(pyarrow.table(columns), buffer := io.BytesIO())
    return buffer.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "deep/er").mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    (tmp_path / "a.txt").write_bytes("\ufeffä one\r\ntwo".encode())
    (tmp_path / "b.jsonl").write_text('{"text": "x", "body": "y"}\n\n{"text": "z\\n", "body": "\\u2028"}\n')
    (tmp_path / "deep/c.md.gz").write_bytes(gzip.compress(b"packed"))
    (tmp_path / "deep/er/d").write_text("no suffix")
    (tmp_path / "deep/e.jsonl.gz").write_bytes(gzip.compress(b'{"text": "rows"}'))
    (tmp_path / "f.parquet").write_bytes(parquet(**TABLE))
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0")
    (tmp_path / ".git/hidden.txt").write_text("hidden")
    return tmp_path


A, B, F = "ä one\ntwo", ["x", "z\n"], ["p", "", "q\r\n"]
CASES = {
    "a file": (["a.txt"], [A]),
    "the lines of a .jsonl": (["b.jsonl"], B),
    "a .gz": (["deep/c.md.gz"], ["packed"]),
    "a .jsonl.gz": (["deep/e.jsonl.gz"], ["rows"]),
    "a folder, its text files in order": (["."], [A, *B, "packed", "rows", "no suffix", *F]),
    "the rows of a .parquet, an empty text for what is missing": (["f.parquet"], F),
    "a dataset": (["hf://parquet?data_files=f.parquet&cache_dir=cache"], F),
    "a folder as a dataset": (["hf://deep?cache_dir=cache"], ["rows"]),
    "a glob": (["*.txt"], [A]),
    "a glob through folders": (["**/*.gz"], ["packed", "rows"]),
    "several at once, in the order given": (["deep/er", "a.txt", "b.jsonl"], ["no suffix", A, *B]),
}


@pytest.mark.parametrize("case", CASES)
def test_documents_are_read_from(case: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    sources, expected = CASES[case]
    assert list(documents(sources)) == expected


@pytest.mark.parametrize(("name", "found"), [("b.jsonl", ["y", "\u2028"]), ("f.parquet", ["b", "c", "d"])])
def test_field_selects_the_text_of_a_row(name: str, found: list[str], folder: Path) -> None:
    assert list(documents([str(folder / name)], field="body")) == found


def test_standard_input_is_one_document(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO("piped é".encode())))
    assert list(documents(["-"])) == ["piped é"]


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "utf-16", "utf-32", "UTF_16"])
def test_text_is_decoded_with_the_given_encoding(encoding: str, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_bytes("café\n".encode(encoding))
    assert list(documents([str(tmp_path / "t.txt")], encoding=encoding)) == ["café\n"]


def test_file_name_with_brackets_is_not_a_glob(tmp_path: Path) -> None:
    (tmp_path / "book [1].txt").write_text("text")
    assert list(documents([str(tmp_path / "book [1].txt")])) == ["text"]


def test_lone_surrogate_in_json_becomes_a_replacement_character(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"text": "a\\ud800b"}')
    assert list(documents([str(tmp_path / "t.jsonl")])) == ["a\ufffdb"]


LONG = ["word " * 40, "line\n" * 40, "a\n\nb\r\n" * 30, "x" * 200, "ä\r\n" * 60]


@pytest.mark.parametrize(("size", "block"), [(1, 1), (7, 2), (64, 15), (64, 64)])
@pytest.mark.parametrize("text", LONG)
def test_pieces_of_a_file_join_to_its_documents(text: str, size: int, block: int, tmp_path: Path) -> None:
    sizes = PieceSizes(piece_chars=size, block_bytes=block)
    (tmp_path / "t.txt.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": f"{text}{i}"}) + "\n" for i in range(5)))
    for name, expected in ("t.txt.gz", [text.replace("\r\n", "\n")]), ("t.jsonl", [f"{text}{i}" for i in range(5)]):
        found = list(pieces(str(tmp_path / name), Reading(), sizes))
        assert len(found) > 1
        assert list(documents([str(tmp_path / name)], sizes=sizes)) == expected


@given(text=st.text("ab \n\r\u3000"), size=st.integers(1, 9))
def test_passages_join_to_the_text_and_are_short(text: str, size: int) -> None:
    parts = list(split(text, size))
    assert "".join(parts) == text
    assert max(map(len, parts)) <= size


def test_text_is_split_after_a_line_that_another_line_follows() -> None:
    assert list(split("one two\nthree\n\nfour five", 17)) == ["one two\n", "three\n\nfour five"]


@pytest.mark.parametrize("suffix", COMPRESS)
def test_compressed_files_are_read_in_any_case_of_their_names(suffix: str, tmp_path: Path) -> None:
    compress = COMPRESS[suffix]
    (tmp_path / f"A.TXT{suffix.upper()}").write_bytes(compress(b"one ") + compress(b"text"))
    (tmp_path / f"B.JSONL{suffix.upper()}").write_bytes(compress(b'{"text": "row"}'))
    (tmp_path / f"C.PARQUET{suffix.upper()}").write_bytes(compress(parquet(**TABLE)))
    (tmp_path / "D.PARQUET").write_bytes(parquet(**TABLE))
    assert list(documents([str(tmp_path)])) == ["one text", "row", *F, *F]


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
def test_compressed_text_may_be_larger_than_a_block(suffix: str, tmp_path: Path) -> None:
    text = "".join(f"{i:07}\n" for i in range(200_000))
    (path := tmp_path / f"t.txt{suffix}").write_bytes(COMPRESS[suffix](text.encode()))
    assert list(documents([str(path)])) == [text]


def test_dictionary_encoded_column_is_read(tmp_path: Path) -> None:
    texts = pyarrow.array(["a", "b", None, "a"])
    (path := tmp_path / "t.parquet").write_bytes(parquet(text=texts.dictionary_encode()))
    assert list(documents([str(path)])) == ["a", "b", "", "a"]


BAD: dict[str, tuple[str, bytes | None, list[str]]] = {  # name, content, expected parts of the message
    "no such file": ("gone.txt", None, ["gone.txt does not exist"]),
    "a glob without a match": ("*.nothing", None, ["*.nothing does not exist"]),
    "a name too long": ("x" * 5000, None, ["does not exist"]),
    "an empty file": ("t.txt", b"", ["t.txt is empty"]),
    "a file of spaces": ("t.txt", b" \n\t", ["t.txt is empty"]),
    "a .jsonl without a line": ("t.jsonl", b"\n\n", ["t.jsonl is empty"]),
    "a .jsonl of empty texts": ("t.jsonl", b'{"text": ""}\n{"text": " "}\n' * 90, ["t.jsonl has no text", "empty"]),
    "a binary file": ("t.txt", b"abc\0def", ["t.txt is binary", "offset 3"]),
    "not UTF-8": ("t.txt", b"ab\nc\xff", ["t.txt is not utf-8", "offset 4", "line 2", "--encoding"]),
    "an archive": ("t.zip", b"PK\3\4\0", ["t.zip is an archive: unpack it"]),
    "a compressed archive": ("t.TAR.GZ", gzip.compress(b"\0"), ["t.TAR.GZ is an archive: unpack it"]),
    "a broken line": ("t.jsonl", b'{"text": "a"}\n\n{"text": ', ["t.jsonl line 3 is not JSON"]),
    "a line without the field": ("t.jsonl", b'{"body": "a"}', ["t.jsonl line 1", "'text'", "body", "--field"]),
    "a field with a line break": ("t.jsonl", b'{"a\\nb": "a"}', ["t.jsonl line 1", r"'a\nb'"]),
    "a field that is no text": ("t.jsonl", b'{"text": 3}', ["t.jsonl line 1 holds int, not text, under 'text'"]),
    "a line that is a list": ("t.jsonl", b"[1]", ["t.jsonl line 1", "list"]),
    "deep brackets": ("t.jsonl", b"[" * 100_000, ["t.jsonl line 1 is not JSON"]),
    "a long number": ("t.jsonl", b"9" * 10_000, ["t.jsonl line 1 is not JSON"]),
    "not a .parquet": ("t.parquet", b"text", ["t.parquet cannot be read as .parquet"]),
    **{f"a cut {s}": (f"t.txt{s}", do(b"text" * 99)[:-9], [f"t.txt{s} is truncated"]) for s, do in COMPRESS.items()},
    **{f"not a {s}": (f"t{s}", b"plain text", [f"t{s} is truncated or not a {s} file"]) for s in COMPRESS},
}


@pytest.mark.parametrize("case", BAD)
def test_bad_source_is_one_sentence(case: str, tmp_path: Path) -> None:
    name, content, expected = BAD[case]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        list(documents([str(tmp_path / name)]))
    assert all(part in str(caught.value) for part in expected), caught.value
    assert "\n" not in str(caught.value)


def test_long_line_of_a_jsonl_is_refused(tmp_path: Path) -> None:
    (path := tmp_path / "t.jsonl").write_text('{"text": "a"}\n' + json.dumps({"text": "b" * 5000}))
    assert [len(text) for text in documents([str(path)])] == [1, 5000]
    sizes = PieceSizes(piece_chars=500, block_bytes=100, line_chars=2000)
    with pytest.raises(UserError, match=r"t\.jsonl line 2 has more than 2,000 characters: split"):
        list(documents([str(path)], sizes=sizes))


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("gone", r"no column 'gone' \(it has 'text', 'body', 'number'\): name one with --field"),
        ("number", r"int64, not text, under 'number' \(it has 'text', 'body', 'number'\): name another --field"),
    ],
)
@pytest.mark.parametrize("source", ["f.parquet", "hf://parquet?data_files=f.parquet&cache_dir=cache"])
def test_table_without_the_field_names_its_columns(
    source: str, field: str, said: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(UserError, match=said):
        list(documents([source], field=field))


def test_table_with_two_columns_of_the_field_is_refused(tmp_path: Path) -> None:
    table = pyarrow.table([["a"], ["b"]], names=["text", "text"])
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    with pytest.raises(UserError, match="two columns 'text'"):
        list(documents([str(tmp_path / "t.parquet")]))


@pytest.mark.parametrize("name", ["t.parquet", "t.zst"])
def test_format_without_its_library_says_what_to_install(name: str, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / name).write_bytes(b"content")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=rf"Cannot read .*{name} without pyarrow: pip install 'onward\[data\]'"):
        list(documents([str(tmp_path / name)]))


def test_what_a_folder_skips_is_listed_by_reason(folder: Path) -> None:
    (folder / "blank.txt.gz").write_bytes(gzip.compress(b"\xef\xbb\xbf \r\n"))
    for path, text in {
        "empty.txt": "",
        "line.jsonl": "\n",
        "space.txt": " \u3000\n\t" * 9,
        "B.ZIP": "PK",
        "run/run.json": "{}",
        "run/tokenizer.json": "{}",
    }.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text)
    (folder / "out.unfinished").mkdir()
    os.mkfifo(folder / "pipe.txt")
    (folder / "loop").symlink_to(folder)
    (folder / "broken.txt").symlink_to("nowhere")
    files, skipped = folder_files(folder)
    assert [path.name for path in files] == ["a.txt", "b.jsonl", "c.md.gz", "e.jsonl.gz", "d", "f.parquet"]
    assert {reason: sorted(path.name for path in paths) for reason, paths in skipped.items()} == {
        "hidden": [".git"],
        ".png": ["picture.png"],
        ".zip": ["B.ZIP"],
        "empty": ["blank.txt.gz", "empty.txt", "line.jsonl", "space.txt"],
        "links to folders": ["loop"],
        "neither files nor folders": ["broken.txt", "pipe.txt"],
        "folders of runs or tokens": ["out.unfinished", "run"],
    }


def piped(path: Path, content: bytes) -> str:
    """A pipe; a thread writes the content to it."""
    os.mkfifo(path)
    threading.Thread(target=path.write_bytes, args=[content], daemon=True).start()
    return str(path)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("pipe", b"a text\n", ["a text\n"]),
        ("p.jsonl.gz", gzip.compress(b'{"text": "x"}\n{"text": "y"}'), ["x", "y"]),
        ("p.parquet", parquet(**TABLE), F),
    ],
)
def test_a_pipe_is_read_as_a_file_of_its_name(name: str, content: bytes, expected: list[str], tmp_path: Path) -> None:
    assert list(documents([piped(tmp_path / name, content)])) == expected


def test_stored_streams_can_be_read_again_and_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"typed")))
    pipe = piped(tmp_path / "p.jsonl", b'{"text": "x"}')
    (tmp_path / "t.txt").write_text("plain")
    calls: list[tuple[str, int, int]] = []
    given = ["-", str(tmp_path / "t.txt"), pipe]
    with stored_streams(given, tmp_path / "streams", lambda *call: calls.append(call)) as sources:
        for _ in range(2):
            assert list(documents(sources)) == ["typed", "plain", "x"]
        assert list(map(str, sources)) == given
    assert calls == [("reading standard input", 5, 0), (f"reading {pipe}", 13, 0)]
    assert not (tmp_path / "streams").exists()


def test_a_stream_that_would_fill_the_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = itertools.repeat(b"y\n" * 500)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=SimpleNamespace(read=lambda size: next(blocks))))
    with pytest.raises(
        UserError, match=r"Cannot store standard input .* longer than 5,000 bytes, half of the free space of"
    ):
        store("-", tmp_path / "streams/0", lambda *_: None, most=5000)
    assert next(blocks), "not all of it is read"
    assert not list((tmp_path / "streams").iterdir())


def test_devices_are_refused() -> None:
    with pytest.raises(UserError, match="/dev/null is neither a file nor a pipe"):
        list(documents(["/dev/null"]))


def test_file_that_vanishes_is_a_user_error(folder: Path) -> None:
    found = documents([str(folder)])
    next(found)
    (folder / "deep/e.jsonl.gz").unlink()
    with pytest.raises(UserError, match=r"e\.jsonl\.gz cannot be read: No such file"):
        list(found)


def test_sources_without_any_text_are_user_errors(tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(b"\0")
    with pytest.raises(UserError, match="contains no text files"):
        list(documents([str(tmp_path)]))
    with pytest.raises(UserError, match="no text is named"):
        list(documents([]))
    with pytest.raises(UserError, match=r"hf://no/such cannot be loaded \(.*name a dataset"):
        list(documents(["hf://no/such"]))
    with pytest.raises(UserError, match="--encoding klingon is unknown"):
        list(read("x", io.BytesIO(b"abc"), Reading(encoding="klingon")))


ENCODINGS = st.sampled_from(
    ["utf-8", "latin-1", "utf-16", "utf-7", "utf-8-sig", "shift_jis", "punycode", "rot13", "hex"]
)
LINES = st.lists(st.dictionaries(st.sampled_from(["text", "b"]), st.text() | st.none()).map(json.dumps))


@given(
    data=st.binary() | st.text().map(str.encode) | LINES.map("\n".join).map(str.encode),
    name=st.sampled_from(["x.txt", "x.jsonl"]),
    encoding=ENCODINGS,
)
def test_any_bytes_are_documents_or_a_user_error(data: bytes, name: str, encoding: str) -> None:
    try:
        found = [
            text
            for piece in read(name, io.BytesIO(data), Reading(encoding=encoding))
            for text in piece.documents("text")
        ]
    except UserError:
        return
    for text in found:
        text.encode()  # fails for lone surrogates


@given(st.binary())
def test_any_bytes_named_gz_are_a_user_error(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.gz"
        path.write_bytes(b"\x1f\x8b\x08" + data)
        with pytest.raises(UserError, match=r"x\.gz"):
            list(documents([str(path)]))


@pytest.mark.parametrize("encoding", ["utf16", "UTF16", "u16", "utf-16", "U32"])
def test_aliases_of_wide_encodings_are_known(encoding: str, tmp_path: Path) -> None:
    (path := tmp_path / "a.txt").write_bytes("word".encode(encoding))
    assert list(documents([str(path)], encoding=encoding)) == ["word"]


def test_names_in_capitals_are_read_as_in_lower_case(tmp_path: Path) -> None:
    (tmp_path / "A.TXT.GZ").write_bytes(gzip.compress(b"word"))
    assert list(documents([str(tmp_path)])) == ["word"]


NESTED: list[dict[str, object]] = [{"data": {"text": "one", "n": 1}}, {"data": None}, {"data": {"text": None}}]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_field_may_be_a_path_and_null_is_an_empty_document(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"t.{kind}"
    if kind == "parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(NESTED), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in NESTED))
    assert list(documents([str(path)], field="data.text")) == ["one", "", ""]
    for field, sentence in {"data.txt": r"no (column|text under) 'data\.txt'", "data.n": "holds int"}.items():
        with pytest.raises(UserError, match=f"t.{kind} .*{sentence}"):
            list(documents([str(path)], field=field))
    flat = tmp_path / "flat.jsonl"
    flat.write_text('{"data.text": "flat", "data": {"text": "nested"}}')
    assert list(documents([str(flat)], field="data.text")) == ["flat"]
