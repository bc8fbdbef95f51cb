"""Fine-tuning compared with TRL and PEFT: tokens per second of SFT, with LoRA and without, steps per second of GRPO,
and memory.

    python -m benchmarks.finetune [--rounds 2] [--precision bf16]

A decoder of about 30 M parameters (8 layers, width 384, 6 heads, vocabulary 16,000, random weights) is trained on the
same batches by Onward and by TRL (with PEFT for LoRA): SFT on 4 sequences of 256 tokens, GRPO on 4 prompts with 8
completions of 32 tokens each. Both sides take turns, each task in a separate process, which reports the median time of
its steps after the first, and its peak memory. If a library is not installed, the benchmark prints its name and leaves
it out.
"""

import argparse
import importlib.util
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

import onward
from onward import StepConfig, StepPlan, Trainer, train_tokenizer
from onward.training import GRPO, Completion, PolicyGradient, Reward, optimizers

CONFIG = onward.DecoderConfig(vocab_size=16_000, d_model=384, n_layers=8, n_heads=6, d_ff=1536, context_length=512)
TASKS = {"sft": "SFT, all weights", "lora": "SFT, LoRA of rank 16", "grpo": "GRPO"}
PEERS = {"sft": ("trl",), "lora": ("trl", "peft"), "grpo": ("trl",)}
WARM = 1  # number of steps that are not timed
ROWS, LENGTH = 4, 256  # number of rows of SFT, and of tokens of a row
PROMPTS, SAMPLES, COMPLETION = 4, 8, 32  # number of prompts of GRPO, of completions of each, and of their tokens
PROMPT = "The quick brown fox jumps over the lazy dog, and "


def main(argv: list[str] | None = None, config: onward.DecoderConfig = CONFIG) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2, help="number of runs of each library (default: 2)")
    parser.add_argument("--steps", type=int, default=3, help="number of timed steps per run (default: 3)")
    parser.add_argument(
        "--precision", default="bf16", choices=["fp32", "bf16"], help="precision of both sides (default: bf16)"
    )
    parser.add_argument("--child", nargs=3, metavar=("SIDE", "TASK", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        side, task, folder = options.child
        seconds = list((ours if side == "onward" else theirs)(task, folder, options.steps + WARM, options.precision))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print("\n" + json.dumps({"seconds": median(seconds[WARM:]), "memory": peak}))
        return
    sides = {task: ["onward", *["trl"] * all(map(importlib.util.find_spec, PEERS[task]))] for task in TASKS}
    for task, peers in PEERS.items():
        if len(sides[task]) == 1:
            missing = [peer for peer in peers if not importlib.util.find_spec(peer)]
            print(f"{TASKS[task]}: {' and '.join(missing)} not installed, left out")
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        onward.save(onward.LanguageModel(onward.Decoder(config), train_tokenizer("byte", [])), folder)
        words = ["--steps", str(options.steps), "--precision", options.precision, "--child"]
        for _ in range(options.rounds):
            for task, several in sides.items():
                for side in several:
                    command = [sys.executable, "-m", "benchmarks.finetune", *words, side, task, folder]
                    done = subprocess.run(command, capture_output=True, text=True)
                    if done.returncode:
                        raise SystemExit(f"{side} failed at {task}:\n{done.stderr[-2000:]}")
                    found.setdefault((task, side), []).append(json.loads(done.stdout.splitlines()[-1]))
    print_table(found)


def print_table(found: dict[tuple[str, str], list[dict[str, float]]]) -> None:
    """Print, for each task, each side's highest speed and lowest memory, and the ratio of Onward's speed to TRL's."""
    print(f"{'':24}{'onward':>12}{'trl':>12}{'ratio':>8}{'memory':>22}")
    for task, name in TASKS.items():
        if (task, "onward") not in found:
            continue
        unit, work = ("steps/s", 1.0) if task == "grpo" else ("tokens/s", float(ROWS * LENGTH))
        both = [
            (work / min(turn["seconds"] for turn in turns), min(turn["memory"] for turn in turns))
            for side in ("onward", "trl")
            if (turns := found.get((task, side)))
        ]
        shown = "".join(f"{speed:12,.{2 if task == 'grpo' else 0}f}" for speed, _ in both)
        ratio = f"{both[0][0] / both[1][0]:8.2f}" if len(both) == 2 else ""
        memory = " | ".join(f"{peak:,.0f}" for _, peak in both) + " MiB"
        print(f"{f'{name} ({unit})':24}{shown}{ratio}{memory:>22}")


@dataclass(frozen=True)
class Characters(Reward, kind="characters"):
    """The number of characters of a completion."""

    def score(self, completion: Completion) -> float:
        return float(len(completion.text))


def sequences() -> torch.Tensor:
    """The batch of SFT, (ROWS, LENGTH + 1): the first token is not a target."""
    return torch.randint(256, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(0))


def ours(task: str, folder: str, steps: int, precision: Any) -> Iterator[float]:
    lm = onward.load(folder)
    if task == "lora":
        onward.add_lora(lm.model, onward.LoRA(16))
    if task == "grpo":
        rule = GRPO(samples=SAMPLES, completion_length=COMPLETION)
        loss = PolicyGradient(rule, lm.text(), Characters())
        rows = torch.tensor([[*lm.text().encode(PROMPT), 0]] * PROMPTS)
        targets = torch.full_like(rows[:, 1:], -100)
        targets[:, -1] = 0
        plan = lambda step: StepPlan([onward.Batch(rows[:, :-1], targets, seed=step)])
    else:
        loss, batch = None, sequences()
        plan = lambda step: StepPlan([onward.Batch(batch[:, :-1], batch[:, 1:])])
    made = optimizers(lm.model, "adamw", 1e-4, 0.0, (0.9, 0.999))
    trainer = Trainer(lm.model, made, lambda step: 1e-4, StepConfig(1.0, precision), loss=loss)
    for step in range(steps):
        yield trainer.train_step(plan(step)).seconds


def theirs(task: str, folder: str, steps: int, precision: str) -> list[float]:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    common: dict[str, Any] = {
        "output_dir": str(Path(folder) / "trl"),
        "max_steps": steps,
        "learning_rate": 1e-4,
        "lr_scheduler_type": "constant",
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "no",
        "use_cpu": True,
        "bf16": precision == "bf16",
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    began, seconds = [0.0], list[float]()

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            began[0] = perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds.append(perf_counter() - began[0])

    make: Callable[[], Any]
    if task == "grpo":
        from trl import GRPOConfig, GRPOTrainer

        size = {"per_device_train_batch_size": PROMPTS * SAMPLES, "num_generations": SAMPLES}
        config = GRPOConfig(**common, **size, max_completion_length=COMPLETION)
        reward = lambda completions, **_: [float(len(text)) for text in completions]
        data = Dataset.from_list([{"prompt": PROMPT}] * (PROMPTS * steps))
        make = lambda: GRPOTrainer(model, reward, config, data, processing_class=tokenizer, callbacks=[Clock()])
    else:
        from trl import SFTConfig, SFTTrainer

        lora = None
        if task == "lora":
            from peft import LoraConfig

            lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        config = SFTConfig(**common, per_device_train_batch_size=ROWS, max_length=None)
        data = Dataset.from_list([{"input_ids": row} for row in sequences().tolist()] * steps)
        make = lambda: SFTTrainer(
            model, config, train_dataset=data, processing_class=tokenizer, peft_config=lora, callbacks=[Clock()]
        )
    make().train()
    return seconds


if __name__ == "__main__":
    main()
