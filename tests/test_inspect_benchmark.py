import pytest

import onward
from benchmarks.inspect import main


def test_benchmark_prints_a_row_for_each_way_to_look_inside(capsys: pytest.CaptureFixture[str]) -> None:
    config = onward.DecoderConfig(vocab_size=50, d_model=16, n_layers=2, n_heads=2, context_length=64)
    main(["--rounds", "1"], config)
    assert len(capsys.readouterr().out.splitlines()) == 5
