"""Two-digit addition, learned badly from examples and well from rewards.

A character model of 405,888 parameters is first trained on 600 sums with their results (supervised fine-tuning), then
on other sums without results. In this second stage, it samples 16 answers to each sum; a correct answer gets a reward
of 1, and GRPO makes correct answers likelier than wrong answers to the same sum (Shao et al., arXiv:2402.03300).
Accuracy is measured on the likeliest answer to sums that neither stage has seen. --out writes the curve as a picture
(.svg, .png, .html). Takes a few minutes.
"""

import argparse
import random
from pathlib import Path

import torch

import onward
from onward import Batch, Loss, Request, StepConfig, StepPlan, Trainer, train_tokenizer
from onward.data import IGNORE_INDEX
from onward.reports import Picture, curves
from onward.training import GRPO, PolicyGradient, optimizers, reward_of

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--sft-steps", type=int, default=250, help="steps of supervised fine-tuning (default: 250)")
parser.add_argument("--steps", type=int, default=200, help="steps of GRPO (default: 200)")
parser.add_argument("--sums", type=int, default=64, help="sums per step in both stages (default: 64)")
parser.add_argument("--seed", type=int, default=0, help="seed of weights, sums and samples (default: 0)")
parser.add_argument("--out", default="", help="file of the picture (default: the terminal)")
options = parser.parse_args()

tokenizer = train_tokenizer("char", ["0123456789+=\n"])
pairs = [(a, b) for a in range(100) for b in range(100)]
random.Random(options.seed).shuffle(pairs)
shown, held_out, others = pairs[:600], pairs[600:1100], pairs[1100:]
torch.manual_seed(options.seed)
model = onward.Decoder(
    onward.DecoderConfig(tokenizer.vocab_size, d_model=128, n_layers=2, n_heads=4, context_length=12)
)


def batch_of(sums: list[tuple[int, int]], seed: int) -> Batch:
    """Sums of two-digit numbers, such as 07+35=042; the targets are the digits of the result."""
    rows = torch.tensor([tokenizer.encode(f"{a:02}+{b:02}={a + b:03}") for a, b in sums])
    targets = rows[:, 1:].clone()
    targets[:, :5] = IGNORE_INDEX
    return Batch(rows[:, :-1], targets, seed=seed)


def accuracy() -> float:
    """Return the fraction of held-out sums whose likeliest answer is right."""
    engine, likeliest = onward.Engine(model), onward.Sampling(temperature=0)
    requests = [engine.add(Request(tokenizer.encode(f"{a:02}+{b:02}="), likeliest, 3)) for a, b in held_out]
    engine.finish()
    answers = [tokenizer.decode(request.tokens) for request in requests]
    return sum(answer == f"{a + b:03}" for answer, (a, b) in zip(answers, held_out)) / len(held_out)


def trainer(rate: float, loss: Loss | None = None) -> Trainer:
    """Return a trainer whose learning rate warms up over 20 steps."""
    made = optimizers(model, "adamw", rate, 0.0, (0.9, 0.99))
    return Trainer(model, made, lambda step: rate * min((step + 1) / 20, 1), StepConfig(clip=1.0), loss=loss)


parameters = sum(p.numel() for p in model.parameters())
print(f"{parameters:,} parameters; {len(shown)} sums with results, {len(others):,} without, {len(held_out)} held out")
choose = random.Random(options.seed)
sft = trainer(3e-3)
for step in range(options.sft_steps):
    sft.train_step(StepPlan([batch_of(choose.sample(shown, options.sums), step)]))
right = [accuracy()]
print(f"after supervised fine-tuning: {right[0]:.1%} of the held-out sums are right", flush=True)

loss = PolicyGradient(GRPO(samples=16, completion_length=3), tokenizer, reward_of("exact"))
grpo, rewards, every = trainer(5e-4, loss), list[float](), max(1, options.steps // 20)
for step in range(options.steps):
    plan = StepPlan([batch_of(choose.sample(others, options.sums), options.sft_steps + step)])
    rewards.append(grpo.train_step(plan).figures["reward"])
    if (step + 1) % every == 0:
        right.append(accuracy())
        reward = sum(rewards[-every:]) / every
        print(f"step {step + 1:4}: {reward:.1%} of the samples, {right[-1]:.1%} of the held-out sums", flush=True)
print(f"after GRPO: {right[-1]:.1%} of the held-out sums are right")
picture = Picture(
    "Addition from rewards",
    f"The share of held-out sums that are right, by steps of GRPO, after fine-tuning on {len(shown)} sums.",
    [curves("accuracy", [i * every for i in range(len(right))], {"held-out sums": right}, x_name="step")],
)
if options.out:
    picture.write(Path(options.out))
else:
    print(f"\n{picture.text()}")
