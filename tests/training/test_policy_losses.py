"""Reinforcement learning losses: equal to their formulas in fp64, and to TRL's if TRL is installed."""

import math
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from onward import Method
from onward.base import fields
from onward.data import IGNORE_INDEX
from onward.training import (
    RLOO,
    GroupMethod,
    OnlineDPO,
    clipped,
    gae,
    group_advantages,
    kl_estimate,
    leave_one_out,
    value_loss,
)
from onward.training.reinforcement.policy_losses import reduced, whitened
from onward.training.reinforcement.rollouts import PolicyOutputs, Rollouts


def case() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Current, older and reference log-probabilities and a mask, each (6, 5), and rewards (6,) in groups of 3."""
    torch.manual_seed(0)
    logprobs = (torch.randn(6, 5, dtype=torch.float64) - 2).requires_grad_()
    old, reference = (logprobs.detach() + torch.randn(6, 5, dtype=torch.float64) * 0.3 for _ in range(2))
    mask = (torch.arange(5) < torch.tensor([[5], [3], [1], [4], [2], [5]])).double()
    return logprobs, old, reference, mask, torch.tensor([1.0, 0.0, 0.5, 2.0, 2.0, -1.0], dtype=torch.float64)


def loss_of(notation: str, kl: float) -> tuple[Tensor, Tensor]:
    """The loss of a method for `case`, and its gradient."""
    logprobs, old, reference, mask, rewards = case()
    method: Any = fields.part(Method, notation, "method")
    advantages = group_advantages(rewards, 3, method.scale)[:, None]
    per_token, _ = method.surrogate(logprobs, old, advantages, mask)
    total, count = reduced(per_token + kl * kl_estimate(logprobs, reference), mask, method.mean_over, 7)
    loss = total / count
    return loss, torch.autograd.grad(loss, logprobs)[0]


clip = lambda x, low, high: min(max(x, low), high)
ppo_loss = lambda ratio, a, low, high: -min(ratio * a, clip(ratio, low, high) * a)
s = lambda x: 1 / (1 + math.exp(-x))
# function from the ratio of a token, the ratio of its completion, its advantage and its log-probability to its loss;
# reduction over tokens; scale of advantages; TRL's options
Token = Callable[[float, float, float, float], float]
CASES: dict[str, tuple[Token, str, str, dict[str, Any]]] = {
    **{
        f"grpo(clip_high=0.28, reduction={mean})": (
            lambda r, q, a, p: ppo_loss(r, a, 0.8, 1.28),
            mean,
            "group",
            {"loss_type": mean, "epsilon_high": 0.28},
        )
        for mean in ("grpo", "bnpo", "dr_grpo", "dapo")
    },
    "grpo(clip_worst=1.1, scale=none)": (
        lambda r, q, a, p: -min(min(r, 1.1) * a, clip(r, 0.8, 1.2) * a),
        "dapo",
        "none",
        {"loss_type": "dapo", "delta": 1.1},
    ),
    "grpo(scale=batch)": (lambda r, q, a, p: ppo_loss(r, a, 0.8, 1.2), "dapo", "batch", {"loss_type": "dapo"}),
    "gspo(clip_low=0.05, clip_high=0.1)": (
        lambda r, q, a, p: ppo_loss(q, a, 0.95, 1.1),
        "grpo",
        "group",
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.1},
    ),
    "cispo(highest=1.1)": (
        lambda r, q, a, p: -min(r, 1.1) * a * p,
        "dapo",
        "group",
        {"loss_type": "cispo", "epsilon_high": 1.1},
    ),
    "sapo": (
        lambda r, q, a, p: -4 / (1.0 if a > 0 else 1.05) * s((1.0 if a > 0 else 1.05) * (r - 1)) * a,
        "grpo",
        "group",
        {"loss_type": "sapo", "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05},
    ),
}


def test_every_method_of_groups_has_a_case() -> None:
    groups = {kind for kind, method in Method.choices().items() if issubclass(method, GroupMethod)}
    assert {fields.parse(name, "")["kind"] for name in CASES} == groups


@pytest.mark.parametrize("name", CASES)
def test_loss_of_groups_is_its_formula_in_fp64(name: str) -> None:
    logprobs, old, reference, mask, rewards = case()
    token, mean, scale, _ = CASES[name]
    groups = rewards.view(2, 3)
    deviation = {"group": groups.std(1, keepdim=True) + 1e-4, "batch": rewards.std() + 1e-4, "none": 1.0}[scale]
    advantages = ((groups - groups.mean(1, keepdim=True)) / deviation).flatten()
    total, lengths = [0.0] * 6, [int(n) for n in mask.sum(1)]
    for i, n in enumerate(lengths):
        change = (logprobs - old)[i, :n].tolist()
        whole = math.exp(sum(change) / n)
        for t in range(n):
            difference = (reference[i, t] - logprobs[i, t]).item()
            total[i] += token(math.exp(change[t]), whole, advantages[i].item(), logprobs[i, t].item())
            total[i] += 0.1 * (math.exp(difference) - difference - 1)
    wanted = {
        "grpo": sum(s / n for s, n in zip(total, lengths)) / 6,
        "bnpo": sum(total) / sum(lengths),
        "dr_grpo": sum(total) / (6 * 7),
        "dapo": sum(total) / sum(lengths),
    }[mean]
    assert math.isclose(loss_of(name, 0.1)[0].item(), wanted, rel_tol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_loss_of_groups_is_that_of_trl(name: str) -> None:
    trainer = pytest.importorskip("trl.trainer.grpo_trainer", reason="install trl to compare losses with it")
    logprobs, old, reference, mask, rewards = case()
    _, _, scale, options = CASES[name]
    fake = their_trainer(logprobs, **{"beta": 0.1, "epsilon_low": 0.2, "epsilon_high": 0.2} | options)
    vars(fake.args).update(options)
    advantages = group_advantages(rewards, 3, scale)  # type: ignore[arg-type]
    inputs = their_inputs(mask) | {"advantages": advantages, "old_per_token_logps": old}
    inputs |= {"ref_per_token_logps": reference, "num_items_in_batch": mask.sum()}
    loss = trainer.GRPOTrainer._compute_loss(fake, None, inputs)
    mine, gradient = loss_of(name, 0.1)
    assert math.isclose(mine.item(), loss.item(), rel_tol=1e-6)
    torch.testing.assert_close(gradient, torch.autograd.grad(loss, logprobs)[0], rtol=1e-5, atol=1e-12)


def test_rloo_is_that_of_trl() -> None:
    trainer = pytest.importorskip("trl.trainer.rloo_trainer", reason="install trl to compare losses with it")
    logprobs, old, _, mask, rewards = case()
    advantages = leave_one_out(rewards, 3)
    assert torch.allclose(advantages[0], rewards[0] - rewards[1:3].mean())
    fake = their_trainer(logprobs, epsilon_low=0.2, epsilon_high=0.2)
    loss = trainer.RLOOTrainer._compute_loss(
        fake, None, their_inputs(mask) | {"advantages": advantages, "old_logps": (old * mask).sum(1)}
    )
    mine = RLOO().surrogate(logprobs, old, advantages[:, None], mask)[0].mean()
    assert math.isclose(mine.item(), loss.item(), rel_tol=1e-6)
    both = [torch.autograd.grad(one, logprobs, retain_graph=True)[0] for one in (mine, loss)]
    torch.testing.assert_close(*both, rtol=1e-5, atol=1e-12)


class Anything(SimpleNamespace):
    """A trainer whose other attributes, which have no effect, are None."""

    def __getattr__(self, name: str) -> Any:
        return None


def their_trainer(logprobs: Tensor, **options: Any) -> Any:
    """The attributes that TRL's losses read from their trainer."""
    same = lambda tensor, *_, **__: tensor
    fake = Anything(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None),
        args=Anything(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        accelerator=Anything(num_processes=1, gather=same, reduce=same, gather_for_metrics=same),
        model=Anything(training=True),
        _metrics={"train": defaultdict(list)},
        **{"beta": 0.0, "top_entropy_quantile": 1.0, "importance_sampling_level": "token", **options},
    )
    fake.current_gradient_accumulation_steps, fake.max_completion_length = 1, 7
    fake._entropy_bonus_enabled = fake.aux_loss_enabled = fake.use_vllm = False
    return fake


def their_inputs(mask: Tensor) -> dict[str, Any]:
    ids = torch.zeros(6, 5, dtype=torch.long)
    return {"prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids, "completion_mask": mask}


def pairs_of(method: OnlineDPO, used: list[float] | None = None) -> tuple[Tensor, Tensor]:
    """The loss of online DPO for `case`, in groups of `method.samples` completions, and its gradient."""
    logprobs, _, reference, mask, rewards = case()
    targets = torch.where(mask > 0, 1, IGNORE_INDEX)
    rollouts = Rollouts(targets, targets, rewards=rewards, reference_logprobs=reference)
    rollouts = rollouts.changed(used=None if used is None else torch.tensor(used))
    outputs = PolicyOutputs(logprobs, logprobs, logprobs, logprobs)
    per_token, figures = method.token_losses(outputs, rollouts)
    total, count = reduced(per_token, rollouts.mask, method.mean_over, 7)
    assert figures.keys() <= {*method.reports}
    return total / count, torch.autograd.grad(total / count, logprobs)[0]


@pytest.mark.parametrize(
    ("method", "used", "wanted"),  # expected (best, worst) of each group of the rewards 1, 0, 0.5, 2, 2, -1
    [
        (OnlineDPO(), None, [(0, 1), (3, 2), (4, 5)]),
        (OnlineDPO(beta=0.5, label_smoothing=0.2, samples=3), None, [(0, 1), (3, 5)]),
        (OnlineDPO(samples=6), None, [(3, 5)]),
        # the remaining rewards of the second group are equal
        (OnlineDPO(samples=3), [0, 1, 1, 1, 1, 0], [(2, 1), None]),
    ],
)
def test_online_dpo_is_dpo_of_the_best_and_the_worst(
    method: OnlineDPO, used: list[float] | None, wanted: list[tuple[int, int] | None]
) -> None:
    logprobs, _, reference, mask, _ = case()
    ratio, losses = ((logprobs - reference) * mask).sum(1), []
    for pair in wanted:
        margin = method.beta * (ratio[pair[0]] - ratio[pair[1]]) if pair else 0 * ratio[0]
        e = method.label_smoothing
        losses.append(-(1 - e) * torch.log(margin.sigmoid()) - e * torch.log((-margin).sigmoid()))
    loss = torch.stack(losses).mean()
    mine, gradient = pairs_of(method, used)
    assert math.isclose(mine.item(), loss.item(), rel_tol=1e-12)
    torch.testing.assert_close(gradient, torch.autograd.grad(loss, logprobs)[0], rtol=1e-12, atol=1e-15)


def test_online_dpo_is_that_of_trl() -> None:
    theirs = pytest.importorskip("trl.experimental.online_dpo.online_dpo_trainer", reason="install trl to compare")
    logprobs, _, reference, mask, rewards = case()
    order = [0, 2, 4, 1, 3, 5]  # TRL orders the first completions of all prompts before the second ones
    ids = torch.zeros(3, 1, dtype=torch.long)
    answers = torch.ones(6, 5, dtype=torch.long)
    losses: list[Tensor] = []
    stats: Any = defaultdict(list)
    same = lambda tensor, *_: tensor
    fake = SimpleNamespace(
        args=Anything(beta=0.1, loss_type="sigmoid", n_gpu=1, gradient_accumulation_steps=1, use_vllm=False),
        _generate=lambda *_: (ids, ids, answers, mask[order], None),
        _forward=lambda model, *_: (logprobs if model == "policy" else reference)[order],
        _calculate_rewards_from_functions=lambda **_: rewards[order],
        ref_model="reference",
        model="policy",
        eos_token_ids=[0],
        reward_funcs=[1],
        processing_class=SimpleNamespace(batch_decode=lambda *_, **__: [""] * 6),
        accelerator=SimpleNamespace(gather_for_metrics=same, backward=losses.append),
        state=Anything(global_step=1),
        stats=stats,
        beta=0.1,
    )
    fake.args.torch_empty_cache_steps = None
    policy = type("Policy", (str,), {"train": lambda self: None})("policy")
    theirs.OnlineDPOTrainer.training_step(fake, policy, {"prompt": ["", "", ""]})
    mine, gradient = pairs_of(OnlineDPO())
    assert math.isclose(mine.item(), losses[0].item(), rel_tol=1e-6)
    torch.testing.assert_close(gradient, torch.autograd.grad(losses[0], logprobs)[0], rtol=1e-5, atol=1e-12)


def test_ppo_is_the_formula_in_fp64() -> None:
    torch.manual_seed(0)
    _, _, _, mask, _ = case()
    rewards, values, old = (torch.randn(6, 5, dtype=torch.float64) * mask for _ in range(3))
    advantages, returns = gae(rewards, values, mask, 0.9, 0.8)
    for i in range(6):
        n = int(mask[i].sum())
        for t in range(n):
            deltas = [rewards[i, k] + 0.9 * (values[i, k + 1] if k + 1 < n else 0) - values[i, k] for k in range(t, n)]
            wanted = torch.stack([(0.9 * 0.8) ** k * delta for k, delta in enumerate(deltas)]).sum()
            assert torch.isclose(advantages[i, t], wanted)
            assert torch.isclose(returns[i, t], wanted + values[i, t])
    white = whitened(advantages, mask)
    assert abs(white.sum()) < 1e-9
    assert torch.isclose((white.square() * mask).sum() / mask.sum(), torch.tensor(1.0, dtype=torch.float64))
    loss = value_loss(values, old, returns, 0.2)
    near = torch.maximum(torch.minimum(values, old + 0.2), old - 0.2)
    torch.testing.assert_close(loss, 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2))


def test_group_of_equal_rewards_gives_no_gradient() -> None:
    logprobs, old, *_ = case()
    equal = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    for advantages in group_advantages(equal, 3), leave_one_out(equal, 3):
        loss, _ = clipped((logprobs - old).exp(), advantages[:, None], 0.2, 0.2)
        assert not torch.autograd.grad(loss.sum(), logprobs)[0].any()


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_the_advantage_of_a_single_completion_is_0(scale: Any) -> None:
    assert group_advantages(torch.tensor([0.3]), 1, scale).tolist() == [0.0]
    assert group_advantages(torch.tensor([0.3, 2.0]), 1, scale).tolist() == [0.0, 0.0]


def test_whole_numbers_are_rewards() -> None:
    rewards = torch.tensor([1, 0, 2, 2])
    assert torch.equal(group_advantages(rewards, 2), group_advantages(rewards.float(), 2))


def test_kl_estimate_is_never_negative_and_exact_near_0() -> None:
    difference = torch.logspace(-8, 0, 100) * torch.tensor([1, -1]).repeat(50)
    found, exact = (kl_estimate(torch.zeros_like(x), x) for x in (difference, difference.double()))
    assert (found >= 0).all()
    torch.testing.assert_close(found.double(), exact, rtol=1e-3, atol=1e-9)
