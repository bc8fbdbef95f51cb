"""One model in one process: agreement of the libraries, and their speed in prefill and decoding."""

from functools import partial
from statistics import median

import numpy as np

from benchmarks.decode.bench import Bench, decode_speeds
from benchmarks.decode.models import PRECISIONS, prompt
from benchmarks.decode.peers import PEERS, Onward, Peer, same
from benchmarks.decode.tables import Cell, Table, in_turns, summary
from onward.generation.runner import COMPILE_AFTER, MAX_PROMPT
from onward.planning.machine import read_bandwidth

TOLERANCE = 1e-3  # limit for differences of fp32 logits, whose standard deviation is about 0.5


def agreement(bench: Bench) -> Table:
    """The logits and greedy tokens of each library in fp32, compared with Onward's.

    Exits if logits differ by TOLERANCE or more, because speeds of different models cannot be compared.
    """
    sizes, table = (
        bench.sizes,
        Table("Agreement in f32", ["peer", "largest difference of logits", "equal first tokens"]),
    )
    tokens = prompt(sizes.config, sizes.prompt)
    ours = Onward(bench.files, "f32")
    expected, answer = ours.logits(tokens), ours.generate([tokens], sizes.new).tokens[0]
    for name in bench.names("f32")[1:]:
        peer = PEERS[name](bench.files, "f32", **({"exact": True} if name == "llama.cpp" else {}))
        largest = float(np.abs(peer.logits(tokens) - expected).max())
        equal = same(answer, peer.generate([tokens], sizes.new).tokens[0])
        table.rows.append([name, f"{largest:.1e}", f"{equal} of {sizes.new}"])
        if not largest < TOLERANCE:
            raise SystemExit(f"Cannot compare speeds with {name}: its logits differ by {largest:.3g}")
    return table


def decode(bench: Bench) -> Table:
    """Tokens per second after the first token, batch 1."""
    sizes, rate = bench.sizes, read_bandwidth(size=bench.sizes.read)
    speed = ["tokens/s", "best", "onward / peer"]
    table = Table(
        f"Decoding: prompt {sizes.prompt}, {sizes.new} new tokens, batch 1",
        ["precision", "peer", *speed, "MB per token", "GB/s", "of the bandwidth", "equal"],
        notes=[
            f"bandwidth: {rate / 1e9:.1f} GB/s; "
            "equal: number of tokens before the first that differs from Onward's in f32"
        ],
    )
    tokens = prompt(sizes.config, sizes.prompt)
    expected = Onward(bench.files, "f32").generate([tokens], sizes.new).tokens[0]
    for precision in bench.precisions:
        peers = bench.peers(precision)
        runs = bench.generate(peers, [tokens], sizes.new)
        speeds = decode_speeds(runs)
        for name, peer in peers.items():
            read = peer.bytes_per_token(sizes.prompt + sizes.new / 2)
            moved, equal = median(speeds[name]) * read, same(expected, runs[name][0].tokens[0])
            traffic: list[Cell] = [read / 1e6, moved / 1e9, f"{moved / rate:.0%}", f"{equal} of {sizes.new}"]
            table.rows.append([name_of(precision, peer), name, *summary(speeds, name), *traffic])
    return table


def name_of(precision: str, peer: Peer) -> str:
    """The name that a library gives to a precision."""
    kind = PRECISIONS[precision]
    return kind.gguf.lower() if kind.quantize and peer.name == "llama.cpp" else precision


def prefill(bench: Bench) -> Table:
    """Prompt tokens per second, measured from the call to the first new token of each request; Onward's call is
    `complete`, and short prompts are measured after Onward has compiled their steps."""
    sizes, columns = bench.sizes, ["precision", "requests", "prompt", "peer", "tokens/s", "best", "onward / peer"]
    table = Table("Prefill: prompt tokens/s of all requests", columns)
    for precision in bench.precisions:
        for requests in sizes.requests_at_once:
            peers = bench.peers(precision, requests)
            for length in sizes.prefill:
                prompts = [prompt(sizes.config, length, seed) for seed in range(requests)]
                cases = {name: partial(peer.first, prompts) for name, peer in peers.items()}
                runs = in_turns(cases, bench.rounds, COMPILE_AFTER + 1 if requests * length <= MAX_PROMPT else 1)
                speeds = {name: [requests * length / taken for taken in found] for name, found in runs.items()}
                for name, peer in peers.items():
                    table.rows.append([name_of(precision, peer), requests, length, name, *summary(speeds, name)])
    return table


def batch(bench: Bench) -> Table:
    """Tokens per second of many rows, compared with one row."""
    sizes, many = bench.sizes, bench.sizes.batch
    table = Table(
        f"Batch {many} in bf16: tokens/s of all rows while all decode",
        ["peer", "batch 1", f"batch {many}", f"batch {many} / batch 1", "onward / peer"],
    )
    prompts = [prompt(sizes.config, sizes.prompt, seed) for seed in range(many)]
    peers = {name: PEERS[name](bench.files, "bf16") for name in bench.names("bf16") if name != "llama.cpp"}
    one, all_rows = (decode_speeds(bench.generate(peers, prompts[:rows], sizes.new)) for rows in (1, many))
    for name in peers:
        single, (speed, _, ours) = median(one[name]), summary(all_rows, name)
        table.rows.append([name, single, speed, median(all_rows[name]) / single, ours])
    return table


def rows(bench: Bench) -> Table:
    """Tokens per second of Onward in each precision, by the number of rows, and relative to bf16."""
    sizes, others = bench.sizes, [name for name in bench.precisions if name != "bf16"]
    table = Table(
        f"Rows: tokens/s of all rows, prompts of {sizes.rows_prompt} tokens, {sizes.new} new tokens",
        ["rows", "bf16", *others, *(f"{name} / bf16" for name in others)],
    )
    names = ["bf16", *others]
    peers = {name: Onward(bench.files, name, rows=max(sizes.rows)) for name in names}
    for count in sizes.rows:
        prompts = [prompt(sizes.config, sizes.rows_prompt, seed) for seed in range(count)]
        found = decode_speeds(bench.generate(peers, prompts, sizes.new))
        speeds = [median(found[name]) for name in names]
        table.rows.append([count, *speeds, *(speed / speeds[0] for speed in speeds[1:])])
    return table
