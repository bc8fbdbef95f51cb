"""Every text-generation model of transformers is read, or refused with a reason."""

from pathlib import Path

import pytest

from docs.site.transformers_models import page, reader, rows
from onward import UserError
from onward.families import read
from onward.families._unread import UNREAD

PAGE = Path(__file__).parents[2] / "docs/models-of-transformers.md"
MAKE = "make it again: python -m docs.site.transformers_models docs/models-of-transformers.md"


def test_every_model_of_transformers_is_read_or_listed_with_a_reason() -> None:
    assert not [name for _, name, family, reason in rows() if not family and not reason], "add them to _unread.py"


def test_no_model_that_is_read_is_listed_as_unread() -> None:
    both = {name for _, name, family, reason in rows() if family and reason} | {*filter(reader, UNREAD)}
    assert not both, "remove them from _unread.py"


def test_page_of_transformers_models_is_up_to_date() -> None:
    assert page() == PAGE.read_text(encoding="utf-8"), MAKE


@pytest.mark.parametrize("model_type", ["bert", "mamba", "git"])
def test_unread_model_is_refused_with_its_reason(model_type: str) -> None:
    for hf in {"model_type": model_type}, {"model_type": "any_vision", "text_config": {"model_type": model_type}}:
        with pytest.raises(UserError, match=f"Cannot read model_type '{model_type}', because {UNREAD[model_type]}"):
            read(hf)
