"""onward quickstart --assistant: from the quickstart's model to one that answers questions about Python."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onward.cli.commands.train import continue_text, train
from onward.cli.shared.output import console, printable
from onward.cli.shared.progress import progress_bars
from onward.data.questions import answers, asked, conversations, preferences, question, write_rows
from onward.errors import UserError
from onward.text.chat import chat_of
from onward.training.config import seconds
from onward.training.finetuning.config import FinetuneConfig, MethodName

if TYPE_CHECKING:
    from onward.language_model import LanguageModel
    from onward.training.run.run import Run

TEMPLATE, HELD_OUT = "plain", 10  # every tenth question is held out
STAGES: dict[MethodName, tuple[str, float, float]] = {  # what is learned, its share of --time, learning rate
    "sft": ("answers to questions", 0.65, 1.5e-3),
    "dpo": ("which of two answers is right", 0.35, 5e-4),
}
ENDS, MOST = 32, 48  # held-out questions that are answered, and tokens of an answer


def folders(base: Path) -> dict[MethodName, Path]:
    """The run of each stage after the first."""
    return {method: base.with_name(f"{base.name}-{method}") for method in STAGES}


def teach(base: Path, time: str, device: str) -> tuple[int, list[dict[str, Any]]]:
    """Fine-tune the model of a quickstart; return the exit status, and the figures of each stage."""
    known = answers()
    held_out = dict([*known.items()][HELD_OUT - 1 :: HELD_OUT])
    trained = {name: answer for name, answer in known.items() if name not in held_out}
    names = ["str.split", "list.append", next(iter(held_out))]
    console.print(f"\n{len(known):,} questions about Python and their answers, of which {len(held_out):,} are held out")
    shown(base, names, held_out, known)
    runs: dict[str, Run] = {}
    before = base
    for method, folder in folders(base).items():
        what, share, rate = STAGES[method]
        rows = conversations if method == "sft" else preferences
        files = [base / f"{method}-{part}.jsonl" for part in ("train", "held-out")]
        for file, part in zip(files, (trained, held_out)):
            write_rows(file, rows(part))
        console.print(f"\nLearning {what} ({method}).")
        config = FinetuneConfig(
            base=str(before),
            sources=(str(files[0]),),
            validation=str(files[1]),
            out=str(folder),
            method=method,
            template=TEMPLATE if method == "sft" else "",
            time=f"{max(1.0, share * seconds(time)):g}s",
            learning_rate=rate,
            device=device,
        )
        runs[method] = start(config)
        if status := train(runs[method]):
            return status, []
        shown(folder, names, held_out, known)
        before = folder
    return 0, [*figures(base, runs, held_out)]


def start(config: FinetuneConfig) -> "Run":
    from onward.training.run.run import Run

    with progress_bars() as progress:
        return Run.start(config, sample=continue_text, progress=progress)


def chatty(folder: Path) -> "LanguageModel":
    """A model with the template of this page, which the pre-trained one lacks."""
    import onward
    from onward.text.templates import with_template

    lm = onward.load(folder)
    lm.tokenizer = with_template(lm.text(), TEMPLATE)
    return lm


def shown(folder: Path, names: list[str], held_out: Mapping[str, str], known: Mapping[str, str]) -> None:
    """Print questions with the model's answers and the right ones."""
    lm = chatty(folder)
    for name in names:
        where = "held out" if name in held_out else "in the training data"
        console.print(f"\n{question(name)} [dim]({where})[/dim]", style="bold")
        text = lm.chat(question(name), MOST, temperature=0.0)
        console.print(printable(" ".join(text.split())), markup=False)
        console.print(f"right: {known.get(name, '')}", style="dim", markup=False)


def figures(base: Path, runs: Mapping[str, "Run"], held_out: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """The figures of each stage on held-out questions."""
    from onward.training.methods import METHODS
    from onward.training.step.loss import CrossEntropy

    ranking = METHODS["simpo"].loss(FinetuneConfig(base=str(base), method="simpo"))  # by the model's own probabilities
    for stage, folder in {"pre-training": base, **{name: run.folder for name, run in runs.items()}}.items():
        lm = chatty(folder)
        prompts = [[*chat_of(lm.text()).encode(asked(name))] for name in [*held_out][:ENDS]]
        done = [answer.finish_reason for (answer,) in lm.complete(prompts, MOST, temperature=0.0)]
        yield {
            "stage": stage,
            "loss_of_answers": runs["sft"].inputs.evaluate(lm.model, lm.text(), CrossEntropy())["loss"],
            "right_answer_preferred": runs["dpo"].inputs.evaluate(lm.model, lm.text(), ranking)["accuracy"],
            "answers_that_end": done.count("stop") / len(done),
        }


def check_free(base: Path) -> list[Path]:
    """The folders of an earlier --assistant, which are replaced; a UserError if one holds something else."""
    from onward.files import read_json

    found = [folder for folder in folders(base).values() if folder.exists()]
    for folder in found:
        options = read_json(folder / "run.json") if (folder / "run.json").exists() else {}
        if not str(options.get("sources", [""])[0]).startswith(str(base)):
            raise UserError(f"{folder} holds something other than a quickstart: choose another --out")
    return found
