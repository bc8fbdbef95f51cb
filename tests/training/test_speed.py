"""onward bench --train: the times of the parts of a step, and the resulting share of the peak FLOPS."""

import json
from pathlib import Path
from typing import Any

import pytest

import onward
from onward.cli import main
from onward.measuring import measure_training
from onward.planning import training_flops

TINY = onward.DecoderConfig(vocab_size=64, d_model=32, n_layers=2, n_heads=4, context_length=64)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_parts_of_a_step_are_all_of_it_and_the_share_follows(optimizer: str) -> None:
    found = measure_training(onward.Decoder(TINY), "fp32", 3, 16, peak=1e11, seconds=0, optimizer=optimizer)
    assert {*found.seconds} == {"data", "forward and loss", "backward", "clipping", "optimizer", "other"}
    assert min(found.seconds.values()) > 0
    assert found.tokens_per_second == pytest.approx(3 * 16 / found.step)
    assert found.flops_per_token == training_flops(TINY, 16)
    assert found.flops_share == pytest.approx(found.tokens_per_second * training_flops(TINY, 16) / 1e11)


def test_bench_train_prints_a_row_for_each_precision_and_batch(tiny_run: Path, capsys: Any) -> None:
    words = ["bench", str(tiny_run), "--train", "--batch", "1,2", "--precision", "float32", "--seconds", "0"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(one["precision"], one["batch"]) for one in found["training"]] == [("fp32", 1), ("fp32", 2)]
    assert found["flops"]["float32"] > 0
    assert main(words) == 0
    out = capsys.readouterr().out
    for column in ("tokens/s", "of the arithmetic", "backward", "optimizer"):
        assert column in out


REFUSED = {
    "--precision int8": "Cannot measure training with precision 'int8': choose float32 or bfloat16",
    "--context 100000": "--context is 100,000: it must be at most the model's",
    "--out roof.svg": "--out is used only by decoding, and not by training",
}


@pytest.mark.parametrize("words", REFUSED)
def test_mistakes_are_one_sentence(words: str, tiny_run: Path, capsys: Any) -> None:
    assert main(["bench", str(tiny_run), "--train", *words.split()]) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert REFUSED[words] in message
