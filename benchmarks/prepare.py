"""How fast texts become tokens on disk, and how much memory it takes.

    python -m benchmarks.prepare                                 64 MB as one .txt, BPE learned from it
    python -m benchmarks.prepare --size 1024 --kind gz           1 GiB as one .txt.gz
    python -m benchmarks.prepare --kind jsonl --tokenizer PATH   documents, with the tokenizer in a folder

The text is made of lines of the built-in corpus in random order. It is prepared by the command in a fresh process;
memory is the proportional set size (what is shared counts once) of that process and all its workers together, looked
at ten times a second. `--options` are passed on to the command, such as --options=--no-exact.
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
from onward.data.sources import documents
from onward.text.tokenizer import train_tokenizer

LINES = 20  # of a document


def generate(path: Path, size: int) -> None:
    """Write text of `size` MiB."""
    choose = random.Random(0)
    lines = [line for text in documents(["embedded"]) for line in text.split("\n") if line.strip()]
    written = 0
    with gzip.open(path, "wt", 1) if path.suffix == ".gz" else open(path, "w", encoding="utf-8") as file:
        while written < size << 20:
            text = "\n".join(choose.choices(lines, k=LINES)) + "\n"
            written += file.write(json.dumps({"text": text}) + "\n" if path.suffix == ".jsonl" else text)


def family(process: int) -> list[int]:
    """The ids of a process and of all that it started."""
    try:
        files = list(Path(f"/proc/{process}/task").glob("*/children"))  # of each of its threads
        children = [int(child) for file in files for child in file.read_text().split()]
    except OSError:  # it has ended
        return []
    return [process, *(one for child in children for one in family(child))]


def memory(process: int) -> int:
    """The proportional set size of a process in kB, 0 once it has ended."""
    try:
        return int(Path(f"/proc/{process}/smaps_rollup").read_text().split("\nPss:")[1].split()[0])
    except (OSError, IndexError):
        return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=64, help="MiB of text")
    parser.add_argument("--kind", choices=("txt", "jsonl", "gz"), default="txt")
    parser.add_argument("--tokenizer", help="a tokenizer.json or its folder (default: BPE of 16,384 learned before)")
    parser.add_argument("--workers", type=int, default=0, help="processes; 0: one for each core")
    parser.add_argument("--options", default="", help="further ones of onward data prepare")
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
        f"{report['bytes'] / 1e6 / seconds:.2f} MB/s, {seconds:.1f} s in all; {peak / 1024:,.0f} MiB of memory at most"
    )


if __name__ == "__main__":
    main()
