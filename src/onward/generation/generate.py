"""Continue prompts token by token.

Shapes: B rows, T tokens in one call, D d_model, V vocabulary.
"""

import secrets
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from onward.errors import UserError
from onward.generation.distribution import draw, next_token_distribution, uniform
from onward.generation.sampling import Sampling
from onward.model.cache import Cache
from onward.model.config import DecoderConfig
from onward.model.decoder import Decoder, without_dropout

CHUNK = 512  # the most prompt tokens per call; bounds the memory of masks
DRAW = 0  # the purpose of the draws here, see `uniform`


@dataclass
class Request:
    """A prompt that is being continued."""

    prompt: list[int]
    sampling: Sampling
    max_new_tokens: int
    tokens: list[int] = field(default_factory=list)  # what has been generated
    start: int = 0  # where in prompt and tokens the context begins
    done: bool = False

    def __post_init__(self) -> None:
        seed = self.sampling.seed
        self.seed = secrets.randbits(63) if seed is None else seed % (1 << 63)

    @property
    def left(self) -> int:
        """How many tokens may still come."""
        return self.max_new_tokens - len(self.tokens)

    def context(self, length: int) -> list[int]:
        """What to go on from: all there is or, once that is more than the context, the later half of one."""
        tokens = self.prompt + self.tokens
        if len(tokens) - self.start > length:
            self.start = len(tokens) - (length // 2 or 1)
        return tokens[self.start :]


@torch.inference_mode()
def generate(
    model: Decoder,
    requests: Sequence[Request],
    *,
    end: Collection[int] = (),
    banned: Tensor | None = None,
    slide: bool = False,
) -> Iterator[tuple[Request, int]]:
    """Continue all requests together; yields (request, token) as tokens come, an end token not among them.

    A request is done at a token of `end` or after its max_new_tokens. `banned` (V,) marks tokens that are never
    chosen. Where prompt and new tokens are more than the model's context, that is a UserError or, with `slide`, the
    row goes on from the later half of what it has seen whenever the context is full. The draws of a request depend
    on its seed alone, not on its company.
    """
    for request in requests:
        check(request, model.config, slide)
    waiting = [request for request in requests if request.max_new_tokens > 0]
    with without_dropout(model):
        while waiting:
            yield from run(model, waiting, end, banned)
            waiting = [request for request in waiting if not request.done]


def run(
    model: Decoder, requests: list[Request], end: Collection[int], banned: Tensor | None
) -> Iterator[tuple[Request, int]]:
    """Prefill and decode until every request is done or one has filled the context."""
    length = model.config.context_length
    requests.sort(key=lambda r: len(r.context(length)), reverse=True)
    contexts = [r.context(length) for r in requests]
    cache, last = prefill(model, contexts, [min(length, len(c) + r.left) for c, r in zip(contexts, requests)])
    samplings = [r.sampling for r in requests]
    home = torch.device("cpu") if last.device.type == "mps" else last.device  # of the draws: MPS has no fp64
    seeds = torch.tensor([r.seed for r in requests], device=home)
    positions = torch.tensor([len(c) for c in contexts], device=last.device)  # of the token to come
    while True:
        index = torch.tensor([len(r.tokens) for r in requests], device=home)
        distribution = next_token_distribution(model.logits(last)[:, 0], samplings, banned)
        chosen = draw(distribution.to(home), uniform(seeds, index, DRAW)).to(last.device)
        for request, token in zip(requests, chosen.tolist()):
            if not request.done:
                if token not in end:
                    request.tokens.append(token)
                    yield request, token
                request.done = token in end or not request.left
        active = torch.tensor([not r.done for r in requests], device=last.device)
        full = active & (positions >= length)
        if not active.any() or full.any():
            return
        reached = min(int(positions.max()) + 1, cache.length)
        last = model.hidden(chosen[:, None], positions.clamp(max=reached - 1)[:, None], cache.upto(reached))
        positions += active  # a row that is done stays where it is and writes over itself


def prefill(model: Decoder, contexts: Sequence[Sequence[int]], lengths: Sequence[int]) -> tuple[Cache, Tensor]:
    """A cache for rows of these lengths that holds the contexts, longest first, and the last states (B, 1, D)."""
    weight = model.embed.weight
    chunk = min(CHUNK, len(contexts[0]))
    cache = Cache(model.config, len(contexts), max(lengths), chunk, device=weight.device, dtype=weight.dtype)
    cache.horizon = torch.tensor(lengths, device=weight.device)
    lasts: list[Tensor] = [torch.empty(0)] * len(contexts)
    for start in range(0, len(contexts[0]), chunk):
        pieces = [context[start : start + chunk] for context in contexts if len(context) > start]
        width = len(pieces[0])
        tokens = torch.tensor([[*p, *[0] * (width - len(p))] for p in pieces], device=weight.device)
        positions = torch.arange(start, start + width, device=weight.device).expand(len(pieces), -1)
        hidden = model.hidden(tokens, positions, cache.rows(0, len(pieces)).upto(min(start + width, cache.length)))
        for row, piece in enumerate(pieces):
            lasts[row] = hidden[row, len(piece) - 1]
    return cache, torch.stack(lasts)[:, None]


def check(request: Request, config: DecoderConfig, slide: bool) -> None:
    """Refuse what cannot be continued, in one sentence."""
    length = config.context_length
    wanted = len(request.prompt) + request.max_new_tokens
    if not request.prompt:
        raise UserError("the prompt is empty and there is no beginning token: give it at least one token")
    check_ids(min(request.prompt), max(request.prompt), config)
    if request.max_new_tokens < 0:
        raise UserError(f"max_new_tokens is {request.max_new_tokens}: it must be at least 0")
    if wanted > length and not slide:
        raise UserError(
            f"{len(request.prompt)} prompt tokens and {request.max_new_tokens} new ones are more than the model's "
            f"context of {length}: shorten them, or let the context slide (slide=True, --slide)"
        )


def check_ids(least: int, greatest: int, config: DecoderConfig) -> None:
    """Refuse token ids that the model does not have, given the least and the greatest of them."""
    for token in least, greatest:
        if not 0 <= token < config.vocab_size:
            raise UserError(
                f"token id {token} is out of range for a vocabulary of {config.vocab_size}: the tokenizer belongs to "
                "another model"
            )
