"""A trained model that is so small that overhead, not arithmetic, determines the time of a token."""

import torch

import onward
from benchmarks.decode.bench import Bench, decode_speeds
from benchmarks.decode.models import Files
from benchmarks.decode.peers import PEERS, same
from benchmarks.decode.tables import Table, summary
from benchmarks.text import SHARED

FOLDER, START, NEW = SHARED / "stories260K", 1, 256


def stories(bench: Bench) -> Table:
    new = NEW if bench.sizes.name == "full" else bench.sizes.new
    columns = ["peer", "tokens/s", "best", "onward / peer", "equal first tokens"]
    table = Table(f"stories260K in f32: {new} new tokens, batch 1", columns)
    if not FOLDER.exists():
        table.notes.append("left out: stories260K is not in the folder of shared data")
        return table
    model = onward.load(FOLDER, torch.float32).model
    files = Files(bench.root / "stories", model.config, lambda _: model)
    peers = {name: PEERS[name](files, "f32") for name in bench.names("f32")}
    runs = bench.generate(peers, [[START]], new)
    speeds, answer = decode_speeds(runs), runs["onward"][0].tokens[0]
    table.rows = [
        [name, *summary(speeds, name), f"{same(answer, found[0].tokens[0])} of {new}"] for name, found in runs.items()
    ]
    return table
