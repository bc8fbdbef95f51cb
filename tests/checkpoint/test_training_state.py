"""A save restores the complete state bit for bit, as it was when the save was requested."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from onward import Decoder, DecoderConfig, Experts, UserError
from onward.base.files import read_json
from onward.checkpoint.load import load_model
from onward.checkpoint.saves.folder import saves
from onward.checkpoint.saves.newest import newest_state
from onward.checkpoint.saves.saver import Saver
from onward.checkpoint.saves.state import restore
from onward.checkpoint.weights import read_tensors
from onward.transforms import compile_blocks

from support.decoders import DECODERS, decoder, token_ids
from support.saves import CPU, state_of

CONFIGS = DECODERS | {"mixtral": DecoderConfig(13, 16, 2, 4, context_length=12, mlp=Experts(backend="loop"))}


class Counting(torch.optim.Optimizer):
    """An optimizer like those of some libraries: its state has integers as well as tensors, and it changes a number in
    its parameter groups."""

    def __init__(self, parameters: list[Tensor]) -> None:
        super().__init__(parameters, {"lr": 0.1, "d": 0.3})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                state["mean"] = 0.9 * state.get("mean", 0) + p.grad.float()
                p.sub_(group["lr"] * group["d"] / state["count"] * state["mean"])
            group["d"] /= 3


def frozen_matrix(model: Decoder) -> tuple[str, Tensor]:
    """The name and the tensor of the first matrix of the first block, which is not trained."""
    return next((name, p) for name, p in model.named_parameters() if name.startswith("blocks.0.") and p.ndim == 2)


def made(model: Decoder) -> list[torch.optim.Optimizer]:
    """One optimizer for vectors and the embedding, another for other matrices and stacks; one matrix is not trained."""
    frozen_matrix(model)[1].requires_grad = False
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        torch.optim.AdamW([p for p in trained if p.ndim < 2] + [model.embed.weight], lr=0.01, fused=True),
        Counting([p for p in trained if p.ndim >= 2 and p is not model.embed.weight]),
    ]


def train(model: Decoder, optimizers: list[torch.optim.Optimizer]) -> None:
    tokens = token_ids(model.config)
    F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
    for p in model.parameters():
        if p.requires_grad and p.grad is None:
            p.grad = torch.zeros_like(p)  # experts without assigned tokens
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def trainable(model: Decoder) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def assert_equal(one: Any, other: Any) -> None:
    one, other = dict(one), dict(other)
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].dtype == other[name].dtype, name
        assert torch.equal(one[name], other[name]), name


@pytest.mark.parametrize("averaged", [False, True], ids=["plain", "averaged"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_saved_state_is_loaded_and_continued_bit_for_bit(
    config: DecoderConfig, dtype: torch.dtype, averaged: bool, tmp_path: Path
) -> None:
    model = decoder(config, dtype)
    optimizers = made(model)
    train(model, optimizers)
    average = {name: p.float() + 0.123 for name, p in trainable(model).items()} if averaged else {}
    progress = {"step": 7, "skipped": [[3, 4]], "losses": [0.1, 1e-30]}
    saver = Saver(tmp_path, 1)
    saved = state_of(model, optimizers, progress, average)
    saver.save(model, saved, {"eos_token_id": 3})
    saver.finish()
    assert saver.pop_failure() is None

    state = newest_state(tmp_path, CPU)
    assert_equal(state.model.named_parameters(), model.named_parameters())
    assert (state.model.head.weight is state.model.embed.weight) == config.tied
    shown = {name.removeprefix("average/"): t for name, t in state.tensors.items() if name.startswith("average/")}
    assert_equal(shown, average)
    frozen = {f"weight/{name}": p for name, p in model.named_parameters() if not p.requires_grad}
    assert_equal(state.tensors, {**saved.tensors, **frozen})
    assert (state.progress, state.messages) == (saved.progress, [])
    assert not [
        name for name in read_tensors(saves(tmp_path)[0] / "state.safetensors") if frozen_matrix(model)[0] in name
    ]
    assert read_json(tmp_path / "config.json")["eos_token_id"] == 3
    used = {name: average.get(name, p) for name, p in model.named_parameters()}
    for name, p in load_model(tmp_path)[0].named_parameters():
        assert torch.equal(p, used[name].to(p.dtype))

    again = made(state.model)
    restore(state.tensors, state.model, again)
    for _ in range(2):
        train(model, optimizers)
        train(state.model, again)
    assert_equal(state.model.named_parameters(), model.named_parameters())


def test_gpt2_is_saved_under_its_own_names_and_turned(tmp_path: Path) -> None:
    saver = Saver(tmp_path, 1)
    model = decoder(CONFIGS["gpt2"])
    saver.save(model, state_of(model, [], {"step": 1}), {})
    saver.finish()
    assert read_json(tmp_path / "config.json")["model_type"] == "gpt2"


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.long)], ids=["plain", "compiled"])
def test_a_model_and_its_optimizers_are_rolled_back_where_they_stand(compiled: bool, tmp_path: Path) -> None:
    model = decoder(CONFIGS["gpt2"])
    tokens, optimizers = token_ids(model.config), made(model)
    if compiled:
        compile_blocks(model, backend="eager")
    train(model, optimizers)
    parameters, average = list(model.parameters()), {name: p + 1 for name, p in trainable(model).items()}
    before = model(tokens)
    saver = Saver(tmp_path, 1)
    saver.save(model, state_of(model, optimizers, {"step": 1}, average), {})
    train(model, optimizers)
    once = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(model, optimizers)
    parameters[0].grad = torch.full_like(parameters[0], float("nan"))
    saver.finish()

    state = newest_state(tmp_path, CPU)
    restore(state.tensors, model, optimizers)
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert torch.equal(model(tokens), before)
    assert_equal({name: state.tensors[f"average/{name}"] for name in average}, average)
    train(model, optimizers)
    assert_equal(model.named_parameters(), once)


def test_optimizer_that_keeps_neither_tensors_nor_numbers_is_refused() -> None:
    model = decoder(CONFIGS["llama"])
    optimizers = made(model)
    optimizers[0].state[model.embed.weight]["history"] = []
    with pytest.raises(UserError, match="AdamW, because it keeps a list as history"):
        state_of(model, optimizers, {"step": 1})


def test_save_has_the_state_at_the_time_of_its_call(tmp_path: Path) -> None:
    model = decoder(CONFIGS["llama"])
    optimizers, saver, gate = made(model), Saver(tmp_path, 1), threading.Event()
    train(model, optimizers)
    mean = optimizers[0].state[model.embed.weight]["exp_avg"]
    wanted = {name: p.detach().clone() for name, p in model.named_parameters()}, mean.clone()
    progress: dict[str, Any] = {"step": 1, "n": [1]}
    shown, hf = {"norm.weight": torch.ones(16)}, {"eos_token_id": [5]}
    saver.thread.submit(gate.wait)
    saver.save(model, state_of(model, optimizers, progress, shown), hf)
    assert not saves(tmp_path), "`save` returns before anything is written"
    with torch.no_grad():
        for tensor in (*model.parameters(), mean, shown["norm.weight"]):
            tensor.fill_(7)
    progress["n"].append(2)
    hf["eos_token_id"].append(6)
    gate.set()
    saver.finish()
    state = newest_state(tmp_path, CPU)
    assert_equal(state.model.named_parameters(), wanted[0])
    assert torch.equal(state.tensors["optimizer/exp_avg/embed.weight"], wanted[1])
    assert (state.tensors["average/norm.weight"] == 1).all()
    assert (state.progress["n"], read_json(tmp_path / "config.json")["eos_token_id"]) == ([1], [5])
