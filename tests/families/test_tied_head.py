"""A head in the files although config.json ties it to the embedding: dropped if it equals the embedding, else kept with
a warning."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedConfig

from onward.base.files import read_json, write_json
from onward.checkpoint.huggingface.save import save_model
from onward.checkpoint.huggingface.tied import UntiedHead
from onward.checkpoint.load import load_model

from support.families import CASES
from support.parity import assert_same_logits, publish, tensors

FIRSTS = {name.split(":")[0]: hf for name, hf in reversed(CASES.items())}


def publish_with_head(hf: PreTrainedConfig, folder: Path) -> None:
    """Write a folder whose config.json ties the head although the files contain a different head."""
    untied = type(hf).from_dict({**hf.to_dict(), "tie_word_embeddings": False})
    publish(untied, folder)
    write_json(folder / "config.json", read_json(folder / "config.json") | {"tie_word_embeddings": True})


TIED = {name: hf for name, hf in FIRSTS.items() if name != "dbrx"}  # dbrx cannot tie its head


@pytest.mark.parametrize("hf", TIED.values(), ids=TIED.keys())
def test_head_that_differs_from_the_tied_embedding_is_kept_as_in_transformers(
    hf: PreTrainedConfig, tmp_path: Path
) -> None:
    publish_with_head(hf, tmp_path)
    with pytest.warns(UntiedHead, match="differs from"):
        ours, original = load_model(tmp_path)
    assert not ours.config.tied
    assert_same_logits(ours, AutoModelForCausalLM.from_pretrained(tmp_path))
    save_model(ours, tmp_path / "saved", original)
    assert load_model(tmp_path / "saved")[0].config == ours.config
    assert tensors(tmp_path / "saved").keys() == tensors(tmp_path).keys()


@pytest.mark.filterwarnings("error")
def test_head_that_equals_the_tied_embedding_stays_tied(tmp_path: Path) -> None:
    publish_with_head(FIRSTS["llama"], tmp_path)
    found = tensors(tmp_path)
    found["lm_head.weight"] = found["model.embed_tokens.weight"].clone()
    save_file(found, tmp_path / "model.safetensors")
    model, _ = load_model(tmp_path)
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.head.weight, found["lm_head.weight"])
