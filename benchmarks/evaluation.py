"""Tasks of lm-evaluation-harness and the loss on a long text, computed by transformers and by Onward.

    python -m benchmarks.evaluation [--questions 2]

Ten multiple-choice tasks with five few-shot examples, from files that this command writes: five tasks use the same
examples for every question (as in MMLU), the others draw examples for each question (as in ARC). The decoder has the
shape of Llama with 124 M parameters (12 layers, width 768, 12 heads, 4 key/value heads, feed-forward of 2,048,
vocabulary 32,000; random weights), in bf16 on both sides, with two threads. Each side runs in a separate process, whose
peak memory is measured.
"""

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

import onward
from onward import LanguageModel, train_tokenizer

CONFIG = onward.DecoderConfig(
    vocab_size=32_000, d_model=768, n_layers=12, n_heads=12, n_kv_heads=4, d_ff=2048, context_length=1024
)
TASKS, EXAMPLES, THREADS, BATCH = 10, 5, 2, 8
SIDES = "transformers", "onward"
YAML = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{train: {folder}/{name}-train.jsonl, test: {folder}/{name}.jsonl}}}}
training_split: train
test_split: test
fewshot_split: train
fewshot_config: {{sampler: {sampler}}}
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: acc}}]
"""


def words(rng: random.Random, count: int) -> str:
    syllable = lambda: rng.choice("bcdfghklmnprstvw") + rng.choice("aeiou")
    return " ".join("".join(syllable() for _ in range(rng.randint(1, 3))) for _ in range(count))


def write_files(folder: Path, questions: int, config: onward.DecoderConfig) -> None:
    rng = random.Random(0)
    (folder / "text.txt").write_text("\n".join(words(rng, 12) + "." for _ in range(questions * 60)), encoding="utf-8")
    tokenizer = train_tokenizer("bpe:2000", [(folder / "text.txt").read_text("utf-8")])
    torch.manual_seed(0)
    model = onward.Decoder(config).to(torch.bfloat16)
    onward.save(LanguageModel(model, tokenizer, {"model_type": "llama"}), folder / "model")
    for i in range(TASKS):
        for name, count in (f"task{i}", questions), (f"task{i}-train", 20):
            rows = [
                {
                    "question": f"Question: {words(rng, 12 + 2 * i)}?\nAnswer:",
                    "choices": [words(rng, 5) for _ in range(4)],
                    "answer": 0,
                }
                for _ in range(count)
            ]
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        sampler = "first_n" if i < TASKS // 2 else "default"
        (folder / f"task{i}.yaml").write_text(YAML.format(name=f"task{i}", folder=folder, sampler=sampler))


def run(side: str, folder: Path) -> dict[str, Any]:
    import datasets
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    warnings.simplefilter("ignore")
    datasets.disable_progress_bars()
    torch.set_num_threads(THREADS)
    lm: Any
    if side == "onward":
        from onward.harness import HarnessModel

        model = onward.load(folder / "model", torch.bfloat16, "cpu")
        lm = HarnessModel(model, progress=lambda *_: None)
    else:
        from lm_eval.models.huggingface import HFLM

        lm = HFLM(pretrained=str(folder / "model"), device="cpu", dtype="bfloat16", batch_size=BATCH)
    manager = TaskManager(include_defaults=False)
    tasks: list[Any] = [str(folder / f"task{i}.yaml") for i in range(TASKS)]
    ask = lambda tasks, limit: simple_evaluate(
        lm, tasks=tasks, num_fewshot=EXAMPLES, task_manager=manager, bootstrap_iters=0, limit=limit, verbosity="ERROR"
    )
    ask(tasks[:1], 1)
    memory_before, start = peak(), perf_counter()
    if side == "onward":
        lm.kept.results.clear()
    samples = ask(tasks, None)["samples"]
    seconds, memory = perf_counter() - start, peak()
    found = [value for task in samples.values() for one in task for [[value, _]] in one["resps"]]
    text = (folder / "text.txt").read_text("utf-8")
    start = perf_counter()
    loss = model.evaluate(text).loss if side == "onward" else loss_of(lm.model, lm.tokenizer(text)["input_ids"])
    return {
        "seconds": seconds,
        "memory": memory,
        "before": memory_before,
        "found": found,
        "loss": loss,
        "loss_seconds": perf_counter() - start,
        "loss_memory": peak(),
    }


@torch.inference_mode()
def loss_of(model: Any, tokens: list[int]) -> float:
    """The mean loss of tokens under a model of transformers, in windows of its context, four in a batch."""
    length, batch = CONFIG.context_length, 4
    total = count = 0.0
    tokens = [0, *tokens]
    starts = range(0, len(tokens) - 1, length)
    for i in range(0, len(starts), batch):
        rows = [tokens[start : start + length + 1] for start in starts[i : i + batch]]
        width = max(map(len, rows))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        targets = torch.tensor([row[1:] + [-100] * (width - len(row)) for row in rows])
        logits = model(ids[:, :-1]).logits.float()
        total += torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").item()
        count += sum(len(row) - 1 for row in rows)
    return total / count


def peak() -> int:
    """The peak memory of this process, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def main(argv: list[str] | None = None, config: onward.DecoderConfig = CONFIG) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=2, help="number of questions of each task (default: 2)")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.side:
        print(json.dumps(run(options.side, options.folder)))
        return
    with tempfile.TemporaryDirectory() as name:
        write_files(Path(name), options.questions, config)
        results = []
        for side in SIDES:
            command = [sys.executable, "-m", "benchmarks.evaluation", "--side", side, "--folder", name]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            results.append(json.loads(done.stdout.splitlines()[-1]))
    theirs, ours = results
    print(f"{'':14}{'tasks (s)':>10}{'peak, MiB':>10}{'loss (s)':>10}{'peak, MiB':>10}")
    for side, one in zip(SIDES, results):
        figures = f"{one['seconds']:10.1f}{one['memory']:10,}{one['loss_seconds']:10.2f}{one['loss_memory']:10,}"
        print(f"{side:14}{figures}")
    ratios = (theirs[key] / ours[key] for key in ("seconds", "memory", "loss_seconds", "loss_memory"))
    print(f"{'ratio':14}" + "".join(f"{ratio:10.2f}" for ratio in ratios))
    differences = [abs(one - other) for one, other in zip(theirs["found"], ours["found"], strict=True)]
    print(
        f"\n{len(differences)} log-likelihoods, of mean {sum(theirs['found']) / len(differences):.1f}: they differ by"
    )
    print(f"{max(differences):.2f} at most (bf16); losses {theirs['loss']:.4f} and {ours['loss']:.4f}")


if __name__ == "__main__":
    main()
