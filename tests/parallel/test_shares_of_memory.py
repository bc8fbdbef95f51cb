"""No process of a divided run holds the whole model."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from onward import Decoder, Run, RunConfig, SelfAttention, Tokenizer
from onward.checkpoint.lazy import load_outline

from support.finetuning import base_model, pairs, sums, write_rows
from support.finetuning import config as of_base
from support.grids import first
from support.heap import HeapPeak
from support.ranks import Ranks

SIZES = {"d_model": 256, "n_layers": 12, "n_heads": 4, "context_length": 8}
SETTINGS: dict[str, Any] = {"steps": 100, "batch_size": 1, "accumulation": 2, "precision": "fp32", "device": "cpu"}
SETTINGS |= {"tokenizer": "char", "model": SIZES}
STATE = 4  # multiple of a weight's bytes: the weight, its gradient, and two moments


LOADED: dict[str, dict[str, Any]] = {
    "adapters": {"lora": "lora(rank=2, dora=True)"},
    "reference": {"method": "dpo"},
    "teacher": {"method": "distill"},
}


def peaks(begin: Callable[..., Run], *arguments: Any) -> tuple[int, int]:
    """The peak allocated bytes of a run after its start and after its second step."""
    gc.collect()
    with HeapPeak() as heap:
        run = begin(*arguments)
        begun = heap.bytes
        gc.collect()
        events = run.train()
        while run.step < 2:
            next(events)
    return begun, heap.bytes


@pytest.mark.parametrize(
    ("mesh", "preset", "average"),
    [
        ("shard=2", "gpt2", 0.0),  # its files have transposed matrices, with queries, keys and values fused
        pytest.param("shard=2", "mini", 0.0, marks=pytest.mark.long),
        pytest.param("tensor=2", "gpt2", 0.0, marks=pytest.mark.long),
        pytest.param("shard=2", "gpt2", 0.9, marks=pytest.mark.long),
    ],
)
def test_process_has_its_share_of_the_state_and_that_of_two_blocks(
    mesh: str, preset: str, average: float, story_file: Path, two: Ranks, tmp_path: Path
) -> None:
    options: dict[str, Any] = SETTINGS | {"preset": preset, "mesh": mesh, "average": average}
    config = RunConfig(**options, sources=(str(story_file),), out=str(tmp_path / "run"))
    started, resumed = two.run(peaks, Run.start, config), two.run(peaks, Run.resume, tmp_path / "run")
    with torch.device("meta"):
        model = Decoder(config.decoder(Tokenizer.load(tmp_path / "run").vocab_size))
    weights, block = (sum(p.nbytes for p in module.parameters()) for module in (model, model.blocks[0]))
    averages = int(average > 0)  # number of averages, each as large as the weights
    share = (1 + averages) * weights / 2
    for (begun, _), (begun_again, _) in zip(started, resumed):
        assert begun <= 2 * share + 4 * block, "its share, and a copy to save"
        assert begun_again <= share + 4 * block, "its share, which it has read alone"
    for _, trained in started + resumed:
        assert trained <= (STATE + averages) * (weights / 2 + 2 * block)


def peak_of_loading(kind: str, begin: Callable[..., Run], *arguments: Any) -> int:
    """The peak allocated bytes of a run at its start or, for a reference or a teacher, while loading this model."""
    gc.collect()
    with HeapPeak() as heap:
        run = begin(*arguments)
    if kind == "adapters":
        return heap.bytes
    gc.collect()
    with HeapPeak() as heap:
        getattr(run.trainer.loss, kind).on(run.device)
    return heap.bytes


@pytest.mark.long
@pytest.mark.parametrize("kind", first(1, LOADED))
def test_process_loads_its_share_of_stored_models(kind: str, two: Ranks, tmp_path: Path) -> None:
    """The models are stored in bf16 and used in fp32."""
    base = base_model(tmp_path / "base", torch.bfloat16, d_model=256, n_layers=12, attention=SelfAttention())
    options = LOADED[kind] | ({"teacher": str(base)} if kind == "teacher" else {})
    rows = write_rows(tmp_path / "rows.jsonl", pairs() if kind == "reference" else sums())
    config = of_base(base, rows, tmp_path / "run", batch_size=1, accumulation=2, mesh="shard=2", **options)
    ways: list[Any] = [(Run.start, config), (Run.resume, tmp_path / "run")]
    model, _ = load_outline(base)
    weights, block = (sum(4 * p.numel() for p in module.parameters()) for module in (model, model.blocks[0]))
    for way in ways:
        for loaded in two.run(peak_of_loading, kind, *way):
            assert loaded <= weights / 2 + 2 * block
