"""onward inspect: look inside a model."""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from shlex import quote
from typing import ClassVar, Literal

from onward.cli.loading import Loading, load
from onward.cli.options import parse
from onward.cli.output import print_json, print_next, print_table
from onward.errors import UserError

ABOUT = """\
The names and shapes of a model's activations, which onward.trace records and onward.edit changes.

examples:
  onward inspect runs/mybook names
  onward inspect runs/mybook names "blocks.0.attn.*"
"""


@dataclass(frozen=True, kw_only=True)
class Options(Loading):
    """The model and the names to list."""

    positional: ClassVar[tuple[str, ...]] = ("model", "view", "pattern")
    model: str  # folder of the model
    view: Literal["names"] = "names"  # the activations with their shapes: B sequences, T tokens in a call, S keys
    pattern: str = "*"  # names to list; * stands for any characters
    json: bool = False  # print the result as JSON


def main(argv: Sequence[str]) -> None:
    options = parse(Options, argv, prog="onward inspect", about=ABOUT)
    from onward.tracing.names import activation_names

    lm = load(options.model, options)
    names = {n: s for n, s in activation_names(lm.model).items() if fnmatchcase(n, options.pattern)}
    if not names:
        raise UserError(f"no activation of {options.model} is named {options.pattern}: try 'blocks.0.*'")
    if options.json:
        print_json(names)
    else:
        print_table([{"name": name, "shape": shape} for name, shape in names.items()])
        print_next(f"onward report {quote(options.model)}")
