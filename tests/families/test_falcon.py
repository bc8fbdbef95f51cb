"""The ALiBi of the Falcon RW models, rounded as published, over more positions than bf16 can distinguish."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import FalconConfig
from transformers.models.falcon.modeling_falcon import build_alibi_tensor

from onward import DecoderConfig
from onward.checkpoint.load import load_model
from onward.families.falcon import FalconAlibi
from onward.model.alibi import alibi_slopes

from support.decoders import assert_close
from support.parity import publish

RW = FalconConfig(
    vocab_size=31,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=32,
    alibi=True,
    multi_query=False,
    parallel_attn=False,
    bias=True,
    attn_implementation="sdpa",  # the eager implementation adds ALiBi twice
)


@torch.inference_mode()
def assert_same_far_logits(folder: Path) -> None:
    theirs = publish(RW, folder)
    tokens = torch.randint(31, (2, 600), generator=torch.Generator().manual_seed(0))
    assert_close(load_model(folder)[0](tokens), theirs(tokens).logits, 2e-5)


def test_falcon_rw_is_the_published_one_beyond_256_tokens(tmp_path: Path) -> None:
    assert_same_far_logits(tmp_path)


@pytest.mark.parametrize(
    ("slope", "position"),
    [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)],
    ids=str,
)
def test_unrounded_products_fail_the_comparison(
    slope: torch.dtype, position: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def score_bias(part: FalconAlibi, config: DecoderConfig, slopes: Tensor, query: Tensor, key: Tensor) -> Tensor:
        slopes = alibi_slopes(config.n_heads).to(slope)[:, None, None]
        return slopes * key.to(position) * config.d_head**-0.5

    monkeypatch.setattr(FalconAlibi, "score_bias", score_bias)
    with pytest.raises(AssertionError, match="not close"):
        assert_same_far_logits(tmp_path)


def test_the_slopes_are_the_published_ones_for_every_number_of_heads() -> None:
    positions = torch.arange(2048.0)[None]
    for heads in range(1, 129):
        config = DecoderConfig(vocab_size=2, d_model=4 * heads, n_layers=1, n_heads=heads)
        theirs = build_alibi_tensor(torch.ones_like(positions, dtype=torch.long), heads, torch.float32)
        slopes = FalconAlibi().slopes(config, positions.device)[:, None, None]
        bias = FalconAlibi().score_bias(config, slopes, positions, positions)
        assert torch.equal(bias, theirs / 2)
