"""Several GPUs compute as one, by nccl; skipped where there are none."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from onward.config.decoder import DecoderConfig
from onward.config.mesh import Mesh
from onward.data.windows import Batch
from onward.model.decoder import Decoder
from onward.training.config import RunConfig
from onward.training.processes import Processes
from onward.training.step.build import build_trainer
from onward.training.step.trainer import StepPlan

from support.decoders import config
from support.ranks import Ranks

GPUS = torch.cuda.device_count()
LLAMA = config(n_kv_heads=2, vocab_size=12)
EIGHT_B: dict[str, Any] = {"vocab_size": 128256, "d_model": 4096, "n_layers": 2, "n_heads": 32, "n_kv_heads": 8}
EIGHT_B |= {"d_ff": 14336, "context_length": 2048}  # two blocks of the sizes of llama-3.1-8b


def losses(decoder: DecoderConfig, mesh: str, device: str, length: int, options: dict[str, Any]) -> list[float]:
    """The losses and norms of gradients of three steps; "": in one process."""
    processes = Processes()
    if mesh:
        processes = Processes.join().arranged(Mesh.parse(mesh)).connected(torch.device(device))
    torch.manual_seed(0)
    model = Decoder(decoder).to(device)
    settings: dict[str, Any] = {"precision": "fp32", "learning_rate": 1e-3, "warmup": 0, "steps": 10} | options
    trainer = build_trainer(RunConfig(**settings), model, processes)
    tokens = torch.randint(decoder.vocab_size, (2, length), generator=torch.Generator().manual_seed(1)).to(device)
    batches = [Batch(row[None], row[None].roll(-1)) for row in tokens]
    steps = [trainer.train_step(StepPlan(batches[processes.batch_rank :: processes.mesh.data])) for _ in range(3)]
    return [figure for step in steps for figure in (step.loss, step.grad_norm)]


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.mark.skipif(GPUS < 2, reason=f"needs two GPUs, and there are {GPUS}")
@pytest.mark.parametrize("options", [{}, {"compile": True}, {"precision": "bf16"}], ids=["fp32", "compiled", "bf16"])
@pytest.mark.parametrize("mesh", ["replicate=2", "shard=2", "context=2", "tensor=2"])
def test_two_gpus_train_as_one(mesh: str, options: dict[str, Any], two: Ranks) -> None:
    if "context" in mesh and "compile" in options:
        pytest.skip("a context axis is not compiled")
    expected = losses(LLAMA, "", "cuda", 12, options)
    tolerance = 1e-2 if options.get("precision") else 1e-4
    for found in two.run(losses, LLAMA, mesh, "cuda", 12, options):
        assert found == pytest.approx(expected, rel=tolerance)


@pytest.mark.skipif(GPUS < 1, reason="needs a GPU")
def test_compiled_steps_of_blocks_of_8b_equal_plain_ones() -> None:
    decoder = DecoderConfig(**EIGHT_B)
    precise = {"precision": "bf16"}
    plain, compiled = (losses(decoder, "", "cuda", 2048, precise | {"compile": c}) for c in (False, True))
    assert compiled == pytest.approx(plain, rel=1e-2)
