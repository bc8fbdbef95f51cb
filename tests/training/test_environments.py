"""Completions with several turns: the environment replies, its tokens are not trained, and models learn to use a
tool."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onward import (
    Batch,
    Decoder,
    DecoderConfig,
    Run,
    StepConfig,
    StepPlan,
    Tokenizer,
    Trainer,
    UserError,
    train_tokenizer,
)
from onward.base import fields
from onward.data import IGNORE_INDEX
from onward.text import Chat, with_template
from onward.training import GRPO, Completion, Environment, PolicyGradient, optimizers, reward_of
from onward.training.environments.calculator import Calculator, calculated
from onward.training.environments.environment import reply_tokens
from onward.training.losses.completions import prompts_of
from onward.training.reinforcement.replay import Question, Replay

from support.finetuning import base_model, config, tokenizer, write_rows
from support.runs import assert_same_run, metrics

TEXT = train_tokenizer("char", ["0123456789+=?#"])  # the character # ends a turn
CHARS = Tokenizer(TEXT.inner, eos="#")


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 + 3", "5"),
        ("2 * (3 - 4) / 8", "-0.25"),
        ("7 // 2 % 2", "1"),
        ("-1e3", "-1000"),
        ("1 / 0", "error"),
        ("2 ** 9", "error"),
        ("9e15", "9e+15"),
        ("9e14 * 9", "error"),
        ("__import__('os')", "error"),
        ("True + 1", "error"),
        ("1 +", "error"),
        ("(" * 150 + ")" * 40, "error"),
        ("1" * 300, "error"),
    ],
)
def test_calculator_computes_arithmetic_alone(expression: str, value: str) -> None:
    assert calculated(expression) == value


@given(st.text())
def test_calculator_replies_to_any_text(text: str) -> None:
    assert isinstance(calculated(text), str)


def test_a_turn_without_an_expression_ends_the_completion() -> None:
    reply = lambda turn: Calculator().reply(Completion("", turn, turns=[turn]))
    assert reply("I say calc(2 + 3) or calc(4)") == "= 4\n"
    assert reply("I say 5") is None


def test_replies_with_a_role_continue_the_conversation() -> None:
    names = with_template(tokenizer(), "chatml")
    chat = Chat(names)
    talk = [{"role": "user", "content": "2?"}, {"role": "assistant", "content": "calc"}]
    [made] = chat.conversations(talk)
    turn = made.tokens[: len(made.trained) - made.trained[::-1].index(True)]
    assert turn[-1] in names.end_ids
    assert turn + reply_tokens(names, "tool", "5") == chat.encode([*talk, {"role": "tool", "content": "5"}])
    with pytest.raises(UserError, match=r"environment\.role is 'tool', which needs a chat template"):
        reply_tokens(tokenizer(), "tool", "5")


def model_of(seed: int) -> Decoder:
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"d_model": 64, "n_layers": 2, "n_heads": 4, "context_length": 16}
    return Decoder(DecoderConfig(vocab_size=CHARS.vocab_size, **sizes))


def asked(pairs: list[tuple[int, int]], seed: int) -> Batch:
    rows = torch.tensor([CHARS.encode(f"{a}+{b}={a + b}") for a, b in pairs])
    targets = torch.full_like(rows[:, 1:], IGNORE_INDEX)
    targets[:, -1] = rows[:, -1]
    return Batch(rows[:, :-1], targets, seed=seed)


def test_tokens_of_replies_are_read_and_not_trained() -> None:
    rule = GRPO(
        samples=4, completion_length=12, environment=Calculator(begin="", end="#", before="7", after="=", turns=3)
    )
    loss = PolicyGradient(rule, CHARS, reward_of("length(characters=2)"))
    loss.replier = lambda completions: ["77="] * len(completions)
    [batch] = loss.rollouts(model_of(0), [asked([(1, 2), (3, 4)], 0)])
    replies = 0
    for tokens, targets, (prompt, answer) in zip(batch.tokens.tolist(), batch.targets.tolist(), prompts_of(batch)):
        text = [*prompt, *answer]
        assert tokens[: len(text) - 1] == text[:-1]
        inside = [i for i in range(len(prompt), len(text)) if targets[i - 1] == IGNORE_INDEX]
        assert all(targets[i - 1] in (text[i], IGNORE_INDEX) for i in range(len(prompt), len(text)))
        replies += len(inside)
        assert CHARS.decode([text[i] for i in inside]) == "77=" * (len(inside) // 3)
        assert all(text[i - 1] == CHARS.eos_id for i in inside[::3]), "a reply follows an end token"
    assert replies > 0
    total, _, figures = loss(model_of(0), batch)
    assert total.isfinite()
    assert figures["logprob_gap"].item() / batch.divisor < 1e-4


@dataclass(frozen=True)
class Secret(Calculator, kind="secret"):
    """If a turn ends with ?, replies with the answer, which the prompt does not contain."""

    def reply(self, completion: Completion) -> str | None:
        return f"={completion.answer}" if completion.turns[-1].endswith("?") else None


def learned_tool(seed: int, steps: int) -> tuple[float, float]:
    """The mean rewards of the first three and the last five steps. The model is first trained on conversations that ask
    (?), receive a digit, and end with one of three random digits; then it is rewarded for writing the digit that it
    received."""
    model, generator = model_of(seed), torch.Generator().manual_seed(seed)
    digits = lambda rows, count: torch.randint(3, (rows, count), generator=generator).tolist()
    trainer = Trainer(model, optimizers(model, "adamw", 3e-3, 0.0, (0.9, 0.99)), lambda step: 3e-3)
    for step in range(40):
        rows = torch.tensor([CHARS.encode(f"{a}+{b}=?#={c}{d}#", special=False) for a, b, c, d in digits(32, 4)])
        rows[rows == TEXT.encode("#")[0]] = CHARS.end_ids[0]
        targets = rows[:, 1:].clone()
        targets[:, [0, 1, 2, 5, 6]] = IGNORE_INDEX  # tokens of the prompt and the reply
        trainer.train_step(StepPlan([Batch(rows[:, :-1], targets, seed=step)]))
    rule = GRPO(samples=16, completion_length=6, environment=Secret(turns=2))
    loss = PolicyGradient(rule, CHARS, reward_of("exact"))
    made = optimizers(model, "adamw", 1e-3, 0.0, (0.9, 0.99))
    trainer = Trainer(model, made, lambda step: 1e-3 * min(1, (step + 1) / 10), StepConfig(1.0), loss=loss)
    rewards = list[float]()
    for step in range(steps):
        rows = torch.tensor([CHARS.encode(f"{a}+{b}={c}") for a, b, c in digits(12, 3)])
        targets = torch.full_like(rows[:, 1:], IGNORE_INDEX)
        targets[:, -1] = rows[:, -1]
        figures = trainer.train_step(StepPlan([Batch(rows[:, :-1], targets, seed=seed * 1000 + step)])).figures
        rewards.append(figures["reward"])
        if step > 8 and sum(rewards[-5:]) / 5 >= 0.9:
            break
    return sum(rewards[:3]) / 3, sum(rewards[-5:]) / 5


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_a_model_learns_to_use_the_reply_of_a_tool(seed: int) -> None:
    first, last = learned_tool(seed, 150)
    assert first <= 0.45
    assert last >= 0.9


def test_a_function_of_the_user_replies(tmp_path: Path) -> None:
    (tmp_path / "talk.py").write_text(
        "def reply(prompts, completions, answers, turns, level):\n"
        "    return [f'{len(t)}{l}' if c else None for c, t, l in zip(completions, turns, level)]\n"
        "def number(prompts, completions, answers): return [1] * len(prompts)\n"
    )
    completions = [Completion("", text, columns={"level": 3}, turns=[text]) for text in ("a", "")]
    opened = fields.part(Environment, f"{tmp_path}/talk.py:reply", "environment").open()
    assert opened(completions) == ["13", None]
    with pytest.raises(UserError, match=r"the environment number replied 1\.0: return a text, or None"):
        fields.part(Environment, f"{tmp_path}/talk.py:number", "environment").open()(completions)


@pytest.mark.long
def test_a_run_with_an_environment_and_replay_resumes_exactly(tmp_path: Path) -> None:
    base = base_model(tmp_path / "base")
    rows = [{"prompt": f"{i} + {i % 7}?", "answer": str(i + i % 7)} for i in range(12)]
    data = write_rows(tmp_path / "sums.jsonl", rows)
    (tmp_path / "talk.py").write_text("def reply(prompts, completions, answers): return [' 12'] * len(prompts)\n")
    options = {"method": "grpo", "reward": "length(characters=3)", "samples": 2, "completion_length": 12, "steps": 4}
    options |= {"environment": f"{tmp_path}/talk.py:reply", "replay": 5, "batch_size": 2, "validation": "none"}
    list(Run.start(config(base, data, tmp_path / "whole", **options)).train())
    run = Run.start(config(base, data, tmp_path / "run", **options))
    for _ in run.train(stop=lambda: run.step == 2):
        pass
    list(Run.resume(run.folder).train())
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    assert "zero_spread" in metrics(tmp_path / "run")[0]


def test_replay_keeps_the_newest_prompts_that_can_be_learned_from() -> None:
    questions = [Question((i,), columns={"level": i}) for i in range(5)]
    replay = Replay(3)
    for question, deviation in zip(questions, (1.0, 0.5, 0.0, 2.0, 1e-9)):
        replay.note(question, deviation)
    assert list(replay.deviations) == [questions[1], questions[3], questions[4]]
    assert sorted(q.prompt for q in replay.draw(9, 0)) == [(1,), (3,), (4,)]
    drawn = [replay.draw(1, seed)[0] for seed in range(200)]
    assert drawn == [replay.draw(1, seed)[0] for seed in range(200)]
    assert drawn.count(questions[3]) > drawn.count(questions[1]) > drawn.count(questions[4])
    replay.note(questions[3], 0.0)
    again = Replay(3)
    again.load_state(replay.state())
    assert again.deviations == replay.deviations
    assert [q.columns for q in again.deviations] == [{"level": 1}, {"level": 4}]


def test_groups_of_equal_rewards_are_replaced_by_earlier_prompts() -> None:
    loss = PolicyGradient(GRPO(samples=4, completion_length=2, replay=4), CHARS, reward_of("regex(pattern='[0-4].*')"))
    model = model_of(0)
    [first] = loss.prepare(model, [asked([(1, 2), (3, 4)], 1)])
    kept = list(loss.replay.deviations)
    assert kept, "some rewards differ"
    loss.reward = type(loss.reward)(reward_of("exact"), CHARS)  # none of these completions gets this reward
    [second] = loss.prepare(model, [asked([(0, 9), (9, 0)], 2)])
    prompts = {tuple(prompt) for prompt, _ in prompts_of(second)}
    assert prompts & {question.prompt for question in kept}
    assert first.rewards.std() > 0
