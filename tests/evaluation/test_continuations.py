"""Continuations that share the computation of a common prefix get the same scores as when each is scored separately."""

import random

import pytest
import torch

from onward import Decoder, UserError, train_tokenizer
from onward.evaluation import continuations
from onward.evaluation.continuations import Pair, Scored, pair_of, score_continuations

from support.decoders import DECODERS, LENGTH, decoder


def pairs_of(config_size: int, seed: int) -> list[Pair]:
    """Contexts of several lengths, many of which share a prefix, with one or more continuations each."""
    rng = random.Random(seed)
    some = lambda count: tuple(rng.randrange(config_size) for _ in range(count))
    beginning, result = some(5), []
    for i in range(9):
        context = (beginning if i % 3 else ()) + some(rng.randint(1, 6))
        result += [Pair(context, some(rng.randint(1, 3))) for _ in range(rng.choice([1, 2, 4]))]
    return [*result, Pair(beginning[:1], some(4)), Pair(some(30), some(3)), result[0]]


@torch.inference_mode()
def alone(model: Decoder, pair: Pair) -> Scored:
    """The score of one pair from a separate call of the model, in fp64."""
    length = model.config.context_length
    tokens = [*pair.context, *pair.continuation][-(length + 1) :]
    log_p = model(torch.tensor([tokens[:-1]]))[0].double().log_softmax(-1)[-len(pair.continuation) :]
    values = [float(row[token]) for row, token in zip(log_p, pair.continuation)]
    return Scored(sum(values), log_p.argmax(-1).tolist() == list(pair.continuation))


@pytest.mark.parametrize("chunk", [4, 256])
@pytest.mark.parametrize("name", DECODERS)
def test_scores_are_those_of_each_pair_alone(name: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(continuations, "SAME", 3)
    monkeypatch.setattr(continuations, "ROWS", 7)
    monkeypatch.setattr(continuations, "CHUNK", chunk)
    model = decoder(DECODERS[name], torch.float64)
    pairs = pairs_of(model.config.vocab_size, 0)
    found = score_continuations(model, pairs)
    for one, pair in zip(found, pairs, strict=True):
        expected = alone(model, pair)
        assert one.logprob == pytest.approx(expected.logprob, abs=1e-6), (len(pair.context), len(pair.continuation))
        assert one.greedy == expected.greedy


def test_greedy_continuations_are_found() -> None:
    model = decoder(DECODERS[next(iter(DECODERS))], torch.float64)
    context, tokens = (1, 2, 3), []
    for _ in range(4):
        tokens.append(int(model(torch.tensor([[*context, *tokens]]))[0, -1].argmax()))
    other = (*tokens[:3], (tokens[3] + 1) % model.config.vocab_size)
    right, wrong = score_continuations(model, [Pair(context, tuple(tokens)), Pair(context, other)])
    assert (right.greedy, wrong.greedy) == (True, False)


def test_common_tokens_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(continuations, "SAME", 3)
    model, read = decoder(DECODERS[next(iter(DECODERS))]), list[tuple[int, ...]]()
    inner = model.hidden
    monkeypatch.setattr(
        model, "hidden", lambda tokens, *rest: (read.append(tuple(tokens.shape)), inner(tokens, *rest))[1]
    )
    score_continuations(model, [Pair((1, 2, 3, 4, i, 5), (7, j)) for i in range(4) for j in range(4)])
    assert read == [(1, 4), (4, 1), (16, 2)], "the beginning, the rest of four contexts, and sixteen continuations"


BOUNDARIES = {  # context, continuation, expected text of the continuation's tokens
    "plain": ("a b", " c", " c"),
    "a space at the end of the context": ("a b ", "c", " c"),
    "an empty context": ("", "abc", "abc"),
}


@pytest.mark.parametrize("name", BOUNDARIES)
def test_pairs_are_cut_where_lm_eval_cuts_them(name: str) -> None:
    context, continuation, text = BOUNDARIES[name]
    tokenizer = train_tokenizer("bpe:270", ["a b c abc " * 50])
    pair = pair_of(tokenizer, context, continuation)
    assert tokenizer.decode(pair.continuation) == text
    assert len(pair.context) > 0


def test_a_token_across_the_boundary_is_of_the_continuation() -> None:
    tokenizer = train_tokenizer("bpe:270", ["abcd " * 99])
    whole = tokenizer.encode("ab cd abcd")
    pair = pair_of(tokenizer, "ab cd ab", "cd")
    assert [*pair.context, *pair.continuation] == whole
    assert len(pair.continuation) > 0


def test_a_continuation_beyond_the_context_is_refused() -> None:
    model = decoder(DECODERS[next(iter(DECODERS))])
    with pytest.raises(UserError, match="shorten it"):
        score_continuations(model, [Pair((1,), (1,) * (LENGTH + 1))])
    with pytest.raises(UserError):
        score_continuations(model, [Pair((1,), (10**6,))])
