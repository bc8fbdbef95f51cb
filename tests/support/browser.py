"""Chromium for tests of the server's page and the site."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def chromium() -> Iterator[Any]:
    """Start Chromium without a window. Skips the test if Chromium or playwright is missing."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
    program = shutil.which("chromium")
    if not program:
        pytest.skip("needs chromium")
    with playwright.sync_playwright() as started:
        yield started.chromium.launch(executable_path=program, args=["--no-sandbox"])
