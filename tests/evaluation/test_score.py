"""Loss, perplexity and bits per byte."""

import math
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onward import Decoder, DecoderConfig, Learned, Tokens, UserError
from onward.evaluation import logprobs
from onward.evaluation.score import evaluate, windows

torch.manual_seed(0)
CONFIG = DecoderConfig(vocab_size=30, d_model=32, n_layers=2, n_heads=4, context_length=12, position=Learned())
MODEL = Decoder(CONFIG).double().eval()
# enough windows for more than one call of the model
MANY = np.random.default_rng(0).integers(0, 30, 5000).astype(np.uint16)
TOKENS = MANY[:100]


@given(count=st.integers(2, 200), length=st.integers(1, 40), data=st.data())
def test_windows_predict_every_token_but_the_first_once(count: int, length: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, length))
    spans = list(windows(count, length, stride))
    assert [i for _, first, end in spans for i in range(first, end)] == list(range(1, count))
    for start, first, end in spans:
        assert 0 <= start < first < end <= start + length + 1
        assert start == 0 or first - start >= length - stride, "at least length - stride tokens come before"


@torch.no_grad()
def plain_nats(tokens: np.ndarray, stride: int) -> list[float]:
    """Compute the losses token by token, by the formula."""
    nats = []
    for start, first, end in windows(len(tokens), CONFIG.context_length, stride):
        logits = MODEL(torch.tensor(tokens[start : end - 1].astype(int))[None])[0].tolist()
        for i in range(first, end):
            row = logits[i - 1 - start]
            nats.append(math.log(sum(map(math.exp, row))) - row[tokens[i]])
    return nats


@pytest.mark.parametrize(("count", "stride"), [*product([2, 12, 13, 14, 100], [1, 5, 6, 12]), (len(MANY), 12)])
def test_loss_perplexity_and_bits_per_byte_equal_the_formulas(count: int, stride: int) -> None:
    found = evaluate(MODEL, MANY[:count], n_bytes=77, stride=stride)
    nats = plain_nats(MANY[:count], stride)
    assert found.tokens == len(nats) == count - 1
    assert found.loss == pytest.approx(math.fsum(nats) / len(nats), rel=1e-9)
    assert found.perplexity == pytest.approx(math.exp(found.loss), rel=1e-9)
    assert found.bits_per_byte == pytest.approx(math.fsum(nats) / math.log(2) / 77, rel=1e-9)


def test_windows_do_not_overlap_by_default() -> None:
    from onward import ValidationWindows, mean_loss

    expected, count = mean_loss(MODEL, ValidationWindows(Tokens.of(TOKENS), 12).batches(4))
    found = evaluate(MODEL, TOKENS, 1)
    assert found.tokens == count
    assert found.loss == pytest.approx(expected, rel=1e-9)


def test_evaluate_reads_tokens_window_by_window() -> None:
    read: list[tuple[int, int]] = []

    class Told(Tokens):
        def __getitem__(self, places: slice) -> np.ndarray:
            read.append((places.start, places.stop))
            return super().__getitem__(places)

    tokens = Told(Tokens.join([Tokens.of(TOKENS[:33]), Tokens.of(TOKENS[33:])]).spans)
    assert evaluate(MODEL, tokens, 1) == evaluate(MODEL, TOKENS, 1)
    assert max(stop - start for start, stop in read) == 13, "no more than a window and its last target"


def test_default_stride_is_the_context_length() -> None:
    assert evaluate(MODEL, TOKENS, 1).stride == 12


@pytest.mark.parametrize("stride", [-1, 13])
def test_a_stride_out_of_range_is_one_sentence(stride: int) -> None:
    with pytest.raises(UserError, match=f"stride is {stride}"):
        evaluate(MODEL, TOKENS, 1, stride)


@pytest.mark.parametrize("count", [0, 1])
def test_a_text_with_nothing_to_predict_is_one_sentence(count: int) -> None:
    with pytest.raises(UserError, match="fewer than two tokens"):
        evaluate(MODEL, TOKENS[:count], 1)


@pytest.mark.parametrize("token", [30, -1])
def test_a_token_id_out_of_range_is_one_sentence(token: int) -> None:
    with pytest.raises(UserError, match=f"token id {token} is out of range"):
        logprobs(MODEL, np.array([[1, token, 2]]))


@pytest.mark.parametrize("element", [math.nan, math.inf])
def test_log_probabilities_that_are_not_finite_are_an_error(element: float) -> None:
    model = Decoder(CONFIG).float()
    with torch.no_grad():
        model.head.weight.fill_(element)
    with pytest.raises(UserError, match="log-probabilities are NaN or infinite"):
        evaluate(model, TOKENS, 100)
