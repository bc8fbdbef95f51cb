"""Compute log-probabilities of continuations of contexts. A long common prefix of contexts is read once.

Shapes: R rows of a cache, T tokens in this call, D d_model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onward.base.errors import UserError
from onward.config.decoder import at
from onward.config.scaling import LinearScaling, Llama3Scaling, YaRNScaling
from onward.data.windows import IGNORE_INDEX
from onward.evaluation.kept import Kept, whole
from onward.evaluation.score import LOGITS
from onward.kernels.cross_entropy import cross_entropies
from onward.model.cache import KVCache
from onward.model.decoder import Decoder, check_ids, without_dropout
from onward.model.divided import cache_config
from onward.text.tokenizer import Tokenizer

FIXED = LinearScaling | YaRNScaling | Llama3Scaling  # scalings that do not depend on the length of the text
ROWS = 64  # maximum number of continuations per call
TOKENS = 1 << 15  # maximum number of tokens in the rows of a call
SAME = 32  # contexts with this many equal first tokens are read together
CHUNK = 256  # number of tokens of a context per call


@dataclass(frozen=True)
class Pair:
    """A context and its continuation, as token ids. The continuation has at least one token."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]


@dataclass(frozen=True)
class Scored:
    """The log-probability of a continuation after its context, in nats."""

    logprob: float
    greedy: bool  # whether every token of the continuation is the model's most likely token


def pair_of(
    tokenizer: Tokenizer, context: str, continuation: str, encode: Callable[[str], list[int]] | None = None
) -> Pair:
    """Encode a context and its continuation as lm-evaluation-harness does. Spaces at the end of the context belong to
    the continuation. Both are encoded as one text; if the context alone has n tokens, the continuation begins after the
    first n tokens. An empty context is replaced by the tokenizer's beginning-of-text token or, without one, its
    end-of-text token."""
    encode = encode or tokenizer.encode
    stripped = context.rstrip()
    continuation = context[len(stripped) :] + continuation
    if not stripped:
        first, tokens = tokenizer.prefix_id, tokenizer.encode(continuation, special=False)
        if first is None or not tokens:
            missing = "text that continues it" if first is not None else "token that begins or ends texts"
            raise UserError(f"a question has an empty context, and there is no {missing}: give it a context")
        return Pair((first,), tuple(tokens[1:] if tokens[0] == first and len(tokens) > 1 else tokens))
    before, full = encode(stripped), encode(stripped + continuation)
    if len(full) < 2:
        raise UserError(f"the context {context!r:.60} is one token together with its continuation: make it longer")
    count = min(len(before), len(full) - 1)  # a token across the boundary belongs to the continuation
    return Pair(tuple(full[:count]), tuple(full[count:]))


@torch.inference_mode()
def score_continuations(
    model: Decoder,
    pairs: Sequence[Pair],
    progress: Callable[[int], None] = lambda done: None,
    kept: Kept | None = None,
) -> list[Scored]:
    """The score of each continuation after its context.

    Texts longer than the model's context lose their first tokens. Scores in `kept` are not computed again, and new
    scores are added to it, batch by batch; the processes `kept.replicas` divide the batches."""
    length = model.config.context_length
    inputs: list[tuple[int, ...]] = []  # all tokens of each pair except the last
    for pair in pairs:
        if len(pair.continuation) > length:
            raise UserError(
                f"Cannot score a continuation of {len(pair.continuation)} tokens in a context of {length}: shorten it"
            )
        tokens = (*pair.context, *pair.continuation)
        check_ids(min(tokens), max(tokens), model.config)
        inputs.append(tokens[-(length + 1) : -1])
    kept = kept or Kept()
    result = [kept_score(kept.get(*request(pair))) for pair in pairs]
    missing = [i for i, one in enumerate(result) if one is None]
    done = len(pairs) - len(missing)
    progress(done)

    def compute() -> None:
        nonlocal done
        contexts = [inputs[i][: len(inputs[i]) - len(pairs[i].continuation)] for i in missing]
        for group in kept.replicas.share(batches(contexts)):
            batch = [missing[j] for j in group]
            states = read(model, [inputs[i] for i in batch], [len(pairs[i].continuation) for i in batch])
            batch_scores = scores(model, states, [pairs[i].continuation for i in batch])
            for i, scored in zip(batch, batch_scores):
                result[i] = scored
            kept.add([(request(pairs[i]), [one.logprob, one.greedy]) for i, one in zip(batch, batch_scores)])
            done += len(batch) * kept.replicas.count
            progress(min(done, len(pairs)))

    with without_dropout(model):
        kept.divide(f"{len(missing):,} scores", compute)
    return whole([one or kept_score(kept.get(*request(pair))) for one, pair in zip(result, pairs)])


def request(pair: Pair) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    return "score", pair.context, pair.continuation


def kept_score(value: Any) -> Scored | None:
    """Return the score in a stored JSON value; None if the value is not a score."""
    match value:
        case [float(), bool()]:
            return Scored(*value)
    return None


def batches(shared: Sequence[tuple[int, ...]]) -> Iterator[list[int]]:
    """Group pairs, by their contexts, into batches of indices. Contexts with a common prefix come first, in batches of
    their own; the other contexts are batched by length."""
    beginnings: dict[tuple[int, ...], list[int]] = {}
    for i, tokens in enumerate(shared):
        beginnings.setdefault(tokens[:SAME], []).append(i)
    groups = [group for group in beginnings.values() if len({shared[i] for i in group}) > 1]
    together = {i for group in groups for i in group}
    for group in (*groups, [i for i in range(len(shared)) if i not in together]):
        ordered = sorted(group, key=lambda i: (len(shared[i]), shared[i], i))
        while ordered:
            size = max(1, min(ROWS, TOKENS // (len(shared[ordered[min(ROWS, len(ordered)) - 1]]) + 1)))
            yield ordered[:size]
            ordered = ordered[size:]


def read(model: Decoder, inputs: Sequence[tuple[int, ...]], counts: Sequence[int]) -> Tensor:
    """Hidden states of the last counts[i] tokens of inputs[i], concatenated: (sum of counts, D).

    A common prefix of at least SAME tokens is read once (unless rotations depend on the length of the text), then the
    rest of each different context (an input without these last tokens), then the last tokens of each input. `inputs`
    must be sorted by the length of the context."""
    # three levels suffice, because tasks have examples, questions and choices
    contexts = [tokens[: len(tokens) - count] for tokens, count in zip(inputs, counts)]
    lengths = [len(tokens) if scales_by_length(model) else 0 for tokens in inputs]
    keys = list(zip(contexts, lengths))
    unique = list(dict.fromkeys(keys))
    columns = enumerate(zip(*(context for context, _ in unique)))
    common = next((i for i, column in columns if len({*column}) > 1), min(len(context) for context, _ in unique))
    common = 0 if common < SAME or len(unique) == 1 or lengths[0] else common
    rest = [tokens[len(context) :] for tokens, context in zip(inputs, contexts)]
    most, chunk = max(map(len, inputs)), max(CHUNK, *map(len, rest))
    config = cache_config(model)
    cache = KVCache(config, len(inputs), most, min(chunk, most), keep=1, device=model.device, dtype=model.dtype)
    if common:
        prefill(model, cache, [unique[0][0][:common]], [0])
        copy_rows(cache, [0] * len(unique), common)
    if any(len(context) > common for context, _ in unique):
        if lengths[0]:
            cache.rope_length[: len(unique)] = torch.tensor([length for _, length in unique], device=model.device)
        # a row with no tokens left computes its last token again, or a token that the next call overwrites
        pieces = [context[common:] or context[-1:] or inputs[0][:1] for context, _ in unique]
        prefill(model, cache, pieces, [min(common, max(0, len(context) - 1)) for context, _ in unique])
    copy_rows(cache, [unique.index(key) for key in keys], max(map(len, contexts)))
    if lengths[0]:
        cache.rope_length[:] = torch.tensor(lengths, device=model.device)
    hidden = forward(model, cache, rest, [len(context) for context in contexts])
    return torch.cat([row[:count] for row, count in zip(hidden, counts)])


def scales_by_length(model: Decoder) -> bool:
    """Whether rotations depend on the length of the whole text, so that texts of different lengths cannot share the
    keys of a common prefix."""
    parts = (at(model.config.position, layer) for layer in range(model.config.n_layers))
    return any(not isinstance(getattr(part, "scaling", None), FIXED | None) for part in parts)


def prefill(model: Decoder, cache: KVCache, pieces: Sequence[Sequence[int]], starts: Sequence[int]) -> None:
    """Write each row's tokens to the first rows of a cache, in chunks, with positions from starts[i] on. Pieces must be
    sorted by length, shortest first: a row drops out once all its tokens are read."""
    for begin in range(0, max(map(len, pieces)), cache.chunk):
        first = next(row for row, piece in enumerate(pieces) if len(piece) > begin)
        parts = [piece[begin : begin + cache.chunk] for piece in pieces[first:]]
        forward(model, cache, parts, [start + begin for start in starts[first:]], first)


def forward(
    model: Decoder, cache: KVCache, pieces: Sequence[Sequence[int]], starts: Sequence[int], first: int = 0
) -> Tensor:
    """Hidden states (R, T, D) of the cache rows from `first` on, with positions from starts[i] on; shorter pieces are
    padded at the end."""
    width = max(map(len, pieces))
    tokens = torch.tensor([[*piece, *[0] * (width - len(piece))] for piece in pieces], device=model.device)
    positions = torch.tensor(starts, device=model.device)[:, None] + torch.arange(width, device=model.device)
    counts = torch.tensor([len(piece) for piece in pieces], device=model.device)
    return model.hidden(tokens, positions, cache.view(first, first + len(pieces), max(starts) + width, counts))


def copy_rows(cache: KVCache, sources: Sequence[int], length: int) -> None:
    """Copy row sources[i] to row i, for all i at once, for positions below `length`. Padding is copied too: the causal
    mask hides it until later tokens overwrite it."""
    if list(sources) == list(range(len(sources))):
        return
    cache.states.copy(sources, range(len(sources)))
    for layer in cache.layers:
        for entry in layer.entries.values():
            used = entry[:, :length]
            used[: len(sources)] = used[torch.tensor(sources, device=entry.device)]


def scores(model: Decoder, hidden: Tensor, continuations: Sequence[Sequence[int]]) -> list[Scored]:
    """Scores from the hidden states before each token of the continuations, concatenated: (number of tokens, D)."""
    targets = torch.tensor([token for one in continuations for token in one], device=model.device)
    values, greedy = [], []
    for start in range(0, len(targets), LOGITS):
        part, wanted = hidden[start : start + LOGITS], targets[start : start + LOGITS]
        logits = model.logits(part[None])[0]
        values.append(-cross_entropies(logits, wanted, IGNORE_INDEX))
        greedy.append(logits.argmax(-1) == wanted)
    counts = list(map(len, continuations))
    pairs = zip(torch.cat(values).double().split(counts), torch.cat(greedy).split(counts))
    return [Scored(float(value.sum()), bool(flag.all())) for value, flag in pairs]
