"""The moving average of the weights."""

from contextlib import suppress

import pytest
import torch
from torch import nn

from onward.training import Average

from support.decoders import DECODERS, decoder, token_ids
from support.devices import on_device


def moved(model: nn.Module, average: Average, times: int) -> list[dict[str, torch.Tensor]]:
    """The weights after each of `times` updates."""
    seen = []
    for _ in range(times):
        for parameter in model.parameters():
            parameter.data += torch.randn_like(parameter)
        average.update()
        seen.append({name: p.detach().double() for name, p in model.named_parameters()})
    return seen


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.999])
def test_average_weighs_each_update_less_than_the_next(decay: float) -> None:
    model = decoder(DECODERS["deepseek"])
    average = Average(model, decay)
    seen = moved(model, average, 6)
    shares = [decay ** (5 - i) for i in range(6)]
    for name, got in average.tensors.items():
        wanted = sum(share * weights[name] for share, weights in zip(shares, seen)) / sum(shares)
        torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)


def test_average_is_kept_in_at_least_fp32() -> None:
    model = on_device(nn.Linear(1, 1, bias=False).bfloat16())
    average = Average(model, 0.999)
    for value in 1.0, 1.0, 2.0:
        model.weight.data.fill_(value)
        average.update()
    assert average.tensors["weight"].item() == pytest.approx(4 / 3, abs=1e-3)
    with average.shown():
        assert model.weight.item() == torch.tensor(4 / 3).bfloat16().item()
    assert model.weight.item() == 2.0


@torch.inference_mode()
def test_averaged_weights_are_in_the_model_only_inside_the_context() -> None:
    model = decoder(DECODERS["gpt2"])
    tokens = token_ids(model.config)
    average = Average(model, 0.9)
    moved(model, average, 3)
    own, other = model(tokens), decoder(DECODERS["gpt2"])
    other.load_state_dict(average.tensors, strict=False)
    with suppress(KeyboardInterrupt), average.shown():
        assert torch.equal(model(tokens), other(tokens))
        raise KeyboardInterrupt
    assert torch.equal(model(tokens), own)


def test_average_continues_exactly_from_its_state() -> None:
    results = []
    for stop in False, True:
        torch.manual_seed(0)
        model = on_device(nn.Linear(3, 4))
        average = Average(model, 0.9)
        moved(model, average, 3)
        if stop:
            saved, average = average, Average(model, 0.9)
            average.tensors, average.updates = saved.tensors, saved.updates
        moved(model, average, 2)
        results.append(average.tensors)
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name])
