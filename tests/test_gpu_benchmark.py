"""benchmarks/gpu.py: a dry run on the CPU makes every table."""

import pytest

from benchmarks import gpu

DRY = {"device": "cpu", "model": "tiny", "trained": "tiny", "prompts": 8, "new": 4, "context": 16, "seconds": 0.05}


@pytest.mark.parametrize("peer", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_dry_run_prints_every_table(
    peer: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "PRECISIONS", ("bfloat16",))
    monkeypatch.setattr(gpu, "ROWS", (1, 2))
    monkeypatch.setattr(gpu, "find_spec", lambda name: peer or None)
    gpu.main([f"--{name}={value}" for name, value in DRY.items()])
    tables = capsys.readouterr().out.split("\n## ")[1:]
    rows = [[line.split(" | ") for line in table.splitlines() if line.startswith("| ")][2:] for table in tables]
    assert [len(one) for one in rows] == [2, 2, 1] if peer else [2, 1]
    assert [cells[:3] for cells in rows[0]] == [["| 8", "bfloat16", "1"], ["| 8", "bfloat16", "2"]]


def test_without_a_gpu_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match="no CUDA device"):
        gpu.main([])
