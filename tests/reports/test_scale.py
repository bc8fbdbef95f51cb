"""Legends and captions describe the picture in each theme, in a terminal and on a narrow screen."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from onward import (
    Alibi,
    AttentionOnly,
    Decoder,
    DecoderConfig,
    Experts,
    LayerNorm,
    Learned,
    PreNorm,
    Sampling,
    SelfAttention,
    explain,
    train_tokenizer,
)
from onward.families import preset
from onward.inspection import loss_by_position, token_statistics
from onward.reports import IDEAS, ColorScale, Picture, Reading, bars, cells
from onward.reports.pictures.diagram import block, in_short
from onward.reports.pictures.picture import pointed
from onward.reports.pictures.scale import SHADES
from onward.reports.pictures.views import VIEWS

from support.pages import TEXT, model_and_tokenizer, write_run, written

SCALES = {
    "linear": ColorScale(2.0, unit="u"),
    "square root": ColorScale(1.0, root=True, unit="u"),
    "signed": ColorScale(0.3, signed=True, unit="u"),
    "under texts": ColorScale(8.32, unit="u", faint=True),
    "signed square root under texts": ColorScale(1.0, signed=True, root=False, unit="u", faint=True),
}
SIZED = re.compile(r'<svg [^>]*--width:([\d.]+)px[^>]*class="(\w+)"')


def reading(text: str = "to be, or not", **options: Any) -> Reading:
    fields = options.pop("fields", {})
    return Reading(*model_and_tokenizer(**fields), text, **options)


def drawn() -> dict[str, Picture]:
    """A picture of each kind except features, whose panels name the end of the scale in their titles."""
    given = reading()
    options: dict[str, Any] = {
        "patch": {"corrupted": "to be, or nut"},
        "next": {"sampling": Sampling(temperature=0.5, top_k=3)},
    }
    mixed = reading(fields={"mlp": Experts(4)})
    views = {name: VIEWS[name](mixed if name == "experts" else given, **options.get(name, {})) for name in VIEWS}
    return {name: make() for name, make in IDEAS.items()} | views


@pytest.fixture(scope="module")
def pictures() -> dict[str, Picture]:
    return drawn()


@pytest.mark.parametrize("name", SCALES)
def test_legend_has_each_value_under_the_color_of_its_cells(name: str) -> None:
    scale = SCALES[name]
    svg = scale.legend().svg
    colors = [
        (float(x) + 6, float(opacity) * (-1 if style == "less" else 1))
        for style, x, opacity in re.findall(r'class="(more|less)" x="(\d+)"[^>]*opacity="([\d.]+)"', svg)
    ]
    labels = re.findall(r'x="([\d.]+)" [^>]*text-anchor="middle">([^<]*)<', svg)
    assert len(labels) == 5
    for place, label in labels:
        value = np.array([float(label)])
        color = next(color for x, color in colors if x == float(place))
        assert color == pytest.approx(float(np.sign(value[0]) * scale.strength(value)[0]), abs=0.02)
    assert ("square-root scale" in svg) == scale.root


@pytest.mark.parametrize("name", SCALES)
def test_terminal_legend_has_the_greatest_value_of_each_character(name: str) -> None:
    scale = SCALES[name]
    limits = [(mark, float(value)) for mark, value in re.findall(r"([░▒▓█]) to ([\d.]+)", "\n".join(scale.text()))]
    assert [mark for mark, _ in limits] == [*SHADES[1:]]
    for place, (_, value) in enumerate(limits, 1):
        assert scale.levels(np.array([0.98 * value, 1.1 * value])).tolist() == [place, min(place + 1, 4)]


def test_legend_says_where_values_are_beyond_it() -> None:
    for values, said in (([[0.5, 1.0]], False), ([[0.5, 1.5]], True), ([[-1.5, 0.0]], True)):
        scale = ColorScale(1.0, signed=True, unit="effect")
        picture = Picture("", "", [cells("", values, scale=scale), cells("", [[0.5]], scale=scale)])
        assert len(picture.legends) == 1
        assert ("full color from ±1" in picture.svg()) == ("from ±1" in picture.text()) == said


def test_panels_of_another_strength_have_a_legend_of_their_own() -> None:
    scale = ColorScale(1, unit="score")
    panels = [cells("", [[0.5]], scale=scale), cells("", [[0.5]], texts=[["a"]], scale=scale)]
    assert [legend.full for legend in Picture("", "", panels).legends] == [1.0, 0.6]
    heads = VIEWS["heads"](reading())
    assert len(heads.legends) == 1
    assert {panel.scale and panel.scale.full for panel in heads.panels} == {heads.legends[0].full}


def test_every_shaded_panel_without_numbers_has_a_legend(pictures: dict[str, Picture]) -> None:
    story = explain(*model_and_tokenizer(), "to be, or not")
    panels = [panel for picture in pictures.values() for panel in picture.panels]
    panels += [panel for step in story.steps for panel in step.panels]
    panels.append(cells("of a user", [[1, 2]]))
    shaded = [panel for panel in panels if panel.scale and "mask=" in panel.body and not panel.data.get("texts")]
    assert len(shaded) > 20
    assert [panel.title for panel in shaded if panel.scale and not (panel.scale.unit or panel.scale.keys)] == []


def test_readout_of_a_large_panel_under_texts_has_the_full_scale() -> None:
    values = np.random.default_rng(0).random((70, 70))
    texts = [["a"] * 70] * 70
    names = ["a"] * 70
    assert pointed(cells("", values, names, names, scale=ColorScale(1)))["full"] == 1
    assert pointed(cells("", values, names, names, texts=texts, scale=ColorScale(1)))["full"] == 0.6
    # some values are beyond the scale
    assert "values" in pointed(cells("", 2 * values, names, names, scale=ColorScale(1)))


def test_captions_name_no_color_that_the_dark_theme_turns_around(pictures: dict[str, Picture], tmp_path: Path) -> None:
    _, page = written(write_run(tmp_path / "run"))
    texts = {name: picture.caption for name, picture in pictures.items()} | {"report": page.text}
    assert [name for name, text in texts.items() if re.search(r"\b(pale|palest|dark|light)\b", text, re.I)] == []


def test_page_promises_values_only_where_some_can_be_read(pictures: dict[str, Picture]) -> None:
    for name, picture in pictures.items():
        readable = any('class="hit"' in panel.body or "<title>" in panel.body for panel in picture.panels)
        assert ("Point at the picture" in picture.html()) == readable, name
    assert "Point at" not in pictures["block"].html()
    assert "Point at" in pictures["attention"].html()


def test_strategies_are_named_with_their_values() -> None:
    sampling = Sampling(temperature=0.7, top_k=4, min_p=0.1, repetition_penalty=1.3, presence_penalty=0.5)
    titles = [panel.title.split(":")[0] for panel in VIEWS["next"](reading(), sampling=sampling).panels]
    penalties = "repetition_penalty 1.3, presence_penalty 0.5"
    assert titles == ["the model", penalties, "temperature 0.7", "top_k 4", "min_p 0.1"]
    assert VIEWS["next"](reading("to")).title == "The token after “<|endoftext|>to”"  # the title is not cut off
    plain = VIEWS["next"](reading(), sampling=Sampling(temperature=1.0))
    assert "step" not in plain.caption


def test_value_of_zero_has_no_bar() -> None:
    made = bars("", {"some": 0.5, "hardly any": 1e-9, "none": 0.0})
    assert re.findall(r'width="([\d.]+)"', made.body) == ["190.0", "1.0", "0.0"]
    assert [line.count("█") for line in made.text] == [24, 1, 0]


def test_tokens_show_the_rank_that_the_caption_explains() -> None:
    given = reading()
    picture, found = VIEWS["tokens"](given), token_statistics(given.model, given.tokens)
    ranks = re.findall(r'class="number soft" x="[\d.]+" y="[\d.]+">(\d+)<', picture.panels[0].body)
    assert [int(rank) for rank in ranks] == found.ranks[1:].tolist()
    assert "rank, 1 where it was the likeliest" in picture.caption
    assert f"mean loss is {-found.logprobs[1:].mean():.3f} nats" in picture.caption
    single = VIEWS["tokens"](reading(ids=[3])).caption
    assert not any(word in single for word in ("entropy", "nan", "mean loss"))


def test_positions_say_what_the_curve_does() -> None:
    for text, beyond in (("to be or not " * 40, True), ("to be or not", False)):
        given = reading(text)
        picture = VIEWS["positions"](given)
        ids = given.encode(text)
        length = 128 if beyond else len(ids) - 1
        loss = loss_by_position(
            given.model, [torch.tensor(ids[: (len(ids) - 1) // length * length + 1]).unfold(0, length + 1, length)]
        ).loss
        trained = loss[:64]
        half = len(trained) // 2
        assert f"{trained[:half].mean():.2f} nats over the first half" in picture.caption
        assert f"{trained[half:].mean():.2f} over the second" in picture.caption
        assert ("beyond it" in picture.caption) == beyond
        assert "so that the loss falls" not in picture.caption


def test_attention_with_sinks_says_that_rows_sum_to_less() -> None:
    plain, sinks = (
        VIEWS["attention"](reading(fields={"attention": SelfAttention(sinks=s)})).caption for s in (False, True)
    )
    assert "sink" not in plain
    assert "sum to 1 together with that of the head's sink, which is not drawn." in sinks


def test_diagram_names_no_other_model_and_the_layers_of_each_kind() -> None:
    titles = lambda config: re.findall(r'class="name"[^>]*>([^<]*blocks?[^<]*)<tspan[^>]*>([^<]*)', block(config).svg())
    gemma = preset("gemma-2-2b").config
    assert titles(gemma) == [
        (f"13 blocks of 77,865,984 parameters, layers {layers}", "x + norm(attn(norm(x))), then x + norm(mlp(norm(x)))")
        for layers in ("0, 2, ..., 24", "1, 3, ..., 25")
    ]
    text = block(gemma).text(200)
    for said in ("× 48", "softmax(50 tanh(q · k × scale / 50)) v", "30 tanh(z / 30)", "q (B, T, 8, 256), k (B, T, 4"):
        assert said in text
    small: dict[str, Any] = {"vocab_size": 50, "d_model": 32, "n_layers": 2, "n_heads": 4}
    scaled = DecoderConfig(**small, block=PreNorm(residual_scale=0.5), attention=SelfAttention(sinks=True))
    assert titles(scaled)[0][1].endswith("mlp(norm(x)), attn and mlp times 0.5")
    assert "a sink in each head" in block(scaled).text(200)
    assert "feed-forward" in block(scaled).caption
    assert "feed-forward" not in block(DecoderConfig(**small, block=AttentionOnly())).caption


def test_layers_in_short() -> None:
    found = [in_short(layers) for layers in ([3], [0, 1, 2], [0, 3], [0, 2, 4], [0, 1, 3, 4], [0, 1, 3, 4, 7])]
    expected = ["3", "0 to 2", "0 and 3", "0, 2, ..., 4", "0, 1, 3, 4", "0, 1, 3, ..., 7"]
    assert found == [f"layer{'s' * (len(one) > 1)} {one}" for one in expected]


def test_steps_of_a_norm_and_a_gate_are_those_of_the_model() -> None:
    def told(title: str, **fields: Any) -> str:
        story = explain(*model_and_tokenizer(**fields), "to be")
        assert not any("GPT" in step.text + step.formula for step in story.steps)
        return next(step.text for step in story.steps if title in step.title)

    assert "root of the mean square, not centered, then multiplied by learned weights" in told("norm")
    learned = {"norm": LayerNorm(), "position": Learned()}
    assert "centered and divided by the standard deviation, then multiplied" in told("norm", **learned)
    assert "two matrices compute" in told("units of the feed-forward")
    sinks = told("weights", attention=SelfAttention(sinks=True), position=Alibi())
    assert "; the rest goes to its sink." in sinks
    assert "sink" not in told("weights")


def test_report_says_the_scale_of_its_attention_map(tmp_path: Path) -> None:
    _, parsed = written(write_run(tmp_path / "run"))
    assert "attention weight, square-root scale" in parsed.text
    assert "learning rate, up to 0.004" in parsed.text


def test_report_calls_no_other_loss_that_of_tokens(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    assert "a uniform guess among" in written(run)[1].text
    options = (run / "run.json").read_text()
    (run / "run.json").write_text(options.replace("{", '{"method": {"kind": "dpo"}, ', 1))
    text = written(run)[1].text
    assert "The loss is that of the method dpo." in text
    for other in ("nats per token,", "negative log-probability of the next token", "perplexity"):
        assert other not in text.partition("Everything on record")[0].partition("Samples")[0]


def test_every_picture_of_a_page_scrolls_in_its_own_box(tmp_path: Path) -> None:
    tokenizer = train_tokenizer("char", [TEXT])
    mixture = Decoder(DecoderConfig(tokenizer.vocab_size, d_model=16, n_layers=1, n_heads=2, mlp=Experts(2)))
    pages = [written(write_run(tmp_path / "run"))[0], IDEAS["positions"]().html()]
    pages += [explain(mixture.eval(), tokenizer, "to be").html()]
    for page in pages:
        assert "@media (max-width: 58rem) { .picture, .curve .plot, #map { min-width: var(--width) } }" in page
        assert re.search(r"figure \{[^}]*overflow-x: auto", page)
        assert re.search(r"\ntable \{[^}]*overflow-x: auto", page)
        outside = re.sub(r"<figure.*?</figure>", "", page, flags=re.S)
        left = [width for width, kind in SIZED.findall(outside) if kind in ("picture", "plot")]
        assert len(SIZED.findall(page)) > len(left)
        assert all(float(width) < 300 for width in left)  # only the legend of the attention map remains
    assert '<figure><svg class="js" id="map"' in pages[0]
