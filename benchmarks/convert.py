"""Converting and loading: MB/s and peak memory of `onward convert`, and the time to load a GGUF file and a folder.

    python -m benchmarks.convert                     a Llama-shaped model of 125 M parameters in fp32 (0.5 GB)
    python -m benchmarks.convert --layers 2          a smaller model, for a trial run

MB/s refer to the size of the fp32 weights that are read, once over the time of the whole command and once without its
start-up time, which is the time of `import torch, onward.api.folders` in a separate process. Bytecode is cached, as in
an installed Onward. Each command runs `--rounds` times in new processes: the shortest time and the highest memory are
printed. The memory is the allocated memory without the memory-mapped input, measured a hundred times a second. Loading
is timed in this process, in turns, with the files in the system's cache.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

import onward
from benchmarks.text import machine, shakespeare

CONVERSIONS = {  # output file or folder, and the options
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
START = "import torch, onward.api.folders"


def run(out: Path, rounds: int, *words: str) -> tuple[float, float]:
    """The minimum time in seconds and the peak memory in MB of a command that writes `out`."""
    times, peaks = list[float](), list[float]()
    for _ in range(rounds):
        shutil.rmtree(out, ignore_errors=True)  # the command overwrites a file, but not a folder
        start = time.perf_counter()
        done = python(WATCH, *words)
        times.append(time.perf_counter() - start)
        peaks.append(int(done.stderr.split()[-1]) * 1024 / 1e6)
    return min(times), max(peaks)


def start_up(rounds: int) -> float:
    """The minimum time in seconds to start Python and import the modules that a conversion needs."""
    times = []
    for _ in range(rounds + 1):  # the first run caches the bytecode
        start = time.perf_counter()
        python(START)
        times.append(time.perf_counter() - start)
    return min(times)


def python(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment)


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
        before = start_up(options.rounds)
        print(f"start-up: {before:.2f} s")
        for name, (out, words) in CONVERSIONS.items():
            path = Path(temporary) / out
            seconds, memory = run(path, options.rounds, "convert", str(folder), str(path), *words)
            rates = f"{size / 1e6 / seconds:8.0f} MB/s, {size / 1e6 / (seconds - before):.0f} without start-up"
            print(f"{name:24}{rates:36}{memory:8.0f} MB at most")
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
