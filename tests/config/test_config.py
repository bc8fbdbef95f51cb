"""Impossible sizes are refused in one sentence; missing sizes are computed."""

from typing import Any

import pytest

from onward import (
    Experts,
    FeedForwardOnly,
    Llama3Scaling,
    NoAttention,
    Plain,
    PreNorm,
    Rotary,
    SelfAttention,
    Sinusoidal,
    UserError,
)

from support.decoders import config

IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"d_model": 10}, "d_model 10 is not divisible by n_heads 4"),
    ({"n_kv_heads": 3}, "n_heads 4 is not a multiple of n_kv_heads 3"),
    ({"d_head": 3}, "rotates 3 of the 3 elements"),
    ({"position": Rotary(fraction=0.25)}, "rotates 1 of the 4 elements"),
    ({"position": (Rotary(), Rotary(fraction=0.25))}, "rotates 1 of the 4 elements"),
    ({"d_model": 9, "d_head": 4, "position": Sinusoidal()}, "d_model is 9"),
    ({"d_head": 6, "attention": SelfAttention(out=False)}, "heads together are 24 wide and d_model is 16"),
    ({"mlp": Experts(count=2, top_k=3)}, "top_k is 3"),
    ({"position": Rotary(scaling=Llama3Scaling(low_frequency=4.0))}, "must be less than high_frequency"),
    ({"attention": ()}, "attention names no part"),
    ({"attention": NoAttention()}, "block is pre_norm and attention none in layer 0"),
    ({"block": (PreNorm(), FeedForwardOnly())}, "block is feed_forward_only and attention self in layer 1"),
    ({"mlp": ()}, "mlp names no part"),
    ({"dropout": 1.0}, "dropout is 1.0"),
    ({"dropout": float("nan")}, "dropout is nan"),
    ({"n_kv_heads": -1}, "n_kv_heads is -1"),
    *(({name: 0}, f"{name} is 0") for name in ("vocab_size", "d_model", "n_layers", "n_heads", "context_length")),
]


@pytest.mark.parametrize(("changes", "sentence"), IMPOSSIBLE, ids=[sentence for _, sentence in IMPOSSIBLE])
def test_impossible_sizes_are_refused_in_one_sentence(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as error:
        config(**changes)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_sizes_that_are_not_given_are_computed() -> None:
    c = config(d_model=48)
    assert (c.n_kv_heads, c.d_head, c.d_ff) == (4, 12, 128)
    assert config(d_model=48, mlp=Plain()).d_ff == 192
    assert config(d_model=10, d_head=2).d_head == 2
