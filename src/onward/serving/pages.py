"""The page at /, whose files are in page/ next to this module, and the chapters of the course, to which its views
link."""

from __future__ import annotations

from functools import lru_cache
from html import escape
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import FileResponse, HTMLResponse

from onward.learn.chapters import chapters, find_chapter
from onward.learn.web import web_page
from onward.serving.errors import ApiError

FOLDER = Path(__file__).parent / "page"
COURSE = (
    '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    '<title>Onward: the course</title>\n<link rel="icon" href="data:,">\n'
    '<link rel="stylesheet" href="/page/course.css">\n</head>\n<body>\n<main>\n'
    "<h1>The course</h1>\n<ol>\n{}\n</ol>\n</main>\n</body>\n</html>\n"
)
# chapters are files of ours that hold their styles, pictures and scripts; nothing else is loaded or sent
CHAPTER_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
router = APIRouter()


@router.get("/", include_in_schema=False)
async def index() -> FileResponse:
    return FileResponse(FOLDER / "index.html")


@router.get("/learn", include_in_schema=False)
async def course() -> HTMLResponse:
    items = (
        f'<li value="{one.number}"><a href="/learn/{one.number}">{escape(one.title)}</a> {escape(one.about)}</li>'
        for one in chapters()
    )
    return HTMLResponse(COURSE.format("\n".join(items)))


@router.get("/learn/{number}", include_in_schema=False)
def chapter(number: str) -> HTMLResponse:
    return HTMLResponse(chapter_page(number), headers={"Content-Security-Policy": CHAPTER_POLICY})


@lru_cache(maxsize=32)
def chapter_page(number: str) -> str:
    """The HTML of a chapter. Raises an ApiError if the course has no chapter of this number."""
    if number not in {str(one.number) for one in chapters()}:
        raise ApiError(f"there is no chapter {number[:20]}: see /learn", 404)
    return web_page(find_chapter(number))
