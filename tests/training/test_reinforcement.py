"""Reinforcement: losses against TRL and formulas in fp64, completions by our engine, and toy tasks that are learned."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import onward
from onward.config.decoder import DecoderConfig
from onward.data.windows import IGNORE_INDEX, Batch
from onward.errors import UserError
from onward.model.decoder import Decoder
from onward.text.tokenizer import Tokenizer, train_tokenizer
from onward.training.finetuning.answers import Reference
from onward.training.reinforcement.policy import PolicyGradient, PolicyOptions
from onward.training.reinforcement.policy_losses import (
    clipped,
    gae,
    group_advantages,
    kl_estimate,
    leave_one_out,
    reduced,
    value_loss,
    whitened,
)
from onward.training.rewards.reward import reward_of
from onward.training.run.run import Run
from onward.training.step.optimizer import optimizers
from onward.training.step.trainer import StepConfig, StepPlan, Trainer
from onward.transforms.heads import VALUE, add_head, head_labels
from onward.transforms.lora import LoRA, add_lora

from support.finetuning import base_model, config, write_rows
from support.runs import assert_same_run, metrics

REDUCTIONS = "grpo", "bnpo", "dr_grpo", "dapo"


def case() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities, older ones, those of a reference, a mask (6, 5) and rewards (6,) in groups of 3."""
    torch.manual_seed(0)
    logprobs = (torch.randn(6, 5, dtype=torch.float64) - 2).requires_grad_()
    old, reference = (logprobs.detach() + torch.randn(6, 5, dtype=torch.float64) * 0.3 for _ in range(2))
    mask = (torch.arange(5) < torch.tensor([[5], [3], [1], [4], [2], [5]])).double()
    return logprobs, old, reference, mask, torch.tensor([1.0, 0.0, 0.5, 2.0, 2.0, -1.0], dtype=torch.float64)


def ours(reduction: Any, kl: float) -> tuple[Tensor, Tensor]:
    """The loss and its gradient."""
    logprobs, old, reference, mask, rewards = case()
    per_token, _ = clipped(logprobs, old, group_advantages(rewards, 3)[:, None], 0.2, 0.28)
    total, count = reduced(per_token + kl * kl_estimate(logprobs, reference), mask, reduction, 7)
    loss = total / count
    return loss, torch.autograd.grad(loss, logprobs)[0]


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_grpo_is_the_formula_in_fp64(reduction: str) -> None:
    logprobs, old, reference, mask, rewards = case()
    groups = rewards.view(2, 3)
    advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()
    total, lengths = [0.0] * 6, mask.sum(1).tolist()
    for i in range(6):
        for t in range(int(lengths[i])):
            ratio, a = math.exp(logprobs[i, t].item() - old[i, t].item()), advantages[i].item()
            difference = (reference[i, t] - logprobs[i, t]).item()
            surrogate = min(ratio * a, min(max(ratio, 0.8), 1.28) * a)
            total[i] += -surrogate + 0.1 * (math.exp(difference) - difference - 1)
    wanted = {
        "grpo": sum(s / n for s, n in zip(total, lengths)) / 6,
        "bnpo": sum(total) / sum(lengths),
        "dr_grpo": sum(total) / (6 * 7),
        "dapo": sum(total) / sum(lengths),
    }[reduction]
    assert math.isclose(ours(reduction, 0.1)[0].item(), wanted, rel_tol=1e-12)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_grpo_is_that_of_trl(reduction: str) -> None:
    trainer = pytest.importorskip("trl.trainer.grpo_trainer", reason="install trl to compare losses with it")
    logprobs, old, reference, mask, rewards = case()
    fake = their_trainer(logprobs, loss_type=reduction, beta=0.1, epsilon_low=0.2, epsilon_high=0.28)
    inputs = their_inputs(mask) | {"advantages": group_advantages(rewards, 3), "old_per_token_logps": old}
    inputs |= {"ref_per_token_logps": reference, "num_items_in_batch": mask.sum()}
    loss = trainer.GRPOTrainer._compute_loss(fake, None, inputs)
    mine, gradient = ours(reduction, 0.1)
    assert math.isclose(mine.item(), loss.item(), rel_tol=1e-6)
    torch.testing.assert_close(gradient, torch.autograd.grad(loss, logprobs)[0], rtol=1e-5, atol=1e-12)


def test_rloo_is_that_of_trl() -> None:
    trainer = pytest.importorskip("trl.trainer.rloo_trainer", reason="install trl to compare losses with it")
    logprobs, old, _, mask, rewards = case()
    advantages, sums = leave_one_out(rewards, 3), ((logprobs * mask).sum(1), (old * mask).sum(1))
    assert torch.allclose(advantages[0], rewards[0] - rewards[1:3].mean())
    fake = their_trainer(logprobs, epsilon_low=0.2, epsilon_high=0.2)
    loss = trainer.RLOOTrainer._compute_loss(
        fake, None, their_inputs(mask) | {"advantages": advantages, "old_logps": sums[1]}
    )
    mine = clipped(*sums, advantages, 0.2, 0.2)[0].mean()
    assert math.isclose(mine.item(), loss.item(), rel_tol=1e-6)
    both = [torch.autograd.grad(one, logprobs, retain_graph=True)[0] for one in (mine, loss)]
    torch.testing.assert_close(*both, rtol=1e-5, atol=1e-12)


class Anything(SimpleNamespace):
    """Attributes of a trainer that do not matter are 0, and so is what they return."""

    def __getattr__(self, name: str) -> Any:
        return None


def their_trainer(logprobs: Tensor, **options: Any) -> Any:
    """What the losses of TRL read of their trainer."""
    same = lambda tensor, *_, **__: tensor
    fake = Anything(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None),
        args=Anything(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        accelerator=Anything(num_processes=1, gather=same, reduce=same, gather_for_metrics=same),
        model=Anything(training=True),
        _metrics={"train": __import__("collections").defaultdict(list)},
        **{"beta": 0.0, "top_entropy_quantile": 1.0, "importance_sampling_level": "token", **options},
    )
    fake.current_gradient_accumulation_steps, fake.max_completion_length = 1, 7
    fake._entropy_bonus_enabled = fake.aux_loss_enabled = fake.use_vllm = False
    return fake


def their_inputs(mask: Tensor) -> dict[str, Any]:
    ids = torch.zeros(6, 5, dtype=torch.long)
    return {"prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids, "completion_mask": mask}


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
        loss, _ = clipped(logprobs, old, advantages[:, None], 0.2, 0.2)
        assert not torch.autograd.grad(loss.sum(), logprobs)[0].any()


DIGITS = train_tokenizer("char", ["0123456789+="])


def prompts(texts: list[str], tokenizer: Tokenizer = DIGITS, seed: int = 0) -> Batch:
    """Prompts that end at =, with their answers."""
    rows = torch.tensor([tokenizer.encode(text) for text in texts])
    targets = torch.full_like(rows[:, 1:], IGNORE_INDEX)
    targets[:, -1] = rows[:, -1]
    return Batch(rows[:, :-1], targets, seed=seed)


def learner(loss: PolicyGradient, rate: float, seed: int, **sizes: Any) -> Trainer:
    torch.manual_seed(seed)
    sizes = {"d_model": 256, "n_layers": 1, "n_heads": 4, "context_length": 8} | sizes
    model = Decoder(DecoderConfig(vocab_size=DIGITS.vocab_size, **sizes))
    if loss.options.method == "ppo":
        add_head(model, VALUE)
    optimizer = optimizers(model, "adamw", rate, 0.0, (0.9, 0.99))
    return Trainer(model, optimizer, lambda step: rate * min(1, (step + 1) / 10), StepConfig(1.0), loss=loss)


def learned(seed: int, steps: int, count: int, samples: int, highest: int, enough: float) -> tuple[float, float, float]:
    """The mean reward of the first three and of the last five steps at sums modulo 10 of digits, after at most `steps`
    of them or once that is `enough`, and the largest difference between log-probabilities of engine and trainer."""
    loss = PolicyGradient(PolicyOptions(samples=samples, completion_length=1), DIGITS, reward_of("exact"))
    trainer, generator = learner(loss, 1e-3, seed), torch.Generator().manual_seed(seed)
    rewards, gap = list[float](), 0.0
    for step in range(steps):
        pairs = torch.randint(highest + 1, (count, 2), generator=generator).tolist()
        batch = prompts([f"{a}+{b}={(a + b) % 10}" for a, b in pairs], seed=seed * 1000 + step)
        figures = trainer.train_step(StepPlan([batch])).figures
        rewards.append(figures["reward"])
        gap = max(gap, figures["logprob_gap"])
        if step > 8 and sum(rewards[-5:]) / 5 >= enough:
            break
    return sum(rewards[:3]) / 3, sum(rewards[-5:]) / 5, gap


@pytest.mark.parametrize(
    ("seed", "steps", "count", "samples", "highest", "reached"),
    [
        (0, 30, 8, 8, 1, 0.8),
        *(pytest.param(seed, 200, 64, 16, 9, 0.9, marks=pytest.mark.long) for seed in range(3)),
    ],
)
def test_grpo_learns_sums_modulo_ten(
    seed: int, steps: int, count: int, samples: int, highest: int, reached: float
) -> None:
    first, last, gap = learned(seed, steps, count, samples, highest, reached)
    assert first <= 0.2
    assert last >= reached
    assert gap < 1e-4


@pytest.mark.parametrize("method", ["rloo", "ppo"])
def test_rloo_and_ppo_learn_to_give_a_digit(method: Any) -> None:
    options = PolicyOptions(method=method, samples=8, completion_length=2, iterations=2 if method == "ppo" else 1)
    loss = PolicyGradient(options, DIGITS, reward_of("regex(pattern='7.*')"))
    trainer = learner(loss, 3e-3, 0, d_model=32)
    rewards = [
        trainer.train_step(StepPlan([prompts(["1+1=2", "2+3=5"], seed=step)])).figures["reward"] for step in range(35)
    ]
    assert sum(rewards[:3]) / 3 < 0.4
    assert sum(rewards[-5:]) / 5 > 0.8


@pytest.mark.parametrize("adapters", [False, True])
def test_kl_is_from_the_model_at_the_start(adapters: bool) -> None:
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(vocab_size=DIGITS.vocab_size, d_model=32, n_layers=1, n_heads=2, context_length=8))
    start = Decoder(model.config)
    start.load_state_dict(model.state_dict())
    if adapters:
        add_lora(model, LoRA(rank=2))
    options = PolicyOptions(samples=2, completion_length=2, kl=0.1)
    loss = PolicyGradient(options, DIGITS, reward_of("exact"), Reference(lambda: start))
    trainer = Trainer(model, optimizers(model, "adamw", 1e-2, 0.0, (0.9, 0.99)), lambda step: 1e-2, loss=loss)
    kl = [trainer.train_step(StepPlan([prompts(["1+1=2"], seed=step)])).figures["kl"] for step in range(4)]
    assert abs(kl[0]) < 1e-9
    assert kl[-1] > 1e-6


@pytest.mark.parametrize("method", ["grpo", "ppo"])
def test_a_run_of_reinforcement_resumes_exactly_and_logs_its_figures(method: str, tmp_path: Path) -> None:
    base = base_model(tmp_path / "base")
    rows = [{"prompt": f"{i} + {i % 7}?", "answer": str(i + i % 7)} for i in range(12)]
    data = write_rows(tmp_path / "sums.jsonl", rows)
    options = {"method": method, "reward": "length(characters=3)", "samples": 2, "completion_length": 4, "steps": 4}
    options |= {"kl": 0.1, "iterations": 3} if method == "ppo" else {}  # stopped between steps with the same samples
    list(Run.start(config(base, data, tmp_path / "whole", **options)).train())
    run = Run.start(config(base, data, tmp_path / "run", **options))
    for _ in run.train(stop=lambda: run.step == 2):
        pass
    list(Run.resume(run.folder).train())
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    assert head_labels(onward.load(run.folder).model) == (VALUE if method == "ppo" else ())
    samples = [json.loads(line) for line in (tmp_path / "whole/samples.jsonl").read_text().splitlines()]
    assert samples == [json.loads(line) for line in (run.folder / "samples.jsonl").read_text().splitlines()]
    assert {row["step"] for row in samples} == {3, 4}
    assert all(row.keys() == {"step", "prompt", "text", "reward", "trained"} for row in samples)
    logged = metrics(tmp_path / "whole")[0]
    assert {"reward", "length", "ended", "entropy", "clip_share", "logprob_gap"} <= logged.keys()
    assert onward.load(run.folder).tokenizer is not None
    (tmp_path / "nan.py").write_text("def nan(p, c, a): return [float('nan')] * len(c)\n")
    broken = config(base, data, tmp_path / "broken", **options | {"reward": f"{tmp_path / 'nan.py'}:nan"})
    with pytest.raises(UserError, match="the reward nan returned nan"):
        list(Run.start(broken).train())
    with pytest.raises(UserError, match="reward is missing"):
        config(base, data, tmp_path / "none", method="rloo")
    assert json.loads((tmp_path / "whole" / "run.json").read_text())["method"] == method


def test_prompts_that_are_cut_leave_room_for_a_completion(tmp_path: Path) -> None:
    base = base_model(tmp_path / "base")
    data = write_rows(tmp_path / "long.jsonl", [{"prompt": f"{i} + 3? " * 60, "answer": "4 " * 60} for i in range(4)])
    options = {"method": "grpo", "reward": "exact", "samples": 2, "completion_length": 4, "too_long": "cut", "steps": 1}
    run = Run.start(config(base, data, tmp_path / "run", **options, validation="none", template=""))
    list(run.train())
    (row, *_) = metrics(tmp_path / "run")
    assert row["length"] == 1
    batch = run.inputs.windows(run.config, 96).read([0])
    assert int((batch.targets[0] == IGNORE_INDEX).long().argmin()) == 94, "95 tokens of the prompt"
    assert batch.num_targets > 60, "and the whole answer"
