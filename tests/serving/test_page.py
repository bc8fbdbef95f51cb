"""The page at / in a real browser: texts, conversations, tokens, views of the model's internals, shared links."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

import onward
from onward.serving.pages import FOLDER

from support.server import Running, serving
from support.web_page import VIEWS, answers, ask, ended, newest, opened, options

FILES = ("", *(f"page/{path.name}" for path in sorted(FOLDER.iterdir())), "learn")
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}[assistant]"
MARKDOWN = """# Title
**bold**, *slanted*, `code<b>`, [link](https://example.org/), [bad](javascript:alert(1)) <img src=x onerror=hit=1>

- one
  1. inner
- two

```html
<script>hit = 1</script>
```
<script>hit = 1</script>"""


@pytest.fixture(scope="module")
def server(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    lm = onward.load(tiny_run)
    talker = onward.Decoder(replace(lm.config, context_length=512)).eval()  # a context long enough for conversations
    talker.load_state_dict(lm.model.state_dict())
    folder = tmp_path_factory.mktemp("models") / "talker"
    chat = onward.LanguageModel(talker, lm.tokenizer)
    chat.text().templates["default"] = TEMPLATE
    onward.save(chat, folder)
    with serving([tiny_run, folder], rows=2) as running:
        yield running


def talk(page: Any) -> None:
    """Choose the model with a chat template."""
    page.select_option("#model", "talker")
    assert page.is_checked("#mode [value=chat]")


def test_files_and_chapters_are_served_without_a_key(tiny_run: Path) -> None:
    with serving(tiny_run, keys=["secret"]) as server:
        for name in FILES:
            reply = httpx.get(f"{server.url}/{name}")
            assert reply.status_code == 200
            assert "script-src 'self'" in reply.headers["content-security-policy"]
            assert "http://" not in reply.text
            assert "https://" not in reply.text
        index = httpx.get(server.url).text
        for chapter in re.findall(r'href="(/learn/\d+)"', index):
            reply = httpx.get(server.url + chapter)
            assert "<h1>" in reply.text
            assert "connect-src" not in reply.headers["content-security-policy"]  # default-src 'none' applies
        assert httpx.get(f"{server.url}/learn/99").status_code == 404
    assert not re.search(r"\son\w+=|style=|<script>", index)  # the policy allows no inline handlers, styles or scripts


@pytest.mark.parametrize("name", ["page/../app.py", "page/%2e%2e/app.py", "page/nothing.js", "learn/..%2fapp.py"])
def test_no_other_file_is_served(name: str, server: Running) -> None:
    assert httpx.get(f"{server.url}/{name}").status_code == 404


@pytest.mark.parametrize(("scheme", "width"), [("dark", 390), ("light", 1280)])
def test_a_text_is_completed_continued_branched_and_looked_into(
    scheme: str, width: int, server: Running, browser: Any
) -> None:
    expect = pytest.importorskip("playwright.sync_api").expect
    with opened(browser, server.url, scheme, width) as page:
        assert page.is_checked("#mode [value=complete]")
        ask(page, "The cat", max_tokens=8, seed=1)
        tokens, figures = newest(page).locator(".token"), newest(page).locator(".figures")
        assert tokens.count() == 8
        expect(figures).to_have_text(re.compile(r"8 tokens · [\d.]+ tokens/s · .* stopped at the limit of 8 tokens"))
        below = page.locator("#box").bounding_box()
        above = newest(page).bounding_box()
        assert above["y"] + above["height"] <= below["y"]  # the newest answer is above the box
        page.click("button >> text=Continue")
        expect(tokens).to_have_count(16)
        ended(page)
        tokens.nth(2).click()
        page.wait_for_selector("#next tr.own")
        expect(page.locator("#chosen")).to_contain_text("Token 3 of 16")
        options(page, top_k=3) if width > 400 else page.evaluate(
            "document.getElementById('top_k').value = 3;"
            "document.getElementById('options').dispatchEvent(new Event('input'))"
        )
        expect(page.locator("#sampled")).to_contain_text("3 of")
        expect(page.locator("#next tr.cut").first).to_contain_text("cut")
        other = page.locator("#next tr:not(.own) button").first
        text = other.text_content()
        other.click()
        ended(page)
        expect(newest(page).locator(".versions")).to_contain_text("2 of 2")
        chosen = newest(page).locator("[aria-selected=true]")
        assert chosen.get_attribute("aria-label").startswith("token 3:")
        assert repr(chosen.text_content().replace("↵\n", "\\n"))[1:-1] == text[1:-1]
        expect(page.locator("#next tr.own button")).to_have_text(text)
        page.click("[title='Previous version']")
        expect(tokens).to_have_count(16)
        tokens.nth(4).click()
        for view in VIEWS:
            page.click(f"#tab-{view}")
            assert page.locator(f"#view-{view} .about a").get_attribute("href").startswith("/learn/")
        expect(page.locator("#engine-model option")).to_have_text(["tiny", "talker"])
        page.wait_for_selector("#engine .blocks i")
        assert page.locator("#engine .blocks i").first.bounding_box()["width"] <= 8
        page.click("#tab-layers")
        page.wait_for_selector("#lens td")
        page.click("#tab-attention")
        page.wait_for_selector("#lines path", state="attached")
        assert page.locator("#attention-text .from").count() == 1
        page.locator("#attention-text .token").nth(3).click()
        expect(page.locator("#attention-from")).to_contain_text("token 4")
        canvas = page.locator("#maps")
        canvas.click(position={"x": 60, "y": canvas.bounding_box()["height"] - 3})
        assert page.locator("#layer").input_value() != "0"
        page.click("#tab-parts")
        page.wait_for_selector("#parts td button")
        page.locator("#parts td button").first.click()
        expect(page.locator("#off-parts")).to_have_text("1 head switched off for new answers.")
        page.click("#again")
        ended(page)
        page.click("#all-on")
        assert page.locator("#off").is_hidden()


def test_a_conversation_is_answered_edited_answered_again_and_kept(server: Running, browser: Any) -> None:
    expect = pytest.importorskip("playwright.sync_api").expect
    with opened(browser, server.url) as page:
        talk(page)
        page.click("#system-fold summary")
        page.fill("#system", "Speak.")
        options(page, max_tokens=6, seed=1)
        for message in ["What is a cat?", "And a dog?"]:
            page.fill("#prompt", message)
            page.press("#prompt", "Enter")
            ended(page)
        said = page.locator("#log .asked .text").all_text_contents()
        assert said == ["What is a cat?", "And a dog?"]
        page.locator("[title='Copy the text']").first.click()
        answer = page.evaluate("navigator.clipboard.readText()")
        page.locator("[title^=Another]").last.click()
        expect(newest(page).locator(".versions")).to_contain_text("2 of 2")
        ended(page)
        page.locator("[title='Change the answer\\'s text']").last.click()
        page.fill(".turn > .editor textarea", "A dog")
        assert newest(page).locator(".asked .text").text_content() == said[1]
        page.click("text=Keep")
        expect(newest(page).locator(".text").last).to_have_text("A dog")
        newest(page).locator("[title^='Continue this']").click()
        expect(newest(page).locator(".text").last).not_to_have_text("A dog")
        ended(page)
        expect(newest(page).locator(".text").last).to_contain_text("A dog")
        page.locator("[title^='Change this message']").first.click()
        page.fill(".editor textarea", "What is a mouse?")
        page.click("text=Send again")
        expect(page.locator("#status")).to_contain_text("copy")
        ended(page)
        expect(page.locator("#log .asked .text")).to_have_text(["What is a mouse?"])
        page.locator("#kept .opener").nth(1).click()  # the complete conversation
        expect(page.locator("#log .asked .text")).to_have_text(said)
        page.click("[title=Rename] >> nth=1")
        page.fill("#kept input", "<b>Cats</b>")
        page.keyboard.press("Enter")
        page.reload()
        page.locator("#kept .opener", has_text="<b>Cats</b>").click()
        expect(page.locator("#log .asked .text")).to_have_text(said)
        expect(newest(page).locator(".versions")).to_contain_text("3 of 3")
        page.check("#show [value=tokens]", force=True)
        newest(page).locator(".token").nth(1).click()
        page.wait_for_selector("#next tr.own")
        page.click("[title=Delete] >> nth=0")
        expect(page.locator("#kept .opener")).to_have_count(1)
        page.click("text=Undo")
        expect(page.locator("#kept .opener")).to_have_count(2)
    messages = [{"role": "system", "content": "Speak."}, {"role": "user", "content": "What is a cat?"}]
    body = {"model": "talker", "messages": messages, "max_tokens": 6, "seed": 1}
    content = server.post("/v1/chat/completions", **body).json()["choices"][0]["message"]["content"]
    assert answer.strip() == content.strip()


def test_markdown_is_drawn_and_html_stays_text(server: Running, browser: Any) -> None:
    with opened(
        browser, server.url, script="Object.defineProperty(navigator, 'clipboard', {value: undefined})"
    ) as page:
        talk(page)
        answers(page, server.served[1].lm.text(), MARKDOWN)
        ask(page, "<img src=x onerror=hit=1>", max_tokens=400)
        answer = newest(page).locator(".text").last
        for selector in (
            "h3",
            "strong",
            "em",
            "p code",
            "ul > li ol > li",
            "pre code",
            "a[href='https://example.org/']",
        ):
            assert answer.locator(selector).count() == 1, selector
        assert page.locator("#log :is(script, img, [onerror], a:not([href^='https:']))").count() == 0
        assert page.evaluate("window.hit") is None
        assert "<script>hit = 1</script>" in answer.locator("pre").text_content()
        assert "[bad](javascript:alert(1)) <img src=x onerror=hit=1>" in answer.text_content()
        answer.locator(".code button").click()  # without a clipboard, as on plain http
        page.locator("#status", has_text="Copied").wait_for()
        page.fill("#prompt", "")
        page.focus("#prompt")
        page.keyboard.press("Control+v")
        assert page.input_value("#prompt") == "<script>hit = 1</script>"


def test_a_shared_link_holds_the_request(server: Running, browser: Any) -> None:
    with opened(browser, server.url) as page:
        page.click("#tab-parts")
        page.click("#parts tbody td button >> nth=1")
        ask(page, "The cat", seed=7, temperature=0.5, max_tokens=8, stop="\\nEnd")
        text = newest(page).locator(".text").text_content()
        page.click("[title='Copy the request']")
        page.click(".share button >> nth=0")
        page.locator("#status", has_text="Copied").wait_for()
        link = page.evaluate("navigator.clipboard.readText()")
        page.click(".share button >> nth=3")
        page.locator("#status.error", has_text="switches nothing off").wait_for()
    with opened(browser, link) as page:
        page.locator("#off", has_text="1 head").wait_for()
        assert page.locator("#seed").input_value() == "7"
        assert page.locator("#stop").input_value() == "\\nEnd"
        page.click("#go")
        ended(page)
        assert newest(page).locator(".text").text_content() == text


def test_the_copied_command_gives_the_text_of_the_page(server: Running, browser: Any) -> None:
    with opened(browser, server.url) as page:
        ask(page, "The cat", frequency_penalty=0.5, max_tokens=8)
        page.check("#show [value=text]", force=True)
        text = newest(page).locator(".text").text_content()
        page.click("[title='Copy the request']")
        page.click(".share button >> nth=3")
        page.locator("#status", has_text="Copied").wait_for()
        words = shlex.split(page.evaluate("navigator.clipboard.readText()"))
    assert words[:2] == ["onward", "generate"]
    result = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == text.strip()


def test_everything_is_reached_by_keyboard(server: Running, browser: Any) -> None:
    with opened(browser, server.url) as page:
        focused = "[document.activeElement.id, document.activeElement.className, document.activeElement.textContent]"

        def tab(until: str, most: int = 80) -> None:
            for _ in range(most):
                page.keyboard.press("Tab")
                if page.evaluate(f"document.activeElement.matches({until!r})"):
                    return
            raise AssertionError(f"Tab reaches {page.evaluate(focused)}, not {until}")

        tab("#prompt")
        page.keyboard.type("The cat")
        tab("#options summary")
        page.keyboard.press("Enter")
        tab("#temperature")
        page.keyboard.press("ArrowLeft")
        assert page.locator("#temperature").input_value() == "0.95"
        tab("#max_tokens")
        page.keyboard.press("Control+a")
        page.keyboard.type("6")
        page.focus("#prompt")
        page.keyboard.press("Control+Enter")
        ended(page)
        page.focus("#new")
        tab("#log .token")
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        page.locator("#chosen", has_text="Token 3 of 6").wait_for()
        tab("[title^=Another]")
        tab("#later")
        page.keyboard.press("Enter")
        page.locator("#chosen", has_text="Token 4 of 6").wait_for()
        tab("#tab-next")
        page.wait_for_selector("#next tr.own")
        tab("#next button:not(:disabled)")
        page.keyboard.press("Enter")
        page.locator(".versions", has_text="2 of 2").wait_for()
        ended(page)
        page.focus("#tab-next")
        page.keyboard.press("ArrowRight")
        page.wait_for_selector("#lines path", state="attached")
        tab("#attention-text .token")
        page.keyboard.press("Home")
        page.locator("#attention-from", has_text="token 1").wait_for()
        page.keyboard.press("ArrowRight")
        page.locator("#attention-from", has_text="token 2").wait_for()
        page.focus("#tab-attention")
        for _ in range(2):
            page.keyboard.press("ArrowRight")
        page.wait_for_selector("#parts button")
        tab("#parts button")
        page.keyboard.press("Enter")
        page.wait_for_selector("#parts button[aria-pressed=true]")


@pytest.mark.parametrize(("width", "scheme"), [(1280, "dark"), (390, "light")])
def test_axe_finds_nothing_in_the_course_and_the_reference(
    width: int, scheme: str, server: Running, browser: Any
) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python").Axe()
    with opened(browser, server.url, scheme, width) as page:
        for path in "/learn", "/learn/4", "/learn/9", "/docs":
            page.goto(server.url + path)
            found = axe.run(page).response["violations"]
            assert [(fault["id"], fault["nodes"][0]["html"]) for fault in found] == [], path


@pytest.mark.parametrize("width", [1280, 390])
def test_axe_finds_nothing(width: int, server: Running, browser: Any) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python").Axe()
    faults: dict[tuple[str, str], list[tuple[str, str]]] = {}

    def check(view: str, part: str = "html") -> None:
        for scheme in "light", "dark":
            page.emulate_media(color_scheme=scheme)
            found = axe.run(page, part).response["violations"]
            faults[view, scheme] = [(fault["id"], fault["nodes"][0]["html"]) for fault in found]

    with opened(browser, server.url, width=width) as page:
        check("empty")
        talk(page)
        stop = answers(page, server.served[1].lm.text(), MARKDOWN)
        ask(page, "Hi", max_tokens=400)
        stop()
        page.click("[title='Copy the request']")
        page.click("#options summary")
        check("chat")
        page.click("#options summary")
        page.click("[title^='Change this']")
        page.check("#mode [value=complete]", force=True)
        ask(page, "The cat", max_tokens=6, temperature=1.5)
        newest(page).locator(".token").nth(2).click()
        page.wait_for_selector("#next tr.own")
        for view, shown in zip(VIEWS, ("#next td", "#lines path", "#lens td", "#parts td button", "#engine .blocks i")):
            page.click(f"#tab-{view}")
            page.wait_for_selector(shown, state="attached")
            check(view, "#inside")
    assert not {key: found for key, found in faults.items() if found}
