"""Draft heads change no token, and their draft tokens equal the formula."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onward import BlockManager, Decoder, Engine, PagedKVCache, Request, Sampling
from onward.generation.drafts import head_draft
from onward.generation.drafts.guess_program import IntegerHead, guess_program
from onward.generation.drafts.head_draft import HeadDraft, PacedHead
from onward.kernels.draws import draw
from onward.model.draft_head import EPS, DraftHead

from support.decoders import DECODERS, decoder
from support.plain_generation import GREEDY, MODELS, PROMPTS, WARM, plainly

HOT = Sampling(temperature=1.3)


def head_for(model: Decoder) -> DraftHead:
    torch.manual_seed(7)
    head = DraftHead(model.config.d_model, 24).to(model.dtype)
    head.initialize(model)
    torch.nn.init.normal_(head.down.weight, std=0.3)
    return head.requires_grad_(False)


@pytest.mark.parametrize("compile_after", [None, 0], ids=["plain", "compiled"])
@pytest.mark.parametrize("slide", [False, True])
@pytest.mark.parametrize("paced", [False, True])
def test_tokens_are_those_of_plain_decoding(
    paced: bool, slide: bool, compile_after: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_draft, "COMPILE_AFTER", 10**9 if compile_after is None else 0)
    model = MODELS["rotary"]
    draft = HeadDraft(model, head_for(model), 3)
    requests = [
        Request(p, s, 40 if slide else 24 - len(p), seed=i)
        for i, (p, s) in enumerate(zip([*PROMPTS, PROMPTS[1], [9] * 11], [GREEDY, WARM] * 3))
    ]
    engine = Engine(
        model, rows=3, draft=PacedHead(model, draft.head) if paced else draft, slide=slide, compile_after=compile_after
    )
    found = [engine.add(request) for request in requests]
    engine.finish()
    assert [r.tokens for r in found] == [plainly(model, r) for r in requests]
    assert sum(r.num_drafted for r in found) > (3 if paced else 40)


def test_an_answer_that_had_begun_is_drafted_for_after_its_first_step() -> None:
    """Its prefix is cached, so that it is not prefilled, and the draft head has read no hidden state of it."""
    model = MODELS["rotary"]
    cache = BlockManager(PagedKVCache(model.config, 1, 24, 24, blocks=24, block_size=1))
    engine = Engine(model, cache=cache, draft=HeadDraft(model, head_for(model), 3), compile_after=None)
    first = engine.add(Request(PROMPTS[0], GREEDY, 9))
    engine.finish()
    begun = engine.add(Request(PROMPTS[0], GREEDY, 9, tokens=first.tokens[:3]))
    engine.finish()
    assert begun.tokens == first.tokens == plainly(model, first)
    assert begun.num_drafted > 0


def by_formula(
    model: Decoder, head: DraftHead, output: nn.Module, context: Sequence[int], request: Request, count: int
) -> list[int]:
    """The draft tokens after a context, step by step in fp64: s = M [n(s), n(e)] + D (silu(G x) * U x), logits = W
    n(s)."""
    w: dict[str, Any] = {name: module.weight.double() for name, module in head.named_children()}  # type: ignore[operator]
    norm = lambda x, name: x * (x.square().mean() + EPS).rsqrt() * w[name]
    embed = model.embed.weight.double()
    out: Any = output.weight.double()  # type: ignore[operator]
    state: Tensor = model.hidden(torch.tensor([context]))[0, -2].double()
    last, guesses = context[-1], list[int]()
    for k in range(count):
        x = torch.cat([norm(state, "state_norm"), norm(embed[last], "token_norm")])
        gated = F.silu(w["gate"] @ x) * (w["up"] @ x)
        state = w["mix"] @ x + w["down"] @ gated
        logits = out @ norm(state, "norm")
        if request.sampling.temperature:
            p = (logits / request.sampling.temperature).softmax(-1)
            index = torch.tensor([len(request.tokens) + k])
            last = int(draw(p[None], torch.tensor([request.seed]), index, 0))
        else:
            last = int(logits.argmax())
        guesses.append(last)
    return guesses


@torch.no_grad()
@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
def test_guesses_are_those_of_the_formula(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_draft, "COMPILE_AFTER", 0 if compiled else 10**9)
    model = decoder(replace(DECODERS["llama"], tied=False)).eval()
    draft = HeadDraft(model, head_for(model), 4)
    draft.start(2, 64, 64, model.config.vocab_size)
    requests = [Request([3, 1, 4], GREEDY, 9, seed=1, tokens=[1, 5]), Request([2], HOT, 9, seed=8, tokens=[7])]
    for request in requests:
        context = request.prompt + request.tokens
        draft.read(request, 0, model.hidden(torch.tensor([context]))[0])
        request.num_cached = len(context) - 1
    found = [proposal.tokens for proposal in draft.propose(requests, [4, 3])]
    assert (draft.programs.get(2) is not None) == compiled
    integers = IntegerHead(model, draft.head)
    head, output = (integers.head, integers.output) if compiled else (draft.head, model.head)
    contexts = [request.prompt + request.tokens for request in requests]
    wanted = [by_formula(model, head, output, c, r, n) for c, r, n in zip(contexts, requests, [4, 3])]
    assert found == wanted


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
@pytest.mark.parametrize("sampling", [GREEDY, replace(HOT, top_k=3)], ids=["greedy", "top_k"])
def test_a_proposal_goes_on_only_if_its_guesses_are_likely_enough(
    sampling: Sampling, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_draft, "COMPILE_AFTER", 0 if compiled else 10**9)
    model = decoder(DECODERS["llama"]).eval()
    draft, request = HeadDraft(model, head_for(model), 4), Request([3, 1, 4], sampling, 9, seed=1, tokens=[1, 5])
    draft.start(1, 64, 64, model.config.vocab_size)
    with torch.no_grad():
        draft.read(request, 0, model.hidden(torch.tensor([request.prompt + request.tokens]))[0])
    whole = draft.propose([request], [4])[0].tokens
    for least, length in ({2: 0.0}, 4), ({2: 1.0}, 2), ({2: 0.0, 3: 1.0}, 3):
        draft.least = least
        assert draft.propose([request], [4])[0].tokens == whole[:length]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_guesses_are_compiled_while_an_engine_runs(dtype: torch.dtype) -> None:
    model = decoder(DECODERS["llama"]).to(dtype)
    with torch.inference_mode():
        assert guess_program(model, head_for(model), 2) is not None


def test_changed_weights_are_copied_again() -> None:
    model = decoder(DECODERS["llama"])
    head = head_for(model)
    before = guess_program(model, head, 1)
    assert guess_program(model, head, 1) is before
    with torch.no_grad():
        head.mix.weight.mul_(2)
    assert guess_program(model, head, 1) is not before
