"""benchmarks/finetune.py: every task makes its steps, and the table has a ratio for each other library."""

from pathlib import Path

import pytest

import onward
from benchmarks.finetune import TASKS, ours, print_table

TINY = onward.DecoderConfig(vocab_size=300, d_model=16, n_layers=1, n_heads=2, context_length=512)


@pytest.mark.parametrize("task", ["sft", "lora", pytest.param("grpo", marks=pytest.mark.long)])
def test_every_task_makes_its_steps(task: str, tmp_path: Path) -> None:
    assert task in TASKS
    onward.save(onward.LanguageModel(onward.Decoder(TINY), onward.train_tokenizer("byte", [])), tmp_path)
    seconds = list(ours(task, str(tmp_path), 2, "fp32"))
    assert len(seconds) == 2
    assert min(seconds) > 0


def test_the_table_has_the_best_turns_and_their_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    turns = {"onward": [0.2, 0.1], "trl": [0.3]}
    print_table({("sft", side): [{"seconds": s, "memory": 5} for s in several] for side, several in turns.items()})
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "SFT, all" in line]
    assert row.split()[-7:] == ["10,240", "3,413", "3.00", "5", "|", "5", "MiB"]
