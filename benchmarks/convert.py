"""Converting and loading: MB/s and peak memory of `onward convert`, and the time to load a GGUF file and a folder.

    python -m benchmarks.convert                     a Llama-shaped model of 125 M parameters in fp32 (0.5 GB)
    python -m benchmarks.convert --layers 2          a smaller one, to try it

MB/s are those of the fp32 weights that are read, start-up and the import of torch included. Each command runs in a new
process; its memory is what it allocates, without the mapped input, measured a hundred times a second. Loading is timed
in this process, in turns, with the files in the system's cache.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

import onward
from benchmarks.text import machine, shakespeare

CONVERSIONS = {  # what is written, and the options
    "f32 -> f32": ("x.gguf", ()),
    "f32 -> bf16": ("bf16.gguf", ("--dtype", "bf16")),
    "f32 -> q8_0": ("q8_0.gguf", ("--dtype", "q8_0")),
    "f32 -> q4_0": ("q4_0.gguf", ("--dtype", "q4_0")),
    "f32 -> folder in bf16": ("folder", ("--dtype", "bf16")),
}
WATCH = """
import re, runpy, sys, threading
from pathlib import Path
sys.argv = ["onward", *sys.argv[1:]]
peak, end = 0, threading.Event()
def watch():
    global peak
    while not end.wait(0.01):
        peak = max(peak, int(re.search("RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]))
watcher = threading.Thread(target=watch)
watcher.start()
try:
    runpy.run_module("onward", run_name="__main__")
except SystemExit:
    pass
end.set()
watcher.join()
print(peak, file=sys.stderr)
"""


def run(*words: str) -> tuple[float, float]:
    """The seconds and the peak memory in MB of a command."""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", WATCH, *words], capture_output=True, text=True, check=True)
    return time.perf_counter() - start, int(done.stderr.split()[-1]) / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    config = onward.DecoderConfig(
        vocab_size=32_000,
        d_model=768,
        n_layers=options.layers,
        n_heads=12,
        n_kv_heads=4,
        d_ff=2048,
        context_length=1024,
    )
    print(machine())
    with TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        torch.manual_seed(0)
        tokenizer = onward.train_tokenizer(f"bpe:{config.vocab_size}", shakespeare())
        onward.save(onward.LanguageModel(onward.Decoder(config), tokenizer), folder)
        size = (folder / "model.safetensors").stat().st_size
        bound = 3 * config.vocab_size * config.d_model * 4 / 1e6 + 300
        print(f"{size / 1e6:.0f} MB of weights; largest tensor times three plus 300 MB: {bound:.0f} MB")
        for name, (out, words) in CONVERSIONS.items():
            seconds, memory = run("convert", str(folder), str(Path(temporary) / out), *words)
            print(f"{name:24}{size / 1e6 / seconds:8.0f} MB/s{memory:8.0f} MB at most")
        times: dict[str, list[float]] = {"x.gguf": [], "model": []}
        for _ in range(options.rounds):
            for name, found in times.items():
                begun = time.perf_counter()
                onward.load(Path(temporary) / name, device="cpu")
                found.append(time.perf_counter() - begun)
        gguf, plain = (median(found) for found in times.values())
        print(f"load: GGUF {gguf:.2f} s, folder {plain:.2f} s, ratio {gguf / plain:.2f}")


if __name__ == "__main__":
    main()
