"""The code behind each operation is no longer than the limits here (see `support.walks`)."""

from pathlib import Path

from support.walks import counted

MOST = {  # lines and files, as in docs/ARCHITECTURE.md: update both if an operation needs more code
    "forward pass": (1979, 14),
    "forward pass, kernels off": (1862, 13),
    "engine step": (1226, 7),
    "lm.generate": (4482, 31),
    "onward generate": (7554, 58),
    "training step": (1756, 12),
    "loss": (466, 3),
    "sampler": (448, 4),
    "family": (662, 6),
}


def test_no_way_through_the_code_grows(tmp_path: Path) -> None:
    found = {name: (sum(lines.values()), len(lines)) for name, lines, _ in counted(tmp_path)}
    assert found.keys() == MOST.keys()
    assert not {name: count for name, count in found.items() if any(map(int.__gt__, count, MOST[name]))}
    page = (Path(__file__).parents[1] / "docs/ARCHITECTURE.md").read_text(encoding="utf-8")
    assert [f"| {name} | {lines:,} | {files} |" in page for name, (lines, files) in MOST.items()] == [True] * len(MOST)
