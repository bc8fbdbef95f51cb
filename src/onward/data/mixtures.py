"""Several tables of examples as one, with shares.

Shapes: M examples of all tables.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from onward.data.examples import Examples
from onward.errors import UserError

SET = "set"  # the number of an example that says which table it comes from


def joined(tables: Sequence[Examples]) -> Examples:
    """Return the examples of all tables in order, each with the index of its table as the number `set`. Raises a
    UserError if their examples have different forms."""
    if len({table.per_example for table in tables}) > 1:
        raise UserError("the sources have examples of different forms: train on them in different runs")
    names = dict.fromkeys(name for table in tables for name in table.numbers)
    numbers = {n: np.concatenate([t.numbers.get(n, np.zeros(len(t))) for t in tables]) for n in names}
    starts = np.cumsum([0, *(len(table.tokens) for table in tables[:-1])])
    return Examples(
        np.concatenate([table.tokens for table in tables]),
        np.concatenate([table.trained for table in tables]),
        np.concatenate([table.ends + start for table, start in zip(tables, starts)]),
        tables[0].per_example,
        numbers | {SET: np.repeat(np.arange(len(tables), dtype=float), [len(table) for table in tables])},
        [text for table in tables for text in table.columns],
    )


def weighted(examples: Examples, weights: Sequence[float], seed: int) -> Examples:
    """Return as many examples as `examples` has, with the share of each table in proportion to `weights`. A table with
    fewer examples than its share is repeated: in whole passes, then by a part of it that the seed draws."""
    generator, sets, total = np.random.default_rng(seed % 2**64), examples.numbers[SET], len(examples)
    chosen = []
    for index, weight in enumerate(weights):
        own = np.flatnonzero(sets == index)
        count = round(total * weight / sum(weights)) if len(own) else 0
        passes, rest = divmod(count, max(1, len(own)))
        chosen += [own] * passes + [np.sort(generator.permutation(own)[:rest])]
    return examples.select(np.concatenate(chosen))


def one_set(examples: Examples, index: int) -> Examples:
    """Return the examples of one of the joined tables, by its index."""
    kept = examples.select(np.flatnonzero(examples.numbers[SET] == index))
    return replace(kept, numbers={name: values for name, values in kept.numbers.items() if name != SET})
