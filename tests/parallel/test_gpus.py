"""Several GPUs compute the same results as one, with NCCL; skipped without several GPUs. The same cases on CPUs, marked
`long`, check the tests themselves."""

from typing import Any

import pytest
import torch

from onward import Batch, Decoder, DecoderConfig, RunConfig, StepPlan
from onward.config.mesh import Mesh
from onward.parallel.processes import Processes
from onward.training.step.build import build_trainer

from support.decoders import config
from support.ranks import Ranks

GPUS = torch.cuda.device_count()
LLAMA = config(n_kv_heads=2, vocab_size=12)
EIGHT_B: dict[str, Any] = {"vocab_size": 128256, "d_model": 4096, "n_layers": 2, "n_heads": 32, "n_kv_heads": 8}
EIGHT_B |= {"d_ff": 14336, "context_length": 2048}  # two blocks with the sizes of llama-3.1-8b


def losses(decoder: DecoderConfig, mesh: str, device: str, length: int, options: dict[str, Any]) -> list[float]:
    """The losses and gradient norms of three steps; mesh "": in one process."""
    processes = Processes()
    if mesh:
        processes = Processes.join().arranged(Mesh.parse(mesh)).connected(torch.device(device))
    torch.manual_seed(0)
    model = Decoder(decoder).to(device)
    settings: dict[str, Any] = {"precision": "fp32", "learning_rate": 1e-3, "warmup": 0, "steps": 10} | options
    trainer = build_trainer(RunConfig(**settings), model, processes)
    tokens = torch.randint(decoder.vocab_size, (4, length), generator=torch.Generator().manual_seed(1)).to(device)
    batches = [Batch(row[None], row[None].roll(-1)) for row in tokens]
    steps = [trainer.train_step(StepPlan(batches[processes.batch_rank :: processes.mesh.data])) for _ in range(3)]
    return [figure for step in steps for figure in (step.loss, step.grad_norm)]


MESHES = "replicate=2", "shard=2", "context=2", "tensor=2", "pipeline=2"
OF_FOUR = "replicate=2 shard=2", "shard=2 tensor=2", "pipeline=2 shard=2", "shard=2 context=2"
OPTIONS: dict[str, dict[str, Any]] = {"fp32": {}, "compiled": {"compile": True}, "bf16": {"precision": "bf16"}}
CASES = [
    (mesh, name) for mesh in (*MESHES, *OF_FOUR) for name in OPTIONS if ("context" in mesh) <= (name != "compiled")
]


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.long), "cuda"])
@pytest.mark.parametrize(("mesh", "options"), CASES)
def test_devices_train_as_one(mesh: str, options: str, device: str, request: pytest.FixtureRequest) -> None:
    count = Mesh.parse(mesh).count
    if device == "cuda" and count > GPUS:
        pytest.skip(f"needs {count} GPUs, and there are {GPUS}")
    ranks: Ranks = request.getfixturevalue("two" if count == 2 else "four")
    expected = losses(LLAMA, "", device, 12, OPTIONS[options])
    for found in ranks.run(losses, LLAMA, mesh, device, 12, OPTIONS[options]):
        assert found == pytest.approx(expected, rel=1e-2 if options == "bf16" else 1e-4)


@pytest.mark.skipif(GPUS < 1, reason="needs a GPU")
def test_compiled_steps_of_blocks_of_8b_equal_plain_ones() -> None:
    decoder = DecoderConfig(**EIGHT_B)
    precise = {"precision": "bf16"}
    plain, compiled = (losses(decoder, "", "cuda", 2048, precise | {"compile": c}) for c in (False, True))
    assert compiled == pytest.approx(plain, rel=1e-2)
