"""A trained model so small that the time of a token is the cost of the program around the arithmetic."""

import torch

import onward
from benchmarks.decode.bench import Bench, decode_speeds
from benchmarks.decode.models import Files
from benchmarks.decode.peers import PEERS
from benchmarks.decode.tables import Table, summary
from benchmarks.text import SHARED

FOLDER, START, NEW = SHARED / "stories260K", 1, 256


def stories(bench: Bench) -> Table:
    """Tokens per second of stories260K in fp32."""
    table = Table(f"stories260K in f32: {NEW} new tokens, batch 1", ["peer", "tokens/s", "best", "onward / peer"])
    if not FOLDER.exists():
        table.notes.append("left out: stories260K is not in the folder of shared data")
        return table
    model = onward.load(FOLDER, torch.float32).model
    files = Files(bench.root / "stories", model.config, lambda _: model)
    peers = {name: PEERS[name](files, "f32") for name in bench.names("f32")}
    new = NEW if bench.sizes.name == "full" else bench.sizes.new
    speeds = decode_speeds(bench.generate(peers, [[START]], new))
    table.rows = [[name, *summary(speeds, name)] for name in peers]
    return table
