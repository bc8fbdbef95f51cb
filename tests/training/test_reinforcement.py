"""Reinforcement learning: losses compared with TRL and with formulas in fp64, completions by the engine, and toy tasks
that are learned."""

import json
import math
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

import onward
from onward import (
    Batch,
    Decoder,
    DecoderConfig,
    LoRA,
    Run,
    StepConfig,
    StepPlan,
    Tokenizer,
    Trainer,
    UserError,
    add_lora,
    train_tokenizer,
)
from onward.data import IGNORE_INDEX
from onward.training import GRPO, PPO, PolicyGradient, optimizers, reward_of
from onward.training.losses.answers import Reference
from onward.transforms import add_head
from onward.transforms.heads import VALUE, head_labels

from support.finetuning import base_model, config, write_rows
from support.finetuning import method as method_of
from support.runs import assert_same_run, metrics

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
    if isinstance(loss.method, PPO):
        add_head(model, VALUE)
    optimizer = optimizers(model, "adamw", rate, 0.0, (0.9, 0.99))
    return Trainer(model, optimizer, lambda step: rate * min(1, (step + 1) / 10), StepConfig(1.0), loss=loss)


def learned(
    seed: int, steps: int, count: int, samples: int, highest: int, enough: float, kind: str = "grpo"
) -> tuple[float, float, float]:
    """Learn sums of digits modulo 10, for at most `steps` steps or until the mean reward reaches `enough`; return the
    mean reward of the first three and of the last five steps, and the largest difference between the log-probabilities
    of engine and trainer."""
    rule = method_of(kind, samples=samples, completion_length=1)
    loss = PolicyGradient(rule, DIGITS, reward_of("exact"))
    trainer, generator = learner(loss, 1e-3, seed), torch.Generator().manual_seed(seed)
    start = deepcopy(trainer.model)
    loss.reference = Reference(lambda _: start)
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
    ("kind", "seed", "steps", "count", "samples", "highest", "reached"),
    [
        *((kind, 0, 30, 8, 8, 1, 0.8) for kind in ("grpo", "gspo", "cispo", "sapo", "online_dpo")),
        *(
            pytest.param(kind, seed, 200, 64, 16, 9, 0.9, marks=pytest.mark.long)
            for kind in ("grpo", "gspo", "cispo", "online_dpo")
            for seed in range(3)
        ),
    ],
)
def test_models_learn_sums_modulo_ten_from_rewards(
    kind: str, seed: int, steps: int, count: int, samples: int, highest: int, reached: float
) -> None:
    first, last, gap = learned(seed, steps, count, samples, highest, reached, kind)
    assert first <= 0.2
    assert last >= reached
    assert gap < 1e-4


@pytest.mark.parametrize("method", ["rloo", "ppo"])
def test_rloo_and_ppo_learn_to_give_a_digit(method: Any) -> None:
    rule = method_of(method, samples=8, completion_length=2, iterations=2 if method == "ppo" else 1)
    loss = PolicyGradient(rule, DIGITS, reward_of("regex(pattern='7.*')"))
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
        add_lora(model, LoRA(rank=2, alpha=32.0))
    loss = PolicyGradient(
        GRPO(samples=2, completion_length=2, kl=0.1), DIGITS, reward_of("exact"), Reference(lambda _: start)
    )
    trainer = Trainer(model, optimizers(model, "adamw", 1e-2, 0.0, (0.9, 0.99)), lambda step: 1e-2, loss=loss)
    kl = [trainer.train_step(StepPlan([prompts(["1+1=2"], seed=step)])).figures["kl"] for step in range(4)]
    assert abs(kl[0]) < 1e-9
    assert kl[-1] > 1e-6


@pytest.mark.long
@pytest.mark.parametrize("method", ["grpo", "ppo", "online_dpo"])
def test_a_run_of_reinforcement_resumes_exactly_and_logs_its_figures(method: str, tmp_path: Path) -> None:
    base = base_model(tmp_path / "base")
    rows = [{"prompt": f"{i} + {i % 7}?", "answer": str(i + i % 7)} for i in range(12)]
    data = write_rows(tmp_path / "sums.jsonl", rows)
    options = {"method": method, "reward": "length(characters=3)", "samples": 2, "completion_length": 4, "steps": 4}
    # so that the run is stopped between steps with the same samples
    options |= {"kl": 0.1, "iterations": 3} if method == "ppo" else {}
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
    assert {*method_of(method).reports} <= logged.keys()
    if method == "online_dpo":  # the base has dropout, which training does not use
        assert logged["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert onward.load(run.folder).tokenizer is not None
    (tmp_path / "nan.py").write_text("def nan(p, c, a): return [float('nan')] * len(c)\n")
    broken = config(base, data, tmp_path / "broken", **options | {"reward": f"{tmp_path / 'nan.py'}:nan"})
    with pytest.raises(UserError, match="the reward nan returned nan"):
        list(Run.start(broken).train())
    with pytest.raises(UserError, match="rloo needs a reward"):
        config(base, data, tmp_path / "none", method="rloo")
    assert json.loads((tmp_path / "whole" / "run.json").read_text())["method"]["kind"] == method


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
