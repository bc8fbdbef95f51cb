"""Small models that continue prompts, and plain generation as the reference: one prompt at a time, without a cache."""

from collections.abc import Callable
from typing import Any

import torch

from onward import (
    Alibi,
    Decoder,
    DecoderConfig,
    DynamicScaling,
    Engine,
    Learned,
    LongRoPEScaling,
    Request,
    Rotary,
    Sampling,
    SelfAttention,
    next_token_distribution,
)
from onward.generation import Draft, LookupDraft, ModelDraft
from onward.generation.drafts.verify import DRAW
from onward.kernels.draws import draw

from support.devices import on_device
from support.recurrent import Fading

PROMPTS = [[1], [4, 7, 1, 9, 30, 2, 2], [11, 12, 13], [5, 6]]
GREEDY, WARM = Sampling(temperature=0), Sampling(temperature=1.3, top_k=20, top_p=0.95)
CONFIGS: dict[str, dict[str, Any]] = {
    "rotary": {},
    "learned": {"position": Learned()},
    "alibi": {"position": Alibi()},
    "windows": {"attention": (SelfAttention(window=5), SelfAttention())},
    "recurrent": {"attention": (Fading(), SelfAttention(window=5))},
    "longrope": {"position": Rotary(scaling=LongRoPEScaling((1.0, 1.5, 1.1, 1.3), (9.0, 4.0, 7.0, 5.0), original=13))},
    "dynamic": {"position": (Rotary(), Rotary(scaling=DynamicScaling(factor=3.0, original=13)))},
}


def decoder(kind: str = "rotary", **changes: object) -> Decoder:
    """A decoder with a vocabulary of 50 and a context of 24."""
    torch.manual_seed(3)
    sizes = {"vocab_size": 50, "d_model": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "context_length": 24}
    model = on_device(Decoder(DecoderConfig(**sizes | CONFIGS[kind] | changes)).eval())  # type: ignore[arg-type]
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4)  # distributions far from uniform, so that the tokens depend on the model
    return model


def run(model: Decoder, requests: list[Request], **options: object) -> list[list[int]]:
    """The tokens of requests that an engine answers together."""
    engine = Engine(model, rows=max(1, len(requests)), **options)  # type: ignore[arg-type]
    for request in requests:
        engine.add(request)
    engine.finish()
    for request in requests:
        if request.error:
            raise request.error
    return [request.tokens for request in requests]


@torch.no_grad()
def plainly(model: Decoder, request: Request) -> list[int]:
    """Generate the tokens after one prompt without a cache: each takes a forward pass of the whole context."""
    prompt, tokens = request.prompt, list[int]()
    length, context = model.config.context_length, list(prompt)
    for index in range(request.max_new_tokens):
        if len(context) > length:
            context = context[-(length // 2 or 1) :]
        logits, may_end = model(torch.tensor([context]))[:, -1], index >= request.min_new_tokens
        allowed = torch.tensor([may_end or token not in request.stop_token_ids for token in range(logits.size(1))])
        p = next_token_distribution(logits, request.sampling, [prompt + tokens], [len(prompt)], allowed)
        token = int(draw(p, torch.tensor([request.seed]), torch.tensor([index]), DRAW))
        if token in request.stop_token_ids:
            break
        tokens.append(token)
        context.append(token)
    return tokens


MODELS = {kind: decoder(kind) for kind in CONFIGS}
DRAFTER = decoder(n_layers=1)
DRAFTS: dict[str, Callable[[], Draft | None]] = {
    "no draft": lambda: None,
    "look-up": lambda: LookupDraft(num_draft_tokens=3, ngram=2),
    "a model": lambda: ModelDraft(DRAFTER, num_draft_tokens=3),
}
