"""Each control of the page at / in a real browser: sliders, menus, editors, copies, and other windows."""

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

import onward

from support.server import Running, serving
from support.web_page import answers, ask, ended, newest, opened


@pytest.fixture(scope="module")
def server(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    lm, twin = onward.load(tiny_run), tmp_path_factory.mktemp("models") / "twin"
    longer = onward.Decoder(replace(lm.config, context_length=512)).eval()
    longer.load_state_dict(lm.model.state_dict())
    onward.save(onward.LanguageModel(longer, lm.tokenizer), twin)
    with serving([tiny_run, twin], rows=2) as running:
        yield running


@pytest.fixture
def expect() -> Any:
    return pytest.importorskip("playwright.sync_api").expect


def test_every_option_is_sent_and_reset(server: Running, browser: Any, expect: Any) -> None:
    given = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.5,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.3,
        "max_tokens": 3,
        "seed": 5,
    }
    with opened(browser, server.url) as page:
        with page.expect_request("**/v1/completions") as sent:
            ask(page, "The cat", stop="\\nEnd", **given)
        body = sent.value.post_data_json
        assert {name: body[name] for name in given} == given
        assert body["stop"] == ["\nEnd"]
        expect(page.locator("#options-set")).to_contain_text("stop \\nEnd")
        page.click("#options summary")
        page.click("#reset")
        expect(page.locator("#options-set")).to_have_text("max_tokens 512")
        assert page.locator("#top_k").input_value() == "0"
        assert page.locator("#stop").input_value() == ""


def test_each_id_of_the_page_is_unique(server: Running, browser: Any) -> None:
    with opened(browser, server.url) as page:
        ids = page.evaluate("[...document.querySelectorAll('[id]')].map((one) => one.id)")
    assert len(ids) == len({*ids})


def test_controls_of_the_views(server: Running, browser: Any, expect: Any) -> None:
    with opened(browser, server.url, width=390) as page:
        ask(page, "The cat", max_tokens=6)
        newest(page).locator(".token").nth(2).click()
        expect(page.locator("#chosen")).to_contain_text("Token 3 of 6")
        page.click("#earlier")
        expect(page.locator("#chosen")).to_contain_text("Token 2 of 6")
        page.click("#tab-attention")
        page.wait_for_selector("#lines path", state="attached")
        maps = page.locator("#maps")
        page.select_option("#layer", "1")
        expect(maps).to_have_attribute("aria-label", re.compile("layer 1 head 0 is marked"))
        page.select_option("#head", "1")
        expect(maps).to_have_attribute("aria-label", re.compile("layer 1 head 1 is marked"))
        page.select_option("#model", "twin")
        page.click("#tab-engine")
        page.wait_for_selector("#engine .blocks i")
        assert page.locator("#engine-model").input_value() == "twin"
        with page.expect_response("**/api/engine"):
            page.select_option("#engine-model", "tiny")
        assert page.locator("#engine-model").input_value() == "tiny"
        page.click("#inside-close")
        expect(page.locator("#inside")).to_be_hidden()
        assert page.evaluate("document.activeElement.id") == "inside-toggle"
        page.click("#inside-toggle")
        expect(page.locator("#inside")).to_be_visible()


def test_a_prompt_is_edited_and_versions_are_chosen(server: Running, browser: Any, expect: Any) -> None:
    with opened(browser, server.url) as page:
        ask(page, "The cat", max_tokens=4, seed=1)
        page.click("[title^='Change this text']")
        page.fill(".editor textarea", "A dog")
        page.click("text=Cancel")
        expect(newest(page).locator(".given")).to_have_text("The cat")
        for title in "Change this text", "Change the answer", "Change this text":  # only one editor is open
            page.click(f"[title^='{title}']")
        expect(page.locator(".editor textarea")).to_have_value("The cat")
        page.fill(".editor textarea", "A dog")
        page.click("text=Complete again")
        ended(page)
        expect(newest(page).locator(".given")).to_have_text("A dog")
        newest(page).locator(".token").nth(2).click()
        expect(page.locator("#chosen")).to_contain_text("Token 3 of 4")
        page.click("[title^=Another]")
        versions = newest(page).locator(".versions")
        expect(versions).to_contain_text("2 of 2")
        ended(page)
        expect(page.locator("#chosen")).to_contain_text("Token 1 of 4")  # the token of the other version is not shown
        assert newest(page).locator("[aria-selected=true]").count() == 1
        page.click("[title='Previous version']")
        expect(versions).to_contain_text("1 of 2")
        page.click("[title='Next version']")
        expect(versions).to_contain_text("2 of 2")
        page.click("#new")
        expect(page.locator("#log article")).to_have_count(0)


def test_the_copied_curl_and_python_give_the_text_of_the_page(server: Running, browser: Any) -> None:
    with opened(browser, server.url) as page:
        ask(page, "The cat", max_tokens=6, seed=3, top_k=5, presence_penalty=0.5)
        page.check("#show [value=text]", force=True)
        text = newest(page).locator(".text").text_content().removeprefix("The cat")
        page.click("[title='Copy the request']")
        copied = []
        for place in 1, 2:
            page.click(f".share button >> nth={place}")
            page.locator("#status", has_text="Copied").wait_for()
            copied.append(page.evaluate("navigator.clipboard.readText()"))
    words = shlex.split(copied[0])
    assert words[0] == "curl"
    assert httpx.post(words[1], json=json.loads(words[-1])).json()["choices"][0]["text"] == text

    def create(extra_body: dict[str, Any], **body: Any) -> Any:  # as the package openai sends it
        choice = httpx.post(f"{server.url}/v1/completions", json=body | extra_body).json()["choices"][0]
        return SimpleNamespace(choices=[SimpleNamespace(text=choice["text"])])

    printed: list[str] = []
    client = SimpleNamespace(completions=SimpleNamespace(create=create))
    names = {"openai": SimpleNamespace(OpenAI=lambda **_: client), "print": printed.append}
    exec(copied[1].removeprefix("import openai\n"), names)
    assert printed == [text]


def test_another_window_sees_a_new_conversation(server: Running, browser: Any, expect: Any) -> None:
    with opened(browser, server.url) as page:
        other = page.context.new_page()
        other.goto(server.url)
        expect(other.locator("#kept .opener")).to_have_count(0)
        ask(page, "The cat", max_tokens=3)
        expect(other.locator("#kept .opener")).to_have_count(1)


def test_reasoning_is_folded_and_a_message_is_copied(server: Running, browser: Any, expect: Any) -> None:
    with opened(browser, server.url) as page:
        page.select_option("#model", "twin")
        page.check("#mode [value=chat]", force=True)
        answers(page, server.served[0].lm.text(), "<think>\nWell.\n</think>\n\nYes.")
        ask(page, "Is it?", max_tokens=60)
        thought = newest(page).locator("details.thought")
        expect(thought).not_to_have_attribute("open", "")
        thought.locator("summary").click()
        expect(thought).to_contain_text("Well.")
        page.click("[title='Copy the message']")
        assert page.evaluate("navigator.clipboard.readText()") == "Is it?"
