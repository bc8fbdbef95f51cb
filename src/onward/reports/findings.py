"""Writes the findings of `onward doctor` as a self-contained HTML page."""

from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from onward.base.files import atomic_write
from onward.reports.pictures.markup import details, page_of, resource, table, visible
from onward.reports.pictures.plot import COLORS

NAMES = {"where": "where", "how": "how it was measured", "why": "why it matters", "mend": "how to fix it"}


def write_findings(page: Path, target: str, summary: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the findings of `onward doctor` about `target`, failures first, under the sentence `summary`. Each of
    `rows` has the keys check, status, what, where, how, why and mend."""
    failed = [row for row in rows if row["status"] == "failed"]
    others = {status: [row for row in rows if row["status"] == status] for status in STATUSES}
    parts = {
        "title": visible(target),
        "style": COLORS + resource("report.css"),
        "lead": visible(f"{summary}. Examined on {date.today().isoformat()}."),
        "failed": "".join(article(row) for row in failed),
        "others": "".join(
            details(
                f"{status}: {len(rows)}",
                [(row["check"], row["what"], row["how"]) for row in rows],
                HEADER,
            )
            for status, rows in others.items()
        ),
    }
    with atomic_write(page) as new:
        new.write_text(page_of("findings.html", parts), encoding="utf-8")


STATUSES = "not run", "ok", "noted", "not applicable"
HEADER = "check", "finding", "how it was measured"


def article(row: Mapping[str, Any]) -> str:
    facts = [(title, str(row[name])) for name, title in NAMES.items() if row[name]]
    return (
        f'<article><h2>{visible(row["check"])}</h2><p class="notice">{visible(row["what"])}</p>{table(facts)}</article>'
    )
