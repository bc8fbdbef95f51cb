"""Code shared by tests, such as small decoders, runs, full disks, and the cases of every family."""

from pathlib import Path

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"  # real data next to the repository, if present
