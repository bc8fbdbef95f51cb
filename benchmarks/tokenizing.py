"""Throughput of tokenization: `tiktoken` compared with the `tokenizers` library, in one process and in two.

    python -m benchmarks.tokenizing                 the vocabulary of GPT-2 if its file exists, else one trained here
    python -m benchmarks.tokenizing FOLDER          the vocabulary of any tokenizer

Slightly more than 25 MB: tinyshakespeare (if its file exists) and the built-in corpus, repeated, in texts of up to
64 KB. Best of three, in turns; starting processes and encoders is not measured.
"""

import os
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

from benchmarks.text import SHARED, machine
from onward.data.sources import passages
from onward.text.fast import Encoder, by_library, by_tiktoken
from onward.text.tokenizer import Tokenizer, train_tokenizer

BYTES = 25_000_000
LIBRARIES = {"tiktoken": by_tiktoken, "tokenizers": by_library}
encoders: dict[str, Encoder] = {}
texts: list[str] = []


def read() -> list[str]:
    """The texts, of at least BYTES bytes in total."""
    shakespeare = SHARED / "tinyshakespeare.txt"
    once = list(passages(["embedded", *([str(shakespeare)] if shakespeare.exists() else [])]))
    return once * (BYTES // size(once) + 1)


def size(texts: list[str]) -> int:
    return sum(len(text.encode()) for text in texts)


def start(folder: str) -> None:
    """Make ready what a process needs, which stays on one core."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    texts.extend(read())
    for name, way in LIBRARIES.items():
        if encoder := way(Tokenizer.load(folder)):
            encoders[name] = encoder


def encode(name: str, part: int, parts: int) -> int:
    """The number of tokens of one part of the texts."""
    return sum(map(len, encoders[name](texts[part::parts])))


def main() -> None:
    if "--help" in sys.argv:
        sys.exit(__doc__)
    with TemporaryDirectory() as learned:
        folder = sys.argv[1] if len(sys.argv) > 1 else str(SHARED / "gpt2-tokenizer")
        if not Path(folder).exists():
            print("the vocabulary of GPT-2 is missing: one of 16,384 ids is used instead")
            train_tokenizer("bpe:16384", read()).save(folder := learned)
        print(machine())
        start(folder)
        for processes in 1, 2:
            best = measure(folder, processes)
            for name, seconds in best.items():
                print(f"{processes} x {name:12}{size(texts) / seconds / 1e6:7.2f} MB/s")
            if len(best) == 2:
                print(f"{processes} x tiktoken / tokenizers: {best['tokenizers'] / best['tiktoken']:.2f}")


def measure(folder: str, processes: int) -> dict[str, float]:
    """The shortest time of each library for all texts, in seconds."""
    best = dict.fromkeys(encoders, float("inf"))
    with ProcessPoolExecutor(processes, get_context("spawn"), start, (folder,)) as pool:
        for _ in range(4):  # the first round starts the processes
            for name in best:
                began = perf_counter()
                list(pool.map(encode, [name] * processes, range(processes), [processes] * processes))
                best[name] = min(best[name], perf_counter() - began)
    return best


if __name__ == "__main__":
    main()
