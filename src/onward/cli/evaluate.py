"""onward evaluate: the loss, perplexity and bits per byte of a model on a text."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from shlex import quote
from typing import ClassVar

from onward.cli.loading import Loading, load
from onward.cli.options import parse
from onward.cli.output import print_json, print_next, print_table, warn_of_unknown
from onward.errors import UserError

ABOUT = """\
Loss, perplexity and bits per byte of a model on a text.

examples:
  onward evaluate runs/mybook                    the validation text of the run
  onward evaluate runs/mybook other.txt
  onward evaluate runs/mybook other.txt --stride 64 --json
  onward evaluate runs/mybook other.txt --quantize int4     what quantized weights cost: two lines, plain and int4
"""


@dataclass(frozen=True, kw_only=True)
class Options(Loading):
    """The model, the text and the output."""

    positional: ClassVar[tuple[str, ...]] = ("model", "sources")
    reads: ClassVar[Mapping[str, tuple[str, ...]]] = {"sources": ("field", "encoding")}
    model: str  # folder of the model, or its name on the hub
    sources: tuple[str, ...] = ()  # files, folders, globs, pipes, - or a corpus; none: the run's validation text
    stride: int = 0  # tokens by which the window moves on; 0: the context length, so that windows do not overlap
    field: str = "text"  # the field of each .jsonl line that holds the text
    encoding: str = "utf-8"  # of the text files
    json: bool = False  # print the result as JSON


def main(argv: Sequence[str]) -> None:
    options = parse(Options, argv, prog="onward evaluate", about=ABOUT)
    from onward.cli.sources import announce
    from onward.data.sources import documents
    from onward.evaluation.text import evaluate_texts
    from onward.training.tasks import inputs_of

    lm = load(options.model, options)
    if options.sources:
        announce(options.sources)
        texts = list(documents(options.sources, field=options.field, encoding=options.encoding))
        warn_of_unknown(lm.tokenizer, texts)
        measure = lambda lm: evaluate_texts(lm.model, lm.text(), texts, options.stride)
    else:
        folder = Path(options.model)
        inputs = inputs_of(folder) if (folder / "inputs.json").exists() else None
        if inputs is None or inputs.validation is None:
            raise UserError(f"{folder} has no validation text of its own: name a text to evaluate on")
        measure = lambda lm: lm.evaluate(inputs.validation, options.stride, n_bytes=inputs.validation_bytes)
    result = asdict(measure(lm))
    plain = asdict(measure(load(options.model, replace(options, quantize="")))) if options.quantize else {}
    if options.json:
        print_json(result | ({"plain": plain} if plain else {}))
    else:
        print_table([{"weights": "plain"} | plain, {"weights": options.quantize} | result] if plain else [result])
        print_next(f'onward generate {quote(options.model)} "Once upon"')
