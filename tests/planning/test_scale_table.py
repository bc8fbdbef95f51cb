"""The table in docs/scale.md equals the output of its command."""

from pathlib import Path

import pytest

from benchmarks.scale import table


@pytest.mark.long
def test_table_of_expected_speeds_is_as_printed() -> None:
    page = Path(__file__).parents[2] / "docs" / "scale.md"
    assert f"\n\n{table()}\n\n" in page.read_text("utf-8")
