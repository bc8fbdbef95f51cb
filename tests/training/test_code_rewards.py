"""Code written by a model: the accesses that its sandbox prevents, and the absence of leftovers."""

import ctypes
import os
import platform
import socket
import sys
import tempfile
from pathlib import Path

import pytest

from onward.evaluation.programs import code_of, num_passed
from onward.evaluation.sandbox import CREATE_RULESET, MACHINES

LINUX = sys.platform == "linux"
FILTERED = LINUX and platform.machine() in MACHINES
LANDLOCKED = LINUX and ctypes.CDLL(None).syscall(CREATE_RULESET, None, 0, 1) >= 1
GOOD = "def f(x):\n    return x + 1\n"
RIGHT = ["assert f(1) == 2", "assert f(-1) == 0"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder used instead of /tmp, next to a folder with a user's file."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home/secret").write_text("a secret")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path


def assert_nothing_left(folder: Path) -> None:
    """Check that there is no file or process in a temporary folder, and that the user's file is unchanged."""
    assert {*os.listdir(folder)} == {"home", "temporary"}
    assert not [*(folder / "temporary").iterdir()]
    assert [(path.name, path.read_text()) for path in (folder / "home").iterdir()] == [("secret", "a secret")]
    for process in Path("/proc").glob("[0-9]*/cwd"):
        try:
            assert not os.readlink(process).startswith(str(folder / "temporary"))
        except OSError:  # the process has ended, or belongs to another user
            continue


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("x = 1", "x = 1"),
        ("```python\nx = 1\n```", "x = 1\n"),
        ("First\n```\nx = 1\n```\nthen\n```py\nx = 2\n```\nends", "x = 2\n"),
        ("```python\nx = 1", "```python\nx = 1"),
    ],
)
def test_code_is_the_last_fenced_block_or_all(text: str, code: str) -> None:
    assert code_of(text) == code


@pytest.mark.parametrize(
    ("code", "tests", "passed"),
    [
        (GOOD, RIGHT, 2),
        (GOOD, [*RIGHT, "assert f(1) == 1", "g(1)", "not Python"], 2),
        (GOOD, ["import sys; sys.exit(0)", "raise KeyboardInterrupt", *RIGHT], 2),
        (GOOD, ["f = None", "assert f(1) == 2"], 2),
        (GOOD + "print('x' * 100)", ["import math, json, random, collections, datetime; assert f(1) == 2"], 1),
        ("open('file', 'w').write('1')", ["assert open('file').read() == '1'"], 1),
        ("import threading\nt = threading.Thread(target=print)\nt.start()\nt.join()", ["pass"], FILTERED),
        ("import threading, time\nthreading.Thread(target=time.sleep, args=[60]).start()", ["pass"], FILTERED),
        ("if __name__ == '__main__':\n    input()", ["pass"], 1),
    ],
)
def test_tests_pass_by_themselves(code: str, tests: list[str], passed: int, folder: Path) -> None:
    assert num_passed(code, tests, 30, 1) == passed
    assert_nothing_left(folder)


ANYWHERE = {  # prevented on every system
    "not Python": "1 +",
    "a zero byte": "x = 1\0",
    "an exception": "1 / 0",
    "exit": "raise SystemExit(0)",
    "exit at once": "import os; os._exit(0)",
    "an endless loop": "while True: pass",
    "an endless wait": "import time; time.sleep(600)",
    "endless output": "while True: print('x' * 10_000)",
    "endless recursion": "def f(): f()\nf()",
    "all memory": "x = bytearray(1 << 40)",
    "more and more memory": "x = []\nwhile True: x.append(bytearray(1 << 27))",
    "a large file": "with open('file', 'wb') as file:\n    while True: file.write(bytes(1 << 20))",
    "many open files": "files = [open('file', 'w') for _ in range(100)]",
    "standard input": "input()",
    "a crash": "import ctypes; ctypes.string_at(0)",
    "forged results": "import os\nfor i in range(3, 64): os.set_inheritable(i, True), os.write(i, b'0\\n')",
    "a wait in an exit handler": "import atexit, time; atexit.register(time.sleep, 600); 1 / 0",
}
FILES = {  # prevented by Landlock
    "a file of the user's": "open(HOME + '/secret').read()",
    "the names of the user's files": "import os; os.listdir(HOME)",
    "the list of users": "open('/etc/passwd').read()",
    "a file written elsewhere": "open(HOME + '/left', 'w')",
    "a file overwritten": "open(HOME + '/secret', 'w')",
    "a file cut": "import os; os.truncate(HOME + '/secret', 0)",
    "a file removed": "import os; os.remove(HOME + '/secret')",
    "a file moved": "import os; os.rename(HOME + '/secret', 'taken')",
    "a link": "import os; os.link(HOME + '/secret', 'taken')",
    "a folder": "import os; os.mkdir('folder')",
    "other processes": "import os; os.listdir('/proc')",
}
CALLS = {  # prevented by seccomp
    "processes without end": "import os\nwhile True: os.fork()",
    "a process": "import os\nif os.fork(): os._exit(0)",
    "another program": "import subprocess; subprocess.run(['true'])",
    "a shell": "import os\nif os.system('true'): raise OSError",
    "this program anew": "import os; os.execv('/bin/true', ['true'])",
    "a signal to the parent": "import os; os.kill(os.getppid(), 0)",
    "a signal to all": "import os; os.killpg(0, 0)",
    "limits of the parent": "import os, resource; resource.prlimit(os.getppid(), resource.RLIMIT_CORE, (0, 0))",
    "the network": "import socket; socket.create_connection(('127.0.0.1', PORT), 1)",
    "a socket": "import socket; socket.socket(socket.AF_UNIX)",
    "the mode of a file": "import os; os.chmod(HOME + '/secret', 0)",
    "the times of a file": "import os; os.utime(HOME + '/secret', (0, 0))",
    "the owner of a file": "import os; os.chown(HOME + '/secret', os.getuid(), os.getgid())",
}


@pytest.mark.parametrize("case", ANYWHERE)
def test_code_that_does_harm_scores_0_and_leaves_nothing(case: str, folder: Path) -> None:
    assert num_passed(ANYWHERE[case], ["pass"], 0.5 if "endless" in case or "wait" in case else 20, 0.5) == 0
    assert_nothing_left(folder)


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(FILES, marks=pytest.mark.skipif(not LANDLOCKED, reason="no Landlock here"), id="files"),
        pytest.param(CALLS, marks=pytest.mark.skipif(not FILTERED, reason="no seccomp filter here"), id="calls"),
    ],
)
def test_the_kernel_refuses_files_and_calls_to_code(cases: dict[str, str], folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        places = f"HOME, PORT = {str(folder / 'home')!r}, {server.getsockname()[1]}"
        lines = {case: code.replace("\n", "\n    ") for case, code in cases.items()}
        refused = [f"try:\n    {code}\nexcept OSError: pass\nelse: 1 / 0" for code in lines.values()]
        assert num_passed(places, [*cases.values()], 20, 0.5) == 0
        assert num_passed(places, refused, 20, 0.5) == len(cases), "by an OSError, and by no mistake of these lines"
    assert_nothing_left(folder)
