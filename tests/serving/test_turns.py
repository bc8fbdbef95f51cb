"""Clients with different keys take turns: none has more than its share of rows and queue while others wait."""

import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from onward.serving import RequestLimits

from support.server import serving


def ask(url: str, key: str, **body: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(f"{url}/v1/completions", json={"prompt": "a", **body}, headers=headers, timeout=60)


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_a_client_with_many_requests_leaves_rows_to_another(
    share: float, tiny_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = RequestLimits(max_queue=8, share=share)
    with serving(tiny_run, rows=4, limits=limits, keys=["many", "few"]) as server:
        step = server.served[0].engine.step

        def slow() -> Any:
            time.sleep(0.05)
            return step()

        long = {"max_tokens": 12, "ignore_eos": True, "seed": 3}
        alone = ask(server.url, "many", **long).json()["choices"]
        monkeypatch.setattr(server.served[0].engine, "step", slow)
        replies: list[httpx.Response] = []
        threads = [threading.Thread(target=lambda: replies.append(ask(server.url, "many", **long))) for _ in range(12)]
        for thread in threads:
            thread.start()
        while server.service.accounts.pending < 12:
            time.sleep(0.01)
        reply, before = ask(server.url, "few", max_tokens=1), len(replies)
        for thread in threads:
            thread.join()
        assert {one.status_code for one in replies} == {200}
        assert all(one.json()["choices"] == alone for one in replies), "a request that has waited goes on as before"
    if share < 1:
        assert reply.status_code == 200
        assert before < 8, "the request overtakes others that were queued before it"
    else:
        assert reply.status_code == 429
