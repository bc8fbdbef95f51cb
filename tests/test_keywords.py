"""Keyword arguments that editors complete are those that dataclasses and signatures declare."""

import pytest

from support.keywords import FILES, SOURCE, module


@pytest.mark.parametrize("folder", FILES)
def test_keywords_are_up_to_date(folder: str) -> None:
    written = (SOURCE / folder / "keywords.py").read_text()
    assert written == module(FILES[folder]()), "run python -m support.keywords"
