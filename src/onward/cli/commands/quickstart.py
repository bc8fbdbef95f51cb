"""onward quickstart: train, evaluate, generate and look, all in one, without any file."""

from collections.abc import Sequence
from dataclasses import dataclass
from shlex import quote

from onward.cli.shared.options import parse
from onward.cli.shared.output import console, print_json, print_next, print_table, printable

ABOUT = """\
Train a small decoder on text that every Python brings along, and watch noise become words.

examples:
  onward quickstart
  onward quickstart --time 30s --out runs/quick
  onward quickstart --assistant
"""


@dataclass(frozen=True)
class Options:
    """How long, and where to."""

    out: str = "runs/quickstart"  # folder of the run; an earlier quickstart in it is replaced
    time: str = "140s"  # how long to train
    assistant: bool = False  # then learn to answer questions about Python: two more runs, in as much time again
    json: bool = False  # print the final figures as JSON


def main(argv: Sequence[str]) -> int:
    options = parse(Options, argv, prog="onward quickstart", about=ABOUT)
    import shutil
    from pathlib import Path

    import onward
    from onward.cli.commands.assistant import check_free, folders, teach
    from onward.cli.commands.train import continue_text, train
    from onward.cli.shared.progress import progress_bars
    from onward.errors import UserError
    from onward.files import read_json
    from onward.training.config import RunConfig
    from onward.training.run.lock import run_lock
    from onward.training.run.run import Run

    folder = Path(options.out)
    config = RunConfig(sources=("embedded",), out=options.out, time=options.time, prompt="Return the")
    stale = check_free(folder) if options.assistant else []
    if folder.exists():
        earlier = read_json(folder / "run.json") if (folder / "run.json").exists() else {}
        if (earlier.get("sources"), earlier.get("prompt")) != (["embedded"], config.prompt):
            raise UserError(f"{folder} holds something other than a quickstart: choose another --out")
        with run_lock(folder):
            shutil.rmtree(folder)
    for old in stale:
        shutil.rmtree(old)
    console.print("Training a decoder on the documentation inside this Python.")
    with progress_bars() as progress:
        run = Run.start(config, sample=continue_text, progress=progress)
    if status := train(run):
        return status
    if options.assistant:
        status, figures = teach(folder, options.time, config.device)
        if status:
            return status
        (print_json if options.json else print_table)(figures)
        print_next(f"onward chat {quote(str(folders(folder)['dpo']))}")
        return 0
    lm = onward.load(folder)
    for prompt in "Return the", "This function", "Raise an exception if":
        console.print(f"\n{prompt}", style="bold", end="")
        for piece in lm.stream(prompt, 80, slide=True, temperature=0.7, seed=1):
            console.print(printable(piece), end="", markup=False)
        console.print()
    if options.json:
        print_json(read_json(folder / "result.json"))
    print_next(
        f'onward generate {quote(options.out)} "Return a list of"',
        f"onward verify {quote(options.out)}",
        f"onward evaluate {quote(options.out)} README.md",
        "onward train mybook.txt --out runs/mybook",
    )
    return 0
