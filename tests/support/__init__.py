"""Code that tests share: small decoders, ways to run them, runs, disks that fill up, and the cases of every family."""

from pathlib import Path

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"  # real data next to the repository, if present
