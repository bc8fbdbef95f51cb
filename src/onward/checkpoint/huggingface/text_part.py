"""The tensors of the text decoder in a model that also takes images or audio, under the names of its family."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

from torch import Tensor

from onward.checkpoint.weights import StoredTensor
from onward.families._needed import text_names
from onward.families._wrappers import TextPart

ADAPTED = ".base_layer."  # in weights that adapters for images or sound change


def text_tensors(part: TextPart, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The stored tensors of the text decoder, under the names of its family without the base prefix."""
    result = dict[str, StoredTensor]()
    for name, new in text_names(part, stored).items():
        result |= dict(converted(new.replace(ADAPTED, "."), stored[name], part))
    return result


def converted(name: str, tensor: StoredTensor, part: TextPart) -> Iterator[tuple[str, StoredTensor]]:
    """Yield a tensor as the family stores it: as one tensor or, for stacked experts, as one for each matrix."""
    rows = part.keys.get("vocab_size")
    match part.kind, name.rpartition(".experts."):
        case "mllama_text_model", _ if name == "embed_tokens.weight" and tensor.mapped and isinstance(rows, int):
            # the embedding has eight more rows than the head, the first of them for an image
            whole = tensor.mapped
            yield name, replace(tensor, shape=[rows, *tensor.shape[1:]], mapped=lambda: whole()[:rows])
        case "qwen3_vl_moe_text", (layer, _, "gate_up_proj" | "down_proj" as stack) if len(tensor.shape) == 3:
            # one tensor for all experts: published files transpose it, files saved by transformers may not
            as_is = tensor.shape[2] == part.keys["hidden_size" if stack == "gate_up_proj" else "moe_intermediate_size"]
            outputs, inputs = tensor.shape[1:] if as_is else tensor.shape[:0:-1]
            names = ("gate_proj", "up_proj") if stack == "gate_up_proj" else ("down_proj",)
            width = outputs // len(names)
            for expert in range(tensor.shape[0]):
                for i, one in enumerate(names):
                    read = partial(matrix_rows, tensor, expert, i * width, as_is)
                    matrix = StoredTensor([width, inputs], tensor.dtype, read)
                    yield f"{layer}.experts.{expert}.{one}.weight", matrix
        case _:
            yield name, tensor


def matrix_rows(stack: StoredTensor, index: int, first: int, as_is: bool, start: int, end: int) -> Tensor:
    """Rows [start, end), counted from `first`, of matrix `index` in a stack; the matrix is transposed unless
    `as_is`."""
    matrix = stack.rows(index, index + 1)[0]
    return (matrix if as_is else matrix.mT)[first + start : first + end]
