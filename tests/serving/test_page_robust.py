"""The page at / handles API keys, server errors, a full context, long conversations and other writing systems."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import onward

from support.server import Running, serving
from support.web_page import answers, ask, ended, newest, opened, options


@pytest.fixture(scope="module")
def server(tiny_run: Path) -> Iterator[Running]:
    with serving(tiny_run, rows=2) as running:
        yield running


def test_the_page_asks_for_a_key_and_keeps_it_for_the_tab(tiny_run: Path, browser: Any) -> None:
    with serving(tiny_run, keys=["schlüssel"]) as server, opened(browser, server.url, faults=["401"]) as page:
        page.fill("#key", "wrong")
        page.keyboard.press("Enter")
        page.locator("#status.error", has_text="key is missing or wrong").wait_for()
        page.fill("#key", "schlüssel")
        page.keyboard.press("Enter")
        page.wait_for_selector("#model option", state="attached")
        assert page.locator("#key-form").is_hidden()
        page.reload()
        page.wait_for_selector("#model option", state="attached")
        ask(page, "The cat", max_tokens=4)
        page.wait_for_selector("#next tr.own")


def replied(page: Any, text: str, count: int = 1, end: str = "") -> None:
    """Reply to each completion request with a stream of `count` times this text as a token, and `end`."""
    logprobs = {"tokens": [text], "token_logprobs": [-1.0]}
    piece = {"token_ids": [70], "text": text, "finish_reason": None, "logprobs": logprobs}
    body = f"data: {json.dumps({'choices': [piece]})}\n\n" * count + end
    page.route("**/v1/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream"))


def test_errors_are_sentences_and_answers_go_on(server: Running, browser: Any) -> None:
    expect = pytest.importorskip("playwright.sync_api").expect
    error = newest_error
    with opened(browser, server.url, faults=["ERR_FAILED", "ERR_CONNECTION", "400"]) as page:
        options(page, max_tokens=4)
        page.click("#go")
        expect(page.locator("#status")).to_have_text("Write the beginning of a text first.")
        page.route("**/tokenize", lambda route: route.abort())
        ask(page, "The cat")
        expect(error(page)).to_have_text("The server does not answer: check that it runs, then try again.")
        page.unroute("**/tokenize")
        replied(page, "a")
        newest(page).get_by_text("Try again", exact=True).click()
        expect(error(page)).to_contain_text("stopped in the middle")
        expect(newest(page).locator(".token")).to_have_count(1)  # the tokens so far stay
        page.unroute("**/v1/completions")
        newest(page).locator("[title^='Continue this']").click()
        expect(newest(page).locator(".token")).to_have_count(5)
        ended(page)
        assert error(page).count() == 0
        ask(page, "The cat", temperature=0)
        newest(page).locator("[title^=Another]").click()
        expect(page.locator("#status")).to_have_text("The same answer has come again.")
        assert newest(page).locator(".versions").count() == 0
        options(page, max_tokens=0)
        page.click("[title^=Another]")
        expect(page.locator("#status.error")).to_contain_text("max_tokens is not a whole number from 1")


def newest_error(page: Any) -> Any:
    return newest(page).locator(".error")


def test_an_answer_is_stopped_and_ends_at_the_context(server: Running, browser: Any) -> None:
    expect = pytest.importorskip("playwright.sync_api").expect
    length = onward.load(server.served[0].root).config.context_length
    with opened(browser, server.url) as page:
        ask(page, "The cat", max_tokens=4000)
        figures = newest(page).locator(".figures")
        expect(figures).to_contain_text(f"the context of {length} tokens is full")
        expect(page.locator("#room")).to_have_text(f"{length} of {length} tokens of context")
        assert newest(page).get_by_text("Continue", exact=True).count() == 0
        ask(page, "cat " * 300)
        expect(newest_error(page)).to_contain_text(f"The context of {length} tokens is full")
        page.route("**/v1/completions", lambda route: None)  # a server that does not answer
        page.fill("#prompt", "The dog")
        page.click("#go")
        page.click("#halt")
        expect(newest(page).locator(".figures")).to_contain_text("stopped by you")


@pytest.mark.parametrize("hash", ["nothing", '{"prompt": []}', '{"messages": [{"role": "tool"}]}', '{"key": 1}', "%"])
def test_a_broken_link_opens_the_page(hash: str, server: Running, browser: Any) -> None:
    with opened(browser, f"{server.url}/#{hash}") as page:
        page.wait_for_selector("#welcome")


@pytest.mark.parametrize("width", [1280, 390])
def test_the_log_follows_an_answer_and_a_kept_conversation_opens_at_its_end(
    width: int, server: Running, browser: Any
) -> None:
    rest = "(log => log.scrollHeight - log.scrollTop - log.clientHeight)(document.getElementById('log'))"
    with opened(browser, server.url, width=width) as page:
        replied(page, "a\n\n", 80, "data: [DONE]\n\n")
        for mode in "chat", "complete":
            page.check(f"#mode [value={mode}]", force=True)
            ask(page, "The cat")
            assert page.evaluate(rest) < 1
            assert page.evaluate("document.getElementById('log').scrollTop") > 500
            page.click("[title='Copy the request']")
            share, box = page.locator(".share").bounding_box(), page.locator("#box").bounding_box()
            assert share["y"] + share["height"] < box["y"]  # the row that opens is above the input box
        page.reload()
        for place in 0, 1:  # the newest conversation and the chat
            if width < 1000:
                page.click("#list-toggle")
            page.click(f"#kept .opener >> nth={place}")
            newest(page).wait_for()
            assert page.evaluate(rest) < 1


def test_large_and_foreign_conversations_are_kept_and_drawn(server: Running, browser: Any) -> None:
    expect = pytest.importorskip("playwright.sync_api").expect
    word = "Donaudampfschifffahrt" * 30
    rows = [[index % 200, piece, 0.5, index, 0] for index, piece in enumerate(["un", "break", "able", " word "] * 8)]
    turn = {"prompt": "مرحبا بالعالم", "shown": 0}
    turn |= {"answers": [{"rows": rows, "leaf": 32, "model": "tiny", "settings": {}, "system": "", "error": ""}]}
    kept = {"id": "a", "title": word, "mode": "chat", "system": "", "updated": 1, "turns": [turn] * 200}
    script = (
        f"localStorage.setItem('onward.conversation.a', {json.dumps(json.dumps(kept))});"
        "localStorage.setItem('onward.conversation.b', '{');"
        "localStorage.setItem('onward.options', '[');"
        "localStorage.setItem('onward.view', JSON.stringify({chat: true}));"
    )
    for width in 1280, 390:
        with opened(browser, server.url, script=script, width=width) as page:
            if width < 1000:
                page.click("#list-toggle")
            page.click("#kept .opener")
            expect(page.locator("#log article")).to_have_count(200)
            assert page.evaluate("getComputedStyle(document.querySelector('.asked .text')).direction") == "rtl"
            tops = "[...document.querySelectorAll('article:last-child .token')].map(one => one.getClientRects().length)"
            tokens = page.evaluate(tops.replace(".length", "[0].top"))
            for start in range(0, 32, 4):  # the three tokens of a word are on one line
                assert len(set(tokens[start : start + 3])) == 1
            assert len(set(tokens)) > 1
            ask(page, word, max_tokens=4)
            expect(page.locator("#log article")).to_have_count(201)


def test_the_bytes_of_a_character_are_drawn_in_angle_brackets(server: Running, browser: Any) -> None:
    expect = pytest.importorskip("playwright.sync_api").expect
    written = ["<D0>", "<B6>"]  # the vocabulary has no token for this letter
    with opened(browser, server.url) as page:
        answers(page, server.served[0].lm.text(), "a ж")
        ask(page, "ж", max_tokens=20)
        expect(newest(page).locator(".text")).to_have_text(re.compile("a" + ".?" + "".join(written)))
        expect(newest(page).locator(".token[aria-label*='<B6>']")).to_have_count(1)
        newest(page).locator(".token", has_text=written[1]).click()
        expect(page.locator("#chosen")).to_contain_text("“<B6>”")
        page.wait_for_selector("#next td")
        expect(page.locator("#next")).not_to_contain_text(re.compile("bytes:|\ufffd"))
        page.click("#tab-attention")
        expect(page.locator("#attention-text .token", has_text=re.compile("^<..>$"))).to_have_text([*written, "<D0>"])
        expect(page.locator("#attention-from")).to_contain_text("From “<D0>”")
        page.click("#tab-parts")
        expect(page.locator("#logit")).to_contain_text('The logit of "<B6>"')


def test_a_full_storage_is_said(server: Running, browser: Any) -> None:
    script = "Storage.prototype.setItem = () => { throw new DOMException('full', 'QuotaExceededError'); };"
    with opened(browser, server.url, script=script) as page:
        ask(page, "The cat", max_tokens=4)
        page.locator("#status.error", has_text="storage is full").wait_for()
        assert newest(page).locator(".token").count() == 4
