"""Completions sampled during training, by the engine.

Shapes: N completions, T tokens of a prompt and its completion, less one.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from onward.data.windows import IGNORE_INDEX, Batch
from onward.generation.cache.growing import growing_cache
from onward.generation.engine.engine import Engine
from onward.generation.request import Request
from onward.generation.sampling import Sampling
from onward.model.decoder import Decoder

ROWS = 256  # completions that the engine continues at a time
CHUNK = 256  # at least as many prompt tokens are read at a time


def prompts_of(batch: Batch) -> list[tuple[list[int], list[int]]]:
    """The prompt and the answer in each row of a batch: the tokens before the first target, and the targets."""
    pairs = []
    for tokens, targets in zip(batch.tokens.tolist(), batch.targets.tolist()):
        answer = [target for target in targets if target != IGNORE_INDEX]
        first = next(i for i, target in enumerate(targets) if target != IGNORE_INDEX)
        pairs.append((tokens[: first + 1], answer))
    return pairs


@torch.no_grad()
def complete(
    model: Decoder,
    prompts: Sequence[list[int]],
    seeds: Sequence[int],
    sampling: Sampling,
    most: int,
    ends: Collection[int],
    samples: int = 1,
) -> list[Request]:
    """Completions of at most `most` tokens, each with its own seed. A completion includes its end token, so that the
    model learns to end. Each prompt comes `samples` times in a row."""
    length = model.config.context_length
    requests = [
        Request(
            prompt,
            sampling,
            min(most, max(1, length - len(prompt))),
            stop=ends.__contains__,
            seed=seed,
            num_logprobs=0,
        )
        for prompt, seed in zip(prompts, seeds)
    ]
    rows = min(len(requests), ROWS)
    cache = growing_cache(model, rows, length, max(CHUNK, min(512, length)))
    engine = Engine(model, rows=rows, cache=cache, compile_after=0)  # at once, so that a resumed run decodes alike
    for sample in range(samples):  # all prompts first, so that their copies find them in the cache
        for request in requests[sample::samples]:
            engine.add(request)
    for _ in engine.run():
        pass
    for request in requests:
        if request.error:
            raise request.error
    return requests


def completion_batch(requests: Sequence[Request]) -> tuple[Tensor, Tensor, Tensor]:
    """Completions as tokens and targets, padded at the end, and the engine's log-probabilities of the targets, each (N,
    T)."""
    width = max(len(r.prompt) + len(r.tokens) for r in requests) - 1
    tokens = torch.zeros(len(requests), width, dtype=torch.int64)
    targets = torch.full((len(requests), width), IGNORE_INDEX)
    logprobs = torch.zeros(len(requests), width)
    for row, r in enumerate(requests):
        whole, start = torch.tensor(r.prompt + r.tokens), len(r.prompt) - 1
        tokens[row, : len(whole) - 1] = whole[:-1]
        targets[row, start : len(whole) - 1] = whole[start + 1 :]
        logprobs[row, start : len(whole) - 1] = torch.tensor([one.logprob for one in r.logprobs])
    return tokens, targets, logprobs
