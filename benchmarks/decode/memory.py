"""Peak memory of loading and generating, in a fresh process for each peer and precision.

As a program, `python -m benchmarks.decode.memory ROOT SIZES PEER PRECISION THREADS` is one of these processes.
"""

import json
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.decode.bench import Bench
from benchmarks.decode.models import PRECISIONS, SIZES, TINY, Files, prompt
from benchmarks.decode.peers import PEERS
from benchmarks.decode.tables import Table

STAGES = "loaded", "first token", "decoded"  # times at which the memory is read


def memory(bench: Bench) -> Table:
    """Peak memory, beyond that of the imported libraries, relative to weights and cache."""
    table = Table(
        f"Memory in MB of a process that loads the model and generates {bench.sizes.new} tokens, libraries not counted",
        ["precision", "peer", "weights", "cache", *STAGES, "peak", "peak / (weights + cache)"],
        notes=[
            "weights in the chosen precision; memory-mapped pages of a file count if they are in memory; a tiny model "
            "generates first, so that code that the libraries load is not counted"
        ],
    )
    for precision in bench.precisions:
        for peer in bench.names(precision):
            kind = PRECISIONS[precision]
            _ = bench.files.gguf(kind.gguf) if peer == "llama.cpp" else bench.files.folder(kind.dtype)
            words = [str(bench.files.root), bench.sizes.name, peer, precision, str(torch.get_num_threads())]
            command = [sys.executable, "-m", "benchmarks.decode.memory", *words]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            found = json.loads(done.stdout.splitlines()[-1])
            expected = found["weights"] + found["cache"]
            cells = [found[name] / 1e6 for name in ("weights", "cache", *STAGES, "peak")]
            table.rows.append([precision, peer, *cells, found["peak"] / expected])
    return table


def resident(line: str) -> int:
    """VmRSS, the current memory of this process, or VmHWM, its peak so far, in bytes."""
    return int(Path("/proc/self/status").read_text().split(f"{line}:")[1].split()[0]) * 1024


def main() -> None:
    root, size, name, precision, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    sizes = SIZES[size]
    tiny = PEERS[name](Files(Path(root) / "tiny", TINY.config), precision)
    tiny.generate([prompt(TINY.config, 8)], 40)  # loads the library completely, and its compiler
    del tiny
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the recorded peak
    length = sizes.prompt + sizes.new
    room = {"onward": {"rows": 1}, "llama.cpp": {"length": length}}
    peer = PEERS[name](Files(Path(root), sizes.config), precision, **room.get(name, {}))
    held, tokens = [resident("VmRSS")], prompt(sizes.config, sizes.prompt)
    for new in (1, sizes.new):
        peer.generate([tokens], new)
        held.append(resident("VmRSS"))
    result = {"weights": peer.all_bytes, "cache": peer.cache_bytes * length, "peak": resident("VmHWM") - before}
    print(json.dumps(result | {stage: size - before for stage, size in zip(STAGES, held)}))


if __name__ == "__main__":
    main()
