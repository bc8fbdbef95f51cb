"""The page at /, in a real browser: it completes, branches, answers knobs, looks inside and switches layers off."""

import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.server import Running, serving


@pytest.fixture(scope="module")
def server(tiny_run: Path) -> Iterator[Running]:
    with serving(tiny_run, rows=2) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
    chromium = shutil.which("chromium")
    if not chromium:
        pytest.skip("needs chromium")
    with playwright.sync_playwright() as started:
        yield started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])


@pytest.mark.parametrize(
    "name", ["", "page/page.js", "page/page.css", "page/api.js", "page/inside.js", "page/engine.js"]
)
def test_files_of_the_page_are_served_without_a_key(name: str, tiny_run: Path) -> None:
    with serving(tiny_run, keys=["secret"]) as server:
        reply = httpx.get(f"{server.url}/{name}")
    assert reply.status_code == 200
    assert "script-src 'self'" in reply.headers["content-security-policy"]
    assert "http://" not in reply.text
    assert "https://" not in reply.text


@pytest.mark.parametrize("name", ["page/../app.py", "page/%2e%2e/app.py", "page/nothing.js"])
def test_no_other_file_is_served(name: str, server: Running) -> None:
    assert httpx.get(f"{server.url}/{name}").status_code == 404


@pytest.mark.parametrize(("scheme", "width"), [("dark", 400), ("light", 1280)])
def test_a_text_is_completed_branched_and_looked_into(scheme: str, width: int, server: Running, browser: Any) -> None:
    expect = pytest.importorskip("playwright.sync_api").expect
    page = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900}).new_page()
    page.set_default_timeout(20_000)
    faults: list[str] = []
    page.on("console", lambda message: message.type == "error" and faults.append(message.text))
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.goto(server.url)
    page.wait_for_selector("#parts button")
    page.fill("#prompt", "The cat")
    page.fill("#max_tokens", "12")
    page.click("#go")
    page.wait_for_selector("#lens td")
    page.locator("#status", has_text="12 tokens").wait_for()
    page.click("#text button >> nth=2")
    page.wait_for_selector("#next tbody button:disabled")
    before = page.locator("#next tbody").text_content()
    page.fill("#temperature", "0.3")
    expect(page.locator("#next tbody")).not_to_have_text(before)
    page.click("#next tbody button:not(:disabled) >> nth=0")
    page.wait_for_selector("#branches button >> nth=1")
    text = page.locator("#text").text_content()
    page.focus("#parts button >> nth=0")
    page.keyboard.press("Enter")
    expect(page.locator("#text")).not_to_have_text(text)
    assert page.get_attribute("#parts button >> nth=0", "aria-pressed") == "true"
    page.wait_for_selector("#engine .blocks i")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert not faults


def test_the_copied_command_gives_the_text_of_the_page(server: Running, browser: Any, tiny_run: Path) -> None:
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    page = context.new_page()
    page.set_default_timeout(20_000)
    page.goto(server.url)
    page.wait_for_selector("#parts button")
    page.fill("#prompt", "The cat")
    page.fill("#max_tokens", "8")
    page.fill("#frequency_penalty", "0.5")
    page.click("#go")
    page.locator("#status", has_text="8 tokens").wait_for()
    text = page.evaluate("[...document.querySelectorAll('#text > *')].map(one => one.textContent).join('')")
    page.click("[data-copy=onward]")
    page.locator("#status", has_text="copied").wait_for()
    words = shlex.split(page.evaluate("navigator.clipboard.readText()"))
    assert words[:2] == ["onward", "generate"]
    result = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == text.replace("↵", "").strip()
