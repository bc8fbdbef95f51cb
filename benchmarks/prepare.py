"""Throughput and memory of `onward data prepare`.

    python -m benchmarks.prepare                                 64 MiB as one .txt, BPE trained beforehand
    python -m benchmarks.prepare --size 1024 --kind gz           1 GiB as one .txt.gz
    python -m benchmarks.prepare --kind jsonl --tokenizer PATH   documents, with a tokenizer from a folder

The text consists of randomly drawn lines of the built-in corpus. The command runs in a new process. Memory is the sum
of the proportional set sizes (shared pages count once) of that process and its workers, measured ten times a second.
`--options` are passed to the command, such as --options=--no-exact.
"""

import argparse
import gzip
import json
import os
import random
import shlex
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.text import machine
from onward import train_tokenizer
from onward.data import documents

LINES = 20  # lines per document


def generate(path: Path, size: int) -> None:
    choose = random.Random(0)
    lines = [line for text in documents(["embedded"]) for line in text.split("\n") if line.strip()]
    written = 0
    with gzip.open(path, "wt", 1) if path.suffix == ".gz" else open(path, "w", encoding="utf-8") as file:
        while written < size << 20:
            text = "\n".join(choose.choices(lines, k=LINES)) + "\n"
            written += file.write(json.dumps({"text": text}) + "\n" if path.suffix == ".jsonl" else text)


def family(process: int) -> list[int]:
    """The ids of a process and its descendants."""
    try:
        files = list(Path(f"/proc/{process}/task").glob("*/children"))  # one file per thread
        children = [int(child) for file in files for child in file.read_text().split()]
    except OSError:  # the process has exited
        return []
    return [process, *(one for child in children for one in family(child))]


def memory(process: int) -> int:
    """The proportional set size of a process in KiB, 0 once it has exited."""
    try:
        return int(Path(f"/proc/{process}/smaps_rollup").read_text().split("\nPss:")[1].split()[0])
    except (OSError, IndexError):
        return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=64, help="MiB of text")
    parser.add_argument("--kind", choices=("txt", "jsonl", "gz"), default="txt")
    parser.add_argument("--tokenizer", help="a tokenizer.json or its folder (default: BPE of 16,384 ids)")
    parser.add_argument("--workers", type=int, default=0, help="number of processes; 0: one per core")
    parser.add_argument("--options", default="", help="further options of onward data prepare")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        path, out = Path(folder) / f"text.{options.kind}".replace(".gz", ".txt.gz"), Path(folder) / "out"
        generate(path, options.size)
        tokenizer = options.tokenizer or str(Path(folder) / "tokenizer")
        if not options.tokenizer:
            os.makedirs(tokenizer)
            train_tokenizer("bpe:16384", documents(["embedded"])).save(tokenizer)
        words = ["prepare", str(path), "--tokenizer", tokenizer, "--out", str(out), "--json"]
        words += ["--workers", str(options.workers), *shlex.split(options.options)]
        start, peak, most = time.perf_counter(), 0, 0
        with subprocess.Popen([sys.executable, "-m", "onward", "data", *words], stdout=subprocess.PIPE) as process:
            while process.poll() is None:
                everyone = family(process.pid)
                peak, most = max(peak, sum(map(memory, everyone))), max(most, len(everyone))
                time.sleep(0.1)
            seconds = time.perf_counter() - start
            assert process.stdout
            report = json.load(process.stdout)
    print(machine())
    print(f"{path.name}: {report['bytes'] / 1e6:,.0f} MB in {report['documents']:,} documents, {most} processes")
    print(f"{report['tokens']:,} tokens, {report['bytes_per_token']:.2f} bytes each")
    print(
        f"{report['bytes'] / 1e6 / seconds:.2f} MB/s, {seconds:.1f} s in total; peak: {peak / 1024:,.0f} MiB of memory"
    )


if __name__ == "__main__":
    main()
