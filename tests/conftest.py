"""What all tests share: one thread, no hub, real data, and one small trained run."""

import os
import random
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="hub-")  # the cache of the hub is empty
os.environ["XDG_CACHE_HOME"] = os.environ["HF_HOME"]  # and that of kept answers and machine code
os.environ["OMP_NUM_THREADS"] = "1"  # the models are too small for more; also of subprocesses

import pytest
import torch
from hypothesis import settings

from support import SHARED, devices
from support.browser import chromium
from support.ranks import Ranks

settings.register_profile("onward", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("onward")
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores Ctrl-C, and its children

TINY = {"d_model": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "context_length": 32}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where tests compute, such as cuda (default: cpu)")


def pytest_configure(config: pytest.Config) -> None:
    stack = ExitStack()
    stack.enter_context(devices.using(config.getoption("device")))
    config.add_cleanup(stack.close)
    config.add_cleanup(lambda: shutil.rmtree(os.environ["HF_HOME"], ignore_errors=True))


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    # Compressed bytes hold the time: two processes would collect tests of different names.
    return argname if isinstance(val, bytes) else None


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device on which the tests compute."""
    return devices.device()


@pytest.fixture(scope="session")
def two() -> Iterator[Ranks]:
    """Two processes of one group, which wait for tasks."""
    with closing(Ranks(2)) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def four() -> Iterator[Ranks]:
    """Four processes of one group, which wait for tasks."""
    with closing(Ranks(4)) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real data beside the repository; tests that use it skip where it is absent."""
    if not SHARED.is_dir():
        pytest.skip(f"needs the data in {SHARED}")
    return SHARED


@pytest.fixture(scope="module")  # playwright's event loop bars others until it ends
def browser() -> Iterator[Any]:
    """Chromium; tests that use it skip where it is absent."""
    with chromium() as started:
        yield started


@pytest.fixture(scope="session")
def story() -> str:
    """About 8,000 characters of simple English, the same each time."""
    choose = random.Random(0).choice
    who, does, where = ["The cat", "A dog", "The old king"], ["sat", "slept", "sang"], ["mat", "hill", "café"]
    return "".join(f"{choose(who)} {choose(does)} on the {choose(where)}.\n" for _ in range(270))


@pytest.fixture(scope="session")
def story_file(story: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "story.txt"
    path.write_text(story, encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def tiny_run(story_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of a small model with BPE; not to be changed."""
    import onward

    folder = tmp_path_factory.mktemp("runs") / "tiny"
    onward.train(
        str(story_file), folder, tokenizer="bpe:300", steps=60, batch_size=8, precision="fp32", device="cpu", model=TINY
    )
    return folder


@pytest.fixture(scope="module")
def lm(tiny_run: Path) -> Any:
    """The model of the tiny run."""
    import onward

    return onward.load(tiny_run)
