"""The tokens that a model reads, seen without a hook: with hooks, no prompt is reused."""

import pytest
from torch import Tensor

from onward import DecoderConfig
from onward.model import decoder


def tokens_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by the number of tokens of each plain call of any decoder."""
    numbers, check = list[int](), decoder.check_tokens

    def checked(tokens: Tensor, config: DecoderConfig) -> None:
        numbers.append(tokens.numel())
        check(tokens, config)

    monkeypatch.setattr(decoder, "check_tokens", checked)
    return numbers
