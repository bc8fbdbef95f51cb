"""The pictures of `onward inspect` show the model's values, for short and long texts."""

import json
import re
from inspect import signature
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from rich.cells import cell_len

from onward import Decoder, DecoderConfig, Experts, Sampling, UserError, trace, train_tokenizer
from onward.cli import main
from onward.cli.commands.inspect import VIEWS as COMMAND_OPTIONS
from onward.inspection import attention_maps
from onward.inspection.head_maps import next_tokens
from onward.reports import Picture, Reading
from onward.reports.pictures.views import VIEWS

from support.pages import HOSTILE, TEXT, Page, model_and_tokenizer


def reading(text: str = "to be, or not", **options: Any) -> Reading:
    return Reading(*model_and_tokenizer(), text, **options)


def mixture(text: str = "to be, or not") -> Reading:
    tokenizer = train_tokenizer("char", [TEXT])
    torch.manual_seed(0)
    config = DecoderConfig(tokenizer.vocab_size, d_model=16, n_layers=2, n_heads=4, mlp=Experts(4))
    return Reading(Decoder(config).eval(), tokenizer, text)


def values(picture: Picture, number: int = 0) -> np.ndarray:
    return np.array(picture.values()["panels"][number]["values"], float)


OPTIONS: dict[str, dict[str, Any]] = {  # options of views that need them, or show more with them
    "patch": {"corrupted": "to be, or nut"},
    "next": {"sampling": Sampling(temperature=0.5, top_k=3)},
}


def read(name: str) -> Picture:
    if name == "experts":
        return VIEWS[name](mixture())
    return VIEWS[name](reading(), **OPTIONS.get(name, {}))


def test_views_declare_the_options_that_the_command_gives_them() -> None:
    of_sampling = {"temperature", "top_k", "top_p"}
    for name, options in COMMAND_OPTIONS.items() - {("names", ()), ("features", ("activation", "time"))}:
        own = {one.name for one in signature(VIEWS[name]).parameters.values() if one.kind == one.KEYWORD_ONLY}
        assert {"sampling" if option in of_sampling else option for option in options} == own


@pytest.mark.parametrize("name", VIEWS)
def test_views_have_every_format(name: str) -> None:
    picture = read(name)
    assert len(picture.caption) > 80
    ElementTree.fromstring(picture.svg())
    parsed = Page(picture.html())
    assert parsed.open == []
    assert len(json.loads(parsed.scripts["data"])) == len(picture.panels)
    assert max(map(cell_len, picture.text(100).splitlines())) <= 110


def test_attention_has_the_weights_of_every_head() -> None:
    given = reading()
    picture, maps = VIEWS["attention"](given, layer=-2), attention_maps(given.model, given.tokens)
    assert [panel.title for panel in picture.panels] == [f"head {h}" for h in range(4)]
    for head in range(4):
        shown = np.nan_to_num(values(picture, head))
        np.testing.assert_allclose(shown, maps[0][head].numpy(), atol=1e-4)
    assert picture.panels[0].data["rows"][1:4] == ["t", "o", "·"]
    [drawn] = VIEWS["arrows"](given, layer=-2, head=1).panels
    np.testing.assert_allclose(drawn.data["values"], maps[0][1].numpy(), atol=1e-4)


def test_next_has_the_probabilities_of_the_model_and_of_each_step() -> None:
    given = reading()
    plain, *steps = VIEWS["next"](given, sampling=Sampling(temperature=0.5, top_k=3)).panels
    assert [*plain.data["bars"].values()][:10] == pytest.approx(
        [p for _, p in next_tokens(given.model, given.tokens)[-1]]
    )
    assert [panel.title.split(":")[0] for panel in steps] == ["temperature 0.5", "top_k 3"]
    assert [p > 0 for p in [*steps[1].data["bars"].values()]][:4] == [True] * 3 + [False]


def test_last_row_of_the_lens_is_the_prediction_of_the_model() -> None:
    given = reading()
    panel = VIEWS["lens"](given).values()["panels"][0]
    likeliest = [row[0] for row in next_tokens(given.model, given.tokens, 1)]
    assert panel["rows"] == ["block 1", "block 0", "embedding"]
    assert panel["values"][0] == pytest.approx([p for _, p in likeliest], rel=1e-3)
    assert panel["texts"][0] == given.pieces([token for token, _ in likeliest])


def test_patching_the_token_that_differs_restores_the_answer() -> None:
    picture = VIEWS["patch"](reading(), corrupted="to be, or nut", right="e", wrong="t")
    streams = values(picture)
    assert picture.panels[0].data["columns"][12] == "o/u"
    assert streams[0, 12] == pytest.approx(1, abs=1e-4)
    np.testing.assert_allclose(streams[:, :12], 0, atol=1e-4)  # earlier tokens are the same in both texts
    assert np.abs(values(picture, 1)).max() > 0.01


def test_units_and_experts_are_those_of_the_trace() -> None:
    given, mixed = reading(), mixture()
    with trace(given.model, "blocks.1.mlp.post") as t:
        given.model(torch.tensor([given.tokens]))
    panel = VIEWS["neurons"](given, layer=1).values()["panels"][0]
    chosen = [int(row.removeprefix("unit ")) for row in panel["rows"]]
    np.testing.assert_allclose(panel["values"], t["blocks.1.mlp.post"][0][:, chosen].T, rtol=1e-3, atol=1e-5)
    shares = values(VIEWS["experts"](mixed), 1)
    assert shares.shape == (4, len(mixed.tokens))
    np.testing.assert_allclose(shares.sum(0), 1, atol=1e-4)
    assert ((shares > 0).sum(0) == 2).all()


def test_idle_units_are_counted_in_words_that_agree() -> None:
    given = reading(TEXT[:60])
    assert "and 0 are above 0 at no token" in VIEWS["neurons"](given).caption
    given.model.get_parameter("blocks.1.mlp.up.weight").data[3] = 0
    assert "and 1 is above 0 at no token" in VIEWS["neurons"](given).caption


def test_positions_go_beyond_the_context_where_the_positions_do() -> None:
    panel = VIEWS["positions"](reading("to be or not " * 40)).values()["panels"][0]
    assert panel["x"][-1] + 2 == 2 * 64 + 1
    assert len(panel["series"]["loss"]) == 64


def test_pictures_of_256_tokens_are_small_and_readable() -> None:
    tokenizer = train_tokenizer("char", [TEXT])
    config = DecoderConfig(tokenizer.vocab_size, d_model=16, n_layers=2, n_heads=4, context_length=256)
    long = Reading(Decoder(config).eval(), tokenizer, (TEXT * 6)[:255])
    for name in "attention", "lens", "tokens", "neurons":
        picture = VIEWS[name](long)
        svg = picture.svg()
        assert len(svg) < 1_000_000
        assert float(re.search(r'viewBox="0 0 ([\d.]+)', svg)[1]) < 1700
        lines = picture.text(100).splitlines()
        assert max(map(cell_len, lines)) <= 110
        assert len(picture.html()) < 1_000_000


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    harmless = HOSTILE.replace("\ud800", "")
    model, tokenizer = model_and_tokenizer(harmless)
    for name in "attention", "arrows", "next", "lens", "tokens":
        picture = VIEWS[name](Reading(model, tokenizer, f"to {harmless} be"))
        page = picture.html()
        assert "<script>alert" not in page
        assert Page(page).open == []
        assert "\x1b" not in picture.text()


MISTAKES: dict[str, tuple[str, dict[str, Any]]] = {
    "text of 271 tokens with a context of 64": ("lens", {"text": "to be " * 45}),
    "layer 2 does not exist: the model has layers 0 to 1": ("attention", {"layer": 2}),
    "this model has no experts": ("experts", {}),
    "give a second text with --corrupted": ("patch", {}),
    "'to' is 2 tokens: give a text of one token": ("patch", {"corrupted": "to be, or nut", "right": "to"}),
    "between texts of 14 and 3 tokens": ("patch", {"corrupted": "to", "right": "t", "wrong": "e"}),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes_are_one_sentence(message: str) -> None:
    view, options = MISTAKES[message]
    text = options.get("text", "to be, or not")
    with pytest.raises(UserError, match=re.escape(message)):
        VIEWS[view](reading(text), **{name: value for name, value in options.items() if name != "text"})


def test_command_shows_a_view_and_writes_it(tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(tiny_run)
    assert main(["inspect", run, "The cat sat", "lens"]) == 0
    assert "embedding" in capsys.readouterr().out
    assert main(["inspect", run, "heads", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["panels"]) == 5
    assert main(["inspect", run, "The cat sat", "attention", "--layer", "-1", "--out", str(tmp_path / "x.html")]) == 0
    assert "Attention of layer 1" in (tmp_path / "x.html").read_text()


@pytest.mark.long
def test_command_trains_a_tuned_lens_and_a_sparse_autoencoder(
    tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text(TEXT * 20)
    text = str(tmp_path / "text.txt")
    assert main(["inspect", str(tiny_run), "The cat sat", "lens", "--tuned", text, "--time", "0.3s"]) == 0
    out, error = capsys.readouterr()
    assert out.startswith("Tuned lens")
    assert re.search(r"trained \d+ steps: the loss went from", error)
    words = ["features", text, "--activation", "blocks.1.mlp.out", "--time", "0.3s"]
    assert main(["inspect", str(tiny_run), *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["title"] == "Features of blocks.1.mlp.out"
    for panel in found["panels"]:
        assert re.match(
            r"feature \d+, active at [\d.]+ % of the tokens, at most [\d.]+; it raises “.*”, "
            r"lowers “.*” \([\d.]+ nats\)$",
            panel["title"],
        )
        assert max(panel["values"][0]) == pytest.approx(float(max(panel["notes"], key=float)), abs=0.006)
    assert main(["inspect", str(tiny_run), *words]) == 0
    assert "[" in capsys.readouterr().out


COMMANDS = {
    "'lense' is not a view: did you mean lens?": ["The cat", "lense"],
    "onward inspect takes a text and a view": ["The cat"],
    "onward inspect takes a text and a view (": ["The cat", "lens", "more"],
    "x.gif: choose a name that ends in .svg, .pdf, .png, .html, .json or .csv": ["The cat", "lens", "--out", "x.gif"],
    "--top-p is 2.0": ["The cat", "next", "--top-p", "2"],
    "the nearest are": ["names", "blocks.9.*"],
    "nothing.txt does not exist": ["features", "nothing.txt"],
    "'blocks.7.mlp.out' is not an activation": ["features", __file__, "--activation", "blocks.7.mlp.out"],
    "--time is '0'": ["The cat", "lens", "--tuned", "embedded", "--time", "0"],
}


@pytest.mark.parametrize("message", COMMANDS)
def test_mistakes_of_the_command_are_one_sentence(
    message: str, tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["inspect", str(tiny_run), *COMMANDS[message]]) == 2
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    assert message in error
    assert not [*tmp_path.iterdir()]
