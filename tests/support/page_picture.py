"""Pictures of the server's page, light and dark: python tests/support/page_picture.py runs/quickstart docs/page

Writes OUT-light.png and OUT-dark.png: a text with two versions, and the attention of one of its tokens. An optional
third argument is the beginning of the text.
"""

import sys

from support.browser import chromium
from support.server import serving
from support.web_page import ask, ended, newest, options

PROMPT = "Return a list of"


def main(model: str, out: str, prompt: str = PROMPT) -> None:
    with serving(model) as server, chromium() as browser:
        for scheme in "light", "dark":
            page = browser.new_context(color_scheme=scheme, viewport={"width": 1280, "height": 860}).new_page()
            page.goto(server.url)
            page.wait_for_selector("#model option", state="attached")
            page.check("#mode [value=complete]", force=True)
            options(page, temperature=0.8, max_tokens=60)
            for seed in range(30):  # try seeds until neither version ends early
                options(page, seed=seed)
                page.click("#new")
                ask(page, prompt)
                tokens = newest(page).locator(".token")
                if tokens.count() < 60:
                    continue
                tokens.nth(9).click()
                page.wait_for_selector("#next tr.own")
                page.locator("#next tr:not(.own) button").first.click()
                ended(page)
                if tokens.count() >= 60:
                    break
            page.wait_for_selector("#next .taken")
            newest(page).locator(".token").nth(24).click()
            page.click("#tab-attention")
            page.wait_for_selector("#lines path", state="attached")
            for name, wanted in ("layer", 2), ("head", 5):
                count = page.locator(f"#{name} option").count()
                page.select_option(f"#{name}", str(min(wanted, count - 1)))
            for name in page.locator("#kept .opener").all_text_contents()[1:]:  # attempts
                page.locator("#kept li", has_text=name).last.locator("[title=Delete]").click()
            page.evaluate("document.getElementById('status').replaceChildren()")
            page.mouse.move(0, 0)
            page.wait_for_timeout(500)
            page.screenshot(path=f"{out}-{scheme}.png")


if __name__ == "__main__":
    main(*sys.argv[1:])
