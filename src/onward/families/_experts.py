"""Experts in a checkpoint: theirs is a matrix per expert, ours a stack of them."""

from collections.abc import Iterator

from onward.families import Row

LLAMA = "gate_proj", "up_proj", "down_proj"


def experts(their: str, our: str, count: int, names: tuple[str, str, str] = LLAMA) -> Iterator[Row]:
    """The rows for `count` experts; `names` are their names of an expert's gate, up and down projections."""
    for name, stack in zip(names, ("gate", "up", "down")):
        yield [f"{their}.{expert}.{name}.weight" for expert in range(count)], f"{our}.{stack}"
