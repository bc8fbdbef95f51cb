"""Names of experts in checkpoints: published files have one matrix per expert, Onward stacks the matrices of all
experts in one tensor."""

from collections.abc import Iterator

from onward.families import Row

LLAMA = "gate_proj", "up_proj", "down_proj"
FUSED = {"gate": ("gate_up_proj", "gate", "up"), "down": ("down_proj", "down")}  # a stack of transformers 5, of ours


def stack_module(matrices: list[str]) -> str:
    """The module under which transformers 5 stores the stacked matrices of experts."""
    return matrices[0].partition(".experts.")[0].replace(".block_sparse_moe", ".mlp") + ".experts"


def experts(their: str, our: str, count: int, names: tuple[str, str, str] = LLAMA) -> Iterator[Row]:
    """Rows of the name mapping for a layer's experts; `names` are those of an expert's gate, up and down
    projections."""
    for name, stack in zip(names, ("gate", "up", "down")):
        yield [f"{their}.{expert}.{name}.weight" for expert in range(count)], f"{our}.{stack}"
