"""The page's API returns the results of the inspection functions; edits affect only their request."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

import onward
from onward import LanguageModel, Sampling, next_token_distribution
from onward.inspection import attention_maps, head_roles, logit_attribution, logit_lens
from onward.serving.usage import spelled

from support.server import Running, serving

TEXT = "The cat sat in the park"


@pytest.fixture(scope="module")
def server(tiny_run: Path) -> Iterator[Running]:
    with serving(tiny_run, rows=4) as running:
        yield running
        assert running.idle()


@pytest.fixture(scope="module")
def tokens(lm: LanguageModel) -> list[int]:
    return lm.text().encode(TEXT)


def test_a_distribution_is_that_of_the_samplers(server: Running, lm: LanguageModel, tokens: list[int]) -> None:
    knobs: dict[str, Any] = {"temperature": 0.7, "top_k": 7, "repetition_penalty": 1.3}
    reply = server.post("/api/distribution", tokens=tokens, position=3, **knobs).json()
    with torch.no_grad():
        logits = lm.model(torch.tensor([tokens[:4]]))[0, -1:].masked_fill(~lm.allowed(), -torch.inf)
    after = next_token_distribution(logits, Sampling(**knobs), [tokens[:4]])[0]
    assert reply["kept"] == int((after > 0).sum())
    for row in reply["rows"]:
        assert row["before"] == pytest.approx(float(logits.softmax(-1)[0, row["token"]]), abs=1e-5)
        assert row["after"] == pytest.approx(float(after[row["token"]]), abs=1e-5)
        assert row["text"] == spelled(lm.text(), row["token"])
    assert sum(row["after"] for row in reply["rows"]) == pytest.approx(1, abs=1e-4)


def test_lens_attention_attribution_and_roles_are_those_of_inspection(
    server: Running, lm: LanguageModel, tokens: list[int]
) -> None:
    given = {"tokens": tokens, "position": 5}
    lens = logit_lens(lm.model, tokens[:6], 5)
    layers = server.post("/api/lens", **given).json()["layers"]
    assert [[row["token"] for row in layer["rows"]] for layer in layers] == lens.ids[:, -1].tolist()
    weights = torch.tensor(server.post("/api/attention", **given).json()["weights"])
    expected = torch.stack(attention_maps(lm.model, tokens[:6]))[:, :, -1].detach()
    torch.testing.assert_close(weights, expected, atol=1e-4, rtol=0)
    parts = server.post("/api/attribution", **given, target=9).json()
    own = logit_attribution(lm.model, tokens[:6], target=9)
    assert (parts["token"], parts["logit"]) == (9, pytest.approx(own.logit))
    torch.testing.assert_close(torch.tensor(parts["heads"]), own.heads.float(), atol=1e-5, rtol=1e-4)
    assert httpx.get(f"{server.url}/api/roles").json()["roles"] == head_roles(lm.model).map()


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no tokens": ({"tokens": []}, "tokens"),
    "a position beyond": ({"tokens": [1], "position": 1}, "Position 1 does not exist: the text has tokens 0 to 0"),
    "a token beyond": ({"tokens": [99999]}, "outside the vocabulary"),
    "a head beyond": ({"tokens": [1], "edits": {"heads": [[0, 9]]}}, "Cannot apply edits to head 9"),
    "a long text": ({"tokens": [1] * 100}, "maximum context length is 32"),
}


def test_a_distribution_lists_the_token_that_was_drawn(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onward.serving.inside.SHOWN", 2)
    rows = server.post("/api/distribution", tokens=[65]).json()["rows"]
    target = next(token for token in range(9) if token not in {row["token"] for row in rows})
    listed = server.post("/api/distribution", tokens=[65], target=target).json()["rows"]
    assert listed[:-1] == rows
    assert listed[-1]["token"] == target
    refused = server.post("/api/distribution", tokens=[65], target=10**6)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "target")


@pytest.mark.parametrize("path", ["distribution", "lens", "attention", "attribution"])
@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_looked_into_is_named(name: str, path: str, server: Running) -> None:
    body, message = WRONG[name]
    reply = server.post(f"/api/{path}", **body)
    assert reply.status_code == 400
    assert message in reply.json()["error"]["message"]


def test_a_target_beyond_the_vocabulary_is_named(server: Running) -> None:
    reply = server.post("/api/attribution", tokens=[1], target=-1)
    assert "Target -1 does not exist" in reply.json()["error"]["message"]


def test_the_views_show_the_model_with_its_parts_switched_off(
    server: Running, lm: LanguageModel, tokens: list[int]
) -> None:
    given: dict[str, Any] = {"tokens": tokens[:6], "edits": {"heads": [[0, 1]]}}
    with torch.no_grad(), onward.edit(lm.model, {"blocks.0.attn.heads.1": 0.0}):
        logits = lm.model(torch.tensor([tokens[:6]]))[0, -1].masked_fill(~lm.allowed(), -torch.inf)
        lens, weights = logit_lens(lm.model, tokens[:6], 5), attention_maps(lm.model, tokens[:6])
        parts = logit_attribution(lm.model, tokens[:6])
    plain = server.post("/api/distribution", tokens=tokens[:6]).json()
    reply = server.post("/api/distribution", **given).json()
    assert reply != plain == server.post("/api/distribution", tokens=tokens[:6]).json()
    for row in reply["rows"]:
        assert row["before"] == pytest.approx(float(logits.softmax(-1)[row["token"]]), abs=1e-5)
    layers = server.post("/api/lens", **given).json()["layers"]
    assert [[row["token"] for row in layer["rows"]] for layer in layers] == lens.ids[:, -1].tolist()
    shown = torch.tensor(server.post("/api/attention", **given).json()["weights"])
    torch.testing.assert_close(shown, torch.stack(weights)[:, :, -1].detach(), atol=1e-4, rtol=0)
    attributed = server.post("/api/attribution", **given).json()
    assert (attributed["token"], attributed["logit"]) == (parts.target, pytest.approx(parts.logit, abs=1e-4))
    assert attributed["heads"][0][1] == 0


def edited(lm: LanguageModel, edits: dict[str, Any], prompt: str, **options: Any) -> str:
    names = [f"blocks.{layer}.attn.heads.{head}" for layer, head in edits.get("heads", [])]
    names += [f"blocks.{layer}.{part}.out" for layer in edits.get("layers", []) for part in ("attn", "mlp")]
    with onward.edit(lm.model, dict.fromkeys(names, 0.0)):
        return lm.generate(prompt, **options)


def test_edits_change_the_answer_of_their_request_only(server: Running, lm: LanguageModel) -> None:
    options: dict[str, Any] = {"max_new_tokens": 14, "temperature": 2.0, "seed": 3, "min_new_tokens": 14}
    all_edits: list[dict[str, Any]] = [{}, {"heads": [[0, head] for head in range(4)]}, {"layers": [0]}, {}]
    expected = [edited(lm, edits, TEXT[:9], **options) for edits in all_edits]
    assert len({*expected}) == 3

    async def ask() -> list[str]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            bodies = [{"prompt": TEXT[:9], **options, "edits": edits} for edits in all_edits]
            replies = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
            return [reply.json()["choices"][0]["text"] for reply in replies]

    assert asyncio.run(ask()) == expected
    again = server.post("/v1/completions", prompt=TEXT[:9], **options).json()["choices"][0]["text"]
    assert again == expected[0], "no edit is left"


@pytest.mark.parametrize("edits", [{"layers": [2]}, {"heads": [[0, 4]]}, {"heads": [[-1, 0]]}, {"heads": [1]}])
def test_an_edit_of_what_the_model_lacks_is_refused(edits: dict[str, Any], server: Running) -> None:
    reply = server.post("/v1/completions", prompt="a", edits=edits)
    assert reply.status_code == 400
    assert "edits" in reply.json()["error"]["message"]


def test_the_picture_of_the_engine_shows_rows_blocks_and_the_queue(server: Running) -> None:
    async def watch() -> list[dict[str, Any]]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            body = {"prompt": [7] * 18, "max_tokens": 12, "n": 6, "ignore_eos": True}
            job = asyncio.ensure_future(client.post("/v1/completions", json=body))
            seen = []
            while not job.done():
                seen.append((await client.get("/api/engine")).json()["engines"][0])
            return seen

    def generated() -> int:
        return int(httpx.get(f"{server.url}/api/engine").json()["engines"][0]["generated"])

    start, seen, answers = generated(), list[dict[str, Any]](), 0
    while not any(len(one["rows"]) == 4 for one in seen) and answers < 20:  # the engine may finish before the query
        seen, answers = seen + asyncio.run(watch()), answers + 1
    assert generated() == start + answers * 6 * 12, "tokens of ended answers count, too"
    assert all(len(one["rows"]) <= one["capacity"] == 4 for one in seen)
    busy = max(seen, key=lambda one: len(one["rows"]))
    assert len(busy["rows"]) == 4
    assert len(busy["waiting"]) == 2
    assert max(busy["references"].values()) == 4, "the four rows share the block of their prompt"
    assert {row["doing"] for one in seen for row in one["rows"]} <= {"prompt", "decoding"}
