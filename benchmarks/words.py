"""The fraction of the words in a model's samples that occur in its training text.

    python -m benchmarks.words                      for runs/quickstart
    python -m benchmarks.words runs/mybook          for any run

For each of five seeds, samples at temperature 0.8 are joined until they have 300 whitespace-separated words.
"""

import json
import sys
from pathlib import Path

import onward
from onward.data import documents

WORDS = 300


def main() -> None:
    folder = sys.argv[1] if len(sys.argv) > 1 else "runs/quickstart"
    if folder == "--help":
        sys.exit(__doc__)
    sources = json.loads((Path(folder) / "run.json").read_text())["sources"]
    known = {word for text in documents(sources) for word in text.split()}
    lm = onward.load(folder)
    for seed in range(5):
        words: list[str] = []
        for i in range(100):
            words += lm.generate("", 600, slide=True, temperature=0.8, seed=1000 * seed + i).split()
            if len(words) >= WORDS:
                break
        words = words[:WORDS]
        print(f"seed {seed}: {sum(word in known for word in words) / len(words):.1%} of {len(words)} words are known")


if __name__ == "__main__":
    main()
