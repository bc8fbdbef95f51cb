"""The balance of experts: an auxiliary loss, routing biases, and the counts of assignments."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from onward import Batch, Decoder, Experts, Gated, Routing, SigmoidRouting, SoftmaxRouting, StepPlan, Trainer
from onward.training import Balance, optimizers
from onward.transforms import compile_blocks, recompute_blocks

from support.decoders import DECODERS, assert_close, config, decoder, token_ids

COUNT = 6
compiled = partial(compile_blocks, backend="eager")
TRANSFORMS: dict[str, list[Callable[[Decoder], None]]] = {
    "as it is": [],
    "recomputed": [recompute_blocks],
    "compiled": [compiled],
    "compiled, recomputed": [compiled, recompute_blocks],
}
transformed = pytest.mark.parametrize("transforms", TRANSFORMS.values(), ids=TRANSFORMS)


def mixture(router: Routing, dtype: torch.dtype = torch.float32) -> Decoder:
    """Four layers, every second one a mixture of experts."""
    experts = Experts(count=COUNT, router=router, backend="loop")
    return decoder(config(n_layers=4, mlp=(Gated(), experts)), dtype).train()


def watched(
    model: Decoder, transforms: list[Callable[[Decoder], None]], loss: float = 0.0, bias: float = 0.0
) -> Balance:
    balance = Balance(model, loss, bias)
    for transform in transforms:
        transform(model)
    return balance


def routed(model: Decoder) -> list[tuple[Tensor, Tensor]]:
    """For each mixture of experts, the scores of all experts (N, X) and the chosen experts (N, A), by the formulas."""
    found = []

    def look(mlp: torch.nn.Module, inputs: tuple[Tensor], _: Tensor) -> None:
        scores = inputs[0].flatten(0, 1) @ mlp.router.weight.mT
        merit = scores.sigmoid() + mlp.router.routing_bias if mlp.router.routing_bias is not None else scores
        found.append((scores, merit.topk(2).indices))

    hooks = [model.blocks[layer].mlp.register_forward_hook(look) for layer in (1, 3)]
    model(token_ids(model.config))
    for hook in hooks:
        hook.remove()
    return found


def switch_loss(model: Decoder) -> Any:
    """X * sum of f * P, computed expert by expert and averaged over the layers."""
    losses = []
    for scores, chosen in routed(model):
        shares = torch.exp(scores) / torch.exp(scores).sum(1, keepdim=True)
        terms = [(chosen == x).double().mean() * shares[:, x].mean() for x in range(COUNT)]
        losses.append(COUNT * sum(terms))
    return (losses[0] + losses[1]) / 2


@transformed
def test_auxiliary_loss_and_gradients_follow_the_formula(
    transforms: list[Callable[[Decoder], None]],
) -> None:
    model = mixture(SoftmaxRouting(), torch.float64)
    names, parameters = zip(*model.named_parameters())
    loss = 0.3 * switch_loss(model)
    wanted = torch.autograd.grad(loss, parameters, allow_unused=True)
    balance = watched(model, transforms, loss=0.3)
    for _ in range(2):  # counts of the previous pass are dropped, and recomputation in the backward pass is not counted
        logits = model(token_ids(model.config))
        found: Any = balance.auxiliary()
        assert_close(found, loss, 1e-12)
        got = torch.autograd.grad(found + 0 * logits.sum(), parameters)
        for name, g, w in zip(names, got, wanted):
            torch.testing.assert_close(g, torch.zeros_like(g) if w is None else w, rtol=1e-9, atol=1e-12, msg=name)
        assert balance.auxiliary() == 0.0


def test_the_gradient_is_that_of_finite_differences() -> None:
    model = mixture(SoftmaxRouting(), torch.float64)
    weight: Any = model.blocks[1].mlp.router.weight
    balance = Balance(model, 1.0, 0.0)

    def auxiliary() -> Any:
        model(token_ids(model.config))
        return balance.auxiliary()

    (gradient,) = torch.autograd.grad(auxiliary(), weight)
    direction, step = torch.randn_like(weight), 1e-6
    values = []
    for sign in 1, -1:
        with torch.no_grad():
            weight += sign * step * direction
        values.append(auxiliary())
        with torch.no_grad():
            weight -= sign * step * direction
    assert_close((gradient * direction).sum(), (values[0] - values[1]).detach() / (2 * step), 1e-7)


@transformed
@pytest.mark.parametrize("router", [SoftmaxRouting(), SigmoidRouting()])
def test_visits_in_training_are_counted_once(router: Routing, transforms: list[Callable[[Decoder], None]]) -> None:
    model = mixture(router)
    wanted = [torch.bincount(chosen.flatten(), minlength=COUNT) for _, chosen in routed(model)]
    balance = watched(model, transforms)
    tokens = token_ids(model.config)
    for _ in range(2):
        model(tokens).sum().backward()
    with torch.no_grad():
        model(tokens)
    model.eval()(tokens).sum().backward()
    for counts, visits in zip(balance.counts, wanted):
        assert torch.equal(counts, 2 * visits)
    busiest = [visits.max().item() / (2 * tokens.numel() / COUNT) for visits in wanted]
    assert balance.loads() == pytest.approx({"expert_load/1": busiest[0], "expert_load/3": busiest[1]})
    balance.step()
    assert not any(counts.any() for counts in balance.counts)


def loads_in_training(model: Decoder, balance: Balance, steps: int) -> list[float]:
    """The mean of `loads` in each step of a training with only the balancing terms."""
    generator, loads = torch.Generator().manual_seed(0), []
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-2)
    for _ in range(steps):
        tokens = torch.randint(model.config.vocab_size, (16, 12), generator=generator)
        (0 * model(tokens).sum() + balance.auxiliary()).backward()
        optimizer.step()
        optimizer.zero_grad()
        loads.append(sum(balance.loads().values()) / len(balance.counts))
        balance.step()
    return loads


@pytest.mark.parametrize("way", ["as it is", pytest.param("compiled, recomputed", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("router", "skewed"),
    [(SigmoidRouting(), "routing_bias"), (SoftmaxRouting(bias=True), "bias")],
    ids=["bias", "loss"],
)
def test_a_router_that_is_skewed_at_first_is_evened_out(router: Routing, skewed: str, way: str) -> None:
    for amount, even in (0.0, False), (0.05, True):
        model = mixture(router)
        for layer in 1, 3:
            getattr(model.blocks[layer].mlp.router, skewed).data[:2] = 1.5
        loads = loads_in_training(model, watched(model, TRANSFORMS[way], loss=20 * amount, bias=amount), 40)
        assert loads[0] > 2.5  # the maximum is 3, if all tokens are assigned to the same two of six experts
        assert (sum(loads[-10:]) / 10 < 1.8) == even


def trainer(router: Routing) -> Trainer:
    model = mixture(router)
    adamw = optimizers(model, "adamw", 1e-2, 0.1, (0.9, 0.99))
    return Trainer(model, adamw, lambda step: 1e-2, balance=Balance(model, 0.5, 0.05))


def plan(model: Decoder, seed: int) -> StepPlan:
    tokens = torch.randint(model.config.vocab_size, (2, 9), generator=torch.Generator().manual_seed(seed))
    return StepPlan([Batch(tokens[:, :-1], tokens[:, 1:])])


def test_a_trainer_continues_with_the_routing_biases_of_its_state() -> None:
    whole, first, second = (trainer(SigmoidRouting()) for _ in range(3))
    plans = [plan(whole.model, seed) for seed in range(4)]
    for one, own in (whole, plans), (first, plans[:2]):
        assert len([*one.train(own)]) == len(own)
    assert first.model.blocks[1].mlp.router.routing_bias.any()
    second.load_state(deepcopy(first.state_dict()))
    list(second.train(plans[2:]))
    assert all(map(torch.equal, second.model.parameters(), whole.model.parameters()))


def own_pass(one: Trainer) -> None:
    one.model(token_ids(one.model.config))


def interrupted_step(one: Trainer) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    hook = one.model.norm.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        one.train_step(plan(one.model, 9))
    hook.remove()


@pytest.mark.parametrize("between", [own_pass, interrupted_step])
@pytest.mark.parametrize("router", [SoftmaxRouting(), SigmoidRouting()])
def test_only_the_forward_passes_of_a_step_are_balanced(router: Routing, between: Callable[[Trainer], None]) -> None:
    plain, other, losses = trainer(router), trainer(router), []
    for seed in range(2):
        between(other)
        losses.append([replace(one.train_step(plan(one.model, seed)), seconds=0.0) for one in (plain, other)])
    assert all(own == another for own, another in losses)
    assert all(map(torch.equal, other.model.parameters(), plain.model.parameters()))


@pytest.mark.parametrize("name", ["llama", "no-output"])
def test_without_experts_nothing_happens(name: str) -> None:
    model = decoder(DECODERS[name]).train()
    balance = Balance(model, 0.1, 0.1)
    model(token_ids(model.config))
    assert (balance.auxiliary(), balance.loads(), balance.counts) == (0.0, {}, [])
    balance.step()
