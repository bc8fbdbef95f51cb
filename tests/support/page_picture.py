"""Pictures of the server's page, light and dark: python tests/support/page_picture.py runs/quickstart docs/page

Writes OUT-light.png and OUT-dark.png. Other requests run meanwhile, so that the picture of the engine shows
rows that decode and blocks that they share.
"""

import sys
import threading

import httpx

from support.browser import chromium
from support.server import Running, serving

PROMPT = "Return a list of"
OTHERS = "The following example shows how a list of the names in a module is made, and what it means "


def keep_busy(server: Running, stop: threading.Event, seed: int) -> None:
    """Ask for answers to one prompt until the event is set."""
    body = {"prompt": OTHERS, "n": 3, "seed": seed, "max_tokens": 64, "min_tokens": 64}
    with httpx.Client(timeout=60) as client:
        while not stop.is_set():
            client.post(f"{server.url}/v1/completions", json=body).raise_for_status()


def main(model: str, out: str) -> None:
    """Take the pictures."""
    stop = threading.Event()
    with serving(model) as server, chromium() as browser:
        clients = [threading.Thread(target=keep_busy, args=(server, stop, seed)) for seed in range(4)]
        for client in clients:
            client.start()
        for scheme in "light", "dark":
            page = browser.new_context(color_scheme=scheme, viewport={"width": 1280, "height": 1180}).new_page()
            page.goto(server.url)
            page.wait_for_selector("#parts button")
            page.fill("#prompt", PROMPT)
            page.fill("#temperature", "0.7")
            for seed in range(30):  # until an answer does not end early
                page.fill("#seed", str(seed))
                page.evaluate("document.getElementById('status').textContent = ''")
                page.click("#go")
                page.locator("#status", has_text="tokens").wait_for()
                if page.inner_text("#status") == "40 tokens":
                    break
            page.wait_for_selector("#lens td")
            for token in 4, 9:
                page.click(f"#text button >> nth={token}")
                page.wait_for_timeout(1000)  # its distribution
                page.locator("#next tbody button:not(:disabled)").first.click()
                page.locator("#status", has_text="tokens").wait_for()
            page.fill("#top_p", "0.9")
            for token in 7, 6, 5, 3, 2, 1, 0:  # until the cut is among the rows that are shown
                page.click(f"#text button >> nth={token}")
                page.wait_for_timeout(1000)
                if page.locator("#next tr.cut").count():
                    break
            page.fill("#layer", "1")
            page.wait_for_selector("#engine td")
            page.wait_for_timeout(1000)  # the rate of the engine is over half a second
            page.wait_for_selector("#engine .shared")
            page.screenshot(path=f"{out}-{scheme}.png")
        stop.set()
        for client in clients:
            client.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
