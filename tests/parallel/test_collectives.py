"""Collectives of real processes: their number and their bytes in a step match the plan."""

from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.tensor.debug import CommDebugMode

from onward import Batch, Decoder, DecoderConfig, Experts, RunConfig, StepPlan
from onward.config.mesh import Mesh
from onward.parallel.processes import Processes
from onward.training.step import muon
from onward.training.step.build import build_trainer
from onward.training.step.muon import orthogonalized

from support.decoders import config
from support.ranks import Ranks
from support.simulated import Counted, Key, planned

LLAMA = config(n_kv_heads=2, vocab_size=12)
MIXTURE = config(mlp=Experts(count=4, top_k=2, d_ff=8))  # its odd vocabulary is not divided


class Debug(CommDebugMode):
    """torch's CommDebugMode without its module tracker, which fails if a module is called twice."""

    def __init__(self) -> None:
        super().__init__()
        tracker: Any = self.advanced_module_tracker
        tracker._fw_pre_hook = tracker._fw_post_hook = tracker._bw_hook = lambda *_: None


def counted(decoder: DecoderConfig, mesh: str) -> tuple[Counter[Key], Counter[Key], int]:
    """The calls and the bytes of a step's collectives, and the number of calls counted by torch's CommDebugMode."""
    processes = Processes.join().arranged(Mesh.parse(mesh)).connected(torch.device("cpu"))
    options = RunConfig(precision="fp32", optimizer="adamw", learning_rate=1e-3, steps=10)
    trainer = build_trainer(options, Decoder(decoder), processes)
    tokens = torch.zeros(2, 12, dtype=torch.int64)
    ours, debug = Counted(processes), Debug()
    with debug, ours:
        trainer.train_step(StepPlan([Batch(tokens, tokens.clone())] * processes.mesh.pipeline))
    return ours.calls, ours.bytes, debug.get_total_counts()


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    ranks = Ranks(4)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("decoder", [LLAMA, MIXTURE], ids=["dense", "experts"])
@pytest.mark.parametrize("mesh", ["replicate=2", "shard=2", "tensor=2", "context=2"])
def test_collectives_of_two_processes_are_those_of_the_plan(mesh: str, decoder: DecoderConfig, two: Ranks) -> None:
    calls, sizes = planned(decoder, Mesh.parse(mesh), 2, 12, precision="fp32")
    assert two.run(counted, decoder, mesh) == [(calls, sizes, calls.total())] * 2


@pytest.mark.parametrize("mesh", ["pipeline=2", pytest.param("pipeline=2 shard=2", marks=pytest.mark.long)])
def test_collectives_of_stages_are_those_of_the_plan(mesh: str, two: Ranks, request: pytest.FixtureRequest) -> None:
    arrangement = Mesh.parse(mesh)
    ranks = two if arrangement.count == 2 else request.getfixturevalue("four")
    for rank, (calls, sizes, _) in enumerate(ranks.run(counted, LLAMA, mesh)):
        stage = rank // arrangement.stage
        assert (calls, sizes) == planned(LLAMA, arrangement, 2, 12, precision="fp32", stage=stage)


@pytest.mark.long
@pytest.mark.parametrize("decoder", [LLAMA, MIXTURE], ids=["dense", "experts"])
@pytest.mark.parametrize(
    "mesh", ["replicate=4", "replicate=2 shard=2", "shard=2 tensor=2", "replicate=2 tensor=2", "shard=2 context=2"]
)
def test_collectives_of_four_processes_are_those_of_the_plan(mesh: str, decoder: DecoderConfig, four: Ranks) -> None:
    calls, sizes = planned(decoder, Mesh.parse(mesh), 2, 12, precision="fp32")
    assert four.run(counted, decoder, mesh) == [(calls, sizes, calls.total())] * 4


def orthogonalizations(decoder: DecoderConfig, mesh: str) -> int:
    """The number of matrices that this process orthogonalizes in a step of Muon; mesh "": a single process."""
    processes = Processes()
    if mesh:
        processes = Processes.join().arranged(Mesh.parse(mesh)).connected(torch.device("cpu"))
    options = RunConfig(precision="fp32", optimizer="muon", learning_rate=1e-3, steps=10)
    trainer, done = build_trainer(options, Decoder(decoder), processes), list[int]()

    def count(matrices: torch.Tensor) -> torch.Tensor:
        done.append(len(matrices))
        return orthogonalized(matrices)

    tokens = torch.zeros(2, 12, dtype=torch.int64)
    with patch.object(muon, "orthogonalized", count):
        trainer.train_step(StepPlan([Batch(tokens, tokens.clone())]))
    return sum(done)


@pytest.mark.parametrize("mesh", ["shard=2", "tensor=2"])
def test_each_matrix_is_orthogonalized_by_one_process(mesh: str, two: Ranks) -> None:
    first, second = two.run(orthogonalizations, LLAMA, mesh)
    assert first + second == orthogonalizations(LLAMA, "")
    assert min(first, second) > 0
