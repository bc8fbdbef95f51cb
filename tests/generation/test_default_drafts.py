"""Drafts that are on by default change no text, stop if they save no time, and are off where they would be noticed."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

import onward
from onward import BlockManager, CacheManager, Decoder, DecoderConfig, Engine, KVCache, PagedKVCache, Request, Sampling
from onward.compiled.interface import decoding_step
from onward.generation import Proposal
from onward.generation.drafts import paced
from onward.generation.drafts.costs import COST, EXPERTS, INTEGERS
from onward.generation.drafts.paced import BEGIN, LENGTHS, MOST_ROWS, SHARE, PacedDraft, default_draft
from onward.kernels.llvm.matrix import has_matrix_unit
from onward.kernels.llvm.products import TILE
from onward.transforms.quantize import quantize_model

from support.decoders import DECODERS
from support.plain_generation import GREEDY, MODELS, decoder, plainly

QUOTING = [7, 3, 9, 4, 11, 5, 7, 3, 9, 4]


@pytest.fixture(autouse=True)
def small_models_draft_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paced, "SMALLEST", 0)


class Fixed:
    """A draft that proposes as many tokens as fit."""

    num_draft_tokens = LENGTHS[-1]
    manager: CacheManager | None = None

    def start(self, rows: int, length: int, chunk: int, vocab_size: int) -> None:
        pass

    def propose(self, requests: Sequence[Request], room: Sequence[int]) -> list[Proposal]:
        return [Proposal([1] * most) for most in room]


def proposed(right: bool, steps: int, rows: int = 1) -> tuple[list[int], int]:
    """The length of a request's proposal in each step, and its number of tokens, if all proposals are right or, without
    `right`, wrong."""
    draft, lengths = PacedDraft(Fixed(), COST), list[int]()
    requests = [Request([0], GREEDY, 10**6) for _ in range(rows)]
    for _ in range(steps):
        found = draft.propose(requests, [LENGTHS[-1]] * rows)
        lengths.append(len(found[0].tokens))
        for request, proposal in zip(requests, found):
            kept = len(proposal.tokens) if right else 0
            request.tokens += [1] * (kept + 1)
            request.num_accepted += kept
    return lengths, len(requests[0].tokens)


@pytest.mark.parametrize("rows", [1, 3])
def test_refused_proposals_cost_a_small_share(rows: int) -> None:
    lengths, tokens = proposed(right=False, steps=1000, rows=rows)
    worst = COST * LENGTHS[0] * rows  # cost of the last proposal
    assert sum(COST * n for n in lengths) <= BEGIN + SHARE * tokens + worst
    assert 0 < sum(map(bool, lengths[:20])) <= 4
    assert any(lengths[500:]), "drafting is tried again"


def test_accepted_proposals_become_longer() -> None:
    assert proposed(right=True, steps=4)[0] == [LENGTHS[0], *[LENGTHS[-1]] * 3]
    assert not any(proposed(right=True, steps=4, rows=5)[0]), "with many rows, drafts save no time"


def test_engine_of_a_model_drafts_by_default_and_says_the_same() -> None:
    lm = onward.LanguageModel(decoder(vocab_size=257, context_length=64), onward.train_tokenizer("byte", []))
    for temperature in 0.0, 1.0:
        options = {"temperature": temperature, "seed": 3, "top_k": 5}
        prompts = [QUOTING, [2, 3], QUOTING * 2]
        found, plain = (lm.complete(prompts, 30, lookup=lookup, **options) for lookup in (None, 0))  # type: ignore[arg-type]
        assert [one.tokens for [one] in found] == [one.tokens for [one] in plain]
        assert sum(one.num_drafted for [one] in found) > 0
        assert sum(one.num_drafted for [one] in plain) == 0


def processor(tokens: object, logits: torch.Tensor) -> torch.Tensor:
    return logits


@pytest.mark.filterwarnings("ignore:decoding steps are not compiled")
@pytest.mark.parametrize("reason", ["functions of the user", "a trace"])
def test_nothing_is_drafted_where_refused_tokens_would_be_seen(reason: str) -> None:
    model = decoder(context_length=64)
    sampling = Sampling(temperature=0, processors=processor if reason[0] == "f" else ())  # type: ignore[arg-type]
    engine = Engine(model, rows=1, draft=default_draft(model, None))
    request = engine.add(Request(QUOTING, sampling, 30))
    if reason == "a trace":
        with onward.trace(model, "blocks.0"):
            engine.finish()
    else:
        engine.finish()
    assert request.num_drafted == 0
    assert len(request.tokens) == 30


def test_decoders_that_draft_by_default() -> None:
    of = lambda config, cache=None: default_draft(Decoder(config), cache)
    assert default_draft(MODELS["recurrent"], None) is None  # the model has parts from outside the package
    assert of(DECODERS["gated delta"]) is None
    long = replace(DECODERS["llama"], context_length=64)
    assert of(long, KVCache(long, 1, 64, chunk=LENGTHS[-1])) is None
    assert isinstance(of(long, KVCache(long, 1, 64, chunk=LENGTHS[-1] + 1)), PacedDraft)
    model = Decoder(long)
    quantize_model(model, "int8")
    found = default_draft(model, None)
    assert found is not None
    assert (1 + found.num_draft_tokens) * found.most_rows < TILE
    assert found.cost == INTEGERS
    experts = replace(long, mlp=onward.Experts(count=4, top_k=2))
    found = of(experts)
    assert found is not None
    assert found.cost == EXPERTS


@pytest.mark.skipif(not has_matrix_unit(None), reason="this CPU has no matrix unit for integers")
@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_integer_weights_draft_as_others_where_rows_round_alike(precision: str) -> None:
    torch.manual_seed(0)
    config = DecoderConfig(vocab_size=64, d_model=64, n_layers=2, n_heads=2, d_ff=128, context_length=64)
    model = Decoder(config).to(torch.bfloat16).eval()
    quantize_model(model, precision)
    draft = default_draft(model, None)
    assert draft is not None
    assert (draft.lengths, draft.most_rows, draft.cost) == ([*LENGTHS], MOST_ROWS, COST)
    lm = onward.LanguageModel(model, onward.train_tokenizer("byte", []))
    asked = [QUOTING, [2, 3], QUOTING * 2]
    found, plain = (lm.complete(asked, 30, temperature=1.0, top_k=3, seed=2, lookup=n) for n in (None, 0))
    assert [one.tokens for [one] in found] == [one.tokens for [one] in plain]
    assert sum(one.num_drafted for [one] in found) > 0
    odd = Decoder(replace(config, d_ff=96)).to(torch.bfloat16)
    quantize_model(odd, precision)
    assert default_draft(odd, None).cost == INTEGERS  # type: ignore[union-attr]


def test_draft_tokens_yield_where_memory_is_short() -> None:
    model: Decoder = decoder(context_length=64)
    cache = BlockManager(PagedKVCache(model.config, 1, 64, 16, blocks=4, block_size=8))  # for 32 tokens
    engine = Engine(model, cache=cache, draft=default_draft(model, cache.cache))
    request = engine.add(Request(QUOTING, GREEDY, 20))
    engine.finish()
    assert request.tokens == plainly(model, Request(QUOTING, GREEDY, 20))
    assert request.error is None


@pytest.mark.parametrize("rows", [1, 3])
def test_steps_of_several_widths_are_compiled_together(rows: int) -> None:
    """Rows with shorter proposals, or none, are padded."""
    model = decoder(context_length=200)
    engine = Engine(
        model,
        cache=CacheManager(KVCache(model.config, rows, 200, 64)),
        draft=default_draft(model, None),
        compile_after=0,
    )
    answers = [[*QUOTING[i:], 1 + i] * 12 if i < 2 else list(range(40)) * 3 for i in range(rows)]
    forced = [Sampling(temperature=0, forced_tokens=tuple(answer)) for answer in answers]
    requests = [engine.add(Request([1 + i], sampling, 120)) for i, sampling in enumerate(forced)]
    engine.finish()
    assert [r.tokens[:120] for r in requests] == [
        answer[:120] + r.tokens[len(answer) :] for answer, r in zip(answers, requests)
    ]
    assert sum(r.num_accepted for r in requests) > 40
    assert engine.runner.compiled
    kinds = [kind for kind, *_ in engine.runner.compiled.pool.free]
    assert {width for (_, width), _, step in kinds if step is decoding_step} == {1, *(1 + n for n in LENGTHS)}
