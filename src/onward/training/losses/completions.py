"""Completions sampled during training, by the engine.

Shapes: N completions, T tokens of a prompt and its completion, less one.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from onward.data.windows import IGNORE_INDEX, Batch
from onward.generation.cache.manager import growing_cache
from onward.generation.engine.engine import Engine
from onward.generation.request import Request
from onward.generation.sampling import Sampling
from onward.model.decoder import Decoder

ROWS = 256  # maximum number of completions in a batch of the engine
CHUNK = 256  # minimum size of a prefill chunk, in tokens
TURN = 7_368_787  # difference between the seeds of consecutive turns of a completion


@dataclass
class ModelCompletion:
    """A completion of a prompt: turns of the model, with replies of an environment between them. The prompt and
    the tokens are token ids."""

    prompt: Sequence[int]
    tokens: list[int] = field(default_factory=list)  # tokens of all turns and replies
    by_model: list[bool] = field(default_factory=list)  # for each token, whether the model wrote it
    logprobs: list[float] = field(default_factory=list)  # from the engine, one per token; 0 for tokens of replies
    ended: bool = False  # whether the last turn ended with a stop token and got no reply


# maps indices of completions and these completions to the tokens of each reply; None: the completion has ended
ReplyFunction = Callable[[Sequence[int], Sequence[ModelCompletion]], Sequence[Sequence[int] | None]]


def prompts_of(batch: Batch) -> list[tuple[list[int], list[int]]]:
    """Return (prompt, answer), two lists of token ids, for each row of a batch: the tokens before the first target, and
    the tokens from there to the last target."""
    pairs = []
    for tokens, targets in zip(batch.tokens.tolist(), batch.targets.tolist()):
        indices = [i for i, target in enumerate(targets) if target != IGNORE_INDEX]
        pairs.append((tokens[: indices[0] + 1], [*tokens[indices[0] + 1 : indices[-1] + 1], targets[indices[-1]]]))
    return pairs


@torch.no_grad()
def complete(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int],
    sampling: Sampling,
    most: int,
    ends: Collection[int],
    samples: int = 1,
    reply: ReplyFunction | None = None,
) -> list[ModelCompletion]:
    """Sample one completion of at most `most` tokens for each prompt, the n-th with seeds[n]; each prompt occurs
    `samples` times in a row in `prompts`. A turn of the model ends with a token of `ends`, which is part of the
    completion, so that the model learns to stop. For completions whose turn has ended, `reply` returns the tokens that
    follow, such as an environment's reply, or None if nothing follows. Raises the error of a completion that failed."""
    length = model.config.context_length
    rows = min(len(prompts), ROWS)
    cache = growing_cache(model, rows, length, max(CHUNK, min(512, length)))
    # compile before the first step, so that a resumed run decodes with the same kernels
    engine = Engine(model, rows=rows, cache=cache, compile_after=0)
    made = [ModelCompletion(prompt) for prompt in prompts]
    active, turn = list(range(len(made))), 0
    while active:
        requests = {i: turn_of(made[i], sampling, most, length, ends, seeds[i] + TURN * turn) for i in active}
        # each distinct prompt first, so that its copies use the cached prefix
        order = sorted(active, key=lambda i: i % samples)
        for i in order:
            engine.add(requests[i])
        engine.finish()
        for i, request in requests.items():
            if request.error:
                raise request.error
            one = made[i]
            one.tokens += request.tokens
            one.by_model += [True] * len(request.tokens)
            one.logprobs += [token.logprob for token in request.logprobs]
            one.ended = one.tokens[-1] in ends
        ended, active, turn = [i for i in active if made[i].ended], [], turn + 1
        for i, tokens in zip(ended, reply(ended, [made[i] for i in ended]) if reply and ended else ()):
            one = made[i]
            if tokens is None:
                continue
            one.ended = False
            if len(one.tokens) + len(tokens) < min(most, length - len(one.prompt)):
                one.tokens += tokens
                one.by_model += [False] * len(tokens)
                one.logprobs += [0.0] * len(tokens)
                active.append(i)
    return made


def turn_of(
    one: ModelCompletion, sampling: Sampling, most: int, length: int, ends: Collection[int], seed: int
) -> Request:
    """Return the engine's request for the next turn of the completion `one`, which has at most `most` tokens in total,
    or `length` including the prompt. The turn ends with a token of `ends`."""
    prompt = [*one.prompt, *one.tokens]
    room = min(most - len(one.tokens), max(1, length - len(prompt)))
    return Request(prompt, sampling, room, stop=ends.__contains__, seed=seed, num_logprobs=0)


def completion_batch(made: Sequence[ModelCompletion]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the completions `made` as three tensors (N, T), padded at the end: tokens, targets, and the engine's
    log-probabilities of the targets. Targets are the tokens that the model wrote; others are IGNORE_INDEX."""
    width = max(len(one.prompt) + len(one.tokens) for one in made) - 1
    tokens = torch.zeros(len(made), width, dtype=torch.int64)
    targets = torch.full((len(made), width), IGNORE_INDEX)
    logprobs = torch.zeros(len(made), width)
    for row, one in enumerate(made):
        ids, start = torch.tensor([*one.prompt, *one.tokens]), len(one.prompt) - 1
        tokens[row, : len(ids) - 1] = ids[:-1]
        by_model = torch.tensor(one.by_model)
        targets[row, start : len(ids) - 1] = torch.where(by_model, ids[start + 1 :], IGNORE_INDEX)
        logprobs[row, start : len(ids) - 1] = torch.tensor(one.logprobs)
    return tokens, targets, logprobs
