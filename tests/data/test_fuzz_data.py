"""Data files that are damaged, unusual or malicious: they are read, or one sentence names the file.

The fuzzer runs a seeded sample by default and many more cases with `-m long`.
"""

import bz2
import functools
import gzip
import io
import json
import lzma
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from encodings.aliases import aliases
from pathlib import Path
from random import Random
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from onward import UserError, train_tokenizer
from onward.data import documents, load_tokens
from onward.data.prepare import prepare
from onward.data.reading import Reading

from support.limits import limited

SECONDS, ROOM = 10, 1 << 30
BYTE = train_tokenizer("byte", [])
WORDS = ["the", "cat\n", "é", "漢字", "\U0001f600", "\r\n", "\u2028", "\x1b", "\\", '"', "{", "[", ","]
VALUES: list[Any] = [
    None,
    True,
    -1,
    2**70,
    1e300,
    float("nan"),
    "",
    " ",
    "\ud800",
    "text",
    [],
    ["a"],
    {},
    {"text": "a"},
]
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda content: pyarrow.compress(content, codec="zstd", asbytes=True),
}
FORMATS = ".txt", ".jsonl", ".parquet"
ENCODINGS = [*sorted({*aliases, *aliases.values()}), "klingon", "", "a\0b", "é", "undefined", "idna", "../x"]
NAMES = [
    "-x.txt",
    "a b.txt",
    "[1].txt",
    "*.txt",
    "a\nb.txt",
    "\udcff.txt",
    "hf:.txt",
    "é.txt",
    ".txt",
    "~",
    "a.",
    "x" * 250,
]
COLUMNS = [
    *([value] for value in ("a", None, 1, 1.5, b"\xff", ["a", "b"], {"text": "a"})),
    pyarrow.array(["a"]).dictionary_encode(),
    pyarrow.array([1]).dictionary_encode(),
    pyarrow.array([b"\xff\xc3"]).view(pyarrow.string()),  # not UTF-8
    pyarrow.array([], pyarrow.string()),
]


def text(random: Random, words: int = 200) -> str:
    return " ".join(random.choices(random.choice([WORDS, WORDS[:2]]), k=random.randrange(words)))


def parquet(table: Any, **options: Any) -> bytes:
    pyarrow.parquet.write_table(table, file := io.BytesIO(), **options)
    return file.getvalue()


def content(random: Random, suffix: str) -> bytes:
    """The content of a readable file."""
    texts = [text(random, 20) for _ in range(random.randint(1, 9))]
    match suffix:
        case ".jsonl":
            return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
        case ".parquet":
            compression, use_dictionary = random.choice(["none", "snappy", "zstd"]), random.random() < 0.5
            return parquet(pyarrow.table({"text": texts}), compression=compression, use_dictionary=use_dictionary)
    return "".join(texts).encode()


def damage(random: Random, content: bytes) -> bytes:
    """The content, truncated or with some bytes inserted, changed, removed, repeated or overwritten."""
    for _ in range(random.randint(1, 3)):
        at, end = sorted(random.randrange(len(content) + 1) for _ in range(2))
        middle, rest = content[at:end], content[end:]
        match random.randrange(6):
            case 0:
                middle, rest = b"", b""
            case 1:
                middle = random.randbytes(random.randint(1, 8)) + middle
            case 2:
                middle = random.randbytes(1) + middle[1:]
            case 3:
                middle = b""
            case 4:
                middle *= 2
            case 5:
                middle = bytes([random.choice([0, 0x7F, 0x80, 0xFF])]) * len(middle)
        content = content[:at] + middle + rest
    return content


Case = tuple[Path, dict[str, Any]]  # the source, and options of `documents`


def random_bytes(random: Random, folder: Path) -> Case:
    path = folder / f"r{random.choice([*FORMATS, '.zip', '.tar', ''])}{random.choice(list(COMPRESS))}"
    path.write_bytes(random.randbytes(random.randrange(3000)))
    return path, {}


def damaged(random: Random, folder: Path) -> Case:
    """A file that is damaged before or after compression."""
    suffix, compression = random.choice(FORMATS), random.choice(list(COMPRESS))
    first, second = random.choice([(damage, bytes_of), (bytes_of, damage), (damage, damage)])
    path = folder / f"d{suffix}{compression}"
    path.write_bytes(second(random, COMPRESS[compression](first(random, content(random, suffix)))))
    return path, {}


def bytes_of(random: Random, content: bytes) -> bytes:
    return content


def wrong_types(random: Random, folder: Path) -> Case:
    """A .jsonl file in which lines are not objects, lack the field, or have a field of another type."""
    (path := folder / "w.jsonl").write_text("\n".join(json.dumps(line(random)) for _ in range(random.randrange(5))))
    return path, {"field": random.choice(["text", "", "a\nb"])}


def line(random: Random) -> Any:
    value = random.choice(["text", "more text", random.choice(VALUES)])
    return random.choice([{random.choice(["text", "text", "", "a\nb"]): value}, value])


def wrong_columns(random: Random, folder: Path) -> Case:
    columns = [random.choice(COLUMNS[:-1]) for _ in range(random.randint(1, 2))]
    names = random.choices(["text", "body", "a.b", ""], k=len(columns))
    if random.random() < 0.1:
        columns, names = [COLUMNS[-1]], ["text"]
    (path := folder / "c.parquet").write_bytes(parquet(pyarrow.table(columns, names=names)))
    return path, {"field": random.choice(["text", "text", "a.b", ""])}


def odd_encoding(random: Random, folder: Path) -> Case:
    path, written = folder / f"e{random.choice(FORMATS[:2])}", text(random)
    try:
        path.write_bytes(written.encode(random.choice(ENCODINGS), "replace"))
    except (LookupError, ValueError, TypeError):  # not a text encoding
        path.write_bytes(random.choice([b"\xff\xfe", b"\xfe\xff", b"\xef\xbb\xbf", b""]) + written.encode())
    return path, {"encoding": random.choice(ENCODINGS)}


def blank(random: Random, folder: Path) -> Case:
    suffix, compression = random.choice(FORMATS), random.choice(list(COMPRESS))
    (path := folder / f"b{suffix}{compression}").write_bytes(
        COMPRESS[compression](random.choice([b"", b" ", b"\n\n", b"\xef\xbb\xbf", b'{"text": ""}\n' * 9, b"\x1e"]))
    )
    return path, {}


def large(random: Random, folder: Path) -> Case:
    """Lines of up to 2 MiB, deep nesting or many lines, possibly compressed."""
    size = 1 << random.randrange(10, 22)
    lines = [
        b"a" * size,
        b'{"text": "' + b"a" * size + b'"}',
        b"[" * size,
        b'{"text": ' * size,
        b"\n" * size,
        b"1" * size,
    ]
    compression = random.choice(list(COMPRESS))
    (path := folder / f"l{random.choice(FORMATS[:2])}{compression}").write_bytes(
        COMPRESS[compression](random.choice(lines))
    )
    return path, {}


def odd_name(random: Random, folder: Path) -> Case:
    path = folder / random.choice(NAMES)
    if random.random() < 0.8:
        path.write_bytes(content(random, path.suffix))
    return random.choice([path, folder]), {}


def link(random: Random, folder: Path) -> Case:
    (path := folder / "k.txt").symlink_to(random.choice([str(folder), "k.txt", "gone", "/dev/null", "t.txt"]))
    (folder / "t.txt").write_text("text")
    return random.choice([path, folder]), {}


def pipe(random: Random, folder: Path) -> Case:
    """A named pipe, given by its path or by its folder."""
    suffix, compression = random.choice(FORMATS), random.choice(list(COMPRESS))
    os.mkfifo(path := folder / f"p{suffix}{compression}")
    if random.random() < 0.2:
        return folder, {}
    written = random.choice([damage, bytes_of])(random, COMPRESS[compression](content(random, suffix)))
    threading.Thread(target=write_to_pipe, args=[path, written], daemon=True).start()
    return path, {}


def write_to_pipe(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except BrokenPipeError:  # the reader has stopped after an error
        pass


def mixed(random: Random, folder: Path) -> Case:
    """A folder with up to three subfolders, each with files of a random kind."""
    for number in range(random.randrange(4)):
        (inside := folder / f"{number}").mkdir()
        random.choice([random_bytes, damaged, blank, odd_name, link])(random, inside)
    return folder, {}


KINDS = [
    random_bytes,
    damaged,
    damaged,
    wrong_types,
    wrong_columns,
    odd_encoding,
    blank,
    large,
    odd_name,
    link,
    pipe,
    mixed,
]


def outcome(source: str, options: dict[str, Any], out: Path | None) -> str:
    """The refusal of a source by `documents` or, with `out`, by `prepare`; "" if it is read."""
    with limited(SECONDS, ROOM), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if out:
            return refusal_of(lambda: prepare([source], BYTE, out, workers=1, reading=Reading(**options)))
        return refusal_of(lambda: "".join(documents([source], **options)).encode())  # fails for lone surrogates


def refusal_of(read: Callable[[], object]) -> str:
    """The message of a refusal, or ""."""
    try:
        read()
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.fuzzer
@pytest.mark.parametrize("count", [150, pytest.param(30_000, marks=pytest.mark.long)])
def test_any_file_of_data_is_read_or_refused_by_its_name(count: int, tmp_path: Path) -> None:
    seen = set()
    for seed in range(count):
        random = Random(seed)
        (folder := tmp_path / str(seed)).mkdir()
        kind = KINDS[seed % len(KINDS)]
        source, options = kind(random, folder)
        out = tmp_path / f"out{seed}" if random.random() < 0.2 else None
        refusal = outcome(str(source), options, out)
        seen.add((kind.__name__, bool(refusal)))
        named = str(folder) in refusal or f"--encoding {options.get('encoding')}" in refusal
        assert not refusal or named, f"seed {seed}: {refusal}"
        assert "\n" not in refusal.replace("a\nb.txt", ""), f"seed {seed}: {refusal}"
        assert not refusal or not out or not list(tmp_path.glob(f"out{seed}*")), f"seed {seed} leaves files"
    assert seen >= {(kind.__name__, refused) for kind in set(KINDS) - {random_bytes} for refused in (False, True)}


def paths(value: Any, *before: str | int) -> Iterator[tuple[str | int, ...]]:
    """The paths (keys and indices) of all values in nested dicts and lists."""
    for key, inside in (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    ):
        yield (*before, key)
        yield from paths(inside, *before, key)


def test_any_value_in_the_index_of_tokens_works_or_is_refused_by_its_file(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"text": "a"}\n{"text": "b"}')
    sources, out = [str(tmp_path / "t.jsonl")], tmp_path / "out"
    path = prepare(sources, BYTE, out).folder / "data.json"
    index, refused = json.loads(path.read_text()), set()
    for number, keys in enumerate(paths(index)):
        *before, last = keys
        for value in VALUES[number % 3 :: 3]:
            changed = json.loads(json.dumps(index))
            functools.reduce(lambda table, key: table[key], before, changed)[last] = value
            path.write_text(json.dumps(changed))
            for read in load_tokens, functools.partial(prepare, sources, BYTE):
                if refusal := refusal_of(functools.partial(read, out)):
                    assert str(out) in refusal
                    refused.add(keys)
    unread = "version", "tokenizer", "files", "size", "listing"  # information for the user, not read by Onward
    assert refused >= {keys for keys in paths(index) if keys[0] == "settings" or keys[-1] not in unread}
