"""Files of the first GPTs as they were published: without the base prefix, and with masks among the weights."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from onward import UserError
from onward.checkpoint.load import load_model
from onward.families import family

from support.families import CASES
from support.parity import assert_same_logits, publish, tensors

OLD = {
    "openai_gpt: as it was": ["position_ids", "h.0.attn.bias"],
    "gpt2: as it was": ["h.0.attn.bias", "h.1.attn.masked_bias"],
    "gpt_neo: alternating": ["h.0.attn.attention.bias", "h.1.attn.attention.masked_bias"],
    "gptj: half turns": ["h.0.attn.bias", "h.1.attn.masked_bias"],
    "gpt_neox: a quarter turns": [f"layers.1.attention.{n}" for n in ("bias", "masked_bias", "rotary_emb.inv_freq")],
}


@pytest.mark.parametrize("case", OLD)
def test_old_files_load_as_the_same_model(case: str, tmp_path: Path) -> None:
    theirs = publish(CASES[case], tmp_path)
    base = family(CASES[case].model_type).BASE
    old = {name.removeprefix(base): tensor for name, tensor in tensors(tmp_path).items()}
    masks = {name: torch.ones(2, 2).tril().bool() for name in OLD[case]}
    save_file(old | masks, tmp_path / "model.safetensors")
    assert_same_logits(load_model(tmp_path)[0], theirs)


@pytest.mark.parametrize("case", OLD)
def test_bias_that_is_no_mask_is_not_ignored(case: str, tmp_path: Path) -> None:
    publish(CASES[case], tmp_path)
    kept = tensors(tmp_path)
    bias = next(name for name in kept if name.endswith((".c_proj.bias", ".fc_out.bias", ".dense.bias")))
    extra = bias.replace(".0.", ".9.")
    save_file(kept | {extra: torch.ones(24)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=f"has a tensor {extra} that"):
        load_model(tmp_path)
