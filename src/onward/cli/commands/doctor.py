"""onward doctor: find common mistakes in a decoder or in training texts."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from rich.text import Text

from onward.base.arguments import Range
from onward.base.errors import UserError
from onward.base.files import writable_ending
from onward.cli.shared.options import parse
from onward.cli.shared.output import Output, console, print_json
from onward.config.ranges import SizeOrZero

ABOUT = """\
Find common mistakes in any decoder that takes token ids (B, T) and returns logits (B, T, V): a mask that shows later
tokens, a loss over the wrong axis, a cache that changes the logits, and others. The exit status is 1 if a check fails.

The model is a folder, or a class or function in a Python file or module. It runs in a separate process. The command
also checks prepared tokens and texts as training data.

examples:
  onward doctor model.py:GPT
  onward doctor model.py:GPT --kwargs '{"vocab_size": 100}' --html findings.html
  onward doctor model.py:GPT --train train.py:step --batches train.py:batches --validation-batches train.py:held_out
  onward doctor model.py:GPT --loss train.py:loss --batches train.py:batches
  onward doctor mypackage.model:build --adapter glue.py:logits
  onward doctor runs/mybook --json
  onward doctor mybook.txt --validation other.txt
"""


OF_MODELS = "adapter", "loss", "cache", "batches", "frozen", "vocab_size", "context_length"


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `onward doctor`, which looks for mistakes in a model or in texts."""

    positional: ClassVar[tuple[str, ...]] = ("target",)
    reads: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "a class or function": ("kwargs", *OF_MODELS),
        "the folder of a model": ("text", *OF_MODELS),
        "texts": ("validation",),
    }
    target: str  # a folder, FILE.py:NAME, MODULE:NAME, or texts
    kwargs: str = ""  # arguments of NAME, as JSON
    adapter: str = ""  # FILE.py:FUNCTION, where FUNCTION(model, tokens) returns logits
    loss: str = ""  # FILE.py:FUNCTION, where FUNCTION(logits, targets) returns your training loss
    cache: str = ""  # FILE.py:FUNCTION; FUNCTION(model) returns a cache: a function from new tokens to logits
    batches: str = ""  # FILE.py:NAME, a list of pairs (token ids, targets), or a function that returns such a list
    validation_batches: str = ""  # FILE.py:NAME, held-out pairs in the format of --batches
    train: str = ""  # FILE.py:FUNCTION that trains: FUNCTION(model) or FUNCTION(model, optimizer, tokens, targets)
    text: str = ""  # text that a trained model should predict well; default: the validation text of a run
    validation: str = ""  # held-out text, if TARGET is training text
    frozen: str = ""  # regular expression for the names of parameters that must not be trained
    vocab_size: SizeOrZero = 0  # number of token ids; 0: the number of logits
    context_length: SizeOrZero = 0  # maximum text length in tokens; 0: read from the model's attributes
    seconds: Annotated[float, Range(1, 1e6)] = 120.0  # time limit for all checks
    gigabytes: Annotated[float, Range(0.1, 1e6)] = 16.0  # memory limit in GiB
    html: str = ""  # also write the findings to this HTML file
    json: bool = False  # print the findings as JSON
    imports: tuple[str, ...] = ()  # the user's modules, which the process that runs the checks also imports

    @property
    def view(self) -> str:
        from onward.data.tokens import is_prepared
        from onward.hub.folder import is_model

        path = Path(self.target)
        if ":" in self.target and not path.exists() and "://" not in self.target:
            return "a class or function"
        model = not path.exists() or is_model(path)
        return "the folder of a model" if model and not is_prepared(path) else "texts"


COLORS = {"ok": "green", "failed": "red", "noted": "blue", "not run": "yellow", "not applicable": "dim"}
LIMITS = "seconds", "gigabytes", "html", "json"


def main(argv: Sequence[str]) -> int:
    options = parse(Options, argv, prog="onward doctor", about=ABOUT)
    if options.text and options.batches:
        raise UserError(
            "Cannot combine --text and --batches, because both give the training data of the model: choose one"
        )
    if options.html:
        writable_ending(Path(options.html), ".html")
    from onward.inspection.doctor.isolated import examine_apart

    arguments = {name: value for name, value in vars(options).items() if name not in LIMITS}
    with console.status("examining"):
        rows = examine_apart(arguments, options.seconds, options.gigabytes)
    counts = Counter(row["status"] for row in rows)
    summary = ", ".join(f"{count} {status}" for status, count in counts.items())
    if options.html:
        from onward.reports.findings import write_findings

        write_findings(Path(options.html), options.target, summary, rows)
    if options.json:
        print_json(rows)
    else:
        print_findings(rows)
        console.print(f"\n{summary}")
    if options.html:
        console.print(f"page: {options.html}", markup=False, soft_wrap=True)
    return bool(counts["failed"])


def print_findings(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a line for each finding; for a failed check also print where the mistake is, how it was found, why it
    matters, and the remedy."""
    output = Output(highlight=False)
    for row in rows:
        line = Text.assemble((f"{row['status']:<15}", COLORS[row["status"]]), f"{row['check']:<14} ", row["what"])
        output.print(line, soft_wrap=True)
        for name in "where", "how", "why", "mend":
            if row[name] and row["status"] == "failed":
                output.print(Text(f"{'':<15}{name:<15}{row[name]}"), soft_wrap=True)
