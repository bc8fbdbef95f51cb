"""A step is compiled only if replaying its recorded operations reproduces everything that the step does."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from onward import Decoder, KVCache
from onward.compiled.interface import NotCompilable
from onward.compiled.program import Program
from onward.compiled.recording import record_step
from onward.model.cache import CacheView

from support.decoders import DECODERS

Function = Callable[[Tensor], Any]
MATRICES = torch.arange(2 * 8 * 83).cos().view(2, 8, 83)
REFUSED: dict[str, tuple[Function, str]] = {  # functions of x (B, T, D), and part of the refusal
    "item": (lambda x: x * x.sum().item(), "_local_scalar_dense, which reads a value"),
    "float": (lambda x: x * float(x[0, 0, 0]), "_local_scalar_dense, which reads a value"),
    "if": (lambda x: x * 2 if x.flatten()[0] else x, "_local_scalar_dense, which reads a value"),
    "equal": (lambda x: x * 2 if torch.equal(x, -x) else x, "equal, which reads a value"),
    "tolist": (lambda x: x * x.flatten().tolist()[0], "tolist, which reads values"),
    "numpy": (lambda x: torch.from_numpy(x.numpy() * 2), "numpy, which reads values"),
    "array": (lambda x: torch.from_numpy(np.asarray(x) * 2), "__array__, which reads values"),
    "dlpack": (lambda x: torch.from_numpy(np.from_dlpack(x) * 2), "__dlpack__, which reads values"),
    "print": (lambda x: x * len(str(x)), "__repr__, which reads values"),
    "rand": (lambda x: x + torch.rand(x.shape), "rand, which draws random numbers"),
    "randn_like": (lambda x: x + torch.randn_like(x), "randn_like, which draws random numbers"),
    "dropout": (lambda x: torch.dropout(x, 0.5, True), "which draws random numbers"),
    "sparse rows": (lambda x: x[0].to_sparse_csr().to_dense()[None], "sparse_csr"),
    "sparse": (lambda x: x.to_sparse().to_dense(), "sparse_coo"),
    "mkldnn": (lambda x: x.to_mkldnn().to_dense(), "_mkldnn"),
    "a power of a number": (lambda x: 2**x, "pow with a tensor"),
    "bounds that are tensors": (lambda x: x.clamp(torch.tensor(-1.0)), "clamp with a tensor"),
    "the least": (lambda x: x.topk(2, largest=False).values, "topk of the smallest"),
    "softmax of others": (lambda x: x.softmax(0), "_softmax over dimensions other than the last"),
    "a mean of all": (lambda x: x - x.mean(), "a mean over dimensions other than the last"),
    "complex": (lambda x: (x * 1j).imag, "complex64"),
    "sort": (lambda x: x.sort().values, "sort"),
    "bmm": (lambda x: x.mT @ x, "bmm of other strides"),
    "scatter": (lambda x: x.scatter(-1, x.topk(2).indices, x), "scatter of a tensor"),
}
EQUAL: dict[str, Function] = {
    "silu": lambda x: torch.nn.functional.silu(x),
    "mean": lambda x: x - x.mean(-1, keepdim=True),
    "rsub": lambda x: 1 - x,
    "clamp": lambda x: x.clamp(-1, 1),
    "cat": lambda x: torch.cat([x[..., 1:], x[..., :1]], dim=-1),
    "sum": lambda x: x * x.sum(-1, keepdim=True),
    "softmax": lambda x: x.softmax(-1),
    "topk": lambda x: torch.cat([x.topk(3).values, x.topk(3).indices.float()], -1),
    "gather": lambda x: x.gather(-1, x.topk(5).indices),
    "scatter": lambda x: x.scatter(-1, x.topk(5).indices, 0.5),
    "bmm": lambda x: x @ MATRICES,
    "bmm with a transposed weight": lambda x: x @ MATRICES.mT.contiguous().mT,
    "rows of": lambda x: torch.ops.onward.rows_of(torch.tensor([[[1.0]], [[0.0]]]), 1, x, 2 * x),
    "an embedding whose weight is transposed": lambda x: torch.embedding(MATRICES[0].T, x.topk(1).indices[..., 0]),
    "constant": lambda x: x * torch.tensor(2.0) + torch.zeros(0).sum(),
}


def compiled(function: Function) -> tuple[Program, KVCache, Tensor]:
    """Compile a function of embedded tokens as a Program."""
    torch.manual_seed(0)
    weight = torch.randn(10, 8)
    cache = KVCache(Decoder(DECODERS["llama"]).config, 2, 8)

    def run(tokens: Tensor, positions: Tensor, view: CacheView) -> Tensor:
        result: Tensor = function(torch.nn.functional.embedding(tokens, weight))
        return result

    return Program(record_step(run, cache, (2, 1)), cache, [weight]), cache, weight


@pytest.mark.parametrize("name", REFUSED)
def test_a_step_that_does_more_than_operations_on_tensors_stays_plain(name: str) -> None:
    function, reason = REFUSED[name]
    with pytest.raises(NotCompilable, match=reason):
        compiled(function)


@pytest.mark.parametrize("name", EQUAL)
def test_a_recorded_function_is_computed_for_other_tokens(name: str) -> None:
    program, cache, weight = compiled(EQUAL[name])
    tokens = torch.tensor([[3], [7]])
    with torch.inference_mode():
        result = program.run(tokens, torch.zeros_like(tokens), cache, 1)
        assert torch.allclose(result, EQUAL[name](weight[tokens]), atol=1e-6)
