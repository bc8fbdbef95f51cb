"""The server's page in a browser: opening it, requesting answers, and models with scripted answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from onward.text.tokenizer import Tokenizer

VIEWS = "next", "attention", "layers", "parts", "engine"
SEEDS = """
let seed = 1000;
const random = crypto.getRandomValues.bind(crypto);
crypto.getRandomValues = (numbers) => numbers.length === 1 ? numbers.fill(seed += 2) : random(numbers);
"""  # the seeds that the page draws for answers are the same in each run; with random ones, answers are sometimes equal


@contextmanager
def opened(
    browser: Any, url: str, scheme: str = "light", width: int = 1280, faults: Sequence[str] = (), script: str = ""
) -> Iterator[Any]:
    """Open the page; afterwards check that the console has no errors except those that contain one of `faults`, and
    that nothing is wider than the window. `script` runs before the page's own scripts."""
    size = {"width": width, "height": 900}
    context = browser.new_context(color_scheme=scheme, viewport=size, permissions=["clipboard-read", "clipboard-write"])
    page = context.new_page()
    page.set_default_timeout(20_000)
    errors: list[str] = []
    page.on("console", lambda message: message.type == "error" and errors.append(message.text))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.add_init_script(SEEDS + script)
    page.goto(url)
    page.wait_for_selector("#model option, #key-form:not([hidden])", state="attached")
    yield page
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert [error for error in errors if not any(known in error for known in faults)] == []
    context.close()


def options(page: Any, **values: object) -> None:
    """Set options in the foldable panel, and close it."""
    page.click("#options summary")
    for name, value in values.items():
        page.fill(f"#{name}", str(value))
    page.click("#options summary")


def ask(page: Any, text: str, **values: object) -> None:
    """Send a text with options, and wait for the end of its answer."""
    if values:
        options(page, **values)
    page.fill("#prompt", text)
    page.click("#go")
    ended(page)


def ended(page: Any) -> None:
    """Wait for the end of the newest answer."""
    page.wait_for_selector("#log article:last-child .acts [title='Copy the text']")
    page.wait_for_selector("#go:not([hidden])")


def newest(page: Any) -> Any:
    """The newest turn."""
    return page.locator("#log article").last


def answers(page: Any, tokenizer: Tokenizer, text: str) -> Callable[[], None]:
    """Make the server's models answer each completion request with this text; return a function that undoes this."""

    def forced(route: Any) -> None:
        body = route.request.post_data_json
        tokens = [*tokenizer.encode(text, special=False), tokenizer.eos_id]
        route.continue_(post_data=json.dumps(body | {"forced_tokens": tokens}))

    page.route("**/v1/completions", forced)
    return lambda: page.unroute("**/v1/completions")
