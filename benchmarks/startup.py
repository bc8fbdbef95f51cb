"""Time of `import onward`, of the help texts, and to the first token of a small model, relative to the time of `import
torch`; best of five, in turns.

python -m benchmarks.startup
"""

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

TEXT = "Once upon a time there was a cat. " * 200
MESSAGE = b"Once\n"  # read by `onward chat`


def main() -> None:
    with TemporaryDirectory() as folder:
        text, model = Path(folder, "text.txt"), f"{folder}/model"
        text.write_text(TEXT)
        train = ["-m", "onward", "train", str(text), "--out", model, "--preset", "tiny", "--steps", "2"]
        subprocess.run([sys.executable, *train], check=True, capture_output=True)
        commands = {
            "import torch": ["-c", "import torch"],
            "import onward, torch": ["-c", "import onward, torch"],
            "import onward; onward.load": ["-c", "import onward; onward.load"],
            "onward --help": ["-m", "onward", "--help"],
            "onward train --help": ["-m", "onward", "train", "--help"],
            "onward generate, one token": ["-m", "onward", "generate", model, "Once", "--max-new-tokens", "1"],
            "onward chat, one token": ["-m", "onward", "chat", model, "--max-new-tokens", "1"],
        }
        best = dict.fromkeys(commands, float("inf"))
        for _ in range(5):
            for name, words in commands.items():
                start = perf_counter()
                subprocess.run([sys.executable, *words], check=True, capture_output=True, input=MESSAGE)
                best[name] = min(best[name], perf_counter() - start)
    for name, seconds in best.items():
        print(f"{name:28}{seconds:6.2f} s{seconds / best['import torch']:8.2f} of import torch")


if __name__ == "__main__":
    main()
