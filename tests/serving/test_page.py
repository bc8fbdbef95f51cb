"""The page at / in a real browser: texts, conversations, branches, knobs, the inside of the model, shared links."""

import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

import onward

from support.server import Running, serving

FILES = (
    "",
    *(f"page/{name}" for name in ("page.js", "page.css", "api.js", "tree.js", "next.js", "inside.js", "share.js")),
)


@pytest.fixture(scope="module")
def server(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    lm = onward.load(tiny_run)
    talker = onward.Decoder(replace(lm.config, context_length=256)).eval()  # a context for conversations
    talker.load_state_dict(lm.model.state_dict())
    folder = tmp_path_factory.mktemp("models") / "talker"
    onward.save(onward.LanguageModel(talker, lm.tokenizer), folder)
    with serving([tiny_run, folder], rows=2) as running:
        yield running


@contextmanager
def opened(browser: Any, url: str, scheme: str = "light", width: int = 1280) -> Iterator[Any]:
    """Open the page; afterwards the console holds no error, and nothing is wider than the window."""
    size = {"width": width, "height": 900}
    context = browser.new_context(color_scheme=scheme, viewport=size, permissions=["clipboard-read", "clipboard-write"])
    page = context.new_page()
    page.set_default_timeout(20_000)
    faults: list[str] = []
    page.on("console", lambda message: message.type == "error" and faults.append(message.text))
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.goto(url)
    page.wait_for_selector("#parts button")
    page.wait_for_selector("#engine .blocks i")
    yield page
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert not faults
    context.close()


def complete(page: Any, prompt: str = "The cat", count: int = 12) -> None:
    """Let the page complete a prompt, and wait for what it shows of the first token."""
    page.fill("#prompt", prompt)
    page.fill("#max_tokens", str(count))
    page.click("#go")
    page.locator("#status", has_text=f"{count} tokens").wait_for()
    page.wait_for_selector("#lens td")


@pytest.mark.parametrize("name", FILES)
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
    with opened(browser, server.url, scheme, width) as page:
        complete(page)
        page.click("#text button >> nth=2")
        page.wait_for_selector("#next tbody button:disabled")
        before = page.locator("#next tbody").text_content()
        page.fill("#top_k", "3")
        expect(page.locator("#kept")).to_contain_text("3 of")
        expect(page.locator("#next tr.cut").first).to_contain_text("cut")
        expect(page.locator("#next tbody")).not_to_have_text(before)
        page.click("#next tbody button:not(:disabled) >> nth=0")
        expect(page.locator("#tree button[aria-current=true]")).to_have_count(2)
        expect(page.locator("#tree button")).to_have_count(3)
        text = page.locator("#text").text_content()
        page.click("#tree button:not([aria-current=true])")
        expect(page.locator("#text")).not_to_have_text(text)
        layer = page.locator("#layer").input_value()
        page.click("#maps", position={"x": 60, "y": page.locator("#maps").bounding_box()["height"] - 3})
        assert page.locator("#layer").input_value() != layer
        assert page.locator("#attention span").count() > 0
        page.click("#parts button >> nth=0")
        page.locator("#status", has_text="12 tokens").wait_for()
        assert page.get_attribute("#parts button >> nth=0", "aria-pressed") == "true"


def test_a_conversation_goes_on_from_its_answers(server: Running, browser: Any) -> None:
    with opened(browser, server.url, width=400) as page:
        page.select_option("#model", "talker")
        page.select_option("#mode", "chat")
        page.fill("#max_tokens", "6")
        for number, message in enumerate(["What is a cat?", "And a dog?"]):
            page.fill("#prompt", message)
            page.press("#prompt", "Enter")
            page.locator("#messages p").nth(2 * number).wait_for()
            page.locator("#status", has_text="tokens").wait_for()
            page.wait_for_selector("#lens td")
        roles = page.locator("#messages b").all_text_contents()
        answer = page.locator("#messages p").nth(1).text_content()
        page.click("#new")
        assert page.locator("#messages p").count() == 0
    assert roles == ["user", "assistant", "user"]
    body = {"model": "talker", "messages": [{"role": "user", "content": "What is a cat?"}], "max_tokens": 6, "seed": 1}
    assert (
        answer
        == "assistant " + server.post("/v1/chat/completions", **body).json()["choices"][0]["message"]["content"].strip()
    )


def test_a_shared_link_holds_prompt_seed_settings_and_what_is_off(server: Running, browser: Any) -> None:
    with opened(browser, server.url) as page:
        page.fill("#seed", "7")
        page.fill("#temperature", "0.5")
        page.click("#parts button >> nth=1")
        complete(page)
        text = page.locator("#text").text_content()
        page.click("[data-copy=link]")
        page.locator("#status", has_text="copied").wait_for()
        link = page.evaluate("navigator.clipboard.readText()")
        page.click("[data-copy=onward]")
        page.locator("#status", has_text="switches nothing off").wait_for()
    with opened(browser, link) as page:
        assert page.locator("#seed").input_value() == "7"
        assert page.get_attribute("#parts button >> nth=1", "aria-pressed") == "true"
        page.click("#go")
        page.locator("#status", has_text="12 tokens").wait_for()
        assert page.locator("#text").text_content() == text


@pytest.mark.parametrize("hash", ["#nothing", "#%7B%22prompt%22%3A%5B%5D%7D", "#%", "#%7B%22key%22%3A1%7D"])
def test_a_broken_link_opens_the_page(hash: str, server: Running, browser: Any) -> None:
    with opened(browser, server.url + "/" + hash) as page:
        complete(page)


def test_everything_is_reached_by_keyboard(server: Running, browser: Any) -> None:
    with opened(browser, server.url, width=400) as page:
        focused = "[document.activeElement.id, document.activeElement.className, document.activeElement.textContent]"

        def tab(until: str, most: int = 80) -> None:
            for _ in range(most):
                page.keyboard.press("Tab")
                if page.evaluate(f"document.activeElement.matches({until!r})"):
                    return
            raise AssertionError(f"Tab reaches {page.evaluate(focused)}, not {until}")

        tab("#prompt")
        page.keyboard.press("Control+a")
        page.keyboard.type("The cat")
        tab("#max_tokens")
        page.keyboard.press("Control+a")
        page.keyboard.type("6")
        page.focus("#prompt")
        tab("#go")
        page.keyboard.press("Enter")
        page.locator("#status", has_text="6 tokens").wait_for()
        tab("#text .token")
        tab("#text .token:nth-of-type(3)")
        tab("#temperature")
        page.keyboard.press("ArrowLeft")
        assert page.locator("#temperature").input_value() == "0.95"
        page.wait_for_load_state("networkidle")  # a button that is made anew loses the focus
        tab("#next tbody button:not(:disabled)")
        page.keyboard.press("Enter")
        page.wait_for_selector("#tree button")
        page.focus("#prompt")
        tab("#tree button:not([aria-current])")
        page.keyboard.press("Enter")
        tab("#layer")
        page.keyboard.press("ArrowUp")
        tab("#parts button")
        page.keyboard.press("Enter")
        page.wait_for_selector("#parts button[aria-pressed=true]")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_fault(scheme: str, server: Running, browser: Any) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python").Axe()
    with opened(browser, server.url, scheme) as page:
        complete(page)
        page.click("#text button >> nth=2")
        page.fill("#top_k", "3")
        page.click("#next tbody button:not(:disabled) >> nth=0")
        page.wait_for_selector("#tree button")
        page.click("#parts button >> nth=0")
        page.locator("#status", has_text="tokens").wait_for()
        faults = axe.run(page).response["violations"]
    assert not [
        (fault["id"], fault["nodes"][0]["html"]) for fault in faults if fault["impact"] in ("serious", "critical")
    ]


def test_the_copied_command_gives_the_text_of_the_page(server: Running, browser: Any, tiny_run: Path) -> None:
    with opened(browser, server.url) as page:
        page.fill("#frequency_penalty", "0.5")
        complete(page, count=8)
        text = page.evaluate("[...document.querySelectorAll('#text > *')].map(one => one.textContent).join('')")
        page.click("[data-copy=onward]")
        page.locator("#status", has_text="copied").wait_for()
        words = shlex.split(page.evaluate("navigator.clipboard.readText()"))
    assert words[:2] == ["onward", "generate"]
    result = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == text.replace("↵", "").strip()
