"""onward train: a model from text."""

import dataclasses
import os
import re
import signal
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, ClassVar, get_origin

from rich.text import Text

from onward import fields
from onward.cli.shared.options import read
from onward.cli.shared.output import console, print_json, print_next
from onward.cli.shared.progress import progress_bars
from onward.cli.shared.sources import announce, check_texts, skipped_in
from onward.errors import UserError
from onward.files import read_json
from onward.training.config import NUMBER, UNITS, RunConfig
from onward.training.presets import MINI, merge, unnamed_changes

if TYPE_CHECKING:
    from onward.model.decoder import Decoder
    from onward.text.tokenizer import Tokenizer
    from onward.training.run.run import Run

Say = Callable[[str | Text], None]  # prints a sentence, in the first process only

OK, LOOK = ("ok    ", "green"), ("look  ", "red")

ABOUT = """\
Train a decoder on text. The run folder is a Hugging Face folder that also holds what is needed to go on.

examples:
  onward train mybook.txt --out runs/mybook
  onward train notes/ 'more/*.md' talks.jsonl.gz --field body --time 10m
  onward train tinyshakespeare --tokenizer char --time 100s --out runs/shakespeare
  cat mybook.txt | onward train - --out runs/piped --epochs 3
  onward train mybook.txt --preset small --model.position learned --model.dropout 0.1
  onward train mybook.txt --preset llama-2-7b --model.d-model 256 --model.n-heads 8 --model.n-layers 4
  onward train mybook.txt --model.attention "(self(window=64), self)" --learning-rate 1e-3
  onward train prepared/web prepared/books --weights 0.7 --weights 0.3 --pack documents --optimizer muon --schedule wsd
  onward train mybook.txt --config myrun.toml
  onward train --resume runs/mybook
  onward train --from runs/mybook --steps 1000
  onward train more.txt --from runs/mybook --out runs/more
  torchrun --standalone --nproc-per-node 2 -m onward train mybook.txt --accumulation 4

SIGTERM saves and exits with 143, SIGHUP with 129, Ctrl-C with 130; SIGUSR1 saves and goes on. A run that was killed is
resumed from its newest save, and gives the weights that it would have given.

--preset takes tiny, mini, small, medium or a published release, which `onward models` lists, with new weights and the
tokenizer's vocabulary. Where its width or its heads change, what follows from them does too.

A TOML file for --config holds the same names: learning_rate = 1e-3, [model] n_layers = 8,
[model.position] kind = "rotary", theta = 500000.0. Options of the command line take precedence over it.
"""


@dataclasses.dataclass(frozen=True)
class Options(RunConfig):
    """A run's configuration, or where to read it from."""

    positional: ClassVar[tuple[str, ...]] = ("sources",)
    config: str = ""  # a TOML file with any of these options
    resume: str = ""  # the folder of a run to go on with; no other option then
    json: bool = False  # print the final figures as JSON


def configure(argv: Sequence[str]) -> tuple[RunConfig | Path, bool]:
    """The configuration of a new run, or the folder of the run to resume; and whether to print figures as JSON."""
    values = read(Options, join_duration(argv), prog="onward train", about=ABOUT)
    values, folder, as_json = given_options(values, RunConfig)
    if folder:
        return folder, as_json
    if "base" in values and (unused := values.keys() & {"preset", "model", "tokenizer"}):
        raise UserError(f"{' and '.join(sorted(unused))} and from are both given: --from has a model and a tokenizer")
    if "sources" in values:
        check_texts([*map(str, values["sources"])])
    if "sources" not in values and (Path(values.get("base", "")) / "inputs.json").exists():
        values = old_data(Path(values["base"])) | values
    if "sources" not in values and "base" in values:
        raise UserError(f"no text to train {values['base']} on, which is no run with tokens of its own: name files")
    if "sources" not in values:
        raise UserError("no text to train on: name files or folders, or `embedded` for the built-in corpus")
    config = fields.build(RunConfig, values)
    return config if config.out else dataclasses.replace(config, out=f"runs/{default_name(config.sources[0])}"), as_json


def old_data(run: Path) -> dict[str, Any]:
    """The options by which a run trains on the tokens of another one."""
    from onward.training.inputs.record import read_config, same_tokens

    config = read_config(run)
    if config.fixed:
        raise UserError(f"{run} was trained on examples, and onward train reads texts: name some")
    again = {"out": f"{run}-longer", "seed": config.seed + 1}  # the windows in another order
    return same_tokens(run, config) | again


def given_options(values: dict[str, Any], cls: type[RunConfig]) -> tuple[dict[str, Any], Path | None, bool]:
    """The options that a command line and the TOML file in it give, or the folder of the run to resume; and whether to
    print figures as JSON."""
    resume, toml, as_json = (values.pop(name, "") for name in ("resume", "config", "json"))
    if resume:
        values.pop("imports", None)  # which are imported by now
    if not values.get("sources"):
        values.pop("sources", None)
    if resume and (values or toml):
        given = ", ".join(["config"] * bool(toml) + list(values))
        raise UserError(f"--resume goes on with the run as it was configured: leave out {given}")
    if resume:
        return {}, Path(resume), as_json
    return merge(from_toml(Path(toml), cls) if toml else {}, values), None, as_json


def main(argv: Sequence[str]) -> int:
    return in_processes(lambda: run_command(*configure(argv)))


def in_processes(command: Callable[[], int]) -> int:
    """The exit status of a command that may be one of several processes, whose errors then become one report."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until there is something to save
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return command()
    from onward.training.failures import one_report

    with one_report():
        return command()


def run_command(config: RunConfig | Path, as_json: bool) -> int:
    """Start or resume a run, and train it; return the exit status."""
    if isinstance(config, RunConfig) and os.environ.get("RANK", "0") == "0":
        announce([*config.sources, config.validation])
    from onward.training.run.run import Run

    if isinstance(config, Path):
        run = Run.resume(config)
    else:
        with progress_bars() as progress:
            run = Run.start(config, sample=continue_text, progress=progress)
    status = train(run)
    if status or run.processes.rank:
        return status
    if as_json:
        print_json(read_json(run.folder / "result.json"))
    print_next(*next_commands(run))
    return 0


def next_commands(run: "Run") -> list[str]:
    """The commands that usually follow a run."""
    named, imports = quote(str(run.folder)), fields.import_options(run.config.imports)
    method = getattr(run.config, "method", "")
    if method == "reward":
        pairs = f"onward evaluate {named} pairs.jsonl{imports}"
        return [pairs, f"onward finetune MODEL prompts.jsonl --method grpo --reward {named}{imports}"]
    if method == "classify":
        examples = f"onward evaluate {named} examples.jsonl{imports}"
        return [examples, f"""python -c 'import onward; print(onward.load("{run.folder}").classify(["a text"]))'"""]
    speak = f"onward chat {named}" if run.tokenizer.templates else f'onward generate {named} "Once upon"'
    return [f"{speak}{imports}", f"onward evaluate {named} other.txt{imports}"]


def continue_text(model: "Decoder", tokenizer: "Tokenizer") -> None:
    """Do what the display does at each validation, to time it."""
    from onward.cli.shared.display import sample_text
    from onward.language_model import LanguageModel

    sample_text(LanguageModel(model, tokenizer), [0])


def train(run: "Run") -> int:
    """Train with a display until the end or a signal, and write the report; return the exit status."""
    folder, first = run.folder, not run.processes.rank
    say: Say = partial(console.print, markup=False, soft_wrap=True) if first else lambda sentence: None
    # torchrun passes on a Ctrl-C that the terminal has sent to each process already
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
    if not first:
        return 0
    if result := conclude(run):
        extent, tokens = "" if run.config.evaluation_tokens else "all ", result["tokens"]
        say(f"\nvalidation {' | '.join(in_words(result))} | {run.progress.seconds:.0f} s")
        say(
            f"(over {extent}{tokens:,} validation tokens in fp32; during the run over about "
            f"{min(tokens, run.config.validation_tokens):,} of them in {run.config.precision})"
        )
    say(f"report: {folder / 'report.html'}")
    return 0


def in_words(result: dict[str, Any]) -> list[str]:
    """The figures of a model on validation text, without counts."""
    figures = {name.replace("_", " "): value for name, value in result.items() if isinstance(value, float)}
    return [f"{name} {fields.decimal(value, 2 if name == 'perplexity' else 4)}" for name, value in figures.items()]


def describe(run: "Run", say: Say) -> None:
    """Say what is trained on what, and the results of the checks."""
    from onward.training.run.checks import start_checks
    from onward.training.run.progress import expected_steps, steps_in_words

    folder, inputs = run.folder, run.inputs
    if unknown := inputs.unknown_characters:
        say(f"{unknown:,} characters are unknown to the tokenizer and were read as \ufffd")
    for source in run.config.sources:
        if skipped := skipped_in(source, folder):
            say(skipped)
    if inputs.cut_documents and run.config.pack == "documents":
        say("the validation text begins inside a document, since no document begins near its share of the text")
    parameters = sum(p.numel() for p in run.model.parameters())
    say(
        f"{parameters:,} parameters, {inputs.tokens:,} training tokens, {steps_in_words(run)} "
        f"{'step' if expected_steps(run) == 1 else 'steps'}, "
        f"{run.config.precision} on {run.device}, into {folder}"
    )
    if run.choice:
        say(str(run.choice))
    config, changes = run.config, run.config.model
    sizes = {name: changes[name] for name in MINI if name in changes} if config.dialed else {}
    if not config.base and (unnamed := unnamed_changes(config.preset, run.model.config, changes, sizes)):
        say(f"beside your changes, the preset is changed in: {'; '.join(unnamed)}")
    for check in start_checks(run.model, run.planner.first_batch(), inputs.train, inputs.validation, fresh=run.fresh):
        say(Text.assemble(OK if check.ok else LOOK, check.sentence))
    examine(run, say)


def examine(run: "Run", say: Say) -> None:
    """Before the first step, say what the cheap half of the doctor's checks finds in the model. A failure does not stop
    the run."""
    if run.step:
        return
    import torch

    from onward.inspection.doctor.checks import CHEAP, doctor

    with torch.compiler.set_stance("force_eager"):
        found = doctor(run.model, checks=CHEAP, fresh=run.fresh)
    failed = [finding for finding in found if finding.status == "failed"]
    for finding in failed:
        where = f", {finding.where}" if finding.where else ""
        say(Text.assemble(LOOK, f"{finding.check}: {finding.what}{where}; {finding.mend}"))
    if not failed:
        say(Text.assemble(OK, f"{len(found)} checks of the doctor find nothing in the model"))


def follow(run: "Run", requests: "Requests", say: Say) -> None:
    """Train, and show the events."""
    from onward.cli.shared.display import Display
    from onward.training.run.events import Notice, Rollback

    with nullcontext() if run.processes.rank else Display(run) as display:
        for event in run.train(requests.stop, requests.save):
            if isinstance(event, Notice):
                say(event.sentence)
            elif isinstance(event, Rollback):
                say(
                    f"step {event.failed_step:,} failed ({event.reason}): back to step {event.step:,}, skips windows "
                    f"{event.skipped[0]:,} to {event.skipped[1] - 1:,}, see {run.folder / 'skipped.jsonl'}"
                )
            elif display:
                display.show(event)


class Requests:
    """Requests by signals: SIGINT, SIGTERM and SIGHUP to save and stop, SIGUSR1 to save and go on. More SIGINT than
    `interrupts` raise KeyboardInterrupt, to stop at once."""

    def __init__(self, say: Say, interrupts: int) -> None:
        self.say, self.interrupts = say, interrupts
        self.signal, self.saving = 0, False

    def note(self, number: int, _: object) -> None:
        if number == signal.SIGUSR1:
            self.saving = True
            return
        if number == signal.SIGINT:
            if not self.interrupts:
                raise KeyboardInterrupt
            if self.signal != number:
                self.say("stopping after this step; press Ctrl-C again to stop at once")
            self.interrupts -= 1
        self.signal = number

    def stop(self) -> bool:
        return self.signal > 0

    def save(self) -> bool:
        wanted, self.saving = self.saving, False
        return wanted


@contextmanager
def signals(requests: Requests) -> Iterator[Requests]:
    """Turn signals into requests."""
    before = {
        number: signal.signal(number, requests.note)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    }
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def join_duration(argv: Sequence[str]) -> list[str]:
    """The words of a command, with a duration that was given as two words as one: --time 10 seconds."""
    words = list(argv)
    for i in range(len(words) - 2, 0, -1):
        number, unit = words[i], words[i + 1]
        if words[i - 1] == "--time" and re.fullmatch(NUMBER, number) and unit in UNITS and not Path(unit).exists():
            words[i : i + 2] = [f"{number} {unit}"]
    return words


def from_toml(path: Path, cls: type[RunConfig]) -> dict[str, Any]:
    """The options in a TOML file. A number is accepted for a text (time = 100), and a text for a list of texts."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"there is no file {path}: name a TOML file") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as TOML: {error}") from None
    for name, kind in fields.hints(cls).items():
        value = values.get(name)
        if kind is str and type(value) in (int, float):
            values[name] = str(value)
        if get_origin(kind) is tuple and isinstance(value, str):
            values[name] = [value]
    return values


def default_name(source: str) -> str:
    """The name of a run after its first source: the file or, of a glob, the folder it looks in."""
    parts = (part for part in Path(source).parts if not {"*", "?"} & set(part))
    return "stdin" if source == "-" else Path(*parts).name.split(".")[0] or "run"
