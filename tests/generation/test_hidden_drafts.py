"""Drafts that read the model's hidden states change no token, and their draft tokens equal the formula."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from onward import Decoder, Engine, Request
from onward.generation.drafts.hidden_draft import HiddenDraft
from onward.model.state_embedding import StateEmbedding

from support.plain_generation import GREEDY, MODELS, PROMPTS, WARM, plainly
from support.recorded_drafts import Recorded


class Sum(nn.Module):
    """A weighted sum of the embedding of a token and the hidden state before it."""

    def forward(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        return embedded + 0.3 * hidden


def draft_for(model: Decoder, **changes: object) -> Decoder:
    torch.manual_seed(7)
    draft = Decoder(replace(model.config, n_layers=1, tied=False, **changes)).eval()  # type: ignore[arg-type]
    draft.embed, draft.head = StateEmbedding(model.embed, Sum()), model.head  # type: ignore[assignment]
    return draft


@pytest.mark.parametrize("compile_after", [None, 0], ids=["plain", "compiled"])
@pytest.mark.parametrize("slide", [False, True])
def test_tokens_are_those_of_plain_decoding(slide: bool, compile_after: int | None) -> None:
    model = MODELS["rotary"]
    draft, rows = HiddenDraft(draft_for(model), 3), 3
    requests = [
        Request(p, s, 40 if slide else 24 - len(p), seed=i)
        for i, (p, s) in enumerate(zip([*PROMPTS, PROMPTS[1], [9] * 11], [GREEDY, WARM] * 3))
    ]
    engine = Engine(model, rows=rows, draft=draft, slide=slide, compile_after=compile_after)
    found = [engine.add(request) for request in requests]
    engine.finish()
    assert [r.tokens for r in found] == [plainly(model, r) for r in requests]
    assert sum(r.num_drafted for r in found) > 40


@torch.no_grad()
def guesses(model: Decoder, draft: Decoder, context: list[int], count: int) -> list[int]:
    """The draft's proposal after a context, without a cache: each token's hidden state is joined with the next token,
    and further draft tokens continue from the draft's own last state."""
    states, tokens = model.hidden(torch.tensor([context[:-1]])), list(context)
    assert isinstance(draft.embed, StateEmbedding)
    for _ in range(count):
        draft.embed.note(states)
        new = draft.hidden(torch.tensor([tokens[1:]]))
        tokens.append(int(draft.logits(new)[0, -1].argmax()))
        states = torch.cat([states, new[:, -1:]], 1)
    return tokens[len(context) :]


@pytest.mark.parametrize("compile_after", [None, 0], ids=["plain", "compiled"])
@pytest.mark.parametrize("rows", [1, 3])
def test_proposals_are_those_of_the_formula(rows: int, compile_after: int | None) -> None:
    model = MODELS["rotary"]
    draft = Recorded(draft_for(model), 3)
    draft.compile_after = compile_after
    engine = Engine(model, rows=rows, draft=draft, compile_after=compile_after)
    for prompt in PROMPTS:
        engine.add(Request(prompt, GREEDY, 24 - len(prompt)))
    engine.finish()
    assert sum(len(tokens) for _, tokens in draft.noted) > 40
    for context, tokens in draft.noted:
        assert tokens == guesses(model, draft.model, context, len(tokens)), context
    assert (draft.runner.compiled is None) == (compile_after is None)
