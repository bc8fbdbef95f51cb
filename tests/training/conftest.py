"""Fixtures shared by several files: a tiny base model and conversations. Tests must not change them."""

from pathlib import Path

import pytest

from support.finetuning import base_model, sums, write_rows


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="session")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "chats.jsonl", sums())
