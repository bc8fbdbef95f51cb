"""Weight files that change while a server uses them: the server ends with an error message, or uses a copy."""

import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from onward.serving.last_words import SENTENCE

from support.server import started


def ask(url: str) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 4, "seed": 1}, timeout=60)


def test_a_server_whose_weights_change_ends_with_a_sentence(tiny_run: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_run, tmp_path / "run")
    log: list[str] = []
    process, url = started(str(folder), "--rows", "1", log=log)
    (path,) = folder.glob("*.safetensors")

    def ask_until_it_ends() -> list[httpx.Response]:
        replies: list[httpx.Response] = []
        with suppress(httpx.TransportError):  # the server has ended
            while True:
                replies.append(ask(url))
        return replies

    with ThreadPoolExecutor(8) as threads:
        asked = [threads.submit(ask_until_it_ends) for _ in range(8)]
        assert ask(url).status_code == 200
        with path.open("r+b") as file:
            file.write(bytes(100))
        replies = [reply for one in asked for reply in one.result()]
    for reply in replies:
        assert reply.status_code == 200 or f"{path.name} was changed" in reply.json()["error"]["message"]
    assert process.wait(30) == 2
    time.sleep(0.2)  # wait until the log has been read
    assert "was changed while the model uses it" in "".join(log)
    assert "Traceback" not in "".join(log)


BEYOND_THE_END = """
import os, sys, threading, numpy
from onward.serving.last_words import say_at_bus_error

say_at_bus_error()
numbers = numpy.memmap(sys.argv[1], numpy.uint8, "r")
os.truncate(sys.argv[1], 100)
step = threading.Thread(target=numbers.sum)
step.start()
step.join()
"""


def test_a_process_that_reads_beyond_the_end_of_a_file_ends_with_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(1 << 20))
    done = subprocess.run([sys.executable, "-c", BEYOND_THE_END, path], capture_output=True, encoding="utf-8")
    assert (done.returncode, done.stderr) == (2, SENTENCE)


@pytest.mark.long
def test_a_server_that_has_copied_its_weights_goes_on(tiny_run: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_run, tmp_path / "run")
    process, url = started(str(folder), "--no-mmap")
    before = ask(url).json()["choices"]
    (path,) = folder.glob("*.safetensors")
    os.truncate(path, 100)
    assert ask(url).json()["choices"] == before
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
