"""onward doctor: finds the usual mistakes in any decoder."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from rich.text import Text

from onward.arguments import Range
from onward.cli.options import parse
from onward.cli.output import Output, console, print_json
from onward.model.part_types import SizeOrZero

ABOUT = """\
Find the usual mistakes of decoders in any model that takes token ids (B, T) and returns logits (B, T, V): one that sees
the future, a loss over the wrong axis, a cache that changes the model, and others. Exit status 1 if one is found.

The model is a folder, or a class or function in a Python file or module, which is run in a process of its own.

examples:
  onward doctor model.py:GPT
  onward doctor model.py:GPT --kwargs '{"vocab_size": 100}'
  onward doctor mypackage.model:build --adapter glue.py:logits
  onward doctor runs/mybook --json
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The model and how it is called."""

    positional: ClassVar[tuple[str, ...]] = ("target",)
    target: str  # a folder, FILE.py:NAME or MODULE:NAME
    kwargs: str = ""  # arguments of NAME, as JSON
    adapter: str = ""  # FILE.py:FUNCTION, where FUNCTION(model, tokens) returns logits
    vocab_size: SizeOrZero = 0  # number of token ids; 0: as many as there are logits
    context_length: SizeOrZero = 0  # tokens of the longest text; 0: what the model's attributes say
    seconds: Annotated[float, Range(1, 1e6)] = 120.0  # for all checks
    gigabytes: Annotated[float, Range(0.1, 1e6)] = 16.0  # of memory
    json: bool = False  # print the findings as JSON


COLORS = {"ok": "green", "failed": "red", "told": "blue", "not applicable": "dim"}


def main(argv: Sequence[str]) -> int:
    options = parse(Options, argv, prog="onward doctor", about=ABOUT)
    from onward.inspection.doctor.isolated import examine_apart

    names = "target", "kwargs", "adapter", "vocab_size", "context_length"
    with console.status("examining"):
        rows = examine_apart({name: getattr(options, name) for name in names}, options.seconds, options.gigabytes)
    counts = Counter(row["status"] for row in rows)
    if options.json:
        print_json(rows)
        return bool(counts["failed"])
    output = Output(highlight=False)
    for row in rows:
        line = Text.assemble((f"{row['status']:<15}", COLORS[row["status"]]), f"{row['check']:<12}", row["what"])
        output.print(line, soft_wrap=True)
        for name in "where", "why", "mend":
            if row[name] and row["status"] == "failed":
                output.print(Text(f"{'':<15}{name:<12}{row[name]}"), soft_wrap=True)
    console.print(f"\n{', '.join(f'{count} {status}' for status, count in counts.items())}")
    return bool(counts["failed"])
