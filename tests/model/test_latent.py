"""The two forms of latent attention give the same result, and the form with fewer multiplications is used."""

from typing import Any, TypeVar

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from onward import LatentAttention
from onward.model import AttentionContext, LatentAttentionModule
from onward.model.context import attention_contexts
from onward.model.mask import AttentionMask

from support.decoders import assert_close, config
from support.devices import on_device

PARTS = {
    "narrow latents": LatentAttention(d_latent=5, d_nope=6, d_rope=4, d_value=3),
    "wide latents": LatentAttention(d_latent=40, d_query_latent=7, d_nope=2, d_rope=2, d_value=3, bias=True),
    "DeepSeek's": LatentAttention(),
}
every_part = pytest.mark.parametrize("part", PARTS.values(), ids=PARTS.keys())


Layer = TypeVar("Layer", bound=LatentAttentionModule)


def module(part: LatentAttention, kind: type[Layer]) -> Layer:
    torch.manual_seed(0)
    made = on_device(kind(part, config(attention=part)).double())
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=parameter.size(-1) ** -0.5)
    return made


def last_of(seen: int, tokens: int) -> AttentionContext:
    """The attention context of the last `tokens` of `seen` tokens; each token attends to all tokens up to itself."""
    positions = torch.arange(seen)[None]
    return AttentionContext(AttentionMask(positions[:, -tokens:], positions))


def inputs(part: LatentAttention, tokens: int, seen: int) -> Any:
    """Queries of the last `tokens` tokens, and the latents and rotary keys of all `seen` tokens."""
    shapes = (1, tokens, 4, part.d_nope + part.d_rope), (1, seen, 1, part.d_latent), (1, seen, 1, part.d_rope)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


@every_part
@pytest.mark.parametrize(("tokens", "seen"), [(1, 9), (4, 9), (9, 9)])
def test_absorbed_form_has_the_values_and_gradients_of_the_expanded(
    part: LatentAttention, tokens: int, seen: int
) -> None:
    layer, given = module(part, LatentAttentionModule), inputs(part, tokens, seen)
    results = []
    for form in layer.expanded, layer.absorbed:
        y = form(given[0], given[1], given[2], last_of(seen, tokens))
        weight = torch.arange(y.numel(), dtype=y.dtype).cos().view_as(y)
        results.append([y, *torch.autograd.grad((y * weight).sum(), [*given, layer.kv.weight])])
    for got, wanted in zip(*results):
        assert_close(got, wanted, 1e-12)


@every_part
def test_layer_has_the_same_gradients_in_either_form(part: LatentAttention) -> None:
    class Forced(LatentAttentionModule):
        absorb = False

        def absorbing_is_cheaper(self, tokens: int, keys: int) -> bool:
            return self.absorb

    layer, x = module(part, Forced), torch.randn(2, 7, 16, dtype=torch.float64, requires_grad=True)
    context = attention_contexts(config(attention=part), x.dtype, torch.arange(7)[None], None, plain=True)[0]
    results = []
    for layer.absorb in False, True:
        y = layer(x, context)
        results.append([y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])])
    for got, wanted in zip(*results):
        assert_close(got, wanted, 1e-12)


@every_part
def test_form_with_fewer_multiplications_is_chosen(part: LatentAttention) -> None:
    layer = module(part, LatentAttentionModule)

    def count(form: Any, tokens: int, seen: int) -> int:
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            form(*inputs(part, tokens, seen), last_of(seen, tokens))
        return counter.get_total_flops()

    taken = set()
    for tokens, seen in [(1, 1), (1, 2), (1, 3), (1, 60), (2, 5), (5, 6), (6, 60), (40, 60), (59, 60), (60, 60)]:
        cheaper = count(layer.absorbed, tokens, seen) < count(layer.expanded, tokens, seen)
        assert layer.absorbing_is_cheaper(tokens, seen) is cheaper
        taken.add(cheaper)
    assert taken == {False, True}
