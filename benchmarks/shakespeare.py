"""Validation loss of the default settings after a given training time, on the whole validation split of character-level
tinyshakespeare.

python -m benchmarks.shakespeare                100 s
python -m benchmarks.shakespeare --time 30s     accepts any time, and any other option of `onward train`
"""

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.text import SHARED, machine


def main() -> None:
    if "--help" in sys.argv:
        sys.exit(__doc__)
    source = SHARED / "tinyshakespeare.txt"
    options = sys.argv[1:] if "--time" in sys.argv else ["--time", "100s", *sys.argv[1:]]
    with TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = ["train", str(source) if source.exists() else "tinyshakespeare", "--tokenizer", "char"]
        subprocess.run([sys.executable, "-m", "onward", *command, "--out", str(run), *options], check=True)
        result = json.loads((run / "result.json").read_text())
    print(machine())
    print(f"validation loss {result['loss']:.4f} after {result['step']:,} steps in {result['seconds']:.0f} s")


if __name__ == "__main__":
    main()
