"""Optimizers: the parameters that they update, and the updates."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from onward import Batch, Decoder, LoRA, UserError, add_lora
from onward.checkpoint.saves.state import restore, training_tensors
from onward.training import CrossEntropy, optimizers
from onward.training.step.muon import Muon
from onward.training.step.normuon import ROWS, NorMuon

from support.decoders import DECODERS, assert_close, decoder, token_ids

NAMES = ["adamw", "muon", "normuon", "torch.optim:NAdam", "torch.optim:Adafactor", "torch.optim:SGD"]
RATES = {"torch.optim:SGD": 5e-2, "torch.optim:Adafactor": 1e-1}


def make(model: Decoder, name: str, weight_decay: float = 0.1) -> list[torch.optim.Optimizer]:
    return optimizers(model, name, RATES.get(name, 1e-2), weight_decay, (0.9, 0.99))


def train(model: Decoder, opts: list[torch.optim.Optimizer], steps: int) -> list[float]:
    """The losses of some steps on one batch."""
    ids, losses = token_ids(model.config), []
    for _ in range(steps):
        loss = CrossEntropy()(model, Batch(ids[:, :-1], ids[:, 1:]))[0] / 22
        loss.backward()
        for optimizer in opts:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("shape", [(12, 12), (30, 7), (7, 30), (1, 9), (9, 1)], ids=str)
def test_muon_is_that_of_torch(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    ours, theirs = (torch.nn.Parameter(w) for w in torch.randn(shape).expand(2, *shape).clone())
    settings: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.3, "momentum": 0.8}
    steps = (
        Muon([{"params": [ours]}], **settings),
        torch.optim.Muon([theirs], **settings, adjust_lr_fn="match_rms_adamw"),
    )
    for _ in range(5):
        ours.grad = theirs.grad = torch.randn(shape)
        for optimizer in steps:
            optimizer.step()
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("shape", [(3, 12, 12), (4, 30, 7), (2, 7, 30), (1, 5, 6)], ids=str)
def test_muon_steps_in_a_stack_as_in_each_of_its_matrices(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    stack = torch.nn.Parameter(torch.randn(shape))
    matrices = [torch.nn.Parameter(w.clone()) for w in stack.detach()]
    together, apart = (Muon([{"params": p}], lr=0.1, weight_decay=0.3) for p in ([stack], matrices))
    for _ in range(5):
        # a tiny gradient next to a large one
        stack.grad = torch.randn(shape) * torch.logspace(-6, 3, shape[0])[:, None, None]
        for w, grad in zip(matrices, stack.grad):
            w.grad = grad
        together.step()
        apart.step()
    assert_close(stack.detach(), torch.stack([w.detach() for w in matrices]), 2e-3)


@pytest.mark.parametrize("optimizer", [Muon, NorMuon])
@pytest.mark.parametrize("shape", [(40, 40), (80, 20), (3, 20, 80)], ids=str)
def test_muon_makes_steps_as_large_as_those_of_adamw(shape: tuple[int, ...], optimizer: type[Muon]) -> None:
    torch.manual_seed(0)
    w = torch.nn.Parameter(torch.zeros(shape))
    w.grad = torch.randn(shape)
    optimizer([{"params": [w]}], lr=1.0, weight_decay=0.0).step()
    assert 0.15 < w.square().mean().sqrt() < 0.25


@pytest.mark.parametrize("shape", [(12, 12), (30, 7), (7, 30), (3, 7, 30)], ids=str)
def test_normuon_divides_rows_by_their_mean_squares_and_keeps_the_size_of_the_update(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    one, other = (torch.nn.Parameter(torch.zeros(shape)) for _ in range(2))
    muon, normuon = (cls([{"params": [p]}], lr=1.0, weight_decay=0.0) for cls, p in ((Muon, one), (NorMuon, other)))
    squares = torch.zeros(shape[:-1])
    for _ in range(4):
        one.grad = other.grad = torch.randn(shape) * torch.logspace(-2, 0, shape[-2])[:, None]
        before = one.detach().clone(), other.detach().clone()
        muon.step()
        normuon.step()
        plain, scaled = one.detach() - before[0], other.detach() - before[1]
        squares = ROWS * squares + (1 - ROWS) * plain.square().mean(-1)
        rows = plain / squares.sqrt()[..., None]
        norms = (x.norm(dim=(-2, -1), keepdim=True) for x in (plain, rows))
        assert_close(scaled, rows * (next(norms) / next(norms)), 1e-4)


def test_normuon_bears_rows_without_gradients() -> None:
    w = torch.nn.Parameter(torch.zeros(2, 6, 4))
    optimizer = NorMuon([{"params": [w]}], lr=1.0, weight_decay=0.0)
    for used in range(2):  # one expert without tokens, then the other
        w.grad = torch.zeros_like(w)
        w.grad[used] = torch.randn(6, 4)
        optimizer.step()
        assert w.square().mean().sqrt() < 0.5


@pytest.mark.parametrize("config", ["gpt-oss", "deepseek", "opt-350m", "no-output"])
@pytest.mark.parametrize("name", NAMES)
def test_each_trainable_parameter_is_updated_once_and_no_frozen_one(name: str, config: str) -> None:
    model = decoder(DECODERS[config])
    model.blocks[0].requires_grad_(False)
    moved = Counter(p for o in make(model, name) for group in o.param_groups for p in group["params"])
    assert moved == Counter(p for p in model.parameters() if p.requires_grad)


def test_muon_moves_the_matrices_inside_the_blocks_and_adamw_the_rest() -> None:
    model = decoder(DECODERS["gpt-oss"])
    muon, adamw = make(model, "muon")
    names = {p: name for name, p in model.named_parameters()}
    moved = {names[p] for p in muon.param_groups[0]["params"]}
    assert {name.split(".", 2)[2] for name in moved} == {
        *(f"attn.{name}.weight" for name in ("q", "k", "v", "out")),
        *(f"mlp.{name}" for name in ("router.weight", "gate", "up", "down")),
    }
    assert (type(muon), type(adamw)) == (Muon, torch.optim.AdamW)


@pytest.mark.parametrize("name", ["muon", "normuon"])
def test_muon_alone_trains_low_rank_adapters(name: str) -> None:
    model = decoder(DECODERS["llama"])
    add_lora(model, LoRA(rank=2))
    [muon] = make(model, name)
    assert {*muon.param_groups[0]["params"]} == {p for p in model.parameters() if p.requires_grad}


def test_muon_without_matrices_of_blocks_leaves_the_parameters_to_adamw() -> None:
    model = decoder(DECODERS["llama"])
    model.blocks.requires_grad_(False)
    [adamw] = make(model, "muon")
    assert isinstance(adamw, torch.optim.AdamW)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_without_trainable_parameters_has_no_optimizer(name: str) -> None:
    with pytest.raises(UserError, match="all parameters are frozen"):
        make(decoder(DECODERS["llama"]).requires_grad_(False), name)


def test_muon_moves_no_taps_of_convolutions() -> None:
    model = decoder(DECODERS["mamba2"])
    moved = set(make(model, "muon")[0].param_groups[0]["params"])
    assert not moved & {p for name, p in model.named_parameters() if "conv" in name}


def test_beta1_is_the_momentum_of_muon() -> None:
    muon, adamw = optimizers(decoder(DECODERS["gpt2"]), "muon", 0.1, 0.0, (0.7, 0.99))
    assert (muon.param_groups[0]["momentum"], adamw.param_groups[0]["betas"][0]) == (0.7, 0.7)


@pytest.mark.parametrize("name", ["adamw", "muon", "normuon", "torch.optim:AdamW"])
@pytest.mark.parametrize("config", ["gpt2", "gpt-oss", "mamba2"])
def test_only_matrices_and_stacks_of_them_decay(config: str, name: str) -> None:
    model = decoder(DECODERS[config])
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for optimizer in optimizers(model, name, 0.1, 0.5, (0.9, 0.99)):
        optimizer.step()
    for name, p in model.named_parameters():
        vector = p.ndim < 2 or "bias" in name or "conv." in name  # biases of experts, convolution kernels
        torch.testing.assert_close(p.detach(), before[name] * (1 if vector else 1 - 0.1 * 0.5), msg=name)


@pytest.mark.parametrize("config", ["llama", "gpt-oss"])
@pytest.mark.parametrize("name", NAMES)
def test_the_loss_falls(name: str, config: str) -> None:
    model = decoder(DECODERS[config])
    losses = train(model, make(model, name), 40)
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("name", NAMES)
def test_the_state_is_kept_under_the_names_of_parameters(name: str) -> None:
    def weights(model: Decoder) -> list[Tensor]:
        return [p.detach().clone() for p in model.parameters()]

    model = decoder(DECODERS["gpt-oss"])
    opts = make(model, name)
    train(model, opts, 3)
    kept = {key: tensor.clone() for key, tensor in training_tensors(model, opts).items()}
    other = decoder(DECODERS["gpt-oss"])
    theirs = make(other, name)
    restore(kept, other, theirs)
    train(model, opts, 2)
    train(other, theirs, 2)
    for got, wanted in zip(weights(other), weights(model)):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("adam", "choose adamw, muon, normuon, or"),
        ("nowhere.at.all:Lion", "cannot be imported"),
        ("torch.optim:Lion", "the module torch.optim has no Lion"),
        ("torch.nn:Linear", "is not an optimizer"),
        ("torch.optim:LBFGS", "does not take the arguments"),
        ("torch.optim:Optimizer", "does not take the arguments"),
        (":Lion", "choose"),
    ],
)
def test_name_that_is_no_optimizer_is_one_sentence(name: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        make(decoder(DECODERS["llama"]), name)
