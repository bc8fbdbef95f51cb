"""Machine code of decoding steps is kept for the next start, executed only if no other user can have written it, and
compiled again if LLVM cannot load it."""

import ctypes
import os
import random
import resource
import shutil
import stat
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from llvmlite import ir

from onward import Decoder, KVCache
from onward.base.files import cache_folder
from onward.compiled.graphs import GraphStep
from onward.compiled.interface import decoding_step
from onward.kernels.llvm import kept
from onward.kernels.llvm.code import INT
from onward.kernels.llvm.compiler import add_kernel, arguments, load
from onward.kernels.llvm.kept import NotKept, checksum, is_loadable, private_folder

from support.decoders import DECODERS

NOBODY = 65534
Doubled = arguments("Doubled", "source", "target")


def multiplying(factor: int, name: str = "kernel") -> ir.Module:
    """A kernel that writes its argument multiplied by a factor."""
    module = ir.Module()

    def emit(code, given, first, end) -> None:
        code.store(code.mul(code.scalar(given.source, "int64", 0), INT(factor)), code.at(given.target, "int64", 0))

    add_kernel(module, name, Doubled, emit)
    return module


def doubled(folder: Path, number: int) -> int:
    """Twice a number, computed by a kernel that is kept in a folder; another number if planted code was executed."""
    engine = load(multiplying(2), folder=folder)
    x, y = ctypes.c_int64(number), ctypes.c_int64()
    given = Doubled(source=ctypes.addressof(x), target=ctypes.addressof(y), items=1, threads=1)
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(engine.get_function_address("kernel"))(ctypes.addressof(given))
    return y.value


@contextmanager
def warned_at_most_once(reason: str = "") -> Iterator[None]:
    """Check that there is one warning for this reason; none without a reason."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    found = [warning for warning in caught if issubclass(warning.category, NotKept)]
    assert len(found) == bool(reason), [str(warning.message) for warning in caught]
    assert not found or reason in str(found[0].message), found[0].message


@pytest.fixture(scope="module")
def planted(tmp_path_factory) -> tuple[str, bytes]:
    """The name of the file that `doubled` loads, and machine code that triples instead."""
    one, other = (tmp_path_factory.mktemp(name) for name in ("double", "triple"))
    load(multiplying(2), folder=one)
    load(multiplying(3), folder=other)
    [path], [code] = one.iterdir(), other.iterdir()
    return path.name, checksum(path, code.read_bytes()[kept.CHECKSUM :]) + code.read_bytes()[kept.CHECKSUM :]


def plant(folder: Path, planted: tuple[str, bytes]) -> Path:
    path = folder / planted[0]
    path.touch(0o600)
    path.write_bytes(planted[1])
    return path


def of_another(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a path belong to another user: change its owner as root, else pretend to be another user."""
    if user := os.geteuid():
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    else:
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)


def moved(path: Path) -> None:
    """Replace a path with a symlink to a safe path."""
    target = path.with_name(path.name + ".elsewhere")
    path.rename(target)
    path.symlink_to(target)


def test_code_is_read_from_its_file_and_compiled_anew_where_it_is_damaged(tmp_path: Path) -> None:
    assert doubled(tmp_path, 21) == 42
    [path] = tmp_path.iterdir()
    written, time = path.read_bytes(), path.stat().st_mtime_ns
    assert doubled(tmp_path, 4) == 8
    assert path.stat().st_mtime_ns == time, "it was not written again"
    for damage in written[: len(written) // 2], b"", written[:40] + b"?" + written[41:]:
        path.write_bytes(damage)
        assert doubled(tmp_path, 5) == 10
        assert path.read_bytes() == written


def test_planted_code_would_be_executed_from_a_safe_file(tmp_path: Path, planted) -> None:
    plant(tmp_path, planted)
    assert doubled(tmp_path, 5) == 15, "the tests below plant code that the checks must refuse"


FILES: dict[str, Callable[[Path, pytest.MonkeyPatch], object]] = {
    "mode 0666": lambda path, _: path.chmod(0o666),
    "mode 0620": lambda path, _: path.chmod(0o620),
    "mode 0602": lambda path, _: path.chmod(0o602),
    "another owner": of_another,
    "a symlink": lambda path, _: moved(path),
    "too long": lambda path, _: os.truncate(path, kept.MAX_BYTES + 1),
    "code of another file": lambda path, _: path.write_bytes(checksum(Path("other.o"), b"code") + b"code"),
    "a pipe": lambda path, _: (path.unlink(), os.mkfifo(path)),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_others_could_have_written_is_compiled_and_replaced(
    name: str, tmp_path: Path, planted, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = plant(tmp_path, planted)
    if name == "another owner" and os.geteuid():  # otherwise the folder would be refused first
        monkeypatch.setattr(kept, "private_folder", lambda folder: folder)
    FILES[name](path, monkeypatch)
    with warned_at_most_once():
        assert doubled(tmp_path, 5) == 10
    assert stat.S_IMODE(path.lstat().st_mode) == 0o600
    assert stat.S_ISREG(path.lstat().st_mode)


FOLDERS: dict[str, tuple[Callable[[Path, pytest.MonkeyPatch], object], str]] = {
    "mode 0777": (lambda folder, _: folder.chmod(0o777), "chmod 700"),
    "mode 0770": (lambda folder, _: folder.chmod(0o770), "chmod 700"),
    "sticky and open to all": (lambda folder, _: folder.chmod(0o1777), "chmod 700"),
    "others may enter": (lambda folder, _: folder.chmod(0o711), "chmod 700"),
    "another owner": (of_another, "belongs to another user"),
    "a symlink": (lambda folder, _: moved(folder), "is a symlink"),
    "a file": (lambda folder, _: (shutil.rmtree(folder), folder.touch()), "is a symlink or a file"),
    "all may write above": (lambda folder, _: folder.parent.chmod(0o777), "chmod go-w"),
    "a group may write above": (lambda folder, _: folder.parent.chmod(0o770), "chmod go-w"),
    "another owner above": (lambda folder, monkeypatch: of_another(folder.parent, monkeypatch), "another user"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_no_code_is_executed_from_a_folder_that_others_can_change(
    name: str, tmp_path: Path, planted, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "above" / "code"
    (tmp_path / "above").mkdir(0o700)
    folder.mkdir(0o700)
    plant(folder, planted)
    spoil, reason = FOLDERS[name]
    spoil(folder, monkeypatch)
    with warned_at_most_once(reason):
        assert doubled(folder, 5) == 10


def test_folders_above_may_be_sticky_and_symlinks_of_them_are_resolved(tmp_path: Path) -> None:
    sticky, link = tmp_path / "sticky", tmp_path / "link"
    sticky.mkdir()
    sticky.chmod(0o1777)
    link.symlink_to(sticky)
    with warned_at_most_once():
        assert private_folder(link / "code") == sticky / "code"


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
def test_folders_and_files_are_made_for_this_user_alone_whatever_the_umask(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        assert doubled(tmp_path / "a" / "b", 21) == 42
    finally:
        os.umask(before)
    [path] = (tmp_path / "a" / "b").iterdir()
    assert [stat.S_IMODE(p.stat().st_mode) for p in (path, path.parent, path.parents[1])] == [0o600, 0o700, 0o700]


def test_a_relative_folder_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert private_folder("code") == tmp_path / "code"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder("code") == tmp_path / ".cache" / "onward" / "code", (
        "the cache folder of the standard is absolute"
    )


def malformed(code: bytes) -> dict[str, bytes]:
    """Variants of the code that LLVM cannot load."""
    return {
        "nothing": b"",
        "text": b"no machine code" * 10,
        "a header": code[:64],
        "a half": code[: len(code) // 2],
        "sections elsewhere": code[:40] + b"\xff" * 8 + code[48:],
    }


def test_code_that_llvm_cannot_load_is_compiled_and_never_ends_the_process(tmp_path: Path) -> None:
    assert doubled(tmp_path, 21) == 42
    [path] = tmp_path.iterdir()
    good = path.read_bytes()
    for name, code in malformed(good[kept.CHECKSUM :]).items():
        path.write_bytes(checksum(path, code) + code)
        with warned_at_most_once():
            assert doubled(tmp_path, 5) == 10, name
        assert path.read_bytes() == good, name


def test_code_without_one_of_its_functions_is_not_loadable(tmp_path: Path) -> None:
    load(multiplying(2, "another"), folder=tmp_path)
    [path] = tmp_path.iterdir()
    code = path.read_bytes()[kept.CHECKSUM :]
    assert is_loadable(code, ["another", "another.worker"])
    assert not is_loadable(code, ["another", "kernel"])


def test_no_python_to_try_code_with_compiles_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doubled(tmp_path, 21) == 42
    for executable in None, "", "/nonexistent", shutil.which("true"):
        monkeypatch.setattr(sys, "executable", executable)
        assert doubled(tmp_path, 5) == 10, executable


@pytest.mark.fuzzer
@pytest.mark.parametrize("count", [10, pytest.param(300, marks=pytest.mark.long)])
def test_damaged_code_with_a_right_checksum_never_ends_the_process(count: int, tmp_path: Path) -> None:
    draw = random.Random(0)
    load(multiplying(2), folder=tmp_path)
    [path] = tmp_path.iterdir()
    good = path.read_bytes()[kept.CHECKSUM :]
    for _ in range(count):
        code = bytearray(good)
        for _ in range(draw.randint(1, 6)):
            place = draw.choice([draw.randrange(64), draw.randrange(len(code) - 1000, len(code))])
            code[place] = draw.randrange(256)
        path.write_bytes(checksum(path, bytes(code)) + code)
        assert load(multiplying(2), folder=tmp_path).get_function_address("kernel")


def test_processes_that_write_and_read_one_file_at_once_find_it_whole(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from onward.kernels.llvm import kept\n"
        "folder = kept.private_folder(sys.argv[1]); path = folder / 'code.o'; mine = sys.argv[2].encode() * 200_000\n"
        "for _ in range(20):\n"
        "    kept.write(path, mine); found = kept.read(path)\n"
        "    assert found and len(found) == 200_000 and len(set(found)) == 1\n"
    )
    words = [sys.executable, "-W", "error", "-c", code, str(tmp_path / "made" / "by all")]
    processes = [subprocess.Popen([*words, letter], stderr=subprocess.PIPE, text=True) for letter in "abcd"]
    assert [process.communicate()[1] for process in processes] == [""] * 4
    assert [path.name for path in (tmp_path / "made" / "by all").iterdir()] == ["code.o"]


def test_a_full_disk_is_one_warning(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with warned_at_most_once("no part of it is left"):
            assert doubled(tmp_path, 21) == 42
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())


def test_a_folder_in_place_of_the_file_is_one_warning(tmp_path: Path, planted) -> None:
    (tmp_path / planted[0]).mkdir()
    with warned_at_most_once("cannot write"):
        assert doubled(tmp_path, 21) == 42


def test_a_folder_that_cannot_be_written_is_one_warning() -> None:
    folder = Path(tempfile.mkdtemp())  # any user may enter its parents, unlike those of tmp_path
    user = os.geteuid()
    try:
        folder.chmod(0o500)
        if user == 0:  # root may write anywhere
            os.chown(folder, NOBODY, NOBODY)
            os.seteuid(NOBODY)
        with warned_at_most_once("Permission denied"):
            assert doubled(folder, 21) == 42
        with warned_at_most_once("Permission denied"):
            assert doubled(folder / "deeper", 21) == 42
    finally:
        if user == 0:
            os.seteuid(user)
        folder.rmdir()


@pytest.mark.parametrize("place", ["/dev/null/home", "/proc/home", "a\0b"])
def test_a_home_that_cannot_hold_a_folder_is_one_warning(place: str) -> None:
    with warned_at_most_once("not kept"):
        assert doubled(Path(place), 21) == 42


def test_torch_compile_gets_a_folder_of_this_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    found = []

    class Step(GraphStep):
        def __init__(self, *arguments: object, **options: object) -> None:
            found.append(os.environ["TORCHINDUCTOR_CACHE_DIR"])

        def run(self, *arguments: object) -> Any:
            pass

    model = Decoder(DECODERS["llama"])
    monkeypatch.chdir(tmp_path)
    with warned_at_most_once():
        Step.compile_ahead(model, KVCache(model.config, 1, 8), (1, 1), decoding_step, Path("code"))
    assert found == [str(tmp_path / "code")]
    (tmp_path / "code").chmod(0o755)
    with warned_at_most_once("other users have access"):
        Step.compile_ahead(model, KVCache(model.config, 1, 8), (1, 1), decoding_step, Path("code"))
    assert found[1] != found[0]
    assert stat.S_IMODE(os.stat(found[1]).st_mode) == 0o700
