"""Indexers choose the tokens that a layer attends to, if there are more than `top_k`."""

from typing import Any

import pytest
import torch
from transformers import DeepseekV32Config

from onward import DecoderConfig, Engine, Indexer, LatentAttention, Request, Sampling, SharedIndexer, UserError
from onward.checkpoint.load import load_model
from onward.config.mesh import Mesh
from onward.families import read
from onward.model.flex import flex
from onward.model.indexed import ChosenMask
from onward.model.mask import AttentionMask
from onward.model.reference import reference
from onward.planning.flops import attention_flops

from support.decoders import DECODERS, assert_close
from support.families.deepseek_v2 import SIZES
from support.families.deepseek_v32 import INDEXER
from support.parity import publish

PART = LatentAttention(5, 7, 6, 4, 3, indexer=Indexer(top_k=5, n_heads=16, d_head=6))


def test_greedy_tokens_beyond_the_chosen_number_are_those_of_transformers(tmp_path: Any) -> None:
    hf = DeepseekV32Config(**{**SIZES, "max_position_embeddings": 64}, **INDEXER, n_group=1, topk_group=1)
    theirs = publish(hf, tmp_path)
    prompt = torch.randint(31, (1, 9), generator=torch.Generator().manual_seed(0))
    engine = Engine(load_model(tmp_path)[0])
    request = Request(prompt[0].tolist(), Sampling(temperature=0), 30)  # steps from the 16th on would be compiled
    engine.add(request)
    engine.finish()
    wanted = theirs.generate(prompt, do_sample=False, max_new_tokens=30, eos_token_id=None, pad_token_id=0)
    assert request.tokens == wanted[0, 9:].tolist()


def test_flex_attention_sees_the_chosen_tokens_only() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 24, 1, 16, generator=generator) for _ in range(3))
    chosen = torch.rand(2, 24, 24, generator=generator).topk(5).indices
    mask = ChosenMask.of(AttentionMask(torch.arange(24)[None], torch.arange(24)[None], plain=True), chosen)
    sees_one = mask.visible().any(-1)[..., None, None]  # a query without a visible chosen token has no result
    one, other = flex(q, k, v, mask, scale=0.3), reference(q, k, v, mask, scale=0.3)
    assert_close(one.where(sees_one, 0), other.where(sees_one, 0), 1e-5)


def test_operations_count_all_keys_of_the_indexer_and_the_chosen_ones_of_attention() -> None:
    config = DECODERS["indexers"]
    index, pair = 2 * 16 * (6 + 1), 2 * 4 * (6 + 4 + 3)
    assert attention_flops(config, 100) == 2 * 100 * index + 3 * 5 * pair
    assert attention_flops(config, 4) == 2 * 4 * index + 3 * 4 * pair


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"indexer": Indexer(d_head=3)}, "indexer.d_head 3 is less than the 4"),
    ({"d_query_latent": 0}, "give d_query_latent"),
    ({"indexer": SharedIndexer()}, "layer 0 shares an indexer, but no layer before it has one"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=str)
def test_invalid_indexer_is_refused(changes: dict[str, Any], message: str) -> None:
    part = LatentAttention(**{name: getattr(PART, name) for name in PART.named} | changes)
    with pytest.raises(UserError, match=message):
        DecoderConfig(13, 16, 2, 4, attention=part)


@pytest.mark.parametrize("axis", ["pipeline", "context"])
def test_mesh_names_the_axis_that_does_not_divide_indexers(axis: str) -> None:
    with pytest.raises(UserError, match=f"cannot divide .* indexer over the {axis} axis: use {axis}=1"):
        Mesh.parse(f"{axis}=2").check_decoder(DECODERS["indexers"])


@pytest.mark.parametrize(
    "keys",
    [{"indexer_types": ["full", "none", "full"]}, {"index_topk_pattern": "FF"}, {"indexer_rope_interleave": False}],
    ids=str,
)
def test_keys_of_indexers_that_mean_nothing_are_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="indexer_"):
        read({"model_type": "glm_moe_dsa", **SIZES, **INDEXER, **keys})
