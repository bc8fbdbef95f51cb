"""The documentation as a site: all links work, every command and public name has a page, and pages display in a
browser."""

import html
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

import onward
from docs.site import build
from docs.site.help_text import help_page, wrapped
from onward.cli.overview import COMMANDS
from onward.learn.chapters import chapters
from onward.learn.glossary import glossary

OVERFLOWING = """() => [...document.querySelectorAll("article *")].filter(e => {
  const box = e.getBoundingClientRect(), out = box.right > innerWidth + 1 && box.width
  return out && !e.closest("pre, table, p:has(> img:only-child), .md-typeset__scrollwrap, details:not([open])")
}).map(e => e.outerHTML.slice(0, 99))"""

BROKEN_FLAGS = """() => [...document.querySelectorAll(".flags code")].filter(e => e.getClientRects().length > 1)
  .map(e => e.textContent)"""


class Page(HTMLParser):
    """The ids, the links and the file addresses of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        self.ids |= {found[name] for name in ("id", "name") if found.get(name)}
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])
        if address := found.get("src") or (found.get("href") if tag == "link" else None):
            self.loaded.append(address)


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the pages in Markdown."""
    folder = tmp_path_factory.mktemp("staged") / "pages"
    build.stage(folder)
    return folder


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the HTML pages."""
    if not build.zensical():
        pytest.skip("needs zensical: pip install 'onward[docs]'")
    return build.build(tmp_path_factory.mktemp("site") / "site").parent


def test_every_command_and_public_name_has_a_page(staged: Path) -> None:
    assert {path.stem for path in (staged / "commands").glob("*.md")} == {*COMMANDS}
    pages = {path.stem for path in (staged / "python").glob("*.md")}
    assert {*onward.__all__, "training.CrossEntropy", "planning.part_sizes"} <= pages
    public = (staged / "public.md").read_text("utf-8")
    assert "| [`Sampling`](python/Sampling.md) |" in public
    assert "| [`CrossEntropy`](python/training.CrossEntropy.md) |" in public


def test_every_option_is_explained_once_and_linked_elsewhere(staged: Path) -> None:
    read = lambda name: (staged / f"{name}.md").read_text("utf-8")
    for page, anchor, meaning in (
        ("options/sampling", "--top-k", "keep only the k most likely tokens; 0: all"),
        ("python/Sampling", "onward.Sampling.top_k", "keep only the k most likely tokens; 0: all"),
        ("options/settings-of-a-run", "--batch-size", ""),
        ("commands/train", "--resume", "folder of a run to continue; only "),
        ("commands/finetune", "dpo.--beta", ""),
    ):
        assert re.search(rf'<div id="{anchor}"><dt>.*</dt>\n<dd>{meaning}', read(page)), (page, anchor)
    for command in "train", "compare", "sweep":
        assert 'id="--batch-size"' not in read(f"commands/{command}")
        assert "[`--batch-size`](../options/settings-of-a-run.md#--batch-size)" in read(f"commands/{command}")


def test_help_becomes_prose_lists_and_a_block_for_each_example() -> None:
    text = "Do it, with --seed.\n\nexamples:\n  onward do     all of it\n  onward do --x\n\nviews:\n  map  a map\n"
    made = help_page(text)
    assert made.startswith("Do it, with `--seed`.\n\n## Examples\n\n")
    assert "All of it:\n\n```sh\nonward do\n```\n\n```sh\nonward do --x\n```\n" in made
    assert '## Views\n\n<dl class="definitions">\n<div id="map">' in made
    assert wrapped(f"onward do {'x' * 70} --seed 1") == f"onward do {'x' * 70} \\\n    --seed 1"


def test_only_pages_pictures_notebooks_and_what_the_theme_needs_are_published(site: Path) -> None:
    files = [path.relative_to(site) for path in site.rglob("*") if path.is_file()]
    kinds = {
        "assets": {".css", ".js", ".png", ""},  # files of the theme; LICENSE has no suffix
        "code": {".html"},
        "commands": {".html"},
        "options": {".html"},
        "python": {".html"},
        "learn": {".html", ".svg", ".png", ".ipynb"},
    }
    assert {path.parts[0] for path in files if len(path.parts) > 1} == {*kinds}
    assert not [path for path in files if len(path.parts) > 1 and path.suffix not in kinds[path.parts[0]]]
    beside = {path.name for path in files if len(path.parts) == 1 and path.suffix not in {".html", ".svg", ".png"}}
    own = {*build.CONFIG["extra_css"], *build.CONFIG["extra_javascript"]}
    assert beside == {"search.js", "search.json", "sitemap.xml", *own}


def test_no_page_shows_an_address_of_an_object(staged: Path) -> None:
    assert not [
        path for path in (staged / "python").glob("*.md") if re.search("0x[0-9a-f]{6}", path.read_text("utf-8"))
    ]


def test_the_glossary_page_has_every_term(staged: Path) -> None:
    text = (staged / "glossary.md").read_text("utf-8")
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == [entry.name for entry in glossary()]


def test_every_chapter_leads_to_its_notebook(staged: Path) -> None:
    for chapter in chapters():
        page = staged / "learn" / chapter.path.name
        assert f"[Notebook]({page.stem}.ipynb)" in page.read_text("utf-8")
        assert page.with_suffix(".ipynb").is_file()


def test_a_link_to_no_file_is_refused(staged: Path, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("[a](nothing.md)", encoding="utf-8")
    with pytest.raises(SystemExit, match=r"page\.md links to nothing\.md"):
        build.linked(tmp_path / "page.md", build.ROOT / "docs/page.md", tmp_path)


def test_links_hold_and_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    pages = {path: Page(path.read_text("utf-8")) for path in site.rglob("*.html") if path.name != "404.html"}
    broken, checked = [], set[tuple[Path, str]]()
    for path, page in pages.items():
        assert not [address for address in page.loaded if address.startswith(("http", "//"))], path
        for link in {*page.links, *page.loaded}:
            place = (path if link.startswith("#") else path.parent, link)  # the navigation repeats links on each page
            if place in checked or re.match(r"\w+:", link):
                continue
            checked.add(place)
            address, _, anchor = unquote(link).partition("#")
            target = Path(os.path.normpath(path.parent / address)) if address else path
            if not target.is_file() or (anchor and target in pages and anchor not in pages[target].ids):
                broken.append((path.name, link))
    assert not broken


EACH = (  # a short page of each kind: axe takes up to two seconds for each
    *("index", "learn/index", "learn/04-attention", "learn/09-decoding", "interchange", "commands/merge"),
    *("options/sampling", "python/Answer", "code/examples/one_head.py", "404"),
)
WIDE = ("glossary", "commands/train", "python/Sampling", "families", "public", "benchmarks", "decisions")


WINDOWS = ("light", 1280), ("dark", 390), ("dark", 1280), ("light", 390)


@pytest.mark.parametrize("third", range(3))
@pytest.mark.parametrize("turn", range(4))  # each page is in another of the four windows in each turn
def test_pages_fit_the_window_and_axe_finds_nothing(turn: int, third: int, site: Path, browser: Any) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe").Axe()
    page, faults = browser.new_page(), list[str]()
    page.on("console", lambda message: message.type == "error" and faults.append(message.text))
    page.on("pageerror", lambda error: faults.append(str(error)))
    missing = lambda request: request.failure != "net::ERR_ABORTED"  # canceled because the next page was opened
    page.on("requestfailed", lambda request: missing(request) and faults.append(request.url))
    others = [f"learn/{chapter.path.stem}" for chapter in chapters()]
    names = dict.fromkeys([*EACH, *WIDE, *others[turn::4]])
    for number, name in enumerate([*names][third::3]):
        scheme, width = WINDOWS[(number + turn) % 4]
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size({"width": width, "height": 900})
        page.goto((site / f"{name}.html").as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        assert not page.evaluate(OVERFLOWING), name
        assert not page.evaluate(BROKEN_FLAGS), name
        assert not page.locator("figure.interactive:not(:has(.controls, .actions))").count(), name
        if name in EACH:
            found = axe.run(page, options={"preload": False}).response["violations"]
            nodes = [node for rule in found for node in rule["nodes"]]
            assert not [(name, scheme, width, node["html"][:200], node["failureSummary"]) for node in nodes]
    assert not faults
    page.close()


def test_search_finds_a_term_in_pages_opened_as_files(site: Path, browser: Any) -> None:
    page = browser.new_page()
    page.goto((site / "index.html").as_uri())
    page.keyboard.press("/")
    page.wait_for_timeout(300)
    page.keyboard.type("nucleus", delay=30)
    page.get_by_text("nucleus sampling draws", exact=False).first.wait_for(timeout=10_000)
    assert not page.get_by_text("<").count()  # excerpts without tags
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe").Axe()
    for scheme in "light", "dark":
        page.emulate_media(color_scheme=scheme)
        found = axe.run(page, options={"preload": False}).response["violations"]
        assert [(rule["id"], rule["nodes"][0]["html"]) for rule in found] == [], scheme
    page.keyboard.press("Control+a")
    page.keyboard.type("swish", delay=30)  # another name for SiLU
    page.get_by_text("as the gate of a feed-forward", exact=False).first.wait_for(timeout=10_000)
    page.keyboard.press("Enter")
    page.wait_for_url("**/glossary.html*", timeout=10_000)


WORKER = """async ([program, index, queries]) => {
  const replies = [], self = { postMessage: (reply) => replies.push(reply) }
  new Function("self", program)(self)
  self.onmessage({ data: { type: 0, data: JSON.parse(index) } })
  while (!replies.length) await new Promise((done) => setTimeout(done, 10))
  const { items } = JSON.parse(index), found = []
  for (const input of queries) {
    const listed = []
    let page, total
    do {
      replies.length = 0
      self.onmessage({ data: { type: 2, data: { input, filter: { input: [], values: [] }, page } } })
      while (!replies.length) await null
      const { data } = replies[0]
      listed.push(...data.items.map(({ id }) => items[id].location))
      page = data.pagination.next
      total = data.pagination.total
    } while (page)
    found.push([total, listed])
  }
  return found
}"""


def test_search_lists_the_term_of_a_name_first_and_counts_what_it_lists(site: Path, browser: Any) -> None:
    (worker,) = site.glob("assets/javascripts/workers/*.js")
    page, index = browser.new_page(), (site / "search.json").read_text("utf-8")
    anchors = dict(re.findall(r'<h2 id="([^"]+)">([^<]+)', (site / "glossary.html").read_text("utf-8")))
    terms = {html.unescape(title): f"glossary.html#{anchor}" for anchor, title in anchors.items()}
    names = [name for entry in glossary() for name in entry.names]
    found = page.evaluate(WORKER, [worker.read_text("utf-8"), index, names])
    first = [listed[0] if listed else None for _, listed in found]
    plain = lambda name: re.sub(r"[\W_]+", " ", name.lower()).strip()
    meant = {name: {terms[one.name] for one in glossary() if plain(name) in map(plain, one.names)} for name in names}
    assert not [(name, one) for name, one in zip(names, first) if one not in meant[name]]
    assert all(total == len(listed) == len(set(listed)) for total, listed in found)


def test_home_shows_the_page_the_output_and_three_doors_in_one_screen(site: Path, browser: Any) -> None:
    for scheme in "light", "dark":
        context = browser.new_context(color_scheme=scheme, viewport={"width": 1280, "height": 800})
        page = context.new_page()
        page.goto((site / "index.html").as_uri())
        seen = [page.locator(".hero .highlight + .highlight"), page.locator(f'.hero img[src*="page-{scheme}"]')]
        for box in (*seen, *page.locator(".doors li").all()):
            assert box.is_visible()
            place = box.bounding_box()
            assert place["y"] + place["height"] <= 800
        picture = seen[1].bounding_box()
        assert picture["width"] / picture["height"] == pytest.approx(1280 / 860, rel=0.01)  # shown in full
        assert page.locator(".doors li").count() == 3
        context.close()


def test_chapter_has_its_neighbors_contents_and_copied_code(site: Path, browser: Any) -> None:
    context = browser.new_context(
        viewport={"width": 1280, "height": 900}, permissions=["clipboard-read", "clipboard-write"]
    )
    page = context.new_page()
    page.goto((site / "learn/05-positions.html").as_uri())
    assert page.locator(".md-sidebar--secondary a").count() > 3
    links = [page.locator(f".md-footer__link--{way}").get_attribute("href") for way in ("prev", "next")]
    assert [Path(link).name for link in links] == ["04-attention.html", "06-block.html"]
    code = page.locator(".highlight").first
    code.locator("button").click()
    assert page.evaluate("navigator.clipboard.readText()").strip() == code.locator("code").inner_text().strip()
    context.close()
