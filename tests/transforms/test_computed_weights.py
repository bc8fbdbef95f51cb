"""Operations that would lose how code of torch.nn.utils computes a weight are refused before they change anything."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from onward import Decoder, LanguageModel, LoRA, UserError, merge_lora, save
from onward.transforms import quantize_model

from support.adapters import stirred
from support.decoders import DECODERS, decoder, token_ids

COMPUTED: dict[str, Callable[[nn.Module], Any]] = {
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", 0.3),
    "parametrized": parametrizations.orthogonal,
}
OPERATIONS: dict[str, Callable[[Decoder, Path], object]] = {
    "merge": lambda model, _: merge_lora(model, "one"),
    "quantize": lambda model, _: quantize_model(model, "int8"),
    "save": lambda model, folder: save(LanguageModel(model), folder / "model"),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("kind", COMPUTED)
@torch.no_grad()
def test_computed_weights_are_refused_before_anything_changes(kind: str, operation: str, tmp_path: Path) -> None:
    model, tokens = decoder(DECODERS["llama"]), token_ids(DECODERS["llama"])
    COMPUTED[kind](model.get_submodule("blocks.1.attn.q"))
    if operation == "merge":
        stirred(model, "one", lora=LoRA(rank=2, targets=("attn",)))
    before = model(tokens)
    with pytest.raises(UserError, match=r"blocks\.1\.attn\.q.* first call torch\.nn\.utils\.prune\.remove or"):
        OPERATIONS[operation](model, tmp_path)
    assert torch.equal(model(tokens), before)
    assert not [*tmp_path.iterdir()]
