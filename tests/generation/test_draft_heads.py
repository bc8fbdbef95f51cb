"""Draft heads change no token, and their guesses equal the formula."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from onward import Decoder, Engine, Request, Sampling
from onward.generation.drafts import head_draft
from onward.generation.drafts.head_draft import Chain, HeadDraft, PacedHead
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


def by_formula(model: Decoder, head: DraftHead, context: Sequence[int], request: Request, count: int) -> list[int]:
    """The guesses after a context, step by step in fp64: s = M [n(s), n(e)] + D (silu(G x) * U x), logits = W n(s)."""
    w = {name: p.double() for name, p in head.named_parameters()}
    norm = lambda x, name: x * (x.square().mean() + EPS).rsqrt() * w[f"{name}.weight"]
    embed, out = model.embed.weight.double(), model.head.weight.double()
    state: Tensor = model.hidden(torch.tensor([context]))[0, -2].double()
    last, guesses = context[-1], list[int]()
    for k in range(count):
        x = torch.cat([norm(state, "state_norm"), norm(embed[last], "token_norm")])
        gated = F.silu(w["gate.weight"] @ x) * (w["up.weight"] @ x)
        state = w["mix.weight"] @ x + w["down.weight"] @ gated
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
    contexts = [request.prompt + request.tokens for request in requests]
    wanted = [by_formula(model, draft.head, c, r, n) for c, r, n in zip(contexts, requests, [4, 3])]
    assert found == wanted
    assert isinstance(draft.chains.get((2, 4)), Chain) == compiled
