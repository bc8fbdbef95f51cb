"""The forward pass explained step by step: its numbers equal the model's, for decoders of all kinds."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from onward import (
    Alibi,
    Decoder,
    DecoderConfig,
    Experts,
    LatentAttention,
    LayerNorm,
    Learned,
    Parallel,
    Plain,
    PostNorm,
    SelfAttention,
    UserError,
    explain,
    trace,
    train_tokenizer,
)
from onward.cli import main
from onward.inspection import attention_maps
from onward.inspection.head_maps import next_tokens
from onward.reports.explain.story import Story

from support.pages import HOSTILE, TEXT, Page, model_and_tokenizer

SOURCE = Path(__file__).parents[2] / "src" / "onward"

KINDS: dict[str, dict[str, Any]] = {
    "gpt2": {"position": Learned(), "norm": LayerNorm(), "mlp": Plain(), "tied": True},
    "experts with alibi": {"position": Alibi(), "mlp": Experts(4), "n_kv_heads": 1},
    "latent": {"attention": LatentAttention(8, 0, 4, 4, 4), "block": Parallel()},
    "post-norm": {"block": PostNorm(), "embed_scale": 4.0, "attention": SelfAttention(attn_softcap=5.0)},
}


def told(text: str = "to be, or not", position: int = -1, layer: int = 0) -> tuple[Decoder, list[int], Story]:
    model, tokenizer = model_and_tokenizer()
    return model, tokenizer.begin(tokenizer.encode(text)), explain(model, tokenizer, text, position, layer)


def step(story: Story, title: str) -> Any:
    return next(one for one in story.steps if title in one.title)


def test_numbers_of_the_steps_are_those_of_the_model() -> None:
    model, tokens, story = told(position=7, layer=1)
    maps = attention_maps(model, tokens)
    for layer, title in enumerate(["Block 0 (of 0 to 1)", "Block 1 (of 0 to 1): attention weights"]):
        values = torch.tensor(step(story, title).panels[0].data["values"])
        assert torch.allclose(values, maps[layer][:, 7, :8], atol=1e-4)
    with trace(model, "embed", "blocks.1.mlp.post", "logits") as t:
        model(torch.tensor([tokens]))
    embedding = step(story, "From id to vector").panels[0].data["values"][0]
    assert embedding == pytest.approx(t["embed"][0, 7, :10].tolist(), rel=1e-3)
    for name, value in step(story, "units").panels[0].data["bars"].items():
        assert value == pytest.approx(float(t["blocks.1.mlp.post"][0, 7, int(name.removeprefix("unit "))]), rel=1e-4)
    likeliest = step(story, "probabilities").panels[0].data["bars"]
    assert [*likeliest.values()] == pytest.approx([p for _, p in next_tokens(model, tokens)[7]], rel=1e-4)
    loss = -float(t["logits"][0, 7].log_softmax(-1)[tokens[8]])
    assert f"a loss of {loss:.2f} nats" in step(story, "probabilities").text
    token = next(iter(likeliest)).replace("·", " ")
    assert f"{token}”. The longer text" in step(story, "The next step").text


COUNTED = re.compile(r"\b(block|layer|head|expert|pair)s? (\d+)\b", re.IGNORECASE)


@pytest.mark.parametrize("config", [{}, KINDS["latent"]], ids=["rotary", "latent"])
def test_blocks_and_heads_are_counted_from_0(config: dict[str, Any]) -> None:
    model, tokenizer = model_and_tokenizer(**config)
    c, said = model.config, explain(model, tokenizer, "to be, or not").text(200)
    found: dict[str, set[int]] = {}
    for name, number in COUNTED.findall(said):
        found.setdefault(name.lower(), set()).add(int(number))
    assert found["block"] == {*range(c.n_layers)}
    assert found["head"] == {*range(c.n_heads)}


def test_no_text_is_written_with_a_number_from_1() -> None:
    """No source file adds 1 to the index of a layer, a head, an expert or a pair in a text."""
    shifted = re.compile(r"\b(layer|block|head|expert|pair|unit)s?[ :,]*\$?\{[^{}]*\+ ?1\}", re.IGNORECASE)
    files = [path for path in SOURCE.rglob("*") if path.suffix in (".py", ".js", ".html")]
    found = {str(path): shifted.findall(path.read_text(encoding="utf-8")) for path in files}
    assert len(files) > 200
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize("config", [{}, KINDS["latent"], KINDS["gpt2"]], ids=["rotary", "latent", "learned"])
def test_arithmetic_that_is_written_out_is_right(config: dict[str, Any]) -> None:
    story = explain(*model_and_tokenizer(**config), "to be, or not")
    dot, scale, score = map(
        float, re.search(r"is (\S+); times (\S+), it is (\S+)\.", step(story, "scores").text).groups()
    )
    assert dot * scale == pytest.approx(score, abs=2e-3)
    head, key = re.search(
        r"In head (\d+), the product of the query and the key of “(.*?)”", step(story, "scores").text
    ).groups()
    panel = step(story, "scores").panels[0].data
    assert round(score, 2) in [
        round(value, 2) for value, name in zip(panel["values"][int(head)], panel["columns"]) if name == key
    ]
    if "position" in config:
        return
    before, after = re.search(r"rotated from \((.*?)\) to \((.*?)\)", step(story, "rotation").text).groups()
    length = lambda pair: sum(float(x) ** 2 for x in pair.split(", ")) ** 0.5
    assert length(before) == pytest.approx(length(after), abs=0.02)


@pytest.mark.parametrize("kind", KINDS)
def test_decoders_of_all_kinds_are_told(kind: str) -> None:
    tokenizer = train_tokenizer("char", [TEXT])
    config = DecoderConfig(tokenizer.vocab_size, **{"d_model": 16, "n_layers": 3, "n_heads": 4} | KINDS[kind])
    torch.manual_seed(0)
    story = explain(Decoder(config).eval(), tokenizer, "to be", layer=-1)
    titles = [one.title for one in story.steps]
    assert titles[:2] == ["From text to tokens", "From id to vector"]
    assert ("Adding the position" in titles) == (kind == "gpt2")
    assert any("choice of experts" in title for title in titles) == (kind == "experts with alibi")
    assert any("rotation" in title for title in titles) == (kind in ("latent", "post-norm"))
    assert any("latent" in title for title in titles) == (kind == "latent")
    assert ("The positions add a bias" in story.text()) == (kind == "experts with alibi")
    assert [titles.count(f"Block {i} (of 0 to 2)") for i in range(3)] == [1, 1, 0]
    assert "nan" not in story.text().lower()


def test_page_is_whole_and_text_stays_text() -> None:
    harmless = HOSTILE.replace("\ud800", "")
    model, tokenizer = model_and_tokenizer(harmless)
    page = explain(model, tokenizer, f"to {harmless} be").html()
    parsed = Page(page)
    assert parsed.open == []
    assert "<script>alert" not in page
    assert not any(name.startswith("on") for _, attributes in parsed.tags for name in attributes)
    assert not re.search(r"https?:|@import|url\((?!#)", page)
    assert len(page) < 300_000
    masks = re.findall(r'<mask id="(\w+)"', page)
    assert len(masks) == len({*masks})
    assert len(json.loads(parsed.scripts["data"])) == [a.get("class") for _, a in parsed.tags].count("panel")


MISTAKES: dict[str, dict[str, Any]] = {
    "position 99 is not in the text, which has tokens 0 to 13": {"position": 99},
    "layer 2 does not exist: the model has layers 0 to 1": {"layer": 2},
    "tokens with a context of 64: shorten it": {"text": "to be " * 40},
}


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes_are_one_sentence(message: str) -> None:
    with pytest.raises(UserError, match=message):
        told(**MISTAKES[message])


def test_command_explains_in_the_terminal_and_as_a_page(
    tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", str(tiny_run), "The cat sat"]) == 0
    assert "From vector to logits" in capsys.readouterr().out
    assert main(["explain", str(tiny_run), "The cat sat", "--out", str(tmp_path / "x.html"), "--theme", "dark"]) == 0
    assert "--paper: #151618" in (tmp_path / "x.html").read_text()
    assert main(["explain", str(tiny_run), "The cat sat", "--out", str(tmp_path / "x.svg")]) == 2
    assert "x.svg: choose a name that ends in .html or .json" in capsys.readouterr().err
