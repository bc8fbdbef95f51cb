"""onward inspect: look inside a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from shlex import quote
from shutil import get_terminal_size
from typing import TYPE_CHECKING, ClassVar, Literal

from onward.cli.loading import Loading, load
from onward.cli.options import parse
from onward.cli.output import console, print_json, print_next, print_table, printable
from onward.errors import UserError

if TYPE_CHECKING:
    from onward.language_model import LanguageModel
    from onward.reports.picture import Picture

ABOUT = """\
Look inside a model: what it does with a text, in the terminal or as a picture, and the names of its activations, which
onward.trace records and onward.edit changes.

examples:
  onward inspect runs/mybook "The cat sat on the" next
  onward inspect runs/mybook "The cat sat on the" attention --layer 1 --out attention.html
  onward inspect runs/mybook "The cat sat on the" lens --out lens.svg
  onward inspect runs/mybook "The cat sat on the" patch --corrupted "The dog sat on the"
  onward inspect runs/mybook heads
  onward inspect runs/mybook names "blocks.0.attn.*"

views of a text:
  attention  the attention maps of all heads of a layer
  next       the likeliest next tokens, and the effect of each step of sampling
  lens       the next token that each layer would predict
  heads      the role of each head: previous token, induction, first token, ... (needs no text)
  tokens     the loss, rank and entropy of each token
  patch      which activations carry what distinguishes the text from another (--corrupted)
  positions  the loss by position, of a long text
  neurons    the most active units of a feed-forward
  experts    the experts of each token
"""


@dataclass(frozen=True, kw_only=True)
class Options(Loading):
    """What to look at, and where to draw it."""

    positional: ClassVar[tuple[str, ...]] = ("model", "words")
    model: str  # folder of the model
    words: tuple[str, ...] = ()  # a text and a view of it, heads, or names and a pattern (* stands for any characters)
    out: str = ""  # a file that ends in .svg, .png, .html or .json; "": the terminal
    theme: Literal["auto", "light", "dark"] = "auto"  # auto: as the reader's system; a .png is then light
    layer: int | None = None  # of attention and neurons, from 0; none: chosen
    corrupted: str = ""  # patch: the other text, of as many tokens
    right: str = ""  # patch: the next token after the text; "": the likeliest
    wrong: str = ""  # patch: the next token after the other text; "": the likeliest
    temperature: float = 0.8  # next: a step of sampling, as of generate
    top_k: int = 0  # next: a step of sampling; 0: none
    top_p: float = 1.0  # next: a step of sampling; 1: none
    json: bool = False  # print the numbers as JSON


def main(argv: Sequence[str]) -> None:
    options = parse(Options, argv, prog="onward inspect", about=ABOUT)
    match options.words:
        case ("names", *patterns) if len(patterns) < 2:
            show_names(options, *patterns)
        case ("heads",):
            show(options, "", "heads")
        case (text, view):
            show(options, text, view)
        case _:
            example = 'onward inspect MODEL "The cat sat" lens'
            raise UserError(f"onward inspect takes a text and a view ({example}), heads alone, or names and a pattern")


def show_names(options: Options, pattern: str = "*") -> None:
    """List the activations of the model with their shapes: B sequences, T tokens in a call, S keys."""
    from onward.tracing.names import activation_names

    lm = load(options.model, options)
    names = {n: s for n, s in activation_names(lm.model).items() if fnmatchcase(n, pattern)}
    if not names:
        raise UserError(f"no activation of {options.model} is named {pattern}: try 'blocks.0.*'")
    if options.json:
        print_json(names)
    else:
        print_table([{"name": name, "shape": shape} for name, shape in names.items()])
        print_next(f'onward inspect {quote(options.model)} "The cat sat" attention')


def show(options: Options, text: str, view: str) -> None:
    """Draw a view of a text."""
    from onward.fields import nearest
    from onward.reports.views import VIEWS

    if view not in VIEWS:
        raise UserError(f"{view!r} is not a view: {nearest(view, VIEWS)}")
    picture = drawn(options, load(options.model, options), text, view)
    if options.out:
        picture.write(Path(options.out), options.theme)
        console.print(f"picture: {options.out}", markup=False, soft_wrap=True)
    elif options.json:
        print_json(picture.values())
    else:
        print(printable(picture.text(get_terminal_size((100, 24)).columns)))


def drawn(options: Options, lm: LanguageModel, text: str, view: str) -> Picture:
    """The picture of a view."""
    from onward.generation.sampling import Sampling
    from onward.reports.views import VIEWS, Reading

    if lm.tokenizer is None:
        raise UserError(f"{options.model} has no tokenizer: name a model that has one")
    sampling = Sampling(temperature=options.temperature, top_k=options.top_k, top_p=options.top_p)
    given = options.layer, options.corrupted, options.right, options.wrong, sampling
    return VIEWS[view](Reading(lm.model, lm.tokenizer, text, *given))
