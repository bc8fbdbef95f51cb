"""onward inspect: look inside a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from inspect import signature
from pathlib import Path
from shlex import quote
from shutil import get_terminal_size
from typing import TYPE_CHECKING, ClassVar, Literal

from onward.base.errors import UserError
from onward.base.fields import nearest
from onward.cli.shared.loading import Loading, load
from onward.cli.shared.options import parse
from onward.cli.shared.output import console, print_json, print_next, print_table, printable
from onward.cli.shared.warnings import warn_of_temperature

if TYPE_CHECKING:
    from onward.api.language_model import LanguageModel
    from onward.data.tokens import Tokens
    from onward.inspection.lens import TunedLens
    from onward.model.decoder import Decoder
    from onward.reports.pictures.picture import Picture
    from onward.text.tokenizer import Tokenizer
    from onward.training.step.trainer import Step

FEATURE_TEXTS = 64  # number of windows in which features are searched for
VIEWS: dict[str, tuple[str, ...]] = {  # options of each view, in addition to the common options
    "attention": ("layer", "head"),
    "arrows": ("layer", "head"),
    "next": ("temperature", "top_k", "top_p"),
    "lens": ("tuned",),
    "heads": (),
    "tokens": (),
    "patch": ("corrupted", "right", "wrong"),
    "positions": (),
    "neurons": ("layer",),
    "experts": (),
    "features": ("activation", "time"),
    "names": (),
}

ABOUT = """\
Look inside a model: draw its computation on a text, in the terminal or as a picture, or list its activations, which
onward.trace records and onward.edit changes.

examples:
  onward inspect runs/mybook "The cat sat on the" next
  onward inspect runs/mybook "The cat sat on the" attention --layer 1 --out attention.html
  onward inspect runs/mybook "The cat sat on the" arrows --layer 1 --head 2
  onward inspect runs/mybook "The cat sat on the" lens --out lens.svg
  onward inspect runs/mybook "The cat sat on the" patch --corrupted "The dog sat on the"
  onward inspect runs/mybook "The cat sat on the" lens --tuned mybook.txt
  onward inspect runs/mybook heads
  onward inspect runs/mybook features mybook.txt --activation blocks.1.mlp.out
  onward inspect runs/mybook names "blocks.0.attn.*"

views of a text:
  attention  the attention maps of all heads of a layer
  arrows     the same as arrows between the tokens of the text
  next       the most likely next tokens, and the effect of each step of sampling
  lens       the next token that each layer would predict
  heads      the role of each head: previous token, induction, first token, ... (needs no text)
  tokens     the loss, rank and entropy of each token
  patch      activation patching: the fraction of the logit difference that each activation restores (--corrupted)
  positions  the loss at each position of a long text
  neurons    the most active units of a feed-forward layer
  experts    the experts of each token

view of a text file:
  features   the features of a sparse autoencoder of an activation, with their texts and effects
"""


@dataclass(frozen=True, kw_only=True)
class Options(Loading):
    """The options of `onward inspect`, which draws the computation inside a model."""

    positional: ClassVar[tuple[str, ...]] = ("model", "words")
    reads: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **{view: (*own, *(["out"] if view != "names" else [])) for view, own in VIEWS.items()},
        "out": ("theme",),
        "tuned": ("time",),
    }
    model: str  # folder of the model
    words: tuple[str, ...] = ()  # a text and a view; "heads"; "features" and a text; or "names" and a pattern
    out: str = ""  # a file that ends in .svg, .pdf, .png, .html, .json or .csv; default: the terminal
    theme: Literal["auto", "light", "dark"] = "auto"  # auto: follows the reader's system (a .png is light)
    layer: int | None = None  # attention, arrows and neurons: layer to draw, from 0; default: chosen automatically
    head: int | None = None  # attention and arrows: head to draw, from 0; default: all heads
    corrupted: str = ""  # patch: the other text, with the same number of tokens
    right: str = ""  # patch: the token expected after the text; default: the most likely token
    wrong: str = ""  # patch: the token expected after the other text; default: the most likely token
    temperature: float = 0.8  # next: the temperature, as in onward generate
    top_k: int = 0  # next: sample from the k most likely tokens; 0: from all tokens
    top_p: float = 1.0  # next: sample from the most likely tokens that reach this total probability; 1: from all
    tuned: str = ""  # lens: text on which a tuned lens is trained before drawing
    activation: str = ""  # features: activation to decompose; default: the residual stream after the middle block
    time: str = "1m"  # features and --tuned: time limit for training
    json: bool = False  # print the numbers as JSON

    @property
    def view(self) -> str:
        """The view named by the words on the command line."""
        match self.words:
            case ("names", *patterns) if len(patterns) < 2:
                return "names"
            case ("heads",):
                return "heads"
            case ("features", _):
                return "features"
            case (_, view) if view in VIEWS.keys() - {"names", "features"}:
                return view
            case (_, "names"):
                raise UserError("the view names takes no text: write onward inspect MODEL names 'blocks.0.*'")
            case (_, "features"):
                raise UserError(
                    "the view features takes a file to train on: write onward inspect MODEL features mybook.txt"
                )
            case (_, view):
                raise UserError(f"{view!r} is not a view: {nearest(view, VIEWS)}")
        example = 'onward inspect MODEL "The cat sat" lens'
        raise UserError(
            f"onward inspect takes a text and a view ({example}), heads alone, features and a text to train on, or "
            "names and a pattern"
        )


def main(argv: Sequence[str]) -> None:
    options = parse(Options, argv, prog="onward inspect", about=ABOUT)
    check(options)
    if options.view == "names":
        show_names(options, *options.words[1:])
    elif options.view == "features":
        present(options, features(options, options.words[1]))
    else:
        present(options, drawn(options, load(options.model, options)))


def check(options: Options) -> None:
    """Check the time limit and the file format before a long computation."""
    from onward.reports.pictures.picture import format_of
    from onward.training.config import seconds

    seconds(options.time)
    if options.out:
        format_of(Path(options.out))


def show_names(options: Options, pattern: str = "*") -> None:
    from onward.tracing.names import activation_names, unknown

    known = activation_names(load(options.model, options).model)
    names = {name: shape for name, shape in known.items() if fnmatchcase(name, pattern)}
    if not names:
        raise unknown(pattern, known)
    if options.json:
        print_json(names)
    else:
        print_table([{"name": name, "shape": shape} for name, shape in names.items()])
        print_next(f'onward inspect {quote(options.model)} "The cat sat" attention')


def present(options: Options, picture: Picture) -> None:
    if options.out:
        picture.write(Path(options.out), options.theme)
        console.print(f"picture: {options.out}", markup=False, soft_wrap=True)
    if options.json:
        print_json(picture.values())
    elif not options.out:
        print(printable(picture.text(get_terminal_size((100, 24)).columns)))


def drawn(options: Options, lm: LanguageModel) -> Picture:
    from onward.generation.sampling import Sampling
    from onward.reports.pictures.reading import Reading
    from onward.reports.pictures.views import VIEWS

    warn_of_temperature(options.temperature)
    tokenizer, text = tokenizer_of(options, lm), options.words[0] if len(options.words) > 1 else ""
    draw = VIEWS[options.view]
    given = {
        **vars(options),
        "sampling": Sampling(temperature=options.temperature, top_k=options.top_k, top_p=options.top_p),
        "tuned": tuned(options, lm.model, tokenizer),
    }
    own = {name: given[name] for name, one in signature(draw).parameters.items() if one.kind == one.KEYWORD_ONLY}
    return draw(Reading(lm.model, tokenizer, text), **own)


def tokenizer_of(options: Options, lm: LanguageModel) -> Tokenizer:
    if lm.tokenizer is None:
        raise UserError(f"{options.model} has no tokenizer: name a model that has one")
    return lm.tokenizer


def tuned(options: Options, model: Decoder, tokenizer: Tokenizer) -> TunedLens | None:
    """Train a tuned lens on the texts of `--tuned`; return None without this option."""
    from onward.inspection.fitting import fit_lens
    from onward.training.config import seconds

    if not options.tuned:
        return None
    tokens = tokens_of(tokenizer, options.tuned)
    with shown_steps() as watch:
        return fit_lens(model, tokens, seconds=seconds(options.time), watch=watch)


def features(options: Options, source: str) -> Picture:
    """Train a sparse autoencoder of the model's activations on `source`, and draw its features."""
    from onward.inspection.fitting import fit_features, windows_of
    from onward.reports.pictures.features import features
    from onward.training.config import seconds

    lm = load(options.model, options)
    tokenizer = tokenizer_of(options, lm)
    tokens = tokens_of(tokenizer, source)
    with shown_steps() as watch:
        autoencoder, name = fit_features(
            lm.model, tokens, options.activation, seconds=seconds(options.time), watch=watch
        )
    texts = windows_of(lm.model, tokens).read(range(FEATURE_TEXTS)).tokens.tolist()
    return features(lm.model, tokenizer, autoencoder, name, texts)


def tokens_of(tokenizer: Tokenizer, source: str) -> Tokens:
    from onward.cli.shared.sources import announce
    from onward.inspection.doctor.target import text_tokens

    announce([source])
    return text_tokens(source, tokenizer)


@contextmanager
def shown_steps() -> Iterator[Callable[[Step], None]]:
    """Yield a function that counts training steps in a progress bar; at the end print the first and last losses."""
    from rich.progress import Progress

    from onward.inspection.fitting import STEPS

    losses: list[float] = []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("training", total=STEPS)

        def show(step: Step) -> None:
            losses.append(step.loss)
            bar.update(task, advance=1)

        yield show
    console.print(f"trained {len(losses)} steps: the loss went from {losses[0]:.3g} to {losses[-1]:.3g}")
