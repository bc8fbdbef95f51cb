"""Documents from every kind of source, and a UserError for every bad source."""

import gzip
import io
import json
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward.data.sources import Sizes, documents, pieces, read, split
from onward.errors import UserError

TABLE = {"text": ["p", None, "q\r\n"], "body": ["b", "c", "d"], "number": [1, 2, 3]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "deep/er").mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    (tmp_path / "a.txt").write_bytes("\ufeffä one\r\ntwo".encode())
    (tmp_path / "b.jsonl").write_text('{"text": "x", "body": "y"}\n\n{"text": "z\\n", "body": "\\u2028"}\n')
    (tmp_path / "deep/c.md.gz").write_bytes(gzip.compress(b"packed"))
    (tmp_path / "deep/er/d").write_text("no suffix")
    (tmp_path / "deep/e.jsonl.gz").write_bytes(gzip.compress(b'{"text": "rows"}'))
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table(TABLE), tmp_path / "f.parquet")
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
    sizes = Sizes(piece_chars=size, block_bytes=block)
    (tmp_path / "t.txt.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": f"{text}{i}"}) + "\n" for i in range(5)))
    for name, expected in ("t.txt.gz", [text.replace("\r\n", "\n")]), ("t.jsonl", [f"{text}{i}" for i in range(5)]):
        found = list(pieces([str(tmp_path / name)], "text", "utf-8", sizes))
        assert len(found) > 1
        assert list(documents([str(tmp_path / name)], sizes=sizes)) == expected


@given(text=st.text("ab \n\r\u3000"), size=st.integers(1, 9))
def test_passages_join_to_the_text_and_are_short(text: str, size: int) -> None:
    parts = list(split(text, size))
    assert "".join(parts) == text
    assert max(map(len, parts)) <= size


def test_text_is_split_after_a_line_that_another_line_follows() -> None:
    assert list(split("one two\nthree\n\nfour five", 17)) == ["one two\n", "three\n\nfour five"]


BAD: dict[str, tuple[str, bytes | None, list[str]]] = {  # name, content, parts of the message
    "no such file": ("gone.txt", None, ["gone.txt does not exist"]),
    "a glob without a match": ("*.nothing", None, ["*.nothing does not exist"]),
    "a name too long": ("x" * 5000, None, ["does not exist"]),
    "an empty file": ("t.txt", b"", ["t.txt is empty"]),
    "a file of spaces": ("t.txt", b" \n\t", ["t.txt is empty"]),
    "a binary file": ("t.txt", b"abc\0def", ["t.txt is binary", "offset 3"]),
    "not UTF-8": ("t.txt", b"ab\nc\xff", ["t.txt is not utf-8", "offset 4", "line 2", "--encoding"]),
    "a cut .gz": ("t.txt.gz", gzip.compress(b"text" * 99)[:-9], ["t.txt.gz is truncated"]),
    "not a .gz": ("t.gz", b"plain text", ["t.gz", "not a .gz"]),
    "a broken line": ("t.jsonl", b'{"text": "a"}\n\n{"text": ', ["t.jsonl line 3 is not JSON"]),
    "a line without the field": ("t.jsonl", b'{"body": "a"}', ["t.jsonl line 1", "'text'", "body", "--field"]),
    "a field with a line break": ("t.jsonl", b'{"a\\nb": "a"}', ["t.jsonl line 1", r"'a\nb'"]),
    "a field that is no text": ("t.jsonl", b'{"text": 3}', ["t.jsonl line 1 holds int, not text, under 'text'"]),
    "a line that is a list": ("t.jsonl", b"[1]", ["t.jsonl line 1", "list"]),
    "deep brackets": ("t.jsonl", b"[" * 100_000, ["t.jsonl line 1 is not JSON"]),
    "not a .parquet": ("t.parquet", b"text", ["t.parquet cannot be read as .parquet"]),
    "a long number": ("t.jsonl", b"9" * 10_000, ["t.jsonl line 1 is not JSON"]),
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


@pytest.mark.parametrize("field", ["gone", "number"])
@pytest.mark.parametrize("source", ["f.parquet", "hf://parquet?data_files=f.parquet&cache_dir=cache"])
def test_table_without_the_field_names_its_columns(
    source: str, field: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(UserError, match=rf"no text under '{field}' \(it has 'text', 'body', 'number'\): .*--field"):
        list(documents([source], field=field))


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
        list(read("x", io.BytesIO(b"abc"), "klingon"))


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
        found = [text for piece in read(name, io.BytesIO(data), encoding) for text in piece.documents("text")]
    except UserError:
        return
    for text in found:
        text.encode()  # no lone surrogate


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
