"""The documentation as a site: all links hold, every command and public name has a page, and a browser shows it."""

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

import onward
from docs.site import build
from onward.cli.overview import COMMANDS
from onward.learn.chapters import chapters
from onward.learn.glossary import glossary

OVERFLOWING = """() => [...document.querySelectorAll("article *")].filter(e => {
  const box = e.getBoundingClientRect(), out = box.right > innerWidth + 1 && box.width
  return out && !e.closest("pre, table, .md-typeset__scrollwrap, details:not([open])")
}).map(e => e.outerHTML.slice(0, 99))"""


class Page(HTMLParser):
    """The ids, the links and the addresses of files of a page."""

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
    """The pages in Markdown."""
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
    train, sampling = ((staged / name).read_text("utf-8") for name in ("commands/train.md", "python/Sampling.md"))
    assert "| `--batch-size N` |" in train
    assert "| `top_k` | `0` | keep only the k most likely tokens; 0: all |" in sampling


def test_no_page_shows_an_address_of_an_object(staged: Path) -> None:
    assert not [
        path for path in (staged / "python").glob("*.md") if re.search("0x[0-9a-f]{6}", path.read_text("utf-8"))
    ]


def test_the_glossary_page_has_every_term(staged: Path) -> None:
    text = (staged / "glossary.md").read_text("utf-8")
    assert re.findall(r"^### (.*)$", text, re.MULTILINE) == [entry.name for entry in glossary()]


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
    broken = []
    for path, page in pages.items():
        assert not [address for address in page.loaded if address.startswith(("http", "//"))], path
        for link in {*page.links, *page.loaded}:
            address, _, anchor = unquote(link).partition("#")
            if re.match(r"\w+:", address):
                continue
            target = (path.parent / address).resolve() if address else path
            if not target.is_file() or (anchor and target in pages and anchor not in pages[target].ids):
                broken.append((path.name, link))
    assert not broken


PAGES = ("index", "learn/index", "glossary", "commands/train", "python/Sampling", "training", "commands/draw")
CONTRAST = ("index", "learn/04-attention", "learn/09-decoding", "commands/draw")  # one of each kind: a second each


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_pages_fit_the_window_with_enough_contrast(scheme: str, width: int, site: Path, browser: Any) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe").Axe()
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})
    page, faults = context.new_page(), list[str]()
    page.on("console", lambda message: message.type == "error" and faults.append(message.text))
    page.on("pageerror", lambda error: faults.append(str(error)))
    missing = lambda request: request.failure != "net::ERR_ABORTED"  # as the next page was opened
    page.on("requestfailed", lambda request: missing(request) and faults.append(request.url))
    others = [f"learn/{chapter.path.stem}" for chapter in chapters()]
    for name in (*PAGES, *others[scheme == "dark" :: 4], *CONTRAST):
        page.goto((site / f"{name}.html").as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        assert not page.evaluate(OVERFLOWING), name
        assert not page.locator("figure.interactive:not(:has(.controls, .actions))").count(), name
        if name in CONTRAST:
            rules = {"runOnly": ["color-contrast", "image-alt", "link-name"]}
            found = axe.run(page, options=rules).response["violations"]
            assert not [(name, node["html"][:200], node["failureSummary"]) for rule in found for node in rule["nodes"]]
    assert not faults
    context.close()


def test_search_finds_a_term_in_pages_opened_as_files(site: Path, browser: Any) -> None:
    page = browser.new_page()
    page.goto((site / "index.html").as_uri())
    page.keyboard.press("/")
    page.wait_for_timeout(300)
    page.keyboard.type("nucleus", delay=30)
    page.get_by_text("nucleus sampling draws", exact=False).first.wait_for(timeout=10_000)
