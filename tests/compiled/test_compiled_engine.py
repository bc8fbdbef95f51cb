"""An engine gives the same answers with compiled and plain steps, for requests that arrive and end at any time, with
and without constraints."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from onward import (
    BlockManager,
    Decoder,
    DecoderConfig,
    Engine,
    Gated,
    GatedDeltaNet,
    LayerNorm,
    Learned,
    Mamba2,
    NoPosition,
    PagedKVCache,
    Parallel,
    Plain,
    PreNorm,
    Request,
    RMSNorm,
    Rotary,
    Sampling,
    Sandwich,
    SelfAttention,
    SharedNorm,
    ShortConvolution,
    Sinusoidal,
)
from onward.compiled.steps import POOLS
from onward.generation import LookupDraft

from support.decoders import decoder

VOCABULARY, LENGTH, ROWS = 19, 40, 3
RECURRENT = (
    GatedDeltaNet(n_heads=1, n_value_heads=2, d_key=5, d_value=4),
    GatedDeltaNet(decay="element", rank=3, negative=True, gate="sigmoid"),
    Mamba2(d_head=8, d_state=3),
    ShortConvolution(),
)


def random_config(random: Random) -> DecoderConfig:
    """A random combination of soft caps, windows, sinks, partial rotations, blocks, biases, norms and recurrent
    layers."""
    heads = random.choice([2, 4])

    def attention() -> SelfAttention:
        return SelfAttention(
            window=random.choice([0, 0, 3, 7]),
            attn_softcap=random.choice([None, None, 2.0]),
            sinks=random.random() < 0.3,
            bias=random.random() < 0.5,
            out_bias=random.random() < 0.5,
            qk_norm=random.choice(["none", "none", "head", "width"]),
        )

    activation: Any = random.choice(["relu", "relu2", "gelu", "gelu_tanh", "silu"])
    return DecoderConfig(
        VOCABULARY,
        16,
        2,
        heads,
        n_kv_heads=random.choice([1, 2, heads]),
        d_head=random.choice([4, 8]),
        context_length=LENGTH,
        position=random.choice([Rotary(), Rotary(fraction=0.5), Learned(), Sinusoidal(), NoPosition()]),
        norm=random.choice([RMSNorm(), RMSNorm(offset=1.0), LayerNorm(), LayerNorm(bias=False)]),
        block=random.choice([PreNorm(), Parallel(), SharedNorm(), Sandwich()]),
        attention=(random.choice([attention(), *RECURRENT]), attention()),
        mlp=random.choice([Gated, Plain])(act=activation, bias=random.random() < 0.5),
        head_bias=random.random() < 0.3,
        logit_softcap=random.choice([None, 5.0]),
    )


@dataclass
class Steps:
    """A constraint: each token exceeds the previous one by at most `most`, modulo the vocabulary size; the answer ends
    after at most `last` tokens."""

    most: int
    last: int
    tokens: list[int] = field(default_factory=lambda: [0])

    def allowed(self) -> Tensor:
        mask = torch.zeros(VOCABULARY, dtype=torch.bool)
        mask[[(self.tokens[-1] + 1 + i) % VOCABULARY for i in range(self.most)]] = True
        return mask

    def accept(self, token: int) -> bool:
        fits = bool(self.allowed()[token])
        self.tokens.append(token)
        return fits and len(self.tokens) <= self.last

    def copy(self) -> Steps:
        return Steps(self.most, self.last, list(self.tokens))


def random_request(random: Random) -> Request:
    sampling = Sampling(
        temperature=random.choice([0, 0.7, 1.5]),
        top_k=random.choice([0, 0, 5]),
        top_p=random.choice([1.0, 1.0, 0.8]),
        repetition_penalty=random.choice([1.0, 1.0, 1.3]),
    )
    constraint = Steps(random.randint(2, 6), random.randint(3, 20)) if random.random() < 0.3 else None
    size = random.randint(1, 12)
    prompt = [random.randrange(VOCABULARY) for _ in range(size)]
    stop = frozenset(random.sample(range(VOCABULARY), random.choice([0, 1])))
    new = random.randint(1, LENGTH - size)
    return Request(prompt, sampling, new, constraint=constraint, stop_token_ids=stop, seed=random.randrange(1 << 30))


def answers(model: Decoder, seed: int, compile_after: int | None) -> list[tuple[list[int], str]]:
    """An engine's answers to random requests from a seed; some requests arrive late, share a prompt, or are canceled,
    and a paged cache is so small that requests are preempted."""
    random, cache, draft = Random(seed), None, None
    if random.random() < 0.5:
        cache = BlockManager(PagedKVCache(model.config, ROWS, LENGTH, 6, blocks=16, block_size=4, keep=4))
    if random.random() < 0.4:
        draft = LookupDraft(random.randint(1, 4), 1)
    engine = Engine(model, rows=ROWS, cache=cache, draft=draft, compile_after=compile_after)
    found, step = list[Request](), 0
    arriving = [random.randint(0, 12) for _ in range(6)]
    while engine.busy or step <= max(arriving):
        for _ in range(arriving.count(step)):
            several = [random_request(random)]
            if random.random() < 0.3:  # n answers to one prompt
                first = several[0]
                several += [Request(first.prompt, first.sampling, first.max_new_tokens, seed=i) for i in range(2)]
            found += [engine.add(request) for request in several]
        if found and random.random() < 0.05:
            engine.cancel(random.choice(found))
        engine.step()
        step += 1
    return [(request.tokens, request.finish_reason) for request in found]


def assert_answers_are_equal(seed: int) -> int:
    """Compare compiled with plain steps; return the number of tokens, or 0 if the model's steps cannot be compiled."""
    model = decoder(random_config(Random(seed)))
    plain = answers(model, seed, None)
    assert answers(model, seed, 0) == plain
    compiled = any(POOLS[model].free.values())
    return sum(len(tokens) for tokens, _ in plain) if compiled else 0


def test_compiled_steps_answer_as_plain_ones_do() -> None:
    assert sum(map(assert_answers_are_equal, range(2))) > 50


@pytest.mark.long
@pytest.mark.fuzzer
def test_many_models_answer_by_compiled_steps_as_by_plain_ones() -> None:
    counts = [assert_answers_are_equal(seed) for seed in range(2, 150)]
    assert sum(counts) > 10_000
    assert sum(map(bool, counts)) > 120
