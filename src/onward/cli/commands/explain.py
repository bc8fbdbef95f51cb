"""onward explain: the forward pass, step by step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from shutil import get_terminal_size
from typing import ClassVar, Literal

from onward.base.errors import UserError
from onward.cli.shared.loading import Loading, load
from onward.cli.shared.options import parse
from onward.cli.shared.output import console, print_next, printable, with_text
from onward.hub.folder import is_model
from onward.learn.glossary import asked, find

ABOUT = """\
Follow one token of a text through a model, from its id to the next token, with the shapes and numbers of this model.
The result is shown in the terminal or written as a page to step through.

examples:
  onward explain runs/mybook "The cat sat on the"
  onward explain runs/mybook "The cat sat on the" --out explain.html
  onward explain runs/mybook "The cat sat on the" --position 1 --layer 2    another token, and another block in detail
  onward help attention                                                     explains a term instead
"""


@dataclass(frozen=True, kw_only=True)
class Options(Loading):
    """The options of `onward explain`, which follows one token through a model."""

    positional: ClassVar[tuple[str, ...]] = ("model", "text")
    reads: ClassVar[Mapping[str, tuple[str, ...]]] = {"out": ("theme",)}
    model: str  # folder of the model
    text: str  # the text that the model reads
    position: int = -1  # position of the token to follow, counted from 0; if negative, counted from the end
    layer: int = 0  # block to show in detail, counted from 0; if negative, counted from the end
    out: str = ""  # a file that ends in .html or .json; default: the terminal
    theme: Literal["auto", "light", "dark"] = "auto"  # colors of the page; auto: follows the reader's system


def main(argv: Sequence[str]) -> None:
    text = " ".join(argv)
    if argv and not any(is_model(word) or Path(word).exists() for word in argv) and find(text):
        raise UserError(
            f"Cannot explain {text!r} without a model and a text: onward help {asked(text)} explains the term"
        )
    options = parse(Options, argv, prog="onward explain", about=ABOUT)
    from onward.reports.explain.page import explain

    lm = load(options.model, options)
    if lm.tokenizer is None:
        raise UserError(f"{options.model} has no tokenizer: name a model that has one")
    story = explain(lm.model, lm.tokenizer, options.text, options.position, options.layer)
    if options.out:
        story.write(Path(options.out), options.theme)
        console.print(f"explanation: {options.out}", markup=False, soft_wrap=True)
    else:
        print(printable(story.text(get_terminal_size((100, 24)).columns)))
        print_next(with_text(f"onward explain {quote(options.model)}", options.text, "--out explain.html"))
