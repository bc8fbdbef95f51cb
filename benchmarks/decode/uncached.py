"""The time that the cache saves: generation with and without a cache, by the number of tokens."""

from collections.abc import Sequence
from time import perf_counter

import torch

import onward
from benchmarks.decode.bench import Bench
from benchmarks.decode.models import prompt
from benchmarks.decode.peers import Onward, same
from benchmarks.decode.tables import Table
from onward.measuring.generation import Generation
from onward.reports import Picture, curves


def flops(config: onward.DecoderConfig, tokens: int, keys: int) -> int:
    """The floating-point operations of the matrix products in one call of a Llama-shaped decoder that computes logits
    only for the last token: `tokens` queries attend to `keys` keys each, masked keys included."""
    c, width = config, config.n_heads * config.d_head
    attention = c.d_model * (2 * width + 2 * c.n_kv_heads * c.d_head)
    layer = tokens * (attention + 3 * c.d_model * c.d_ff) + 2 * tokens * keys * width
    return 2 * (c.n_layers * layer + c.d_model * c.vocab_size)


@torch.inference_mode()
def without_cache(model: onward.Decoder, tokens: list[int], new: int) -> Generation:
    """Greedy generation that computes all tokens again in every step."""
    context, seconds, start = torch.tensor([tokens]), list[float](), perf_counter()
    for _ in range(new):
        best = model.logits(model.hidden(context)[:, -1:]).argmax(-1)
        context = torch.cat([context, best], 1)
        seconds.append(perf_counter() - start)
    return Generation([context[0, len(tokens) :].tolist()], [seconds])


def uncached(bench: Bench) -> Table:
    """The time of generating with a cache and without one, by the number of tokens."""
    sizes, table = (
        bench.sizes,
        Table(
            "With and without a cache: onward, bf16, from a prompt of one token, one run each",
            ["tokens", "s without", "s with", "speed-up", "GFLOP without", "GFLOP with", "FLOP ratio"],
        ),
    )
    onward_peer, first = Onward(bench.files, "bf16", rows=1), prompt(sizes.config, 1)
    onward_peer.generate([first], 4)
    cached = onward_peer.generate([first], sizes.uncached)
    plain = without_cache(onward_peer.model, first, sizes.uncached)
    lengths = [size for size in (1, 8, 32, 64, 128, 256, 512) if size < sizes.uncached] + [sizes.uncached]
    for length in lengths:
        slow, fast = plain.seconds[0][length - 1], cached.seconds[0][length - 1]
        many = sum(flops(sizes.config, t, t) for t in range(1, length + 1))
        few = sum(flops(sizes.config, 1, t) for t in range(1, length + 1))
        table.rows.append([length, slow, fast, slow / fast, many / 1e9, few / 1e9, many / few])
    ratios = [[row[column] for row in table.rows] for column in (0, 3, 6)]
    table.picture = drawn(*ratios)  # type: ignore[arg-type]  # of numbers
    table.notes.append(f"equal first tokens: {same(plain.tokens[0], cached.tokens[0])} of {sizes.uncached}")
    return table


def drawn(lengths: Sequence[float], speed_ups: Sequence[float], flop_ratios: Sequence[float]) -> Picture:
    """The speed-up and the ratio of the counted operations, by the number of tokens."""
    caption = (
        "Without a cache, each step computes all earlier tokens again; with a cache, it computes only the new token, "
        "which attends to the cached keys and values. The speed-up is smaller than the ratio of the operations, "
        "because many tokens at once are limited by arithmetic, and a single token by the memory bandwidth."
    )
    series = {"speed-up": speed_ups, "operations without a cache / with a cache": flop_ratios}
    panel = curves("", lengths, series, x_name="tokens", log=True)
    return Picture("What the cache saves", caption, [panel])
