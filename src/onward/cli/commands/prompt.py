"""onward prompt: how examples in a prompt change the probabilities of answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import quote
from typing import Any, ClassVar, Literal

from onward.base.errors import UserError
from onward.base.fields import counted
from onward.cli.shared.loading import Loading, load
from onward.cli.shared.options import parse
from onward.cli.shared.output import console, print_json, print_next, print_table, with_text
from onward.config.ranges import Size

ABOUT = """\
Show the most likely answers to the question at the end of a prompt, and how their probabilities change as 0, 1, 2, 4
and more examples precede the question (in-context learning). The examples of a file, if one is given, come first, and
then those in the prompt.

examples:
  onward prompt runs/mybook "great → good; hot → warm; huge →"
  onward prompt runs/mybook "great → good; hot → warm; huge →" --examples shots.jsonl --out shots.svg
  onward prompt runs/mybook "huge →" --examples shots.csv --candidates big,small       your own answers
  onward prompt runs/mybook "huge →" --examples shots.csv --max-new-tokens 4           whole answers by beam search
  onward prompt gpt2 "Q: 2 + 2? A: 4
Q: 3 + 4? A:" --json                                               one line per example

--examples takes a .jsonl, .json or .csv file of rows with a question (huge →) and its answer (big).
"""


@dataclass(frozen=True, kw_only=True)
class Options(Loading):
    """The options of `onward prompt`, which shows the effect of examples in a prompt."""

    positional: ClassVar[tuple[str, ...]] = ("model", "prompt")
    reads: ClassVar[Mapping[str, tuple[str, ...]]] = {"out": ("theme",)}
    model: str  # folder of the model, or its name on the hub
    prompt: str  # examples, followed by the beginning of a question
    examples: str = ""  # a file with more examples, in rows with a question and an answer
    separator: str = ""  # text between examples; default: a line break, or "; " if a prompt of one line has semicolons
    candidates: str = ""  # answers to compare, separated by commas; default: the model's most likely answers
    max_new_tokens: Size = 1  # maximum number of tokens in an answer; if greater than 1, beam search finds the answers
    top: Size = 8  # number of answers to show
    out: str = ""  # a file that ends in .svg, .pdf, .png, .html, .json or .csv; default: the terminal
    theme: Literal["auto", "light", "dark"] = "auto"  # auto: follows the reader's system (a .png is light)
    json: bool = False  # print the probabilities as JSON


def main(argv: Sequence[str]) -> None:
    options = parse(Options, argv, prog="onward prompt", about=ABOUT)
    from onward.evaluation.in_context import alternatives, shots_of
    from onward.evaluation.tasks.files import rows
    from onward.reports.pictures.in_context import in_context, shown
    from onward.reports.pictures.picture import format_of

    if options.out:
        format_of(Path(options.out))
    candidates = [text.strip() for text in options.candidates.split(",") if text.strip()]
    if options.candidates and not candidates:
        raise UserError(f"candidates is {options.candidates!r}, which has no answer: write answers such as big,small")
    if candidates and options.max_new_tokens > 1:
        raise UserError(
            "Cannot combine --max-new-tokens, which searches for answers, with --candidates, which lists them"
        )
    given: list[str] = []
    for _, row in rows(options.examples, "examples", ("question", "answer")) if options.examples else ():
        given.append(f"{str(row['question']).strip()} {str(row['answer']).strip()}")
    shots = shots_of(options.prompt, given, options.separator)
    lm = load(options.model, options)
    answers = alternatives(
        lm.model,
        lm.text(),
        shots,
        candidates=candidates,
        max_new_tokens=options.max_new_tokens,
        top=options.top,
    )
    if options.out:
        in_context(shots, answers).write(Path(options.out), options.theme)
    if options.json:
        print_json({"question": shots.question, "examples": shots.examples, **asdict(answers)})
        return
    table: list[dict[str, Any]] = []
    for answer, values in zip(answers.answers, answers.probabilities):
        columns = {counted(count, "example"): f"{value:.3g}" for count, value in zip(answers.counts, values)}
        table.append({"answer": shown(answer)} | columns)
    print_table(table)
    if options.out:
        console.print(f"picture: {options.out}", markup=False, soft_wrap=True)
    else:
        print_next(with_text(f"onward prompt {quote(options.model)}", options.prompt, "--out prompt.svg"))
