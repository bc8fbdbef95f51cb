"""Texts of reports: sources and times."""

import re
from collections.abc import Mapping
from typing import Any

UNSHOWN = "shards", "unknown_characters", "files", "size", "listing", "fingerprint"  # fields of a source


def source_line(value: Any) -> str:
    """Describe recorded data sources in one line, with shortened hashes."""
    if isinstance(value, Mapping):
        shown = {key: source_line(item) for key, item in value.items() if key not in UNSHOWN}
        return ", ".join(item if key == "name" else f"{key} {item}" for key, item in shown.items())
    if isinstance(value, list):
        more = f"; and {len(value) - 5} more" if len(value) > 5 else ""
        return "; ".join(source_line(item) for item in value[:5]) + more
    if isinstance(value, int):
        return f"{value:,}"
    return "" if value is None else re.sub(r"\b([0-9a-f]{12})[0-9a-f]{20,}\b", r"\1…", str(value))


def duration(seconds: float) -> str:
    """Seconds in words: 0.5 s, 2 min 13 s, 3 h 5 min."""
    rounded = round(seconds)
    hours, minutes = rounded // 3600, rounded // 60 % 60
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rounded % 60} s" if minutes else f"{seconds:.3g} s"
