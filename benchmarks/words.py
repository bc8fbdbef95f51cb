"""Which share of the words a model writes occur in the text it learned from.

    python -m benchmarks.words                      of runs/quickstart
    python -m benchmarks.words runs/mybook          of any run

Samples of temperature 0.8 are joined until there are 300 words, cut at white space, for five seeds.
"""

import json
import sys
from pathlib import Path

import onward
from onward.data.sources import documents

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
