"""Decoding with unmerged LoRA adapters and with quantized caches, in compiled and in plain steps."""

from functools import partial
from statistics import median
from typing import NamedTuple

import torch

import onward
from benchmarks.decode.bench import Bench, decode_speeds
from benchmarks.decode.models import PRECISIONS, prompt
from benchmarks.decode.peers import CHUNK
from benchmarks.decode.tables import Cell, Table, in_turns
from onward.measuring.generation import GREEDY, Generation, serve

LORA = onward.LoRA(rank=16, targets=("attn", "mlp"))
NAMES = "first", "second", "third"


class Case(NamedTuple):
    """The adapter of each row ("": none), and whether the cache is quantized."""

    name: str
    adapters: tuple[str, ...]
    quantized: bool = False


CASES = (
    Case("no adapter", ("",)),
    Case("an adapter", ("first",)),
    Case("an adapter in 4 rows", ("first",) * 4),
    Case("3 adapters and none in 4 rows", (*NAMES, "")),
    Case("quantized cache", ("",), True),
    Case("quantized cache, 4 rows", ("",) * 4, True),
)


def variants(bench: Bench) -> Table:
    """Tokens per second of the rows of each case together, after the first token of each."""
    sizes, columns = bench.sizes, ["precision", "case", "compiled", "plain", "compiled / plain", "equal tokens"]
    length, new = sizes.uncached, sizes.new
    table = Table(f"Adapters of rank {LORA.rank} and int8 caches: tokens/s, prompt {length}, {new} new tokens", columns)
    for precision in (name for name in bench.precisions if not PRECISIONS[name].quantize):
        model = adapted(bench, precision)
        for case in CASES:
            ways = {
                name: partial(generate, engine(model, case, length + new, after), case, length, new)
                for name, after in (("compiled", 0), ("plain", None))
            }
            runs = in_turns(ways, bench.rounds)
            compiled, plain = (median(found) for found in decode_speeds(runs).values())
            rows = zip(*(found[0].tokens for found in runs.values()))
            equal = sum(a == b for row in rows for a, b in zip(*row))
            cells: list[Cell] = [compiled, plain, compiled / plain, f"{equal} of {new * len(case.adapters)}"]
            table.rows.append([precision, case.name, *cells])
    return table


@torch.no_grad()
def adapted(bench: Bench, precision: str) -> onward.Decoder:
    """The model in a precision, with three adapters that change it."""
    dtype = PRECISIONS[precision].dtype
    model = onward.load(bench.files.folder(dtype), dtype).model
    for name in NAMES:
        onward.add_lora(model, LORA, name)
    for name, parameter in model.named_parameters():
        if name.endswith(".b"):
            parameter.normal_(std=0.01)
    return model


def engine(model: onward.Decoder, case: Case, length: int, compile_after: int | None) -> onward.Engine:
    rows = len(case.adapters)
    cache = onward.KVCache(model.config, rows, length, CHUNK, quantized=case.quantized, dtype=model.dtype)
    return onward.Engine(model, rows=rows, cache=onward.CacheManager(cache), compile_after=compile_after)


def generate(engine: onward.Engine, case: Case, length: int, new: int) -> Generation:
    config = engine.model.config
    prompts = [prompt(config, length, seed) for seed in range(len(case.adapters))]
    return serve(engine, [onward.Request(p, GREEDY, new, adapter=a) for p, a in zip(prompts, case.adapters)])
