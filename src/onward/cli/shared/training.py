"""Train a run with its display: start or resume it, print its figures and the usual next commands."""

import os
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from shlex import quote
from time import perf_counter
from typing import TYPE_CHECKING, Any

from rich.text import Text

from onward.base import fields
from onward.base.alone import ALONE
from onward.base.files import read_json
from onward.cli.shared.output import console, print_json, print_next
from onward.cli.shared.progress import progress_bars
from onward.cli.shared.signals import Requests, Say, signals
from onward.cli.shared.sources import announce, skipped_in
from onward.training.config import RunConfig
from onward.training.finetuning.config import FinetuneConfig
from onward.training.presets import MINI, unnamed_changes

if TYPE_CHECKING:
    from onward.model.decoder import Decoder
    from onward.text.tokenizer import Tokenizer
    from onward.training.run.run import Run

OK, LOOK = ("ok    ", "green"), ("look  ", "red")


def in_processes(command: Callable[[], int], remedy: str = "go on with --resume") -> int:
    """Run a command. Errors of processes that torchrun started are printed as one report, which ends with `remedy` if a
    process was lost. The command may silence the console while it runs."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until there is something to save
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return command()
    from onward.parallel.failures import one_report
    from onward.parallel.launch import Launch

    with one_report(remedy=remedy):
        Launch.meet().check_command(sys.argv[1:])
        try:
            return command()
        finally:
            console.quiet = False


def run_command(config: RunConfig | Path, as_json: bool, mesh: str = "") -> int:
    """Start a run or resume the one in a folder, train it, and print its figures. The time of a new run counts from
    this call. `mesh` replaces the mesh of a resumed run unless it is ""."""
    began = perf_counter()
    if (left := after_restart(config)) is None:
        return 0
    config = left
    if isinstance(config, RunConfig) and os.environ.get("RANK", "0") == "0":
        announce([*config.sources, config.validation])
    from onward.training.run.lock import keeping
    from onward.training.run.run import Run

    with keeping():
        if isinstance(config, Path):
            run = Run.resume(config, mesh=mesh)
        else:
            with progress_bars() as progress:
                run = Run.start(config, sample=continue_text, progress=progress, began=began)
    status = train(run)
    if status or run.processes.rank:
        return status
    if as_json:
        print_json(read_json(run.folder / "result.json"))
    print_next(*next_commands(run))
    return 0


def after_restart(config: RunConfig | Path) -> RunConfig | Path | None:
    """Return `config` or, after torchrun has restarted the processes, the folder of the run if it has a save; None if
    the run has finished."""
    from onward.checkpoint.saves.folder import saves
    from onward.training.run.lock import of_this_job, this_job
    from onward.training.run.together import joined

    folder = Path(config.out) if isinstance(config, RunConfig) else config
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if not (this_job() or restarts):
        return config
    processes = joined() or ALONE
    if this_job():  # torchrun counts restarts per machine, without those due to a joining machine
        restarts = int(processes.agreed(lambda: str(restarts or int(of_this_job(folder)))))
    if not restarts:
        return config
    if processes.agreed(lambda: "finished" if (folder / "result.json").exists() else "") == "finished":
        if not processes.rank:
            console.print(f"the run in {folder} has finished", markup=False, soft_wrap=True)
        return None
    begun = processes.agreed(lambda: "begun" if saves(folder) else "") == "begun"
    return folder if begun else config


def next_commands(run: "Run") -> list[str]:
    from onward.generation.drafts.paced import is_small

    named, imports = quote(str(run.folder)), fields.import_options(run.config.imports)
    method = run.config.method.kind if isinstance(run.config, FinetuneConfig) else ""
    if method == "reward":
        pairs = f"onward evaluate {named} pairs.jsonl{imports}"
        return [pairs, f"onward finetune MODEL prompts.jsonl --method grpo --reward {named}{imports}"]
    if method == "classify":
        examples = f"onward evaluate {named} examples.jsonl{imports}"
        return [examples, f"""python -c 'import onward; print(onward.load("{run.folder}").classify(["a text"]))'"""]
    if method == "draft" and is_small(run.model.config):  # a small model uses a draft head only on request
        return [f'onward generate {quote(run.config.base)} "Once upon" --draft {named}{imports}']
    if method == "draft":
        named = quote(run.config.base)
    speak = f"onward chat {named}" if run.tokenizer.templates else f'onward generate {named} "Once upon"'
    return [f"{speak}{imports}", f"onward evaluate {named} other.txt{imports}"]


def continue_text(model: "Decoder", tokenizer: "Tokenizer") -> None:
    """Generate a validation's text once before training, so that a run with a time limit can measure how long the
    generation takes."""
    from onward.api.language_model import LanguageModel
    from onward.cli.shared.display import sample_text

    sample_text(LanguageModel(model, tokenizer), [0])


def train(run: "Run") -> int:
    """Train a run with its display until its end or a signal, and write its report."""
    folder, first = run.folder, not run.processes.rank
    say: Say = partial(console.print, markup=False, soft_wrap=True) if first else lambda sentence: None
    # torchrun forwards Ctrl-C, which the terminal has already sent to each process
    with signals(Requests(say, interrupts=1 if run.processes.count == 1 else 2)) as requests:
        describe(run, say)
        follow(run, requests, say)
    from onward.reports.runs.write import conclude, write_reports

    if not run.ended:
        say(f"\nStopped and saved at step {run.step:,}.")
        if first:
            write_reports(folder, device=run.device)
            say(f"report: {folder / 'report.html'}")
        say(f"To go on: onward train --resume {quote(str(folder))}{fields.import_options(run.config.modules)}")
        return 128 + requests.signal
    if not first and not run.processes.divides:
        return 0
    if result := conclude(run):
        tokens = result["tokens"]
        extent = "all " if tokens >= len(run.inputs.validation or ()) - 1 else ""
        say(f"\nvalidation {' | '.join(in_words(result))} | {run.progress.seconds:.0f} s")
        say(
            f"(over {extent}{tokens:,} validation tokens in fp32; during the run over about "
            f"{min(tokens, run.config.validation_tokens):,} of them in {run.config.precision})"
        )
    say(f"report: {folder / 'report.html'}")
    return 0


def in_words(result: dict[str, Any]) -> list[str]:
    """The figures of an evaluation as texts such as "loss 1.2345", without counts."""
    figures = {name.replace("_", " "): value for name, value in result.items() if isinstance(value, float)}
    return [f"{name} {fields.decimal(value, 2 if name == 'perplexity' else 4)}" for name, value in figures.items()]


def describe(run: "Run", say: Say) -> None:
    """Print the sizes of model and data, and the results of the checks before training."""
    from onward.training.run.checks import start_checks
    from onward.training.run.progress import expected_steps, steps_in_words

    folder, inputs = run.folder, run.inputs
    if unknown := inputs.unknown_characters:
        say(f"{unknown:,} characters are unknown to the tokenizer and were read as \ufffd")
    for source in run.config.sources:
        if skipped := skipped_in(source, folder):
            say(skipped)
    if inputs.cut_documents and run.config.pack == "documents":
        say("the validation text begins inside a document, because no document begins near the split")
    many = run.trainer.processes
    weights = many.whole_parameters(run.model).values() if many else run.model.parameters()
    parameters = sum(p.numel() for p in weights)
    say(
        f"{parameters:,} parameters, {inputs.tokens:,} training tokens, {steps_in_words(run)} "
        f"{'step' if expected_steps(run) == 1 else 'steps'}, "
        f"{run.config.precision} on {run.device}, into {folder}"
    )
    if many:
        from onward.training.run.arrangement import in_words

        say(in_words(run.config, run.model.config, many.mesh))
    if run.choice:
        say(str(run.choice))
    config, changes = run.config, run.config.model
    sizes = {name: changes[name] for name in MINI if name in changes} if config.dialed else {}
    if not config.base and (unnamed := unnamed_changes(config.preset, run.model.config, changes, sizes)):
        say(f"in addition to your options, the preset is changed in: {'; '.join(unnamed)}")
    for check in start_checks(run.model, run.planner.first_batch(), inputs.train, inputs.validation, fresh=run.fresh):
        say(Text.assemble(OK if check.ok else LOOK, check.sentence))
    examine(run, say)


def examine(run: "Run", say: Say) -> None:
    """Run the fast checks of `onward doctor` before the first step, unless the model is divided or not trained, and
    print their failures; they do not stop the run."""
    frozen = isinstance(run.config, FinetuneConfig) and run.config.method.beside
    if run.step or run.processes.divides or frozen:
        return
    import torch

    from onward.inspection.doctor.checks import CHEAP, doctor

    with torch.compiler.set_stance("force_eager"):
        findings = doctor(run.model, checks=CHEAP, fresh=run.fresh)
    failed = [finding for finding in findings if finding.status == "failed"]
    for finding in failed:
        where = f", {finding.where}" if finding.where else ""
        say(Text.assemble(LOOK, f"{finding.check}: {finding.what}{where}; {finding.mend}"))
    if not failed:
        say(Text.assemble(OK, f"{len(findings)} doctor checks found no problems in the model"))


def follow(run: "Run", requests: "Requests", say: Say) -> None:
    """Train a run and show its progress, until it ends or a signal has asked to stop."""
    from onward.cli.shared.display import Display
    from onward.training.run.events import Notice, Rollback

    with nullcontext() if run.processes.rank else Display(run) as display:
        for event in run.train(requests.stop, requests.save):
            if isinstance(event, Notice):
                say(event.sentence)
            elif isinstance(event, Rollback):
                say(
                    f"step {event.failed_step:,} failed ({event.reason}): back to step {event.step:,}, skipping "
                    f"windows {event.skipped[0]:,} to {event.skipped[1] - 1:,}, see {run.folder / 'skipped.jsonl'}"
                )
            elif display:
                display.show(event)
