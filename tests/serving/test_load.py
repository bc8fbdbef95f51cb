"""Many clients at the same time: no request is lost, confused with another or answered twice, and no threads or files
remain open afterwards."""

import asyncio
import json
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from onward import LanguageModel
from onward.serving import RequestLimits

from support.server import Running, serving

PROMPTS = ["The cat", "A dog sat", "One day", "In the park there was"]
MALFORMED: list[Any] = [
    {"prompt": {}},
    {"prompt": "a", "n": -1},
    {"prompt": "a", "regex": "("},
    {"max_tokens": "x"},
    [1],
]


@pytest.fixture(scope="module")
def server(tiny_run: Path) -> Iterator[Running]:
    with serving(tiny_run, rows=16, limits=RequestLimits(max_queue=1000)) as running:
        yield running


async def text_of(client: httpx.AsyncClient, body: dict[str, Any]) -> str:
    """Send a request, streamed or not; return the text of its first answer."""
    if not body.get("stream"):
        reply = await client.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"][0]["text"]
    text, ends = "", 0
    async with client.stream("POST", "/v1/completions", json=body) as reply:
        async for line in reply.aiter_lines():
            ends += line == "data: [DONE]"
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
    assert ends == 1
    return text


def body_of(rng: random.Random) -> dict[str, Any]:
    """The body of a random request."""
    body: dict[str, Any] = {"prompt": rng.choice(PROMPTS), "max_tokens": rng.randint(1, 12), "seed": rng.randint(0, 9)}
    body |= rng.choice([{}, {"temperature": 0}, {"top_k": 5}, {"regex": "[a-z ]{3,9}"}, {"stop": "e"}, {"top_p": 0.8}])
    return body | rng.choice([{}, {"stream": True}])


async def load(url: str, count: int, at_a_time: int, expected: dict[str, str], rng: random.Random) -> None:
    limit = asyncio.Semaphore(at_a_time)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=httpx.Limits(max_connections=at_a_time)) as client:

        async def one(kind: float, body: dict[str, Any], wait: float) -> None:
            async with limit:
                if kind < 0.05:
                    reply = await client.post("/v1/completions", json=MALFORMED[int(wait * 1e4) % len(MALFORMED)])
                    assert reply.status_code == 400, reply.text
                elif kind < 0.15:
                    task = asyncio.ensure_future(text_of(client, body))
                    await asyncio.sleep(wait)
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
                else:
                    key = json.dumps({name: value for name, value in body.items() if name != "stream"}, sort_keys=True)
                    assert await text_of(client, body) == expected[key]

        bodies = [body_of(rng) for _ in range(count)]
        await asyncio.gather(*(one(rng.random(), body, rng.random() / 20) for body in bodies))


def expected_texts(lm: LanguageModel, seed: int, count: int) -> dict[str, str]:
    """The results of `generate` for each request of `load` with this seed, by the request's fields as JSON."""
    rng, texts = random.Random(seed), dict[str, str]()
    for _ in range(count):
        body = {name: value for name, value in body_of(rng).items() if name != "stream"}
        key = json.dumps(body, sort_keys=True)
        if key not in texts:
            options = {"temperature": 1.0, **body}
            prompt, new = options.pop("prompt"), options.pop("max_tokens")
            texts[key] = lm.generate(prompt, new, **options)
    return texts


def own_threads() -> int:
    """The number of threads outside the server's thread pools, whose size is bounded."""
    return len([thread for thread in threading.enumerate() if not thread.name.startswith("onward-")])


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(("count", "at_a_time"), [(120, 24), pytest.param(1000, 64, marks=pytest.mark.long)])
def test_mixed_requests_get_the_answers_that_they_would_get_alone(
    count: int, at_a_time: int, server: Running, lm: LanguageModel
) -> None:
    expected = expected_texts(lm, 0, count)
    server.post("/v1/completions", prompt="a", max_tokens=1)
    threads, files = own_threads(), open_files()
    asyncio.run(load(server.url, count, at_a_time, expected, random.Random(0)))
    assert server.idle(within=5)
    left = lambda: (own_threads() - threads, open_files() - files)
    end = time.monotonic() + 5
    while max(left()) > 2 and time.monotonic() < end:  # uvicorn closes connections a moment later
        time.sleep(0.05)
    assert max(left()) <= 2, "two idle connections"


@pytest.mark.long
def test_memory_is_flat_over_ten_thousand_requests(server: Running) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    async def many(count: int) -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            for _ in range(count // 20):
                bodies = [{"prompt": PROMPTS[i % 4] + " a" * (i % 7), "max_tokens": 2} for i in range(20)]
                await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))

    asyncio.run(many(2000))
    before = resident()
    asyncio.run(many(10_000))
    assert resident() - before < 8 << 20
