"""The norms by which DoRA divides are those of the present weights, in every mode of PyTorch."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from onward import Decoder, LoRA, add_lora, merge_lora, use_adapter

from support.adapters import stirred
from support.decoders import DECODERS, assert_close, decoder, token_ids

LLAMA = DECODERS["llama"]
DORA = LoRA(rank=2, targets=("attn.q", "embed"), dora=True)


def of_weights(change: Callable[[Any], object]) -> Callable[[Decoder], object]:
    return lambda model: [change(layer.weight) for layer in (model.embed, model.blocks[0].attn.q)]


CHANGES: dict[str, Callable[[Decoder], object]] = {
    "in place": of_weights(lambda weight: weight.add_(weight.sin())),
    "another adapter is merged": lambda model: merge_lora(model, "plain"),
    "trained tokens are merged": lambda model: merge_lora(model, "tokens"),
}


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_dora_equals_the_merged_model_after_its_base_has_changed(change: str) -> None:
    model, tokens = decoder(LLAMA, torch.float64), token_ids(LLAMA)
    stirred(model, "plain", lora=LoRA(rank=2, targets=("attn.q", "embed")))
    stirred(model, "tokens", lora=LoRA(rank=2, tokens=(int(tokens[0, 0]), 3)))
    stirred(model, "dora", lora=DORA)
    before = model(tokens)
    CHANGES[change](model)
    with use_adapter(model, "dora"):
        adapted = model(tokens)
    assert (adapted - before).abs().max() > 1e-3
    merge_lora(model, "dora")
    assert_close(model(tokens), adapted)


@pytest.mark.parametrize("created", ["base", "adapter"])
@torch.inference_mode()
def test_dora_of_inference_tensors_follows_their_changes(created: str) -> None:
    tokens = token_ids(LLAMA)
    with torch.inference_mode(created == "base"):
        model = decoder(LLAMA, torch.float64)
    with torch.inference_mode(created == "adapter"):
        add_lora(model, DORA)
    before = model(tokens)
    model.embed.weight.add_(model.embed.weight.sin())
    adapted = model(tokens)
    assert not torch.allclose(adapted, before)
    merged = copy.deepcopy(model)
    merge_lora(merged)
    assert_close(merged(tokens), adapted)


def test_gradient_is_available_after_a_call_of_dora_in_inference_mode() -> None:
    model, tokens = decoder(LLAMA), token_ids(LLAMA)
    add_lora(model, DORA)
    with torch.inference_mode():
        plain = model(tokens)
    logits = model(tokens)
    assert_close(logits, plain)
    logits.square().mean().backward()
