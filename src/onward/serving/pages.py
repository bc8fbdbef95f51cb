"""The page at /: its files are in page/ beside this module."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import FileResponse

FOLDER = Path(__file__).parent / "page"
router = APIRouter()


@router.get("/", include_in_schema=False)
async def index() -> FileResponse:
    return FileResponse(FOLDER / "index.html")
