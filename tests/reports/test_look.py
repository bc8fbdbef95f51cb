"""The views on the page of a run: attention, next tokens, losses, lens and experts equal the model's values."""

import base64
import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from onward import Decoder, DecoderConfig, Experts, Gated, Sampling, next_token_distribution, train_tokenizer
from onward.evaluation import logprobs
from onward.inspection import attention_maps, head_scores
from onward.inspection.head_maps import logits, next_tokens
from onward.reports import RunRecord
from onward.reports.pictures.markup import resource
from onward.reports.runs.look import distributions, passage, prompts
from onward.reports.runs.report import write_report

from support.pages import TEXT, Page, model_and_tokenizer, write_run, written


def test_attention_on_the_page_is_that_of_the_model(tmp_path: Path) -> None:
    model, tokenizer = model_and_tokenizer()
    _, parsed = written(write_run(tmp_path / "run"))
    shown = json.loads(parsed.scripts["attention"])
    tokens = [tokenizer.bos_id, *tokenizer.encode(TEXT)]
    maps = attention_maps(model, tokens)
    assert shown["pieces"][1:12] == list("to·be,·or↵⇥")
    assert shown["heads"] == 4
    for layer, weights in zip(shown["layers"], maps, strict=True):
        found = np.frombuffer(base64.b64decode(layer), np.uint8).reshape(4, len(tokens), len(tokens)) / 255
        np.testing.assert_allclose(found, weights.numpy(), atol=0.5 / 255 + 1e-6)
        assert not np.triu(found, 1).any()
    layer, head, query = shown["open"]
    scores = head_scores(maps)
    assert scores[layer, head].mean() == scores.mean(-1).max()
    assert scores[layer, head, query] == scores[layer, head].max()


def test_next_token_tables_are_those_of_the_model_and_mark_the_token_that_follows(tmp_path: Path) -> None:
    model, tokenizer = model_and_tokenizer()
    page, _ = written(write_run(tmp_path / "run"))
    tokens = [tokenizer.bos_id, *tokenizer.encode(TEXT)]
    tables = re.findall(r"<article><h3>after .*?</article>", page, re.DOTALL)
    assert len(tables) == len(tokens)
    true = np.exp(logprobs(model, np.array([tokens]))[0])
    share = lambda p: f"<span>{100 * p:.1f} %</span>" if p >= 0.001 else "<span>1 in "
    for i, (table, likeliest) in enumerate(zip(tables, next_tokens(model, tokens))):
        rows = re.findall(r"<li.*?</li>", table, re.DOTALL)
        marked = [row for row in rows if "class=true" in row]
        assert all(share(p) in row for row, (_, p) in zip(rows, likeliest))
        if i == len(tokens) - 1:
            assert not marked
        else:
            assert len(marked) == 1
            assert share(true[i]) in marked[0]
            assert len(rows) == (10 if tokens[i + 1] in dict(likeliest) else 11)


SETTINGS = [  # temperature, top-k, top-p and min-p
    *((1.0, 0, 1.0, 0.0), (0.0, 0, 1.0, 0.0), (0.5, 0, 0.9, 0.0), (2.0, 5, 1.0, 0.0), (1.3, 0, 0.35, 0.0)),
    *((0.7, 8, 0.8, 0.0), (0.6, 0, 1.0, 0.3), (0.9, 6, 0.9, 0.2)),
]


@pytest.mark.skipif(not shutil.which("node"), reason="runs the script of the page")
def test_sliders_shape_the_distribution_as_generate_does(tmp_path: Path) -> None:
    model, tokenizer = model_and_tokenizer()
    shown = [tokenizer.bos_id, *tokenizer.encode(TEXT)]
    table = distributions(logits(model, shown), shown[1:], tokenizer, likeliest=9)
    script = f"""{resource("pictures/sampling.js")}
const table = {json.dumps(table)}
const shape = setting => table.rows.map(row => reshape(row, table.temperatures, ...setting))
console.log(JSON.stringify({json.dumps(SETTINGS)}.map(shape)))
"""
    found = json.loads(subprocess.run(["node", "-e", script], capture_output=True, check=True).stdout)
    compared = 0
    for (temperature, top_k, top_p, min_p), rows in zip(SETTINGS, found):
        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        exact = next_token_distribution(logits(model, shown), sampling)
        likeliest = logits(model, shown).topk(9).indices
        for row, p, ids in zip(rows, exact, likeliest):
            most = len(ids) - bool(min_p)  # for more tokens, the page does not know which of the others are kept
            if (top_p < 1 or min_p) and (p > 0).sum() > most:
                continue
            compared += 1
            assert row["shares"] == pytest.approx(p[ids].tolist(), abs=2e-4)
            assert row["others"] == pytest.approx(1 - float(p[ids].sum()), abs=1e-3)
    assert compared > 4 * len(shown)


@pytest.mark.skipif(not shutil.which("node"), reason="runs the script of the page")
def test_prompt_box_finds_the_longest_beginning_that_is_typed() -> None:
    _, tokenizer = model_and_tokenizer()
    given = prompts(tokenizer, [tokenizer.bos_id, *tokenizer.encode("to be")])
    assert given == ["", "t", "to", "to ", "to b", "to be"]
    wanted = {"": 0, "t": 0, "to": 1, "to be,": 2, "to be, or": 3, "to bee": 2, "to be, or not": 3}
    script = f"""{resource("pictures/sampling.js")}
const prompts = {json.dumps(["", "to", "to be", "to be, or"])}
console.log(JSON.stringify({json.dumps([*wanted])}.map(typed => promptOf(prompts, typed))))
"""
    found = json.loads(subprocess.run(["node", "-e", script], capture_output=True, check=True).stdout)
    assert [one["at"] for one in found] == [*wanted.values()]
    assert [one["known"] for one in found] == [True] * 5 + [False] * 2


def test_losses_on_the_page_are_those_of_the_model(tmp_path: Path) -> None:
    model, tokenizer = model_and_tokenizer()
    page, parsed = written(write_run(tmp_path / "run"))
    tokens = [tokenizer.bos_id, *tokenizer.encode(TEXT)]
    true = -logprobs(model, np.array([tokens]))[0]
    assert [float(x) for x in re.findall(r'title="([\d.]+) nats', page)] == pytest.approx(true.tolist(), abs=0.006)
    assert f"The mean over these {len(true)} tokens is {true.mean():.3f} nats" in parsed.text


def test_samples_know_their_step_and_the_decoder_is_drawn(tmp_path: Path) -> None:
    page, parsed = written(write_run(tmp_path / "run"))
    assert re.findall(r'<article data-step="(\d*)">', page) == ["0", "20", "40"]
    assert "2 blocks of" in parsed.text
    assert "q 16 → 16" in parsed.text.replace("q16", "q 16")


@pytest.mark.parametrize("mlp", [Gated(), Experts(count=4, d_ff=8)], ids=["gated", "experts"])
def test_lens_is_on_the_page_and_experts_where_there_are_some(mlp: Gated | Experts, tmp_path: Path) -> None:
    _, tokenizer = model_and_tokenizer()
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(tokenizer.vocab_size, d_model=16, n_layers=5, n_heads=4, mlp=mlp)).eval()
    write_report(tmp_path / "page.html", RunRecord(tmp_path), model, tokenizer, TEXT)
    parsed = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    _, *panels = json.loads(parsed.scripts["data"])
    lens, layers = ([p for p in panels if ("expert 0" in p["rows"]) == of_experts] for of_experts in (False, True))
    likeliest = next_tokens(model, [tokenizer.bos_id, *tokenizer.encode(TEXT)][:20], 1)
    assert [p for panel in lens for p in panel["values"][0]] == pytest.approx(
        [row[0][1] for row in likeliest], rel=1e-3
    )
    assert [panel["title"] for panel in layers] == ["layer 0", "layer 2", "layer 4"] * isinstance(mlp, Experts)
    assert ("The experts of each token" in parsed.text) == isinstance(mlp, Experts)
    assert [a.get("class") for _, a in parsed.tags].count("panel") == 1 + len(panels)


PASSAGES = {  # text: expected passage of at most 30 characters
    "Short, no end": "Short, no end",
    "One two three. Four five six seven. Eight.": "One two three.",
    "A sentence that is much too long to be shown. This one, though, fits.": "This one, though, fits.",
    "A HEADING\n\nThis, below it, is longer. More.": "This, below it, is longer.",
    "No sentence ends in all of this text, which is long": "No sentence ends in all of",
    "Said “I will not go there.” So he stayed at home that day.": "Said “I will not go there.”",
    "A key (any text, e.g. a name) is read. So it is.": "A key (any text, e.g. a name)",
    "Mr. J. S. Bach, they said, came in. He sat down.": "He sat down.",
    "See e.g. that etc. or this. More of it follows.": "See e.g. that etc. or this.",
    "It (this. And that) is so. (Is it so? Yes.) Then more.": "It (this. And that) is so.",
    "Open (and never closed. So it is. And so on and on.": "Open (and never closed.",
    "x" * 40: "x" * 40,
}


@pytest.mark.parametrize(("text", "expected"), PASSAGES.items(), ids=range(len(PASSAGES)))
def test_shown_text_is_cut_at_the_ends_of_sentences(text: str, expected: str) -> None:
    tokenizer = train_tokenizer("char", PASSAGES)
    assert passage(tokenizer, text, 30 + (tokenizer.bos_id is not None)) == expected
