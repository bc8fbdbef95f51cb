"""benchmarks/lora.py: adapters need at most 60 % of the memory of gradients and optimizer."""

import re

import pytest

import onward
from benchmarks.lora import main

TINY = onward.DecoderConfig(vocab_size=64, d_model=64, n_layers=2, n_heads=2, context_length=8)


def test_adapters_need_at_most_three_fifths_of_the_memory(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--rank", "4"], TINY)
    ratios = [float(ratio) for ratio in re.findall(r"([\d.]+)%", capsys.readouterr().out)]
    assert ratios[0] == 100
    assert len(ratios) == 5
    assert max(ratios[1:]) < 60
