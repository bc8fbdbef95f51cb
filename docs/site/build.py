"""Build the site: python -m docs.site.build [FOLDER]. Needs the extra `docs`.

The build copies the pages of docs/ and their pictures, and adds the chapters of the course as notebooks. It generates
pages for commands, options, public names and the glossary, and zensical converts all pages to HTML. Links to files
outside docs/ lead to pages with the text of these files, so that the site needs no network.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from docs.site.commands import command_pages, option_pages
from docs.site.navigation import navigation
from docs.site.public import MODULES, with_links
from docs.site.reference import glossary_page, name_pages
from onward.learn.chapters import HEADING, PARTS, chapters
from onward.learn.glossary import glossary
from onward.learn.interactive.figure import InteractiveFigure, script, style, with_figures
from onward.learn.notebook import notebook

ROOT = Path(__file__).parents[2]
SITE = Path(__file__).parent
OUTSIDE = {  # pages of files outside docs/
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "examples.md": "examples/README.md",
}
PUBLISHED = (".md", ".svg", ".png")  # the kinds of files that are copied from docs/
WORDS_A_MINUTE = 200
SECONDS = (7, 3, 5, 4, 16, 33, 17, 13, 23, 2, 4, 11, 8, 4, 12, 25, 33)  # to run each chapter, on two cores
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
UNFOUND = "---\nsearch:\n  exclude: true\n---\n\n"
SHIM = "https://unpkg.com/iframe-worker/shim"  # the theme's script; search_frame.js replaces it and needs no network
CONFIG: dict[str, Any] = {
    "site_name": "Onward",
    "docs_dir": "pages",
    "site_dir": "html",
    "use_directory_urls": False,
    "theme": {
        "name": "material",
        "font": False,
        "features": [
            *("navigation.tabs", "navigation.sections", "navigation.top", "navigation.footer", "navigation.prune"),
            *("content.code.copy", "toc.follow", "search.highlight"),
        ],
        "palette": [
            {
                "media": f"(prefers-color-scheme: {name})",
                "scheme": scheme,
                "toggle": {"icon": icon, "name": f"Switch to {other} colors"},
            }
            for name, scheme, icon, other in (
                ("light", "default", "lucide/sun", "dark"),
                ("dark", "slate", "lucide/moon", "light"),
            )
        ],
    },
    "plugins": ["offline"],
    "extra": {"generator": False},
    "extra_css": ["site.css", "interactive.css"],
    "extra_javascript": ["site.js", "interactive.js"],
    "markdown_extensions": [
        *("attr_list", "md_in_html", "tables", "pymdownx.superfences", "pymdownx.highlight"),
        {"toc": {"permalink": True}},
    ],
}


def build(folder: Path) -> Path:
    """Build the site in `folder`; return its first page."""
    shutil.rmtree(folder, ignore_errors=True)
    pages = folder / "pages"
    nav = stage(pages)
    (folder / "mkdocs.yml").write_text(json.dumps(CONFIG | {"nav": nav}), encoding="utf-8")
    program = zensical()
    if not program:
        raise SystemExit("the site needs zensical: pip install 'onward[docs]'")
    done = subprocess.run([program, "build", "--strict"], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    html = folder / "html"
    shutil.copy(SITE / "search_frame.js", html / "assets")
    shutil.copy(SITE / "404.html", html)  # the theme's own page loads its style from the root of a host
    for page in html.rglob("*.html"):
        shim = Path(os.path.relpath(html / "assets/search_frame.js", page.parent)).as_posix()
        text = page.read_text("utf-8").replace(SHIM, shim)
        page.write_text(text.replace("<th></th>", "<td></td>"), encoding="utf-8")  # headers must not be empty
    for worker in html.glob("assets/javascripts/workers/*.js"):
        worker.write_text(worker.read_text("utf-8") + (SITE / "search_exact.js").read_text("utf-8"), encoding="utf-8")
    for index in html / "search.json", html / "search.js":
        index.write_text(searched(index.read_text("utf-8")), encoding="utf-8")
    return html / "index.html"


def searched(index: str) -> str:
    """Return the search index with one item for each name of a glossary term, such as RoPE, and only one item for a
    method that several classes inherit. The path of such an item also contains the name, so that the term is one of the
    first results."""
    start = index.index("{")
    found, end = json.JSONDecoder().raw_decode(index, start)
    names = {entry.name: entry.names for entry in glossary()}
    items = []
    for item in found["items"]:
        own = names.get(item["title"], ()) if item["location"].startswith("glossary.html#") else ()
        items += [item | {"title": name, "path": ["Glossary", name]} for name in own] or [item]
    inherited = lambda item: (item["title"], item["text"] if "python/" in item["location"] else item["location"])
    found["items"] = list({inherited(item): item for item in reversed(items)}.values())[::-1]
    return index[:start] + json.dumps(found, ensure_ascii=False) + index[end:]


def zensical() -> str | None:
    """Return the path of zensical, which converts Markdown to HTML: in the folder of the Python interpreter or on the
    PATH; None if it is not installed."""
    return shutil.which("zensical", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


def stage(pages: Path) -> list[dict[str, object]]:
    """Write the sources of the site; return its navigation."""
    shutil.copytree(ROOT / "docs", pages, ignore=unpublished)
    for page, file in OUTSIDE.items():
        shutil.copy(ROOT / file, pages / page)
    for name in "site.css", "site.js":
        shutil.copy(SITE / name, pages)
    guides = [path.stem for path in pages.glob("*.md")]
    names = {module: name_pages(module) for module in MODULES}
    written = {"learn/index.md": learn_page(), "glossary.md": glossary_page(), **command_pages(), **option_pages()}
    written |= {"interactive.css": style(), "interactive.js": script()}
    for pages_of_module in names.values():
        written |= pages_of_module
    for path in sorted(pages.rglob("*.md")):
        page = str(path.relative_to(pages))
        source = ROOT / OUTSIDE.get(page, f"docs/{page}")
        written |= linked(path, source, pages)
    written["public.md"] = with_links(written["public.md"], {*written})
    for chapter in chapters():
        page, file = f"learn/{chapter.path.name}", f"{chapter.path.stem}.ipynb"
        written[page] = with_figures(chapter, written[page], InteractiveFigure.html)
        written[page] = HEADING.sub(rf"\g<0>\n\n[Notebook]({file}){{ .badge download }}", written[page], count=1)
        written[f"learn/{file}"] = notebook(chapter)
    for name, text in written.items():
        (pages / name).parent.mkdir(parents=True, exist_ok=True)
        (pages / name).write_text(text, encoding="utf-8")
    return navigation(names, guides)


def unpublished(folder: str, names: Sequence[str]) -> set[str]:
    """Return the files and folders of a folder of docs/ that are not part of the site."""
    files = {name for name in names if Path(folder, name).is_file() and not name.endswith(PUBLISHED)}
    return files | ({*names} & {SITE.name})


def learn_page() -> str:
    """Return the page with the list of chapters, with the reading time and running time of each."""
    minutes = [len(one.text.split()) / WORDS_A_MINUTE for one in chapters()]
    rows = [
        f"{one.number}. **[{one.title}]({one.path.name})** *{read:.0f} min of reading, {ran} s of running*\n\n"
        f"    {one.about}\n"
        for one, read, ran in zip(chapters(), minutes, SECONDS, strict=True)
    ]
    parts = ", ".join(f"*{title}* from chapter {first}" for first, title in PARTS.items())
    return "\n".join(
        [
            "# The course\n",
            "Each chapter takes 10 to 20 minutes with its exercises, on a laptop without a GPU. Copy its code into a "
            "file, open its notebook (linked below its title, or `onward learn 4 --notebook attention.ipynb`), or let "
            "`onward learn 4 --run` run it. `onward learn 4` shows a chapter in the terminal. Most chapters "
            "ask you to write functions: `onward learn 4 --check mine.py` checks them and names the likely mistake. "
            f"The course has {len(PARTS)} parts: {parts}. Each part ends with a quiz.\n",
            '<div class="chapters" markdown="1">\n',
            *rows,
            "</div>\n",
            f"Reading takes {sum(minutes):.0f} minutes at {WORDS_A_MINUTE} words a minute. Running takes "
            f"{sum(SECONDS) / 60:.0f} minutes: `onward learn N --run` for each chapter in order in a fresh clone, on "
            "two cores.",
            "",
        ]
    )


def linked(path: Path, source: Path, pages: Path) -> Mapping[str, str]:
    """Return a page whose links work in the site, and pages with the text of linked files outside docs/. `source` is
    the page's file in the repository."""
    found: dict[str, str] = {}
    staged_outside = {file: page for page, file in OUTSIDE.items()} | {"README.md": "index.md"}

    def link(match: re.Match[str]) -> str:
        target = Path(os.path.normpath(source.parent / match[1]))
        anchor = match[2] or ""
        if not target.is_relative_to(ROOT) or not target.is_file():
            raise SystemExit(f"{source.relative_to(ROOT)} links to {match[1]}, which is not a file")
        place = target.relative_to(ROOT)
        if place.parts[0] == "docs":
            staged = pages / place.relative_to("docs")
        elif str(place) in staged_outside:
            staged = pages / staged_outside[str(place)]
        else:
            staged, anchor = pages / "code" / f"{place}.md", ""
            language = {".py": "python", ".toml": "toml"}.get(target.suffix, "text")
            found[f"code/{place}.md"] = f"{UNFOUND}# {place}\n\n````{language}\n{target.read_text('utf-8')}````\n"
        return os.path.relpath(staged, path.parent) + anchor

    parts = FENCED.split(path.read_text(encoding="utf-8"))
    text = "".join(part if i % 2 else LINK.sub(link, part) for i, part in enumerate(parts))
    return {str(path.relative_to(pages)): text.replace("<details>", '<details markdown="1">'), **found}


if __name__ == "__main__":
    if [word for word in sys.argv[1:] if word.startswith("-")]:
        raise SystemExit("usage: python -m docs.site.build [FOLDER]")
    print(f"site: {build(Path(sys.argv[1] if sys.argv[1:] else ROOT / 'build/site').absolute())}")
