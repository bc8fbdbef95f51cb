"""Experts in a checkpoint: theirs is a matrix per expert, ours a stack of them."""

from collections.abc import Iterator

from onward.families import Row

LLAMA = "gate_proj", "up_proj", "down_proj"
FUSED = {"gate": ("gate_up_proj", "gate", "up"), "down": ("down_proj", "down")}  # a stack of transformers 5, of ours


def stack_module(matrices: list[str]) -> str:
    """Return the module in which transformers 5 stacks these matrices of experts."""
    return matrices[0].partition(".experts.")[0].replace(".block_sparse_moe", ".mlp") + ".experts"


def experts(their: str, our: str, count: int, names: tuple[str, str, str] = LLAMA) -> Iterator[Row]:
    """Yield the rows for `count` experts; `names` are their names of an expert's gate, up and down projections."""
    for name, stack in zip(names, ("gate", "up", "down")):
        yield [f"{their}.{expert}.{name}.weight" for expert in range(count)], f"{our}.{stack}"
