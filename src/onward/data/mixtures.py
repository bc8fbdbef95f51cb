"""Several tables of examples as one, with shares that are constant or change over a run."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from onward.base.errors import UserError
from onward.data.curricula import Interleaving
from onward.data.examples import Examples
from onward.data.packing import ExampleBatch, PackedExamples, batch_of

SET = "set"  # name of the number that stores the index of an example's table


def joined(tables: Sequence[Examples]) -> Examples:
    """Join tables of examples into one, in order; the number `set` of each example is the index of its table."""
    if len({table.per_example for table in tables}) > 1:
        raise UserError("the sources have examples of different forms: train on them in separate runs")
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
    """Draw about as many examples as the tables have in total, in proportion to the tables' weights. A table smaller
    than its share is repeated: in full passes, then by a random part that depends on the seed."""
    generator, sets, total = np.random.default_rng(seed % 2**64), examples.numbers[SET], len(examples)
    chosen = []
    for index, weight in enumerate(weights):
        own = np.flatnonzero(sets == index)
        count = round(total * weight / sum(weights)) if len(own) else 0
        passes, rest = divmod(count, max(1, len(own)))
        chosen += [own] * passes + [np.sort(generator.permutation(own)[:rest])]
    return examples.select(np.concatenate(chosen))


class MixedRows:
    """The rows of a fine-tuning run on several tables whose shares change over the run. Row i is a pure function of the
    seed and i, and contains examples of one table; each table has its own epochs."""

    def __init__(self, tables: Sequence[PackedExamples], mixture: Interleaving, seed: int) -> None:
        self.tables, self.mixture, self.seed = tables, mixture, seed

    def __len__(self) -> int:
        return sum(map(len, self.tables))

    def read(self, numbers: Sequence[int]) -> ExampleBatch:
        """Rows by number, padded to the longest; numbers continue beyond the first epoch."""
        sources, ranks = self.mixture.locate(np.array(numbers))
        rows = [self.tables[table].examples_of([rank])[0] for table, rank in zip(sources.tolist(), ranks.tolist())]
        batch = batch_of(self.tables[0].examples, rows, self.tables[0].by_example)
        return batch.changed(seed=(self.seed * 1_000_003 + numbers[0]) % 2**63)


def one_set(examples: Examples, index: int) -> Examples:
    """The examples of one of the tables that `joined` joined."""
    kept = examples.select(np.flatnonzero(examples.numbers[SET] == index))
    return replace(kept, numbers={name: values for name, values in kept.numbers.items() if name != SET})
