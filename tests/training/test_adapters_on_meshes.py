"""Adapters on a sharded model are initialized and trained as in one process."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import onward
from onward import Decoder, Run
from onward.checkpoint.saves.folder import saves
from onward.checkpoint.weights import read_tensors
from onward.training.run.initial_values import FILE

from support.decoders import DECODERS
from support.finetuning import config, pairs, tokenizer, write_rows
from support.grids import first
from support.ranks import Ranks

WAYS: dict[str, dict[str, Any]] = {
    "dora, tokens, full modules and biases": {
        "lora": "lora(rank=2, targets=(attn.q, mlp), dora=True, tokens=(5, 40), full=(attn.k, norm), bias=all)"
    },
    "frozen, then pissa": {"first": "frozen", "lora": "lora(rank=2, targets=(attn,), init=pissa)"},
    "new tokens": {"template": "chatml"},
    "olora": {"lora": "lora(rank=2, init=olora)"},
    "eva": {"lora": "lora(rank=2, init=eva)"},
    "pissa of the head": {"lora": "lora(rank=2, targets=(head,), init=pissa)"},
    "continued": {"first": ""},
    "merged": {"first": "merged", "lora": "lora(rank=3)"},
    "a head of rewards": {"method": "reward", "lora": "lora(rank=2)"},
}


def stored_gpt2(folder: Path) -> Path:
    """A folder with a model whose files have transposed matrices, with queries, keys and values fused."""
    torch.manual_seed(0)
    model = Decoder(replace(DECODERS["gpt2"], vocab_size=tokenizer().vocab_size, context_length=96))
    onward.save(onward.LanguageModel(model, tokenizer()), folder)
    return folder


def train(made: Any, until: int) -> None:
    run = Run.start(made)
    list(run.train(lambda: run.step >= until))


# the tensor axis does not support these
SHARDS_ONLY = "dora, tokens, full modules and biases", "frozen, then pissa", "olora"
CASES = [(way, "shard=2") for way in WAYS] + [(way, "tensor=2") for way in WAYS if way not in SHARDS_ONLY]


@pytest.mark.parametrize("case", first(2, CASES), ids=" on ".join)
def test_adapters_begin_and_learn_as_in_one_process(case: tuple[str, str], two: Ranks, tmp_path: Path) -> None:
    """The tensors of the first save equal those of one process; those of the last differ by at most 1e-4."""
    way, mesh = case
    base, rows = stored_gpt2(tmp_path / "base"), write_rows(tmp_path / "rows.jsonl", pairs())
    options = {"method": "dpo", "steps": 3, "batch_size": 2, "accumulation": 2, "learning_rate": 1e-2} | WAYS[way]
    if "first" in options:
        plain = {key: value for key, value in options.items() if key != "first"}
        train(config(base, rows, tmp_path / "adapter", **plain | {"lora": "lora(rank=2, targets=(mlp,))"}), 1)
        base = tmp_path / "adapter"
    train(config(base, rows, tmp_path / "one", **options), 3)
    two.run(train, config(base, rows, tmp_path / "two", **options, mesh=mesh), 3)
    assert not (tmp_path / "two" / FILE).exists()
    for number, tolerance in (0, 0.0), (-1, 1e-4):
        one, other = (saves(tmp_path / run)[number] for run in ("one", "two"))
        for name in "state.safetensors", "adapter_model.safetensors":
            if (one / name).exists():
                ours, theirs = read_tensors(one / name), read_tensors(other / name)
                assert ours.keys() == theirs.keys()
                for key, tensor in ours.items():
                    assert (theirs[key] - tensor).abs().max() <= tolerance, key
