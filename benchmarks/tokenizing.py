"""Throughput of tokenization: Onward's encoder, `tiktoken` by itself and `tokenizers`, in one process and in two.

    python -m benchmarks.tokenizing                 a vocabulary trained here, GPT-2's and a SentencePiece one
    python -m benchmarks.tokenizing FOLDER          the vocabulary of the tokenizer in FOLDER
    python -m benchmarks.tokenizing --mb 4          less text, takes a sixth of the time

GPT-2's and the SentencePiece vocabulary are left out if their files do not exist; `tiktoken` does not support
SentencePiece.

The text has at least 25 MB (or `--mb`): tinyshakespeare (if its file exists) and the built-in corpus,
repeated, in pieces of up to 64 KB. Best of four rounds, in turns; the first one also starts the processes.
"""

import argparse
import json
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from tempfile import TemporaryDirectory
from time import perf_counter

import tiktoken

from benchmarks.text import SHARED, machine
from onward import Tokenizer, train_tokenizer
from onward.data.sources import passages
from onward.text.fast import Encoder, by_library, encoder, ranked_tokens, split_pattern

VOCABULARIES = {"GPT-2": "gpt2-tokenizer", "SentencePiece": "stories260K"}
encoders: dict[str, Encoder] = {}
texts: list[str] = []


def by_tiktoken_alone(tokenizer: Tokenizer) -> Encoder | None:
    """`tiktoken` with the published pattern; None for a vocabulary that it does not support."""
    table = json.loads(tokenizer.inner.to_str())
    pattern, ranked = split_pattern(table), ranked_tokens(table)
    if not pattern or not ranked:
        return None
    ranks = {token: rank for rank, token in enumerate(ranked)}
    core = tiktoken.Encoding("", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    return lambda texts: [core.encode_to_numpy(text, disallowed_special=()) for text in texts]


LIBRARIES = {"Onward": encoder, "tiktoken": by_tiktoken_alone, "tokenizers": by_library}


def read(megabytes: float) -> list[str]:
    """The texts, of at least this many megabytes in total."""
    shakespeare = SHARED / "tinyshakespeare.txt"
    once = list(passages(["embedded", *([str(shakespeare)] if shakespeare.exists() else [])]))
    return once * (int(megabytes * 1e6) // size(once) + 1)


def size(texts: list[str]) -> int:
    return sum(len(text.encode()) for text in texts)


def start(folder: str, megabytes: float) -> None:
    """Load the texts and the encoders in a process, in which `tokenizers` uses one thread."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    texts.extend(read(megabytes))
    for name, way in LIBRARIES.items():
        if found := way(Tokenizer.load(folder)):
            encoders[name] = found


def encode(name: str, part: int, parts: int) -> int:
    """The number of tokens of one part of the texts."""
    return sum(map(len, encoders[name](texts[part::parts])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--mb", type=float, default=25)
    options = parser.parse_args()
    print(machine())
    with TemporaryDirectory() as learned:
        folders = {options.folder: options.folder} if options.folder else {"trained here, 16,384 ids": learned}
        if not options.folder:
            train_tokenizer("bpe:16384", read(options.mb)).save(learned)
            folders |= {name: str(SHARED / place) for name, place in VOCABULARIES.items() if (SHARED / place).exists()}
        for name, folder in folders.items():
            print(name)
            encoders.clear()
            texts.clear()
            start(folder, options.mb)
            for processes in 1, 2:
                best = measure(folder, options.mb, processes)
                for library, seconds in best.items():
                    print(f"  {processes} x {library:12}{size(texts) / seconds / 1e6:7.2f} MB/s", flush=True)


def measure(folder: str, megabytes: float, processes: int) -> dict[str, float]:
    """The shortest time of each library for all texts, in seconds."""
    best = dict.fromkeys(encoders, float("inf"))
    with ProcessPoolExecutor(processes, get_context("spawn"), start, (folder, megabytes)) as pool:
        for _ in range(4):  # the first round starts the processes
            for name in best:
                began = perf_counter()
                list(pool.map(encode, [name] * processes, range(processes), [processes] * processes))
                best[name] = min(best[name], perf_counter() - began)
    return best


if __name__ == "__main__":
    main()
