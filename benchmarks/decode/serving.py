"""Many requests at once, and caches of many slots or tokens."""

import random
from collections.abc import Callable
from functools import partial
from statistics import median

from benchmarks.decode.bench import Bench, decode_speeds
from benchmarks.decode.models import Sizes, prompt
from benchmarks.decode.peers import LlamaCpp, Onward, Peer, Transformers
from benchmarks.decode.tables import Table, in_turns, summary


def requests(bench: Bench) -> Table:
    """Requests of mixed lengths: Onward's engine, and transformers one by one and with continuous batching."""
    prompts, new = mixed(bench.sizes)
    table = Table(
        f"{len(prompts)} requests of mixed lengths in bf16: {sum(map(len, prompts)):,} prompt tokens, {sum(new):,} new",
        ["way", "new tokens/s", "best", "onward / way"],
    )
    onward = Onward(bench.files, "bf16")
    ways: dict[str, Callable[[], float]] = {"onward": lambda: onward.serve(prompts, new).total}
    if "transformers" not in bench.absent:
        alone, batched = (Transformers(bench.files, "bf16") for _ in range(2))  # batching changes the model's attention
        ways["transformers, one by one"] = lambda: sum(
            alone.generate([one], most).total for one, most in zip(prompts, new)
        )
        continuous = partial(batched.serve, prompts, new)
        try:
            continuous()
            ways["transformers, continuous batching"] = continuous
        except Exception as error:
            table.notes.append(f"transformers' continuous batching does not run here: {type(error).__name__}: {error}")
    seconds = in_turns(ways, bench.rounds)
    speeds = {name: [sum(new) / taken for taken in found] for name, found in seconds.items()}
    table.rows = [[name, *summary(speeds, name)] for name in ways]
    return table


def mixed(sizes: Sizes) -> tuple[list[list[int]], list[int]]:
    choose = random.Random(0)
    prompts = [prompt(sizes.config, choose.randint(*sizes.request_prompt), seed) for seed in range(sizes.requests)]
    return prompts, [choose.randint(*sizes.request_new) for _ in prompts]


def slots(bench: Bench) -> Table:
    """The time per token in caches with few and with many slots, for the same number of cached tokens."""
    sizes, few = bench.sizes, bench.sizes.slots[0]
    table = Table(
        f"Decoding with about {sizes.present} tokens in a cache: onward, bf16",
        ["slots", "ms per token", f"relative to {few}"],
    )
    tokens, new = prompt(sizes.config, sizes.present - sizes.present_new // 2), sizes.present_new
    peers = {size: Onward(bench.files, "bf16", rows=1, slots=size) for size in sizes.slots}
    speeds = decode_speeds(bench.generate(peers, [tokens], new))
    for size in sizes.slots:
        table.rows.append([size, 1000 / median(speeds[size]), median(speeds[few]) / median(speeds[size])])
    return table


def context(bench: Bench) -> Table:
    """Decoding with a long context."""
    sizes = bench.sizes
    table = Table(
        f"Decoding after {sizes.context:,} tokens of context, bf16",
        ["peer", "tokens/s", "best", "onward / peer", "prefill tokens/s"],
    )
    peers: dict[str, Peer] = {"onward": Onward(bench.files, "bf16", rows=1)}
    if "llama.cpp" not in bench.absent:
        peers["llama.cpp"] = LlamaCpp(bench.files, "bf16", length=sizes.context + sizes.context_new)
    runs = bench.generate(peers, [prompt(sizes.config, sizes.context)], sizes.context_new)
    speeds = decode_speeds(runs)
    for name, found in runs.items():
        table.rows.append([name, *summary(speeds, name), sizes.context / median(run.first for run in found)])
    return table
