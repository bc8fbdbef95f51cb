"""Complete requests with and without the model's draft head, in turns; the texts must be equal.

    onward finetune MODEL DATA --method draft
    python -m benchmarks.draft_head MODEL --prompt "Once upon a time" --prompt "One day"

With --widen 12, stories260K is as slow as a model of 33 M parameters, and writes the same stories.

Printed for each temperature: wall-clock time and CPU time per token, from the best round of each request, and the ratio
plain / draft.
"""

import argparse
import os
from collections import defaultdict
from pathlib import Path
from time import perf_counter, process_time

PROMPTS = "Once upon a time", "One day, a little boy named Tim", "Lily and her mom went to the park.", "The cat was"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a model with a draft head")
    parser.add_argument("--prompt", action="append", help="a prompt; may be given several times")
    parser.add_argument("--new", type=int, default=200, help="number of tokens of an answer")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--widen", type=int, default=1, help="measure the model at this multiple of its width")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # before torch is imported

    import onward
    from onward.checkpoint.draft_heads import draft_of, is_draft_head
    from onward.generation.drafts.paced import is_small

    folder = Path(options.model)
    if not is_draft_head(folder / "draft"):
        raise SystemExit(f"{options.model} has no draft head: train one with onward finetune --method draft")
    lm = onward.load(options.model)
    if lm.draft_head is None:
        lm.draft_head = draft_of(folder / "draft", folder, lm.model)
    if options.widen > 1:
        from benchmarks.widened import widened

        lm = widened(lm, options.widen)
    if is_small(lm.config):
        print("for a model of this size, drafts are off by default; this benchmark turns them on")
    print(f"{sum(p.numel() for p in lm.model.parameters()):,} weights")
    kinds = {"plain": 0, "draft": None}
    for temperature in options.temperatures:
        best: defaultdict[tuple[str, int, str], float] = defaultdict(lambda: float("inf"))
        tokens: dict[tuple[str, int], list[int]] = {}
        steps: dict[tuple[str, int], int] = {}
        for _ in range(options.rounds):
            for number, prompt in enumerate(options.prompt or PROMPTS):
                for kind, lookup in kinds.items():
                    start = perf_counter(), process_time()
                    [[answer]] = lm.complete(prompt, options.new, temperature=temperature, seed=number, lookup=lookup)
                    for clock, now, then in zip(("clock", "cpu"), (perf_counter(), process_time()), start):
                        best[kind, number, clock] = min(best[kind, number, clock], now - then)
                    tokens[kind, number], steps[kind, number] = answer.tokens, answer.steps
        numbers = range(len(options.prompt or PROMPTS))
        assert all(tokens["plain", n] == tokens["draft", n] for n in numbers), "a draft changed a text"
        total = {(kind, clock): sum(best[kind, n, clock] for n in numbers) for kind, clock in KEYS}
        count = sum(len(tokens["plain", n]) for n in numbers)
        per_step = count / sum(steps["draft", n] for n in numbers)
        for clock in "clock", "cpu":
            plain, draft = total["plain", clock], total["draft", clock]
            print(
                f"temperature {temperature}, {clock}: plain {plain / count * 1e6:.0f} us/token, draft "
                f"{draft / count * 1e6:.0f}, ratio {plain / draft:.2f}; {per_step:.2f} tokens per step"
            )


KEYS = [(kind, clock) for kind in ("plain", "draft") for clock in ("clock", "cpu")]

if __name__ == "__main__":
    main()
