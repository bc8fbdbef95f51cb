from typing import Any

import pytest
import torch
from torch.nn import functional as F

from onward import Alibi, Decoder, DecoderConfig, Learned, SelfAttention
from onward.inspection import attention_maps, head_scores
from onward.inspection.head_maps import next_tokens

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


def decoder(**parts: Any) -> Decoder:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 20,
        "d_model": 16,
        "n_layers": 3,
        "n_heads": 4,
        "n_kv_heads": 2,
        "dropout": 0.5,
    }
    model = Decoder(DecoderConfig(**sizes, context_length=16, **parts))
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.5)
    return model.eval()


VARIANTS = {
    "rotary": {},
    "alibi": {"position": Alibi()},
    "learned, capped": {"position": Learned(), "attention": SelfAttention(attn_softcap=2.0)},
    "window": {"attention": (SelfAttention(window=3), SelfAttention())},
    "sinks": {"attention": SelfAttention(sinks=True)},
}
every_variant = pytest.mark.parametrize("parts", VARIANTS.values(), ids=VARIANTS)


@every_variant
def test_attention_rows_sum_to_one_and_future_weights_are_zero(parts: dict[str, Any]) -> None:
    model = decoder(**parts)
    maps = attention_maps(model, TOKENS)
    assert [tuple(weights.shape) for weights in maps] == [(4, 8, 8)] * 3
    for weights in maps:
        assert torch.equal(weights.triu(1), torch.zeros_like(weights))
        sums = weights.sum(-1)
        if parts.get("attention") == SelfAttention(sinks=True):
            assert (sums > 0).all()
            assert (sums < 1).all()
        else:
            torch.testing.assert_close(sums, torch.ones_like(sums))
    if "window" in str(parts) and isinstance(parts["attention"], tuple):
        assert not maps[0].tril(-3).any()
        assert maps[1].tril(-3).any()


@every_variant
def test_attention_weights_give_the_output_of_the_kernel_that_ran(parts: dict[str, Any]) -> None:
    model, seen = decoder(**parts), []
    hooks = [
        block.attn.attend.register_forward_hook(lambda _, inputs, output: seen.append((inputs[2], output)))
        for block in model.blocks
    ]
    maps = attention_maps(model, TOKENS)
    for hook in hooks:
        hook.remove()
    for weights, (v, output) in zip(maps, seen, strict=True):
        mixed = weights @ v[0].transpose(0, 1).repeat_interleave(2, 0)  # (H, T, E)
        torch.testing.assert_close(mixed.transpose(0, 1), output[0], atol=1e-5, rtol=1e-5)


def test_attention_maps_of_a_training_model_have_no_dropout() -> None:
    model = decoder()
    expected = attention_maps(model, TOKENS)
    model.train()
    for ours, theirs in zip(attention_maps(model, TOKENS), expected, strict=True):
        assert torch.equal(ours, theirs)
    assert model.training


@pytest.mark.long
def test_attention_of_compiled_blocks_is_captured() -> None:
    model = decoder()
    expected = attention_maps(model, TOKENS)
    for block in model.blocks:
        block.compile(backend="eager")
    model(torch.tensor([TOKENS]))
    for ours, theirs in zip(attention_maps(model, TOKENS), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_next_tokens_are_the_most_probable_of_each_position() -> None:
    model = decoder()
    places = next_tokens(model, TOKENS, top=5)
    probabilities = F.softmax(model(torch.tensor([TOKENS]))[0], -1)
    assert len(places) == len(TOKENS)
    for likeliest, p in zip(places, probabilities):
        ids, shares = zip(*likeliest)
        assert list(shares) == sorted(shares, reverse=True)
        torch.testing.assert_close(torch.tensor(shares), p[list(ids)])
        assert shares[-1] >= p[[i for i in range(20) if i not in ids]].max()
    assert next_tokens(model, TOKENS[:3], top=5)[-1][0][0] == places[2][0][0]
    assert len(next_tokens(model, TOKENS, top=100)[0]) == 20


def test_head_score_is_high_for_a_few_earlier_tokens_and_zero_for_trivial_heads() -> None:
    tokens = 10
    eye, uniform = torch.eye(tokens), torch.ones(tokens, tokens).tril()
    first, previous = torch.zeros(tokens, tokens), eye.roll(1, 0)
    first[:, 0] = previous[0] = 1
    previous[0, 1:] = 0
    few = eye.clone()
    few[5:] = 0
    few[5:, 1:4] = 1 / 3
    heads = [eye, uniform / uniform.sum(-1, keepdim=True), first, previous, (eye + previous) / 2, few]
    scores = head_scores([torch.stack(heads)])
    assert scores.shape == (1, 6, tokens)
    means = scores[0].mean(-1)
    torch.testing.assert_close(means[:5], torch.zeros(5), atol=1e-6, rtol=0)
    assert means[5] > 0.4
    assert scores[0, 5, :5].eq(0).all()
