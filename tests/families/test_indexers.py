"""Models with an indexer are read up to the number of tokens that it chooses, and longer contexts are refused."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV32Config, GlmMoeDsaConfig, PreTrainedConfig

from onward import Engine, Request, Sampling, UserError
from onward.checkpoint.huggingface.save import save_model
from onward.checkpoint.load import load_model

from support.families.deepseek_v2 import GROUPS, SIZES, yarn
from support.parity import publish

INDEXER = {"index_topk": 12, "index_head_dim": 6, "index_n_heads": 2}
MODELS = {
    "deepseek_v32": DeepseekV32Config(
        **{**SIZES, "max_position_embeddings": 64},
        **GROUPS,
        **INDEXER,
        **yarn(mscale=1.0, mscale_all_dim=1.0),
        first_k_dense_replace=1,
    ),
    "glm_moe_dsa": GlmMoeDsaConfig(
        **{**SIZES, "max_position_embeddings": 64},
        **INDEXER,
        indexer_types=["full", "shared", "full"],
        first_k_dense_replace=2,
        attention_bias=True,
    ),
}


@pytest.mark.parametrize("hf", MODELS.values(), ids=MODELS)
@torch.inference_mode()
def test_model_with_an_indexer_is_exact_up_to_the_tokens_it_chooses(hf: PreTrainedConfig, tmp_path: Path) -> None:
    theirs = publish(hf, tmp_path / "published")
    ours, original = load_model(tmp_path / "published")
    assert ours.config.context_length == 12
    tokens = torch.randint(31, (3, 13), generator=torch.Generator().manual_seed(0))
    short = tokens[:, :12]
    assert torch.allclose(ours(short), theirs(short).logits, atol=1e-5)
    with pytest.raises(UserError, match="12 positions"):
        ours(tokens)

    save_model(ours, tmp_path / "saved", original)
    assert json.loads((tmp_path / "saved/config.json").read_text())["model_type"] == "deepseek_v3"
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.allclose(ours(short), back(short).logits, atol=1e-5)


def test_longer_context_than_the_indexer_chooses_is_refused(tmp_path: Path) -> None:
    publish(MODELS["deepseek_v32"], tmp_path)
    engine = Engine(load_model(tmp_path)[0])
    with pytest.raises(UserError, match="12"):
        engine.add(Request([1] * 10, Sampling(temperature=0), 8))
