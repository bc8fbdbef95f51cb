"""Interactive figures: controlled with the keyboard in a browser, they show the numbers that Python computes."""

import itertools
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import onward
from onward import Sampling, next_token_distribution
from onward.families import preset
from onward.inspection.inputs import logits
from onward.kernels.operations import rotate
from onward.learn.cells import cells
from onward.learn.chapters import chapters
from onward.learn.interactive.cache import cache_memory
from onward.learn.interactive.figure import InteractiveFigure, page_of, read_figure
from onward.learn.interactive.masks import mask_grid
from onward.learn.interactive.rotary import rotary_pairs
from onward.learn.interactive.samplers import samplers
from onward.learn.interactive.scaling import loss_surface
from onward.learn.interactive.stepper import stepper
from onward.learn.notebook import notebook
from onward.learn.terminal import for_terminal
from onward.learn.web import web_page
from onward.model.context import angles_at, rotary
from onward.planning import REFIT, cache_bytes, weight_bytes

NO_HEADING = {"page-has-heading-one": {"enabled": False}}  # the heading is in the chapter around a figure
LETTERS = "abcdefghijklmnopqrstuvwxyz ."


def writer() -> onward.LanguageModel:
    """A character model whose logits differ a lot."""
    tokenizer = onward.train_tokenizer("char", [LETTERS])
    torch.manual_seed(0)
    model = onward.Decoder(onward.DecoderConfig(tokenizer.vocab_size, d_model=16, n_layers=1, n_heads=2)).eval()
    model.get_parameter("norm.weight").data *= 20
    return onward.LanguageModel(model, tokenizer)


@contextmanager
def opened(browser: Any, figure: InteractiveFigure | str, scheme: str = "light", width: int = 1280) -> Iterator[Any]:
    """Show a figure, or HTML of figures; afterwards check that there were no errors and that the page fits the
    window."""
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900}, offline=True)
    page = context.new_page()
    page.set_default_timeout(10_000)
    faults: list[str] = []
    page.on("console", lambda message: message.type == "error" and faults.append(message.text))
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.set_content(figure.page() if isinstance(figure, InteractiveFigure) else page_of(figure))
    yield page
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert not faults
    context.close()


def press(page: Any, label: str, *keys: str) -> None:
    """Press keys on the control with this label."""
    for key in keys:
        page.get_by_label(label, exact=True).press(key)


def columns(page: Any) -> list[list[str]]:
    """The texts of the rows of a table of bars: the name, and the columns next to the bar."""
    rows = [row.locator("th, td:not(.bar)").all_text_contents() for row in page.locator("tbody tr").all()]
    return [[text.replace("\u00a0", " ").strip() for text in row] for row in rows]


def share(p: float) -> str:
    return f"{100 * p:.1f} %" if p >= 0.001 else "< 0.1 %" if p else "cut"


SETTINGS: list[tuple[dict[str, list[str]], dict[str, Any]]] = [
    ({"temperature": ["ArrowLeft"] * 8}, {"temperature": 0.6}),
    ({"temperature": ["Home"]}, {"temperature": 0}),
    ({"top-k": ["ArrowRight"] * 5, "temperature": ["End"]}, {"temperature": 2, "top_k": 5}),
    ({"top-p": ["ArrowLeft"] * 20}, {"temperature": 1, "top_p": 0.8}),
    ({"min-p": ["ArrowRight"] * 10, "temperature": ["End"]}, {"temperature": 2, "min_p": 0.1}),
]


def test_sliders_show_the_distribution_of_the_sampler(browser: Any) -> None:
    lm = writer()
    z = logits(lm.model, lm.tokenizer.begin(lm.tokenizer.encode("a")))[-1]
    with opened(browser, samplers(lm, ["the c", "a"])) as page:
        page.get_by_label("Text").select_option("1")
        for keys, options in SETTINGS:
            for label, pressed in keys.items():
                press(page, label, *pressed)
            p = next_token_distribution(z[None], Sampling(**options))[0][z.argsort(descending=True)]
            assert (p == 0).any() == (len(options) > 1 or options["temperature"] == 0)
            shown = [*p[:12].tolist(), float(p[12:].sum())]
            assert [row[1] for row in columns(page)] == [share(one) for one in shown]
            assert page.locator(".summary").text_content().startswith(f"{int((p > 0).sum())} token")
            page.get_by_role("button", name="Draw").press("Enter")
            drawn = [int(row[2] or 0) for row in columns(page)]
            assert sum(drawn) == 100
            assert not any(count for count, one in zip(drawn, shown) if not one)
            page.get_by_role("button", name="Reset").press("Enter")


FIGURES = [chapter.path.parent / cell.figure for chapter in chapters() for cell in cells(chapter.text) if cell.figure]


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_all_figures_share_a_page_and_axe_finds_nothing(scheme: str, width: int, browser: Any) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe").Axe()
    figures = [read_figure(path) for path in FIGURES]
    with opened(browser, "".join(figure.html() for figure in figures), scheme, width) as page:
        assert page.locator("figure.interactive .body .controls").count() == len(figures)
        violations = axe.run(page, options={"rules": NO_HEADING}).response["violations"]
        assert not [(rule["id"], node["html"][:200]) for rule in violations for node in rule["nodes"]]


def test_every_file_of_numbers_has_its_place_in_a_chapter() -> None:
    assert {path.name for path in chapters()[0].path.parent.glob("*.json")} == {path.name for path in FIGURES}


def test_a_frame_in_a_notebook_has_the_height_of_its_figure(browser: Any) -> None:
    page = browser.new_page(viewport={"width": 700, "height": 900})
    page.set_content(rotary_pairs(torch.ones(8), torch.ones(8), trained=16)._repr_html_())
    inside = page.frame_locator("iframe").locator("main")
    inside.locator("svg.axes").wait_for()
    page.wait_for_function("document.querySelector('iframe').style.height !== '36rem'")
    assert 0 <= page.locator("iframe").bounding_box()["height"] - inside.bounding_box()["height"] < 60


def test_a_chapter_shows_its_figures_on_its_page_in_its_notebook_and_as_a_line_in_a_terminal() -> None:
    chapter = chapters()[9]
    figure = read_figure(chapter.path.parent / "10-cache.json")
    assert figure.html() in web_page(chapter)
    assert json.dumps(figure._repr_html_(), ensure_ascii=False) in notebook(chapter)
    assert f"*{figure!r}: `onward learn 10 --web 10-kv-cache.html`, or the notebook*" in for_terminal(chapter)


def test_a_figure_is_written_and_read_and_its_text_cannot_end_the_script(tmp_path: Path) -> None:
    figure = InteractiveFigure("samplers", "A title", "What to try", {"text": "</script><b>"})
    figure.write(tmp_path / "figure.json")
    assert read_figure(tmp_path / "figure.json") == figure
    assert json.loads((tmp_path / "figure.json").read_text())["data"] == {"text": "</script><b>"}
    assert "</script><b>" not in figure.page()
    assert "A title" in figure._repr_html_()
    with pytest.raises(onward.UserError, match=r"Cannot write figure.svg"):
        figure.write(Path("figure.svg"))


def test_stepper_shows_the_numbers_of_the_forward_pass(browser: Any) -> None:
    lm = writer()
    tokens = lm.tokenizer.begin(lm.tokenizer.encode("the ca"))
    with onward.trace(lm.model, "blocks.0.attn.q", "blocks.0.attn.weights", "logits") as trace:
        logits(lm.model, tokens)
    with opened(browser, stepper(lm, "the ca"), width=390) as page:
        rows = lambda: [
            [cell.strip() for cell in row.locator("td, th").all_text_contents()]
            for row in page.locator("table").first.locator("tbody tr").all()
        ]
        for _ in range(3):
            page.get_by_role("button", name="Next").press("Enter")
        assert "query, key and value" in page.locator(".step .name").text_content()
        assert f"q (1, {len(tokens)}, 2, 8)" in page.locator(".step .name").text_content()
        numbers = [[f"{x:.2f}" for x in head] for head in trace["blocks.0.attn.q"][0, -1].tolist()]
        assert [row[1:] for row in rows()] == numbers
        press(page, "step", *["ArrowRight"] * 3)
        weights = trace["blocks.0.attn.weights"][0, :, -1].tolist()
        assert [row[1:] for row in rows()] == [[f"{x:.2f}" for x in head] for head in weights]
        press(page, "step", "End", "ArrowLeft", "ArrowLeft")
        p = trace["logits"][0, -1].softmax(-1).sort(descending=True).values[:10].tolist()
        assert [row[1] for row in columns(page)] == [share(one) for one in p]
        press(page, "step", "End")
        assert page.get_by_role("button", name="Next").is_disabled()


@pytest.mark.parametrize(
    ("kind", "size", "documents", "layers"),
    [("all earlier tokens", 3, 3, 1), ("a window", 4, 1, 3), ("a window", 3, 3, 2), ("a chunk", 5, 2, 2)],
)
def test_masks_follow_packing_windows_chunks_and_layers(
    kind: str, size: int, documents: int, layers: int, browser: Any
) -> None:
    starts = [12 * i // documents for i in range(documents)]
    document = [max(s for s in starts if s <= t) for t in range(12)]
    near = {
        "a window": lambda q, k: q - k < size,
        "a chunk": lambda q, k: (q - document[q]) // size == (k - document[k]) // size,
    }.get(kind, lambda q, k: True)
    sees = lambda q, k: k <= q and document[q] == document[k] and near(q, k)
    seen = torch.tensor([[float(sees(q, k)) for k in range(12)] for q in range(12)])
    reached = torch.linalg.matrix_power(seen, layers) > 0
    with opened(browser, mask_grid(12)) as page:
        page.get_by_label("a token sees").select_option(kind)
        press(page, "packed documents", *["ArrowRight"] * (documents - 1))
        press(page, "size", *["ArrowRight"] * (size - 3))
        press(page, "layers", *["ArrowRight"] * (layers - 1))
        press(page, "token that looks", "ArrowLeft")
        cells = page.locator(".grid i")
        state = torch.tensor(cells.evaluate_all("all => all.map(i => 2 * i.matches('.seen') + i.matches('.reached'))"))
        assert torch.equal(state.view(12, 12) == 2, seen > 0)
        assert torch.equal(state.view(12, 12) > 0, reached)
        text = page.locator(".summary").text_content()
        assert f"allows {int(seen.sum())} of 144 pairs" in text
        assert f"Token 10 sees {', '.join(map(str, seen[10].nonzero()[:, 0].tolist()))}" in text
        cells.nth(12 * 4).click()
        assert "Token 4 sees" in page.locator(".summary").text_content()


@pytest.mark.parametrize(("bases", "theta"), [(-2, 100.0), (2, 5e5)])
def test_dials_and_score_are_those_of_the_rotary_positions(bases: int, theta: float, browser: Any) -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 16, dtype=torch.float64)
    distance = 7
    positions = torch.tensor([[distance, 0]]).double()
    cos, sin = rotary(onward.Rotary(theta), 16, positions, torch.tensor([[[8.0]]]))
    turned = rotate(torch.stack([q, k])[None, :, None], cos, sin)[0, :, 0]
    with opened(browser, rotary_pairs(q, k, trained=32)) as page:
        press(page, "distance", *["ArrowRight"] * (distance - 1))
        press(page, "base", *["ArrowRight" if bases > 0 else "ArrowLeft"] * abs(bases))
        assert f"score at this distance is {turned[0] @ turned[1]:.3f}" in page.locator(".summary").text_content()
        degrees = (angles_at(positions, theta, 16)[0, 0] * 180 / torch.pi % 360).tolist()
        assert page.locator(".dial b").all_text_contents() == [f"{one:.1f}°" for one in degrees]
        full = [math.ceil(2 * math.pi * theta ** (i / 8)) for i in range(8)]
        assert page.locator(".dial span").all_text_contents() == [f"turn: {one:,}" for one in full]
        assert page.locator(".dial.far").count() == sum(one > 32 for one in full)


def test_loss_and_optimum_are_those_of_the_law(browser: Any) -> None:
    with opened(browser, loss_surface(REFIT, {"a": (1e9, 1e10), "b": (70e9, 1.4e12)})) as page:
        summary = lambda: page.locator(".summary").text_content()
        page.get_by_label("start from").select_option("b")
        assert f"The loss is {REFIT.loss(70e9, 1.4e12):.3f}" in summary()
        assert "C = 6 N D = 5.88e23 operations, 20 tokens per parameter" in summary()
        press(page, "parameters N", "PageDown", "Home", *["ArrowRight"] * 5)
        n = 10**6.05
        assert f"The loss is {REFIT.loss(n, 1.4e12):.3f}" in summary()
        best = REFIT.optimum(6 * n * 1.4e12)
        assert f"has {REFIT.loss(*best):.3f}" in summary()
        terms = REFIT.E, REFIT.A / n**REFIT.alpha, REFIT.B / 1.4e12**REFIT.beta
        assert [row[1] for row in columns(page)] == [f"{term:.3f}" for term in terms]
        page.get_by_role("button", name="Move to the best").press("Enter")
        assert f"The loss is {REFIT.loss(*best):.3f}" in summary()
        assert page.locator("svg.axes path.level").count() == 6


OUTSIDE_OR_OVERPRINTED = """() => [...document.querySelectorAll("svg.axes")].flatMap(svg => {
  const boxes = query => [...svg.querySelectorAll(query)].map(e => [e, e.getBoundingClientRect()])
  const all = svg.getBoundingClientRect(), texts = boxes("text")
  const out = boxes("circle").filter(([, { left, right, top, bottom }]) =>
    left < all.left || right > all.right || top < all.top || bottom > all.bottom)
  const met = texts.filter(([, a], i) => texts.some(([, b], j) =>
    i < j && a.left < b.right && b.left < a.right && a.top + 4 < b.bottom && b.top + 4 < a.bottom))
  return [...out, ...met].map(([e]) => e.outerHTML)
})"""


def test_plots_of_the_law_are_readable_at_the_ends_of_the_sliders(browser: Any) -> None:
    with opened(browser, loss_surface(REFIT, {"a": (1e9, 1e10)})) as page:
        for n, d in itertools.product(["Home", "End"], repeat=2):
            press(page, "parameters N", n)
            press(page, "tokens D", d)
            assert not page.evaluate(OUTSIDE_OR_OVERPRINTED), (n, d)
        starts = page.locator("path.level").evaluate_all("es => es.map(e => e.getBoundingClientRect().top)")
        assert max(starts[:-1]) - min(starts[:-1]) < 1  # the last curve begins at the left edge
        assert page.get_by_role("button", name="Move to the best").is_disabled()


def test_cache_has_the_bytes_of_the_plan(browser: Any) -> None:
    names = ["llama-2-7b", "llama-3.1-8b", "gpt2-large"]
    with opened(browser, cache_memory(names)) as page:
        shown = lambda: page.locator(".summary b").text_content().replace("\u00a0", " ")
        for name in names:
            config = preset(name).config
            page.get_by_label("start from").select_option(name)
            length = 2 ** round(math.log2(config.context_length))
            assert shown() == in_units(cache_bytes(config, 1, length, torch.bfloat16))
            assert columns(page)[3] == [f"weights of {name}", in_units(weight_bytes(config, torch.bfloat16))]
        press(page, "rows (batch)", *["ArrowRight"] * 3)
        press(page, "kv heads", *["ArrowLeft"] * 2)  # 20, 10, 5
        press(page, "layers", "ArrowLeft")
        fewer = replace(config, n_kv_heads=5, n_layers=35)
        for option, dtype, quantized in ("float32", torch.float32, False), ("int8", torch.bfloat16, True):
            page.get_by_label("dtype").select_option(option)
            assert shown() == in_units(cache_bytes(fewer, 8, 1024, dtype, quantized=quantized))
        cache = onward.KVCache(fewer, 8, 1024, chunk=0, quantized=True, device="meta", dtype=torch.bfloat16)
        assert shown() == in_units(cache.nbytes())
        press(page, "heads", "ArrowLeft")  # 19 has no divisors but 1 and 19
        assert "1 kv head ·" in page.locator(".summary").text_content()


@pytest.mark.parametrize("name", ["mistral-7b", "deepseek-v2-lite"])
def test_a_cache_of_another_form_is_refused(name: str) -> None:
    with pytest.raises(onward.UserError, match=f"Cannot show the cache of {name}"):
        cache_memory([name])


@pytest.mark.parametrize(
    "empty", [lambda: samplers(writer(), []), lambda: cache_memory([]), lambda: loss_surface(REFIT, {})]
)
def test_a_figure_of_nothing_is_refused(empty: Any) -> None:
    with pytest.raises(onward.UserError, match="is empty: give at least one"):
        empty()


def in_units(count: int) -> str:
    i = min(4, int(math.log2(count) / 10))
    return f"{count / 1024**i:.4g} {['B', 'KiB', 'MiB', 'GiB', 'TiB'][i]}"
