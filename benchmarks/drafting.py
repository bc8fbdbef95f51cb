"""Complete requests with the default drafts, and without drafts: code edits, summaries and replies with
quotations, and texts that quote nothing.

    python -m benchmarks.drafting --model 30M --dtype bfloat16 --rounds 5

No trained model of these sizes is available here. The model therefore has random weights, and its answers are forced
(`forced_tokens`): changed files of this repository, summaries and replies that quote its documentation, and plays. The
times are those of a model of this shape, and the acceptance rate is that of a model that writes exactly these texts.
For an edit, the prompt is the complete file before the change, with the commit message, and the answer is the file
after it; other prompts are excerpts of 2,500 characters. stories260K, if its files exist, is a trained model and writes
its own stories. Each request runs alternately with and without drafts.
"""

import argparse
import random
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

import torch

import onward
from benchmarks.decode.models import CONFIG, random_model
from benchmarks.decode.tables import Table, in_turns
from benchmarks.text import SHARED, machine, shakespeare

ROOT = Path(__file__).parents[1]
SIZES = {
    "30M": onward.DecoderConfig(vocab_size=8192, d_model=512, n_layers=8, n_heads=8, context_length=2048),
    "124M": CONFIG,
}
STORY = 250  # number of tokens of a story
Pair = tuple[str, str]  # prompt and answer


def git(*words: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True).stdout


def edits() -> Iterator[Pair]:
    """Files of Onward before and after changes, with the commit message of each change."""
    for commit in git("log", "--format=%H", "-300", "HEAD").split():
        files = git("diff-tree", "--no-commit-id", "--name-only", "-r", "--diff-filter=M", commit).split()
        if len(files) == 1 and files[0].startswith("src") and files[0].endswith(".py"):
            before, after = git("show", f"{commit}~:{files[0]}"), git("show", f"{commit}:{files[0]}")
            reason = git("show", "-s", "--format=%s", commit)
            if 1500 < len(before) < 4000:
                yield f"{before}\n# {reason}\n", after


def pages() -> Iterator[str]:
    """Excerpts of Onward's documentation pages."""
    for page in sorted((ROOT / "docs").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        if len(text) > 5000:
            start = random.Random(page.name).randrange(len(text) - 4500)
            yield text[start : start + 4500]


def summaries() -> Iterator[Pair]:
    for text in pages():
        said = [part.strip() for part in text[:2500].replace("\n", " ").split(". ") if 60 < len(part) < 250]
        if len(said) > 4:
            answer = f'The text makes three points. First: "{said[1]}". It goes on: "{said[2]}", which matters here. '
            yield text[:2500] + "\n\nSummarize with quotations.\n", answer + f'In the end, "{said[-1]}".'


def replies() -> Iterator[Pair]:
    for text in pages():
        lines = [line for line in text[:2500].split("\n") if len(line) > 60]
        if len(lines) > 6:
            quoted = ["\n".join(f"> {line}" for line in part) for part in (lines[:2], lines[3:5])]
            answer = f"{quoted[0]}\n\nI agree.\n\n{quoted[1]}\n\nThis is not clear to me: what happens otherwise?"
            yield text[:2500] + "\n\nAnswer point by point.\n", answer


def prose() -> Iterator[Pair]:
    for text in pages():
        yield text[:2500], text[2500:3500]


def plays() -> Iterator[Pair]:
    text, draws = "".join(shakespeare()), random.Random(1)
    while True:
        start = draws.randrange(len(text) - 4500)
        yield text[start : start + 2500], text[start + 2500 : start + 3500]


KINDS = {
    "code edit": edits,
    "summary with quotations": summaries,
    "reply with quotations": replies,
    "page": prose,
    "play": plays,
}
STORIES = "stories260K"


def compared(lm: onward.LanguageModel, requests: list[tuple[list[int], dict[str, object]]], rounds: int) -> list[float]:
    """The time without drafts divided by the time with drafts: the median over the rounds, the ratio of the best times,
    and the ratio of the lowest CPU times; then tokens per step, and the fraction of draft tokens that were accepted."""
    done: dict[str, list[onward.Completion]] = {}

    def run(name: str) -> tuple[float, float]:
        lookup = 0 if name == "without" else None
        start, cpu = perf_counter(), process_time()
        done[name] = [lm.complete([prompt], lookup=lookup, seed=1, **options)[0][0] for prompt, options in requests]  # type: ignore[arg-type]
        return perf_counter() - start, process_time() - cpu

    times = in_turns({name: partial(run, name) for name in ("without", "with")}, rounds)
    assert [one.tokens for one in done["with"]] == [one.tokens for one in done["without"]], "a draft changed a text"
    total = lambda name: sum(getattr(one, name) for one in done["with"])
    tokens = sum(len(one.tokens) for one in done["with"])
    ratios = [a / b for (a, _), (b, _) in zip(times["without"], times["with"])]
    least = lambda name, kind: min(each[kind] for each in times[name])
    best = [least("without", kind) / least("with", kind) for kind in (0, 1)]
    return [median(ratios), *best, tokens / total("steps"), total("num_accepted") / max(total("num_drafted"), 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SIZES, default="30M")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "int8", "int4"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--texts", type=int, default=4, help="number of texts of each kind")
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS, STORIES], default=[*KINDS, STORIES])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(machine())
    columns = ["request", "speed-up", "of the best times", "in CPU time", "tokens per step", "accepted"]
    table = Table(f"Drafts by default, {options.model} in {options.dtype}", columns)
    files = [file.read_text(encoding="utf-8") for file in [*ROOT.glob("docs/*.md"), *ROOT.glob("src/onward/*/*.py")]]
    tokenizer = onward.train_tokenizer("bpe:8192", [*files, *shakespeare()])
    model = random_model(SIZES[options.model])
    if options.dtype != "float32":
        model = model.to(torch.bfloat16)
    if options.dtype in ("int8", "int4"):
        from onward.transforms.quantize import quantize_model

        quantize_model(model, options.dtype)
    lm = onward.LanguageModel(model, tokenizer)
    for kind, texts in ((kind, KINDS[kind]) for kind in options.kinds if kind in KINDS):
        pairs = [pair for pair, _ in zip(texts(), range(options.texts))]
        requests = [
            (tokenizer.encode(prompt), {"forced_tokens": answer, "max_new_tokens": len(answer)})
            for prompt, answer in ((prompt, tokenizer.encode(answer)) for prompt, answer in pairs)
        ]
        table.rows.append([kind, *compared(lm, requests, options.rounds)])
        print(table.rows[-1], flush=True)
    folder = SHARED / "stories260K"
    if STORIES in options.kinds and folder.exists():
        stories = onward.load(folder, device="cpu")
        for temperature in 0.0, 0.8:
            begins = ["Once upon a time", "Lily had a red ball.", "One day, Tom and", "The dog was sad because"]
            requests = [
                (stories.text().encode(text), {"temperature": temperature, "max_new_tokens": STORY}) for text in begins
            ]
            table.rows.append([f"{STORIES}, temperature {temperature}", *compared(stories, requests, options.rounds)])
    print(table.as_text())


if __name__ == "__main__":
    main()
