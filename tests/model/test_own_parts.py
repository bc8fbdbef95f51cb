"""Parts from outside the package: each call has its own cache entries, and parts that would be wrong with a cache are
refused."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import onward
from onward import Decoder, KVCache, SelfAttention, UserError
from onward.model import AttentionContext, PreNormModule, SelfAttentionModule, build_branches, layer_norms, previous

from support.decoders import assert_close, config, decoder, token_ids
from support.own_parts import Own, TwiceBlock

Forward = Callable[[Any, Tensor, AttentionContext], Tensor]


class Mixed(PreNormModule):
    """A block with a gate that is initialized to 0, so that its bugs have an effect only after training."""

    def __init__(self, width: int, layer: int, *branches: Any) -> None:
        super().__init__(*branches)
        self.layer = layer
        self.gate = nn.Parameter(torch.zeros(width))
        self.conv = nn.Conv1d(width, width, 3)
        self.table = nn.Embedding(32, width)

    def rest(self, x: Tensor, context: AttentionContext, y: Tensor | None = None) -> Tensor:
        return super().forward(x if y is None else x + self.gate * y, context)


def block(forward: Forward) -> onward.Block:
    """A block whose module has this `forward`."""
    module = type(forward.__name__, (Mixed,), {"forward": forward})

    @dataclass(frozen=True)
    class Made(Own, kind=""):
        name: str = forward.__name__
        kind = "made"

        def build(self, config: onward.DecoderConfig, layer: int) -> Any:
            return module(config.d_model, layer, *build_branches(config, layer))

    return Made()


def odd_layers(self: Any, x: Tensor, context: AttentionContext) -> Tensor:
    return self.rest(x, context) if self.layer % 2 else x + self.mlp(self.mlp_norm(x))


def often(self: Any, x: Tensor, context: AttentionContext) -> Tensor:
    for _ in range(2 + self.layer):
        x = self.rest(x, context, previous(x, context, 2))
    return x


def by_position(self: Any, x: Tensor, context: AttentionContext) -> Tensor:
    return self.rest(x, context, self.table(context.mask.query_positions))


def recurrent_twice(self: Any, x: Tensor, context: AttentionContext) -> Tensor:
    return self.rest(self.rest(x, context), context)


RIGHT = odd_layers, often, by_position, recurrent_twice


def shifted(self: Any, x: Tensor, context: AttentionContext) -> Tensor:
    return self.rest(x, context, F.pad(x, (0, 0, 1, -1)))


def convolved(self: Any, x: Tensor, context: AttentionContext) -> Tensor:
    return self.rest(x, context, self.conv(F.pad(x.mT, (2, 0))).mT)


def running_mean(self: Any, x: Tensor, context: AttentionContext) -> Tensor:
    return self.rest(x, context, x.cumsum(1) / torch.arange(1, x.size(1) + 1)[:, None])


def positions_from_0(self: Any, x: Tensor, context: AttentionContext) -> Tensor:
    return self.rest(x, context, self.table(torch.arange(x.size(1))))


def in_prompts_only(self: Any, x: Tensor, context: AttentionContext) -> Tensor:
    return self.rest(x, context) if x.size(1) > 1 else x


def by_values(self: Any, x: Tensor, context: AttentionContext) -> Tensor:
    return self.rest(x, context) if x[0, -1, 0] > 0 else x


def bidirectional(self: Any, x: Tensor, context: AttentionContext) -> Tensor:
    return self.rest(x, context, x.flip(1).cumsum(1).flip(1))


def batch_statistics(self: Any, x: Tensor, context: AttentionContext) -> Tensor:
    return self.rest(x, context, x.mean(0, keepdim=True))


def dropout_left_on(self: Any, x: Tensor, context: AttentionContext) -> Tensor:
    return self.rest(x, context, F.dropout(x, 0.5))


def kept_in_the_module(self: Any, x: Tensor, context: AttentionContext) -> Tensor:
    last, self.last = getattr(self, "last", 0.0), x.detach().mean()
    return self.rest(x, context, x + last)


WRONG = {
    shifted: "its logits with a cache differ",
    convolved: "its logits with a cache differ",
    running_mean: "its logits with a cache differ",
    positions_from_0: "take positions from the AttentionContext",
    in_prompts_only: "equally often in every forward",
    by_values: "rows|forward|tokens after it",  # which of these depends on the weights
    bidirectional: "a token reads tokens after it",
    batch_statistics: "depend on the other rows of the batch",
    dropout_left_on: "randomness only if self.training",
    kept_in_the_module: "keep nothing from one forward pass to the next in the module",
}


def made(forward: Forward, **changes: Any) -> onward.DecoderConfig:
    return config(n_layers=2, context_length=32, block=block(forward), **changes)


@pytest.mark.parametrize("forward", RIGHT)
@pytest.mark.parametrize("attention", [SelfAttention(window=4), onward.GatedDeltaNet(n_heads=2, d_key=6)])
def test_own_block_generates_the_tokens_of_its_plain_forward(forward: Forward, attention: Any) -> None:
    model = decoder(made(forward, attention=attention))
    tokens = token_ids(model.config, rows=1, length=5)
    for _ in range(20):
        tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)
    request = onward.Request(tokens[0, :5].tolist(), max_new_tokens=20, sampling=onward.Sampling(temperature=0.0))
    engine = onward.Engine(model, compile_after=4)
    engine.add(request)
    engine.finish()
    assert request.tokens == tokens[0, 5:].tolist()


@pytest.mark.parametrize("length", [1, 2, 3, 4, 7])
def test_own_part_has_any_context_length(length: int) -> None:
    model = decoder(config(n_layers=2, context_length=length, block=TwiceBlock()))
    tokens, positions = token_ids(model.config, rows=1, length=length), torch.arange(length)[None]
    assert_close(model(tokens, positions, KVCache(model.config, 1, length, length).view()), model(tokens))


@pytest.mark.parametrize("forward", WRONG)
def test_own_block_that_a_cache_breaks_is_refused_by_name(forward: Forward) -> None:
    wrong = made(forward)
    Decoder(wrong)(torch.zeros(1, 4, dtype=torch.int64))  # a forward pass without a cache is allowed
    for _ in range(2):
        with pytest.raises(UserError, match=f"Cannot generate with Made, because .*({WRONG[forward]})"):
            KVCache(wrong, 1, 8)


class Redefined(PreNormModule):
    """The module of a block that a notebook cell redefines."""


@dataclass(frozen=True)
class Cell(Own, kind="cell", internal=True):
    def build(self, config: onward.DecoderConfig, layer: int) -> Any:
        return Redefined(*build_branches(config, layer))


class Backwards(PreNormModule):
    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        return super().forward(x + x.flip(1), context)


def test_a_part_whose_module_is_defined_again_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    same = config(block=Cell())
    KVCache(same, 1, 8)
    with monkeypatch.context() as patched:
        patched.setitem(globals(), "Redefined", Backwards)
        with pytest.raises(UserError, match="Cannot generate with Cell, because a token reads tokens after it"):
            KVCache(same, 1, 8)
    KVCache(same, 1, 8)


class WideModule(SelfAttentionModule):
    """Attention that adds one element to each key and query, and keeps a third vector in its cache."""

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        q, k, v = (F.pad(t, (0, 1), value=0.3) for t in self.project(x))
        keys, values, extra = context.update(k=k, v=v, extra=2 * v)
        y = self.attend(q, keys, values, context) + self.attend(q, keys, extra, context)
        return self.out(y[..., :-1].flatten(-2))


@dataclass(frozen=True)
class Wide(SelfAttention, kind="wide"):
    def build(self, config: onward.DecoderConfig, layer: int) -> WideModule:
        return WideModule(self, config, layer_norms(config, layer))


def test_entries_of_own_attention_are_found_and_need_no_declaration() -> None:
    model = decoder(config(attention=Wide(), block=TwiceBlock(), n_kv_heads=2))
    cache, tokens = KVCache(model.config, 2, 12, 12), token_ids(model.config)
    assert {name: tuple(t.shape[2:]) for name, t in cache.layers[0].entries.items()} == {
        f"{name}{call}": (2, 5) for call in ("", "@1") for name in ("k", "v", "extra")
    }
    assert_close(model(tokens, torch.arange(12).expand(2, -1), cache), model(tokens))
    other = Decoder(config(attention=Wide(), n_kv_heads=2))
    assert [len(layer.entries) for layer in KVCache(other.config, 1, 4).layers] == [3, 3]


def test_packed_documents_of_own_parts_are_those_alone() -> None:
    model = decoder(made(often, n_kv_heads=2))
    tokens = token_ids(model.config, rows=1)
    packed = model(tokens, torch.cat([torch.arange(5), torch.arange(7)])[None])
    assert_close(packed, torch.cat([model(tokens[:, :5]), model(tokens[:, 5:])], 1))


def divided(self: Any, x: Tensor, context: AttentionContext) -> Tensor:
    return self.rest(x, context, previous(x[:, :2], context).repeat(1, 2, 1))


def test_earlier_tokens_are_refused_where_processes_divide_them() -> None:
    with pytest.raises(UserError, match="Cannot read earlier tokens in a text of 4, of which this process has 2"):
        Decoder(made(divided))(torch.zeros(1, 4, dtype=torch.int64))


def test_trial_leaves_the_random_numbers_as_they_were() -> None:
    torch.manual_seed(5)
    before = torch.rand(1)
    torch.manual_seed(5)
    KVCache(made(odd_layers, d_model=24), 1, 4)
    assert torch.equal(before, torch.rand(1))


def test_plain_parts_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onward.base.handed.tried", None)
    KVCache(config(), 1, 4)
