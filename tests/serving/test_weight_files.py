"""Files of weights that change under a server: it ends with a sentence, or has copied them."""

import os
import shutil
import signal
from pathlib import Path

import httpx
import pytest

from support.server import started


def ask(url: str) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 4, "seed": 1}, timeout=60)


@pytest.mark.parametrize("change", ["truncated", "rewritten"])
def test_a_server_whose_weights_change_ends_with_a_sentence(change: str, tiny_run: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_run, tmp_path / "run")
    process, url = started(str(folder), "--compile", "--rows", "1")
    assert ask(url).status_code == 200
    (path,) = folder.glob("*.safetensors")
    if change == "truncated":
        os.truncate(path, 100)
    else:
        with path.open("r+b") as file:
            file.write(bytes(100))
    reply = ask(url)
    assert reply.status_code == 400
    assert f"{path.name} was changed" in reply.json()["error"]["message"]
    assert process.wait(30) == 2
    said = process.stderr.read() if process.stderr else ""
    assert "was changed while the model uses it" in said
    assert "Traceback" not in said


def test_a_server_that_has_copied_its_weights_goes_on(tiny_run: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_run, tmp_path / "run")
    process, url = started(str(folder), "--no-mmap")
    before = ask(url).json()["choices"]
    (path,) = folder.glob("*.safetensors")
    os.truncate(path, 100)
    assert ask(url).json()["choices"] == before
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
