"""onward draw: pictures of the ideas behind a decoder."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from shutil import get_terminal_size
from typing import ClassVar, Literal, get_args

from onward.base.errors import UserError
from onward.cli.shared.options import parse
from onward.cli.shared.output import console, print_next, print_table

ABOUT = """\
Draw an idea with a caption, in the terminal or to a file. The drawing is computed by the code of the models.

examples:
  onward draw                               the ideas
  onward draw mask                          causal, bidirectional and packed documents
  onward draw rope --out rope.html          shows the value under the pointer
  onward draw samplers --out samplers.svg   follows the reader's light or dark colors
  onward draw samplers --logits 5,2.9,2.3,1.1    your own logits through each sampler
  onward draw block gpt2                    the diagram of a release or of a model's folder
  onward draw cache --out cache.png --theme dark
"""
LEAST, MOST = 4, 1000  # minimum and maximum number of logits for --logits
LARGEST = 1e30  # largest absolute value of a logit: divided by a temperature, it is still finite in fp32
Idea = Literal["mask", "rope", "alibi", "window", "positions", "samplers", "cache", "block"]


@dataclass(frozen=True)
class Options:
    """The options of `onward draw`, which draws an idea of Transformers."""

    positional: ClassVar[tuple[str, ...]] = ("idea", "model")
    reads: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **dict.fromkeys(get_args(Idea), ("out",)),
        "block": ("out", "model"),
        "samplers": ("out", "logits"),
        "out": ("theme",),
    }
    idea: Literal["", Idea] = ""  # mask, rope, alibi, window, positions, samplers, cache or block; default: list ideas
    model: str = ""  # block only: a release or the folder of a model; default: an example model
    logits: str = ""  # samplers only: 4 to 1000 numbers, separated by commas; default: example logits
    out: str = ""  # a file that ends in .svg, .pdf, .png, .html, .json or .csv; default: the terminal
    theme: Literal["auto", "light", "dark"] = "auto"  # auto: follows the reader's system (a .png is light)

    @property
    def view(self) -> str:
        return self.idea or "alone"


def main(argv: Sequence[str]) -> None:
    if argv and not argv[0].startswith("-") and argv[0] not in get_args(Idea) and (advice := instead(argv)):
        end = "" if advice.endswith("?") else ", and onward draw lists the ideas"
        raise UserError(f"{argv[0]!r} is not an idea to draw: {advice}{end}")
    options = parse(Options, argv, prog="onward draw", about=ABOUT)
    from onward.planning.descriptions import sentence
    from onward.planning.releases import find
    from onward.reports.pictures.diagram import block
    from onward.reports.pictures.ideas import IDEAS, samplers

    if not options.idea:
        print_table([{"idea": name, "shows": sentence(draw)} for name, draw in IDEAS.items()])
        print_next("onward draw mask", "onward draw block gpt2 --out block.svg")
        return
    if options.model:
        picture = block(find(options.model)[1])
    elif options.logits:
        picture = samplers(logits_of(options.logits))
    else:
        picture = IDEAS[options.idea]()
    if options.out:
        picture.write(Path(options.out), options.theme)
        console.print(f"picture: {options.out}", markup=False, soft_wrap=True)
    else:
        print(picture.text(get_terminal_size((100, 24)).columns))


def instead(words: Sequence[str]) -> str:
    """The command for words that are a model or a term of the glossary; "" for others."""
    from onward.families import presets
    from onward.hub.folder import is_model
    from onward.learn.glossary import asked, find, forms, plain

    if words[0] in presets() or is_model(words[0]):
        return f"onward draw block {words[0]} draws the blocks of this model"
    term = " ".join(takewhile(lambda word: not word.startswith("-"), words))
    entries = find(term)
    if not entries:
        return ""
    names = {*map(plain, entries[0].names)}
    if drawn := [idea for idea in get_args(Idea) if names & {*forms(idea)}]:
        return f"did you mean {drawn[0]}?"
    return (
        f"onward help {asked(term)} explains the term, onward inspect MODEL TEXT shows the attention, heads and next "
        "tokens of a model"
    )


def logits_of(text: str) -> dict[str, float]:
    """Parse numbers separated by commas; return them by token name, "#0", "#1" and so on."""
    try:
        logits = {f"#{index}": float(number) for index, number in enumerate(text.split(","))}
    except ValueError:
        raise UserError(f"logits is {text!r}: give numbers separated by commas, such as 2,1,0.5,0") from None
    if not all(abs(logit) <= LARGEST for logit in logits.values()) or not LEAST <= len(logits) <= MOST:
        raise UserError(f"logits is {text!r}: give {LEAST} to {MOST} finite numbers of at most {LARGEST:g}")
    return logits
