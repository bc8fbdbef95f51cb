"""Start-up time of `import onward` and of the help texts, relative to `import torch`; best of five, in turns.

python -m benchmarks.startup
"""

import subprocess
import sys
from time import perf_counter

COMMANDS = {
    "import torch": ["-c", "import torch"],
    "import onward, torch": ["-c", "import onward, torch"],
    "import onward; onward.load": ["-c", "import onward; onward.load"],
    "onward --help": ["-m", "onward", "--help"],
    "onward train --help": ["-m", "onward", "train", "--help"],
}


def main() -> None:
    best = dict.fromkeys(COMMANDS, float("inf"))
    for _ in range(5):
        for name, words in COMMANDS.items():
            start = perf_counter()
            subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
            best[name] = min(best[name], perf_counter() - start)
    for name, seconds in best.items():
        print(f"{name:28}{seconds:6.2f} s{seconds / best['import torch']:8.2f} of import torch")


if __name__ == "__main__":
    main()
