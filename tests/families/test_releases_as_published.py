"""Folders as they are on the hub: supported tensors are read, and a message names the other tensors."""

from pathlib import Path

import pytest
import torch

from onward.checkpoint.huggingface.save import save_model
from onward.checkpoint.load import load_model

from support.published import RELEASES, assert_read_as_in_transformers, release


@pytest.mark.parametrize("name", RELEASES)
def test_release_is_read_as_in_transformers_and_saved_as_its_text_family(name: str, tmp_path: Path) -> None:
    release(name, tmp_path / "hub")
    assert_read_as_in_transformers(name, tmp_path / "hub")
    model, keys = load_model(tmp_path / "hub")
    save_model(model, tmp_path / "saved", keys)
    again, saved_keys = load_model(tmp_path / "saved")
    assert again.config == model.config
    assert saved_keys["model_type"] == RELEASES[name].family
    assert all(torch.equal(one, other) for one, other in zip(again.parameters(), model.parameters(), strict=True))
