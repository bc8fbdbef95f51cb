"""Counts the tokens that a model processes, without a hook, since hooks disable the reuse of prompts."""

import pytest
from torch import Tensor

from onward import DecoderConfig
from onward.model import decoder


def tokens_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets the number of tokens of each plain call of any decoder."""
    numbers, check = list[int](), decoder.check_tokens

    def checked(tokens: Tensor, config: DecoderConfig) -> None:
        numbers.append(tokens.numel())
        check(tokens, config)

    monkeypatch.setattr(decoder, "check_tokens", checked)
    return numbers
