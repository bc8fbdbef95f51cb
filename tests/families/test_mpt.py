"""The maximum ALiBi bias of MPT, which MPT-StoryWriter changes and transformers ignores."""

from pathlib import Path

import pytest
from transformers import MptConfig
from transformers.models.mpt import modeling_mpt

from onward.checkpoint.load import load_model
from onward.families import express

from support.families.mpt import SIZES
from support.parity import assert_same_logits, publish


def test_published_steepness_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    theirs = publish(MptConfig(**SIZES, attn_config={"alibi_bias_max": 4}), tmp_path)
    ours, _ = load_model(tmp_path)
    with pytest.raises(AssertionError, match="not close"):
        assert_same_logits(ours, theirs)
    build = modeling_mpt.build_mpt_alibi_tensor
    monkeypatch.setattr(
        modeling_mpt, "build_mpt_alibi_tensor", lambda heads, length, _, device: build(heads, length, 4)
    )
    assert_same_logits(ours, theirs)
    # saved in Onward's format, since transformers would compute a different model
    assert express(ours.config)["model_type"] == "onward"
