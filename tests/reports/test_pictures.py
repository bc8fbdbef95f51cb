"""Pictures: every file format, the values that panels show, and pictures of concepts with the model's own
computations."""

import base64
import io
import json
import re
import struct
import zlib
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from rich.cells import cell_len

from onward import DecoderConfig, Experts, Parallel, PostNorm, SelfAttention
from onward.base.errors import UserError
from onward.cli import main
from onward.families import preset
from onward.planning.parameters import modules
from onward.reports import IDEAS, ColorScale, Picture, arrows, bars, cells, curves
from onward.reports.pictures.diagram import block, rows_of
from onward.reports.pictures.numbers import latex_of
from onward.reports.pictures.panels import unique
from onward.reports.pictures.pdf import ZOOM, unfiltered
from onward.reports.pictures.picture import in_rows, png_of

from support.pages import HOSTILE, Page

NAMES = ["<b>", "the", "\n", "a rather long token", "日本"]
VALUES = np.array([[0.5, np.nan, np.nan], [1.0, -0.25, np.nan], [0.0, 0.25, 0.5]])


def image(svg: str, style: str) -> np.ndarray:
    """The values from 0 to 1 in the first mask with a style's color."""
    name = re.search(rf'<rect class="{style}" [^>]* mask="url\(#(\w+)\)"', svg)[1]
    png = base64.b64decode(re.search(rf'<mask id="{name}".*?base64,([^"]*)"', svg)[1])
    columns, rows = struct.unpack(">II", png[16:24])
    size = struct.unpack(">I", png[33:37])[0]
    pixels = np.frombuffer(zlib.decompress(png[41 : 41 + size]), np.uint8).reshape(rows, columns + 1)
    assert png[29:33] == struct.pack(">I", zlib.crc32(png[12:29]))
    assert not pixels[:, 0].any()
    return pixels[:, 1:] / 255


def panel(idea: str, number: int) -> dict:
    return IDEAS[idea]().values()["panels"][number]


@pytest.mark.parametrize("name", IDEAS)
def test_ideas_have_a_caption_and_every_format(name: str) -> None:
    picture = IDEAS[name]()
    assert len(picture.caption) > 150
    root = ElementTree.fromstring(picture.svg())
    assert float(root.get("viewBox").split()[2]) <= 1000
    assert "prefers-color-scheme: dark" in picture.svg()
    assert all(cell_len(line) <= 120 for line in picture.text(100).splitlines())
    page = picture.html()
    parsed = Page(page)
    assert parsed.open == []
    assert picture.caption in parsed.text
    assert len(page) < 200_000
    assert not re.search(r"https?:|@import|url\((?!#)", page)
    assert len(json.loads(parsed.scripts["data"])) == len(picture.panels)
    assert json.dumps(picture.values(), allow_nan=False)


def test_cells_are_as_strong_as_their_values_and_nan_is_blank() -> None:
    made = cells("title", VALUES, NAMES[:3], NAMES[:3], scale=ColorScale(1))
    assert image(made.body, "more") == pytest.approx(np.where(VALUES > 0, VALUES, 0), abs=0.003)
    assert image(made.body, "less") == pytest.approx(np.where(VALUES < 0, -VALUES, 0), abs=0.003)
    assert 'd="M0 0H1v1H0zM0 1H2v1H0zM0 2H3v1H0z"' in made.body
    assert made.data["values"] == [[0.5, None, None], [1.0, -0.25, None], [0.0, 0.25, 0.5]]
    rooted = cells("", VALUES, scale=ColorScale(1, root=True))
    assert image(rooted.body, "more")[0, 0] == pytest.approx(0.5**0.5, abs=0.003)
    assert made.text == ["<b> ▒▒    ", "the ██−−  ", "  ↵ ··░░▒▒"]


def test_panels_of_256_tokens_are_small_and_their_labels_do_not_overlap() -> None:
    tokens = [f"token{i}" for i in range(256)]
    made = cells("", np.tril(np.random.default_rng(0).random((256, 256))), tokens, tokens, room=900)
    assert len(Picture("", "", [made]).svg()) < 120_000
    places = [float(y) for y in re.findall(r'<text class="label" x="-6" y="([\d.]+)"', made.body)]
    assert min(np.diff(places)) >= 11
    assert max(map(cell_len, made.text)) <= 256 + 10


def test_curves_and_bars_show_their_numbers() -> None:
    made = curves(
        "c", [1, 2, 3], {"up": torch.tensor([1, 2, 3]), "gap": [3, np.nan, 1]}, x_name="step", marks={"here": 2}
    )
    assert made.data["series"] == {"up": [1, 2, 3], "gap": [3, None, 1]}
    (up,) = re.findall(r'<path class="smooth" [^>]*d="M([^"]*)"', made.body)
    heights = [float(point.split()[1]) for point in up.split("L")]
    assert heights[1] - heights[0] == pytest.approx(heights[2] - heights[1], abs=0.11)
    assert made.text[0].endswith("▁▄█")
    drawn = bars("b", {"one": 1.0, "two": 0.5, "minus": -0.25}, marked="two")
    assert re.findall(r'rect class="(\w+)" [^>]*width="([\d.]+)"', drawn.body) == [
        ("more", "190.0"),
        ("less", "95.0"),
        ("less", "47.5"),
    ]


def test_legend_of_curves_breaks_into_rows_within_the_panel() -> None:
    long = {f"a curve with a long name {i}": [1, 2] for i in range(4)}
    few, many = (curves("c", [0, 1], series, x_name="step") for series in ({"short": [1, 2]}, long))
    rows = re.findall(r' x="0" y="(\d+)">', many.body)
    assert len(rows) == len({*rows}) == 4 // 2
    assert many.height > few.height


def test_each_of_six_curves_has_its_own_color_in_both_themes() -> None:
    made = curves("c", [0, 1], {str(i): [i, i + 1] for i in range(6)}, x_name="step")
    styles = re.findall(r'<path class="(\w+)" opacity="1"', made.body)
    assert len({*styles}) == 6
    for theme in "light", "dark":
        svg = Picture("", "", [made]).svg(theme)
        colors, strokes = (
            dict(re.findall(of, svg)) for of in (r"--(\w+): (#\w+)", r"path\.(\w+) { stroke: var\(--(\w+)")
        )
        assert len({colors[strokes[style]] for style in styles}) == 6


def test_arrows_are_as_strong_as_the_weights_of_each_query() -> None:
    panel = arrows("", ["the", "cat", "it"], np.array([[1, 0, 0], [0.5, 0.5, 0], [0.04, 0.9, 0.06]]))
    assert re.findall(r"<title>(.*?)</title>", panel.body) == ["cat to the: 0.50", "it to cat: 0.90"]  # 0.04 has none
    assert [line.split(" → ")[1] for line in panel.text] == ["the 1.00", "the 0.50, cat 0.50", "cat 0.90, it 0.06"]
    for pieces, weights, message in (("a" * 65, np.eye(65), "at most 64 tokens"), ("ab", np.eye(3), "(2, 2), got")):
        with pytest.raises(UserError, match=re.escape(message)):
            arrows("", pieces, weights)


def test_panels_of_one_width_are_spread_evenly_over_the_rows() -> None:
    for count, rows in {1: [1], 4: [2, 2], 12: [3, 3, 3, 3], 7: [3, 3, 1]}.items():
        assert [len(row) for row in in_rows(range(count), [300.0] * count, 960, 30)] == rows
    assert [len(row) for row in in_rows(range(4), [300.0, 300, 300, 301], 960, 30)] == [3, 1]


def test_texts_stay_texts() -> None:
    harmless = HOSTILE.replace("\ud800", "")
    parts = [
        cells(harmless, VALUES, [harmless] * 3, [harmless] * 3, texts=[[harmless] * 3] * 3, reading=harmless),
        curves(harmless, [0, 1], {harmless: [0, 1]}, x_name=harmless, marks={harmless: 1}),
        bars(harmless, {harmless: 1.0}, unit=harmless),
    ]
    picture = Picture(harmless, harmless, parts)
    ElementTree.fromstring(picture.svg())
    page = picture.html()
    plain = Picture(
        "", "", [cells("", VALUES, texts=[[""] * 3] * 3), curves("", [0, 1], {"": [0, 1]}, x_name="")]
    ).html()
    tags = lambda text: {(tag, name) for tag, attributes in Page(text).tags for name in attributes}
    assert Page(page).open == []
    assert "<script>alert" not in page
    assert {(tag, name) for tag, name in tags(page) if name.startswith("on") or tag == "img"} == set()
    assert [tag for tag, _ in Page(page).tags].count("script") == [tag for tag, _ in Page(plain).tags].count("script")


def test_masks_are_causal_bidirectional_and_packed() -> None:
    causal, both, packed = (np.array(panel("mask", i)["values"]) for i in range(3))
    assert (causal == np.tril(np.ones((6, 6)))).all()
    assert (both == 1).all()
    assert (packed == np.kron(np.eye(2), np.tril(np.ones((3, 3))))).all()
    reach = np.array(panel("window", 3)["values"])
    assert reach[11].tolist() == [0, 0] + [1] * 10  # three layers with a window of 4 reach 9 tokens back


def test_rotary_scores_depend_on_the_distance_alone() -> None:
    near, far = panel("rope", 4)["series"].values()
    assert near == pytest.approx(far, abs=1e-4)
    assert np.std(near) > 0.5
    assert panel("rope", 0)["degrees"][:3] == [0, 57, 115]


def test_alibi_bias_is_minus_slope_times_distance() -> None:
    for number, slope in enumerate((1 / 2, 1 / 16, 1 / 256)):
        values = panel("alibi", number)["values"]
        assert values[9] == pytest.approx([-slope * d for d in range(9, -1, -1)], rel=1e-4)
        assert values[0][1:] == [None] * 9


def test_cache_picture_shows_what_lies_in_each_slot() -> None:
    whole, window = panel("cache", 0), panel("cache", 1)
    assert whole["texts"][5] == [*"01234567", "–", "–"]
    assert whole["texts"][6] == whole["texts"][5]  # a rollback overwrites position 5 and clears nothing
    assert whole["values"][6][4:] == [0.4, 1, 0, 0, 0, 0]
    assert window["texts"][5] == [*"56734"]
    assert window["values"][5] == [0.4, 0.4, 1, 0, 0]


CONFIGS = {
    "grouped": DecoderConfig(50, d_model=32, n_layers=3, n_heads=4, n_kv_heads=2),
    "experts": DecoderConfig(50, d_model=32, n_layers=2, n_heads=4, mlp=Experts(4, d_shared=8), block=Parallel()),
    "post-norm": DecoderConfig(50, d_model=32, n_layers=2, n_heads=4, block=PostNorm(), tied=True),
    "five kinds": DecoderConfig(
        50, d_model=32, n_layers=5, n_heads=4, attention=tuple(SelfAttention(window=w) for w in (1, 2, 3, 4, 5))
    ),
    "gpt2": preset("gpt2").config,
    "deepseek-v2-lite": preset("deepseek-v2-lite").config,
    "gemma-2-2b": preset("gemma-2-2b").config,
}


@pytest.mark.parametrize("name", CONFIGS)
def test_diagram_has_every_product_of_the_decoder_with_its_sizes(name: str) -> None:
    config = CONFIGS[name]
    shown = " ".join(f"{box} {what}" for row in rows_of(config) for box, what in row.boxes)
    for module, _ in modules(config)[:3]:
        for path, child in module.named_modules():
            if isinstance(child, torch.nn.Linear) and "mlp.shared" not in path:
                assert f"{path.split('.')[-1]} {child.in_features:,} → {child.out_features:,}" in shown
    picture = block(config)
    ElementTree.fromstring(picture.svg())
    assert f"{config.vocab_size:,})" in picture.text(120)


def test_command_draws_in_the_terminal_and_writes_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["draw", "mask"]) == 0
    assert "causal (a decoder)" in capsys.readouterr().out
    for ending in "svg", "html", "json":
        assert main(["draw", "block", "gpt2", "--out", str(tmp_path / f"x.{ending}"), "--theme", "dark"]) == 0
    assert json.loads((tmp_path / "x.json").read_text())["title"] == "A decoder of 124 M parameters"
    svg = (tmp_path / "x.svg").read_text()
    assert "--paper: #151618" in svg
    assert "#fcfbf9" not in svg


def test_pdf_is_a_page_with_the_pixels_of_the_png(tmp_path: Path) -> None:
    pypdf = pytest.importorskip("pypdf")
    picture = IDEAS["mask"]()
    picture.write(tmp_path / "x.pdf")
    (page,) = pypdf.PdfReader(tmp_path / "x.pdf", strict=True).pages
    width, height = map(float, re.search(r'width="([\d.]+)" height="([\d.]+)"', picture.svg()).groups())
    assert [float(side) for side in page.mediabox[2:]] == pytest.approx([0.75 * width, 0.75 * height], abs=0.3)
    pillow = pytest.importorskip("PIL.Image")
    png = png_of(picture.svg("light"), ZOOM, "white")
    assert page.images[0].image.tobytes() == pillow.open(io.BytesIO(png)).convert("RGB").tobytes()


@pytest.mark.parametrize("filters", [(0, 0, 0), (1, 2, 3), (4, 4, 4), (3, 4, 1)])
def test_every_filter_of_a_png_is_undone(filters: tuple[int, ...]) -> None:
    wanted = np.random.default_rng(0).integers(0, 256, (3, 5, 3))
    padded = np.pad(wanted, ((1, 0), (1, 0), (0, 0)))
    left, above, corner = padded[1:, :-1], padded[:-1, 1:], padded[:-1, :-1]
    near = [left, above, corner]
    distance = np.stack([abs(left + above - corner - one) for one in near])
    paeth = np.choose(distance.argmin(0), near)
    predicted = np.stack([0 * left, left, above, (left + above) // 2, paeth])[[*filters], range(3)]
    assert np.array_equal(unfiltered(np.array(filters, np.uint8), (wanted - predicted).astype(np.uint8)), wanted)


FORMS = {  # a panel, and expected rows of its values
    "cells": (cells("c", np.eye(2), ["a", "b"], ["x", "y"]), ["c,a,x,1.0", "c,a,y,0.0"]),
    "curves": (curves("c", [1, 2], {"loss": [3.0, 4.0]}, x_name="step"), ["c,loss,1,3.0", "c,loss,2,4.0"]),
    "arrows": (
        arrows("c", ["a", "b"], np.array([[1, 0], [0.25, 0.75]])),
        ["c,a,a,1.0", "c,a,b,0.0", "c,b,a,0.25", "c,b,b,0.75"],
    ),
    "bars": (bars("c", {"one, two": 0.5}), ['c,"one, two",,0.5']),
}


@pytest.mark.parametrize("form", FORMS)
def test_numbers_of_a_picture_are_rows_of_a_csv(form: str, tmp_path: Path) -> None:
    panel, rows = FORMS[form]
    Picture("", "", [panel]).write(tmp_path / "x.csv")
    assert (tmp_path / "x.csv").read_text().splitlines()[: 1 + len(rows)] == ["panel,row,column,value", *rows]


def test_table_in_latex_escapes_its_texts() -> None:
    table = latex_of([{"a_b": "1,000", "name": "50 % & {x}"}, {"a_b": "+2.5", "name": "~^\\"}])
    assert r"\begin{tabular}{rl}" in table
    assert r"a\_b & name \\" in table
    assert r"1,000 & 50 \% \& \{x\} \\" in table
    assert r"+2.5 & \textasciitilde{}\textasciicircum{}\textbackslash{} \\" in table


def test_png_is_twice_the_size_of_the_svg(tmp_path: Path) -> None:
    picture = IDEAS["mask"]()
    width, height = map(float, re.search(r'width="([\d.]+)" height="([\d.]+)"', picture.svg()).groups())
    picture.write(tmp_path / "x.png")
    png = (tmp_path / "x.png").read_bytes()
    assert struct.unpack(">II", png[16:24]) == pytest.approx((2 * width, 2 * height), abs=1)


MISTAKES = {
    "draw masks": "did you mean mask",
    "draw samplers --logits 2,1,x,0": "logits is '2,1,x,0': give numbers separated by commas",
    "draw samplers --logits 2,1,nan,0": "give 4 to 1000 finite numbers",
    "draw samplers --logits 2,1,0": "give 4 to 1000 finite numbers",
    "draw samplers --logits 1e308,-1e308,0,1": "finite numbers of at most 1e+30",
    "draw mask gpt2": "gpt2 is one argument too many: onward draw mask takes no model",
    "draw mask --out {folder}/x.bmp": "x.bmp: choose a name that ends in .svg, .pdf, .png, .html, .json or .csv",
    "draw mask --out {folder}": "choose a name that ends in",
    "draw mask --out {folder}/a/file/x.svg": "cannot write",
    "draw block nosuch": "nosuch",
    "draw --out {folder}/x.svg": "--out is not used by onward draw alone",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_mistakes_are_one_sentence(words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/file").write_text("kept")
    assert main(words.format(folder=tmp_path).split()) == 2
    out, error = capsys.readouterr()
    assert not out
    assert error.count("\n") == 1
    assert MISTAKES[words] in error
    assert (tmp_path / "a/file").read_text() == "kept"


def test_repeated_names_get_unused_numbers() -> None:
    assert unique(["a", "b", "a", "a"], [1, 2, 3, 4]) == {"a": 1, "b": 2, "a (2)": 3, "a (3)": 4}
    assert unique(["a (2)", "a", "a"], [1, 2, 3]) == {"a (2)": 1, "a": 2, "a (3)": 3}
