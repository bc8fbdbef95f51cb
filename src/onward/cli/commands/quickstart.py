"""onward quickstart: train a small decoder and generate text in one command, without any file."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from time import perf_counter
from typing import TYPE_CHECKING

from onward.base.alone import ALONE, Alone
from onward.base.files import read_json
from onward.cli.shared.options import parse
from onward.cli.shared.output import console, print_json, print_next, print_table, printable
from onward.cli.shared.progress import progress_bars
from onward.cli.shared.training import continue_text, in_processes, train
from onward.training.config import RunConfig

if TYPE_CHECKING:
    from onward.training.run.run import Run

ABOUT = """\
Train a small decoder on the documentation inside Python, and watch noise turn into words.

examples:
  onward quickstart
  onward quickstart --time 30s --out runs/quick
  onward quickstart --assistant
  torchrun --standalone --nproc-per-node 8 -m onward quickstart     on 8 GPUs
"""


@dataclass(frozen=True)
class Options:
    """The options of `onward quickstart`, which trains a small model in minutes."""

    out: str = "runs/quickstart"  # folder of the run; an earlier quickstart in this folder is replaced
    time: str = "140s"  # how long to train
    assistant: bool = False  # also train the model to answer questions about Python; two more runs double the time
    json: bool = False  # print the final figures as JSON


def main(argv: Sequence[str]) -> int:
    return in_processes(lambda: quickstart(argv), "give the same command again")


def quickstart(argv: Sequence[str]) -> int:
    """Processes share the work, and the first one prints the texts and figures."""
    options = parse(Options, argv, prog="onward quickstart", about=ABOUT)
    from onward.api.quickstart import make_room, pretraining
    from onward.training.run.together import joined

    processes = joined() or ALONE
    console.quiet = bool(processes.rank)
    config = pretraining(options.out, options.time, processes.count)
    with processes.first_before_others():
        if not processes.rank:
            make_room(config, assistant=options.assistant)
    console.print("Training a decoder on the documentation and the comments inside this Python.")
    if status := train(start(config)):
        return status
    if options.assistant:
        return assist(options, processes)
    return 0 if processes.rank else sample(options)


def start(config: RunConfig) -> "Run":
    """Start the run; its time counts from this call."""
    began = perf_counter()
    from onward.training.run.run import Run

    with progress_bars() as progress:
        return Run.start(config, sample=continue_text, progress=progress, began=began)


def sample(options: Options) -> int:
    import onward

    lm = onward.load(options.out)
    for prompt in "Return the", "This function", "Raise an exception if":
        console.print(f"\n{prompt}", style="bold", end="")
        for piece in lm.stream(prompt, 80, slide=True, temperature=0.7, seed=1):
            console.print(printable(piece), end="", markup=False)
        console.print()
    if options.json:
        print_json(read_json(Path(options.out) / "result.json"))
    print_next(
        f'onward generate {quote(options.out)} "Return a list of"',
        f"onward verify {quote(options.out)}",
        f"onward evaluate {quote(options.out)}",
        "onward train mybook.txt --out runs/mybook",
        f"onward serve {quote(options.out)}",
    )
    return 0


def assist(options: Options, processes: Alone) -> int:
    """Fine-tune the model in STAGES, and print answers before and after each stage in the first process."""
    from onward.api.quickstart import STAGES, finetuning, held_out_answers, stage_figures
    from onward.data.questions import answers

    folder, held_out, first = Path(options.out), held_out_answers(), not processes.rank
    console.print(f"\n{len(answers()):,} questions about Python with answers; {len(held_out):,} are held out")
    runs: dict[str, Run] = {}
    before = folder
    for stage in STAGES:
        if first:
            show_answers(before)
        console.print(f"\nLearning {stage.purpose} ({stage.method.kind}).")
        run = start(finetuning(stage, folder, before, options.time, processes.count))
        if status := train(run):
            return status
        runs[stage.method.kind], before = run, run.folder
    if first:
        show_answers(before)
        (print_json if options.json else print_table)([*stage_figures(folder, runs)])
    print_next(f"onward chat {quote(str(before))}", f"onward serve {quote(str(before))}")
    return 0


def show_answers(folder: Path) -> None:
    from onward.api.quickstart import MAX_TOKENS, held_out_answers, with_chat
    from onward.data.questions import answers, question

    lm, held_out = with_chat(folder), held_out_answers()
    for name in "str.split", "list.append", next(iter(held_out)):
        where = "held out" if name in held_out else "in the training data"
        console.print(f"\n{question(name)} [dim]({where})[/dim]", style="bold")
        text = lm.chat(question(name), MAX_TOKENS, temperature=0.0)
        console.print(printable(" ".join(text.split())), markup=False)
        console.print(f"correct answer: {answers().get(name, '')}", style="dim", markup=False)
