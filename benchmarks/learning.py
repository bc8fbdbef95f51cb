"""Learning a BPE vocabulary: Onward's trainer compared with `tokenizers`, and with others if they are installed.

    python -m benchmarks.learning FILE                    at most 1,000 MB of a text file, 32,768 ids
    python -m benchmarks.learning --megabytes 100         of the installed Python files
    python -m benchmarks.learning --only onward gigabpe   leave out the slow ones

`gigabpe` reads a file and learns no token in which a line break is followed by other text, which is less work and gives
worse tokens for code; all other trainers split the same passages by GPT-2's pattern. Each trainer runs in a new
process; the time includes reading the text.
"""

import argparse
import site
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.text import machine

READ = """
import sys
from onward.data.sources import passages
from onward.text.patterns import GPT2
path, size = sys.argv[1], int(sys.argv[2])
"""
TRAINERS = {
    "onward": "from onward import train_tokenizer; train_tokenizer(f'bpe:{size}', passages([path]))",
    "tokenizers": """
from onward.text.learning import by_tokenizers, pre_tokenizers
by_tokenizers(passages([path]), size, "<|endoftext|>", sorted(pre_tokenizers.ByteLevel.alphabet()))
""",
    "rustbpe": "import rustbpe; rustbpe.Tokenizer().train_from_iterator(passages([path]), size, pattern=GPT2)",
    "bpeasy": "import bpeasy; bpeasy.train_bpe(passages([path]), GPT2, 128, size)",
    "gigabpe": """
import gigabpe
gigabpe.train_bpe([path], vocab_size=size, special_tokens=["<|endoftext|>"], pretokenizer="bytelevel")
""",
}


def collect(path: Path, source: str, size: int) -> int:
    """Write at most `size` bytes of text, and return their number."""
    files = [Path(source)] if source else sorted(Path(site.getsitepackages()[0]).rglob("*.py"))
    with path.open("wb") as file:
        for one in files:
            with one.open("rb") as text:
                file.write(text.read(size - file.tell()))
        return file.tell()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", default="")
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--ids", type=int, default=32_768)
    parser.add_argument("--only", nargs="+", choices=TRAINERS, default=[*TRAINERS])
    options = parser.parse_args()
    print(machine())
    with TemporaryDirectory() as folder:
        path = Path(folder) / "text.txt"
        size = collect(path, options.file, options.megabytes * 1_000_000)
        print(f"{size / 1e6:,.0f} MB of text, {options.ids:,} ids")
        for name in options.only:
            start = time.perf_counter()
            words = [sys.executable, "-c", READ + TRAINERS[name], str(path), str(options.ids)]
            done = subprocess.run(words, capture_output=True, text=True)
            seconds = time.perf_counter() - start
            why = done.stderr.strip().splitlines()[-1:] if done.returncode else []
            print(f"{name:12}" + (why[0] if why else f"{seconds:8.1f} s{size / seconds / 1e6:8.1f} MB/s"), flush=True)


if __name__ == "__main__":
    main()
