"""onward generate: continue one prompt or many."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from onward.base.errors import UserError
from onward.cli.shared.compiling import Compiling, compile_steps
from onward.cli.shared.drafts import tell_draft, with_draft
from onward.cli.shared.input import read_text
from onward.cli.shared.loading import Loading, load
from onward.cli.shared.options import made, read
from onward.cli.shared.output import console, print_next, print_table, printable
from onward.cli.shared.streams import ClosedInput
from onward.cli.shared.warnings import warn_of_temperature, warn_of_unknown
from onward.config.ranges import SizeOrZero
from onward.generation.options import GenerationOptions

if TYPE_CHECKING:
    from onward.api.language_model import LanguageModel
    from onward.generation.engine.engine import Engine
    from onward.generation.logprobs import TokenLogprob
    from onward.generation.request import Request
    from onward.generation.results import SearchResult
    from onward.text.tokenizer import Tokenizer

ABOUT = """\
Continue prompts with a model. Prompts run in batches; answers are printed in order, as they are generated.

examples:
  onward generate runs/mybook "Once upon"
  onward generate runs/mybook "Once upon" --temperature 0 --max-new-tokens 50 --logprobs 3
  onward generate runs/mybook "Once upon" "In the end" --top-p 0.9 --seed 1 --n 3
  onward generate runs/mybook "Once upon" --stop . --stop "\\n"
  echo "Once upon" | onward generate runs/mybook
  onward generate runs/mybook --prompts many.txt --json > answers.jsonl
  onward generate runs/mybook "Once upon" --draft runs/small
  onward generate runs/mybook "Once upon" --lookup 0
  onward generate runs/mybook "Once upon" --beams 4 --n 2
"""


@dataclass(frozen=True)
class Speculation:
    """Speculative decoding: the same distribution, often faster. A step verifies several draft tokens."""

    draft: str = ""  # folder of a smaller model, a draft head or an EAGLE-3 draft; mtp: the model's own layer
    lookup: SizeOrZero | None = None  # tokens to draft from the earlier text; 0: none; default: if drafts are faster


@dataclass(frozen=True)
class Search:
    """Search for likely answers instead of sampling."""

    beams: int = 0  # number of beams for beam search; 0: no beam search
    groups: int = 1  # number of groups of beams (diverse beam search)
    diversity: float = 0.0  # penalty on a token's log-probability for each earlier group that chose it in this step
    length_penalty: float = 1.0  # exponent of the length in beam search; larger values prefer longer answers
    early_stopping: Literal["true", "false", "never"] = "false"  # true: stop when as many answers as beams are finished


@dataclass(frozen=True, kw_only=True)
class Options(GenerationOptions, Search, Speculation, Compiling, Loading):
    """The options of `onward generate`, which continues prompts."""

    positional: ClassVar[tuple[str, ...]] = ("model", "prompt")
    fixed: ClassVar[tuple[str, ...]] = ("adapter",)  # answers always use the adapter that --adapter selects
    common: ClassVar[tuple[str, ...]] = (
        *("max_new_tokens", "temperature", "top_k", "top_p", "repetition_penalty", "stop", "seed", "n"),
        *("prompts", "beams", "draft", "regex", "json_schema", "logprobs", "device", "json"),
    )
    reads: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "sampling": (
            *("seed", "stop", "logprobs", "regex", "json_schema", "grammar", "compile"),
            *("draft", "lookup", "prompt_cache", "context_overflow"),
        ),
        "beams": ("groups", "diversity", "length_penalty", "early_stopping"),
        "prompts": ("field",),
    }
    model: str  # folder of the model, or its name on the hub
    prompt: tuple[str, ...] = ()  # texts to continue; -, or no text if input is piped: standard input
    prompts: str = ""  # a file of prompts: one per line, .jsonl or .parquet; -: the lines of standard input
    field: str = "prompt"  # field that contains the prompt in each .jsonl line or .parquet row
    context_overflow: Literal["error", "slide"] = "error"  # slide: drop the older half of a full context
    prompt_cache: str = ""  # folder in which the keys and values of prompts are kept for the next call
    json: bool = False  # print one line of JSON per answer

    @property
    def speculative(self) -> bool:
        """Whether the options request drafts; statistics are printed for these, but not for default drafts."""
        return bool(self.draft or self.lookup)

    @property
    def view(self) -> str:
        return "search" if self.beams else "sampling"


def main(argv: Sequence[str]) -> None:
    given = read(Options, argv, prog="onward generate", about=ABOUT)
    options = made(Options, given | schema(given), "onward generate")
    if {"draft", "lookup"} <= given.keys():
        raise UserError("Cannot combine --draft and --lookup: choose one")
    if searching := options.view == "search":
        options = replace(options, temperature=options.temperature if "temperature" in given else 1.0)
    warn_of_temperature(options.temperature)
    prompts = [read_text() if prompt == "-" else prompt for prompt in options.prompt]
    if options.prompts:
        prompts += from_file(options.prompts, options.field)
    if not prompts:
        prompts = ["" if isinstance(sys.stdin, ClosedInput) or sys.stdin.isatty() else read_text()]
    lm = load(options.model, options)
    trained = with_draft(lm, options.model, options.draft) if options.draft else False
    warn_of_unknown(lm.tokenizer, prompts)
    if searching:
        search(lm, prompts, options)
    else:
        engine = lm.engine(
            slide=options.context_overflow == "slide",
            draft=None if trained else draft_of(options),
            lookup=options.lookup,
            prompt_cache=options.prompt_cache,
        )
        if lm.draft_head and not given.keys() & {"draft", "lookup"}:
            tell_draft(options.model)
        if options.compile:
            compile_steps(engine, [min(len(prompts) * options.n, engine.scheduler.rows)])
        sample(lm, prompts, options, engine)
    if sys.stdout.isatty():
        print_next(f"onward evaluate {quote(options.model)}")


def draft_of(options: Options) -> 'LanguageModel | Literal["mtp"] | None':
    if options.draft == "mtp":
        return "mtp"
    return load(options.draft, replace(options, revision="")) if options.draft else None


def schema(given: Mapping[str, Any]) -> dict[str, str]:
    """Return the option json_schema with the content of FILE for `--json-schema @FILE`; {} for a schema or none."""
    asked = given.get("json_schema", "")
    if asked.startswith("@"):
        return {"json_schema": Path(asked[1:]).read_text(encoding="utf-8", errors="replace")}
    if asked and not asked.lstrip().startswith(("{", "[")) and Path(asked).suffix:
        raise UserError(f"json_schema is {asked!r}, which is not JSON: write @{asked} for a file")
    return {}


def from_file(file: str, field: str) -> list[str]:
    """Read prompts: one per line or, in .jsonl and .parquet, per record."""
    from onward.cli.shared.sources import announce
    from onward.data.sources import documents, has_records, is_plain_text

    announce([file])
    field = "text" if field == Options.field and is_plain_text(file) else field  # the default is a field of records
    texts = [read_text()] if file == "-" else documents([file], field=field, raw=True)
    if has_records(file):
        return list(texts)
    if lines := [line for text in texts for line in text.split("\n") if line.strip()]:
        return lines
    raise UserError("standard input is empty: write a prompt on each line")  # an empty file has its own error


def sample(lm: "LanguageModel", prompts: Sequence[str], options: Options, engine: "Engine") -> None:
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress

    answers, errors = lm.submit(engine, prompts, options), Console(stderr=True)
    quiet = len(answers) == 1 or sys.stdout.isatty() or not errors.is_terminal
    columns = *Progress.get_default_columns(), MofNCompleteColumn()
    with Progress(*columns, console=errors, transient=True, redirect_stdout=False, disable=quiet) as bar:
        task = bar.add_task("answers", total=len(answers))
        for number, (request, answer) in enumerate(answers.items()):
            prompt_index, index = divmod(number, options.n)
            printed = Printed(prompts[prompt_index], number, len(answers))
            while not request.done:
                engine.advance()  # not `step`, which checks the model for changes by user code
                bar.update(task, completed=sum(one.done for one in answers))
                if not options.json:
                    printed.add(answer.take())
            text = answer.finish()
            if options.json:
                place = {"prompt_index": prompt_index, "index": index, "prompt": prompts[prompt_index]}
                print_line(place | {"text": text} | row(request, lm.text(), speculative=options.speculative))
                continue
            if text or not request.error:
                printed.finish(answer.take())
            if request.logprobs:
                print_table([*likely(request.logprobs, lm.text())])
    if not options.json:
        tell_cut(list(answers))
    for request in answers:
        if request.error:
            raise request.error
    if engine.draft and options.speculative:
        report(list(answers), engine.draft.num_draft_tokens, engine.times.speed_up())


class Printed:
    """Prints one prompt and its answer as the answer grows, after a line such as [1/3] if there are several answers."""

    def __init__(self, prompt: str, number: int, count: int) -> None:
        self.show = printable if sys.stdout.isatty() else str
        self.waiting = prompt  # printed with the first piece of the answer, so that no prompt precedes an error
        if count > 1:
            self.waiting = f"[{number + 1}/{count}]\n{prompt}"

    def add(self, piece: str) -> None:
        if piece:
            print(self.show(self.waiting + piece), end="", flush=True)
            self.waiting = ""

    def finish(self, piece: str) -> None:
        print(self.show(self.waiting + piece), flush=True)


def row(request: "Request", tokenizer: "Tokenizer", *, speculative: bool) -> dict[str, Any]:
    values: dict[str, Any] = {
        "tokens": request.tokens,
        "finish_reason": request.finish_reason,
        "seed": request.seed,
    }
    if request.error:
        values["error"] = str(request.error)
    if request.num_logprobs is not None:
        one = lambda token, value: {"token": token, "text": tokenizer.piece(token), "logprob": value}
        values["logprobs"] = [
            one(token.token, token.logprob) | {"alternatives": [one(*other) for other in token.alternatives]}
            for token in request.logprobs
        ]
    if speculative:
        values |= {"steps": request.steps, "num_drafted": request.num_drafted, "num_accepted": request.num_accepted}
    return values


def likely(logprobs: "Sequence[TokenLogprob]", tokenizer: "Tokenizer") -> Iterator[dict[str, Any]]:
    for one in logprobs:
        others = ", ".join(f"{tokenizer.piece(token)!r} {value:.2f}" for token, value in one.alternatives)
        values = {"token": repr(tokenizer.piece(one.token)), "logprob": one.logprob}
        yield values | ({"likeliest": others} if others else {})


def tell_cut(answers: "Sequence[Request | SearchResult]") -> None:
    cut = [answer for answer in answers if answer.finish_reason == "length"]
    if cut:
        subject = "the answer was" if len(answers) == 1 else f"{len(cut):,} of {len(answers):,} answers were"
        longest = max(len(answer.tokens) for answer in cut)
        console.print(f"{subject} cut after {longest:,} tokens: see --max-new-tokens", soft_wrap=True)


def report(requests: "Sequence[Request]", num_draft_tokens: int, speed_up: float | None) -> None:
    """Print how many draft tokens were accepted and, if speculation is slower than plain decoding, advise against
    it."""
    from onward.generation.drafts.times import expected_tokens

    total = lambda name: sum(getattr(request, name) for request in requests)
    drafted, steps, tokens = total("num_drafted"), total("steps"), sum(len(request.tokens) for request in requests)
    if not drafted:
        console.print("no tokens were drafted")
        return
    rate = total("num_accepted") / drafted
    console.print(
        f"accepted {rate:.1%} of {drafted:,} draft tokens; tokens per step: {tokens / steps:.2f} measured, "
        f"{expected_tokens(rate, num_draft_tokens):.2f} expected at this rate with {num_draft_tokens} draft "
        "tokens each time",
        soft_wrap=True,
    )
    if speed_up is not None and speed_up < 1:
        console.print(
            f"speculation gives {speed_up:.2f} times the plain speed here: leave it out",
            soft_wrap=True,
        )


def search(lm: "LanguageModel", prompts: Sequence[str], options: Options) -> None:
    continuations = lm.beam_search(
        prompts,
        options=options,
        beams=options.beams,
        groups=options.groups,
        diversity=options.diversity,
        length_penalty=options.length_penalty,
        early_stopping="never" if options.early_stopping == "never" else options.early_stopping == "true",
    )
    count, number = sum(map(len, continuations)), 0
    for prompt_index, (prompt, answers) in enumerate(zip(prompts, continuations)):
        for index, answer in enumerate(answers):
            if options.json:
                place = {"prompt_index": prompt_index, "index": index, "prompt": prompt}
                print_line(place | asdict(answer))
            else:
                Printed(prompt, number, count).finish(answer.text)
            number += 1
    if not options.json:
        tell_cut([answer for answers in continuations for answer in answers])


def print_line(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)
