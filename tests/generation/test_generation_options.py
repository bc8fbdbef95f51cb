"""Options with values that no request can use are refused in one sentence."""

from typing import Any

import pytest
import torch

from onward import GenerationOptions, Sampling, UserError, next_token_distribution

CYCLE: dict[str, Any] = {}
CYCLE["properties"] = CYCLE
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "more answers than there is room for": ({"n": 100_000_000}, "n is 100000000: .*from 1 to 10000"),
    "a schema with a set": ({"json_schema": {"enum": {1}}}, "json_schema is not JSON"),
    "a schema that contains itself": ({"json_schema": CYCLE}, "json_schema is not JSON"),
    "a schema with a surrogate": ({"json_schema": '{"const": "\ud800"}'}, "json_schema holds half a character"),
    "an expression with a surrogate": ({"regex": "a\ud800"}, "regex holds half a character"),
    "a token id that is a fraction": ({"logit_bias": {5.7: 1}}, "logit_bias is not a mapping of token ids to numbers"),
    "a bias that fp32 cannot hold": ({"logit_bias": {5: 1e39}}, "logit_bias holds"),
    "a bias below all that fp32 can hold": ({"logit_bias": {5: -1e39}}, "logit_bias holds"),
    "a frequency penalty that fp32 cannot hold": ({"frequency_penalty": 1e39}, "frequency_penalty is 1e\\+39"),
    "a presence penalty that fp32 cannot hold": ({"presence_penalty": -1e39}, "presence_penalty is -1e\\+39"),
    "a repetition penalty that fp32 cannot hold": ({"repetition_penalty": 1e39}, "repetition_penalty is 1e\\+39"),
    "a repetition penalty that is 0 in fp32": ({"repetition_penalty": 1e-46}, "repetition_penalty is 1e-46"),
}


@pytest.mark.parametrize("case", BAD)
def test_option_is_refused(case: str) -> None:
    given, said = BAD[case]
    with pytest.raises(UserError, match=said) as caught:
        GenerationOptions(**given)
    assert "\n" not in str(caught.value)


def test_token_ids_of_biases_may_be_texts() -> None:
    assert Sampling(logit_bias={"5": 1}).logit_bias == {5: 1.0}  # type: ignore[dict-item]


EXTREMES: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1e30, "suppress_tokens": (0,)},
    "counts": {"frequency_penalty": 1e15, "presence_penalty": 1e15, "repetition_penalty": 1e15, "temperature": 1e-6},
    "products": {"logit_bias": {0: 1e15, 1: -1e15}, "repetition_penalty": 1e-15, "temperature": 1e-6},
}


@pytest.mark.parametrize("case", EXTREMES)
def test_distribution_is_finite_at_extremes_of(case: str) -> None:
    history = [[0, 0, 1]]
    found = next_token_distribution(torch.tensor([[2.0, -1.0, 0.0]]), Sampling(**EXTREMES[case]), history, [0])
    assert float(found.sum()) == pytest.approx(1)
