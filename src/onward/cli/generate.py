"""onward generate: what follows a prompt, or many."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from onward import fields
from onward.cli.options import read
from onward.cli.output import console, print_next, print_table, printable, warn_of_unknown
from onward.errors import UserError
from onward.generation.options import GenerationOptions

if TYPE_CHECKING:
    from onward.generation.engine import Engine
    from onward.generation.request import Request, TokenLogprob
    from onward.language_model import LanguageModel
    from onward.text.tokenizer import Tokenizer

ABOUT = """\
Continue prompts with a model: all of them together, printed in their order, the text as it comes.

examples:
  onward generate runs/mybook "Once upon"
  onward generate runs/mybook "Once upon" --temperature 0 --max-new-tokens 50 --logprobs 3
  onward generate runs/mybook "Once upon" "In the end" --top-p 0.9 --seed 1 --n 3
  onward generate runs/mybook --prompts many.txt --json > answers.jsonl
  onward generate runs/mybook "Once upon" --draft runs/small
  onward generate runs/mybook "Once upon" --beams 4 --n 2
"""


@dataclass(frozen=True)
class Speculation:
    """Speculative decoding: the same distribution, faster. Proposed tokens are tested together."""

    draft: str = ""  # folder of a smaller model with the same tokenizer that proposes tokens
    lookup: int = 0  # propose so many tokens, those that followed where the text was the same before; 0: none


@dataclass(frozen=True)
class Search:
    """Search for likely answers, in place of sampling."""

    beams: int = 0  # beam search with so many beams; 0: none
    groups: int = 1  # beams in so many groups, which differ from each other
    diversity: float = 0.0  # taken off a token's log-probability for each earlier group that has just chosen it
    length_penalty: float = 1.0  # of beams: the greater, the better longer answers do
    early_stopping: Literal["true", "false", "never"] = "false"  # true: as soon as there are so many answers as beams
    alpha: float | None = None  # contrastive search with this weight, 0 to 1, of what repeats; 0.6 is usual
    k: int = 4  # tokens that contrastive search chooses from


@dataclass(frozen=True, kw_only=True)
class Options(GenerationOptions, Search, Speculation):
    """What to continue, and how."""

    positional: ClassVar[tuple[str, ...]] = ("model", "prompt")
    model: str  # folder of the model
    prompt: tuple[str, ...] = ()  # texts to continue; none, here or in a file: start from nothing
    prompts: str = ""  # a file of prompts: one per line, or .jsonl; - for standard input
    field: str = "prompt"  # the field of each .jsonl line that holds the prompt
    context_overflow: Literal["error", "slide"] = "error"  # slide: go on beyond the context, from the later half of it
    prompt_cache: str = ""  # a folder that keeps what has been read of prompts for the next time
    device: str = "auto"  # auto, cpu, cuda, mps
    allow_nonfinite: bool = False  # load a model although weights of it are NaN or infinite
    json: bool = False  # print a line of JSON per answer


NEEDS = {
    "beams": ("groups", "diversity", "length_penalty", "early_stopping"),
    "alpha": ("k",),
}


def main(argv: Sequence[str]) -> None:
    given = read(Options, argv, prog="onward generate", about=ABOUT)
    options = fields.build(Options, given)
    check(options, given)
    import onward

    prompts = (*options.prompt, *(from_file(options.prompts, options.field) if options.prompts else ())) or ("",)
    load = lambda folder: onward.load(folder, device=options.device, allow_nonfinite=options.allow_nonfinite)
    lm = load(options.model)
    warn_of_unknown(lm.tokenizer, prompts)
    sampling = {name: getattr(options, name) for name in fields.hints(GenerationOptions) if name in given}
    if options.json_schema.startswith("@"):
        sampling["json_schema"] = Path(options.json_schema[1:]).read_text(encoding="utf-8", errors="replace")
    if options.beams or options.alpha is not None:
        search(lm, prompts, options, sampling)
    else:
        draft = load(options.draft) if options.draft else None
        slide, folder = options.context_overflow == "slide", options.prompt_cache
        engine = lm.engine(draft=draft, lookup=options.lookup, slide=slide, prompt_cache=folder)
        sample(lm, prompts, options, sampling, engine)
    if sys.stdout.isatty():
        print_next(f"onward evaluate {quote(options.model)}")


def check(options: Options, given: dict[str, Any]) -> None:
    """Refuse what cannot be combined."""
    ways = [name for name in ("beams", "alpha", "draft", "lookup") if name in given]
    if len(ways) > 1:
        raise UserError(f"{ways[0]} and {ways[1]} are both given: choose one")
    for way, names in NEEDS.items():
        for name in names:
            if name in given and way not in given:
                raise UserError(f"{name} is given without {way}, which it belongs to: give both or none")
    if {"beams", "alpha"} & {*ways}:
        if options.context_overflow == "slide":
            raise UserError(f"{ways[0]} cannot slide beyond the context: leave out one of them")
        if options.prompt_cache:
            raise UserError(f"{ways[0]} does not use a prompt_cache: leave out one of them")


def from_file(file: str, field: str) -> list[str]:
    """The prompts in a file."""
    from onward.data.sources import documents

    found = documents([file], field=field)
    if file.lower().removesuffix(".gz").endswith(".jsonl"):
        return list(found)
    return [line for text in found for line in text.split("\n") if line.strip()]


def sample(
    lm: "LanguageModel", prompts: Sequence[str], options: Options, sampling: dict[str, Any], engine: "Engine"
) -> None:
    """Continue all prompts together and print their answers in order, each as it comes."""
    from rich.progress import MofNCompleteColumn, Progress

    sampling.pop("max_new_tokens", None)
    answers = lm.answers(prompts, options.max_new_tokens, sampling | {"slide": engine.slide})
    for request in answers:
        engine.add(request)
    prompt_of = [prompt for prompt in prompts for _ in range(options.n)]
    show = printable if sys.stdout.isatty() else str
    quiet = len(answers) == 1 or sys.stdout.isatty() or not console.is_terminal
    columns = *Progress.get_default_columns(), MofNCompleteColumn()
    with Progress(*columns, console=console, transient=True, redirect_stdout=False, disable=quiet) as bar:
        task = bar.add_task("answers", total=len(answers))
        for prompt, (request, answer) in zip(prompt_of, answers.items()):
            waiting = prompt  # until something follows it: where that is a mistake, there is nothing to print
            while not request.done:
                engine.step()
                bar.update(task, completed=len(answers) - len(engine.waiting) - len(engine.active))
                if not options.json and (piece := answer.take()):
                    print(show(waiting + piece), end="", flush=True)
                    waiting = ""
            text = answer.finish()
            if options.json:
                print_line(row(prompt, text, request, lm.text(), speculative=bool(engine.draft)))
                continue
            print(show(waiting + answer.take()), flush=True)
            if request.logprobs:
                print_table([*likely(request.logprobs, lm.text())])
    if engine.draft:
        report(list(answers), engine.draft.num_draft_tokens)


def row(prompt: str, text: str, request: "Request", tokenizer: "Tokenizer", *, speculative: bool) -> dict[str, Any]:
    """All there is to say of an answer."""
    found: dict[str, Any] = {
        "prompt": prompt,
        "text": text,
        "tokens": request.tokens,
        "finish_reason": request.finish_reason,
    }
    if request.num_logprobs is not None:
        one = lambda token, value: {"token": token, "text": tokenizer.piece(token), "logprob": value}
        found["logprobs"] = [
            one(chance.token, chance.logprob) | {"alternatives": [one(*other) for other in chance.alternatives]}
            for chance in request.logprobs
        ]
    if speculative:
        found |= {"steps": request.steps, "num_drafted": request.num_drafted, "num_accepted": request.num_accepted}
    return found


def likely(chances: "Sequence[TokenLogprob]", tokenizer: "Tokenizer") -> Iterator[dict[str, Any]]:
    """How likely each token was, and what else might have come."""
    for chance in chances:
        others = ", ".join(f"{tokenizer.piece(token)!r} {value:.2f}" for token, value in chance.alternatives)
        found = {"token": repr(tokenizer.piece(chance.token)), "logprob": chance.logprob}
        yield found | ({"likeliest": others} if others else {})


def report(requests: "Sequence[Request]", num_draft_tokens: int) -> None:
    """How well speculation went."""
    from onward.generation.speculation import expected_tokens

    total = lambda name: sum(getattr(request, name) for request in requests)
    tested, steps, tokens = total("num_drafted"), total("steps"), sum(len(request.tokens) for request in requests)
    if not tested:
        console.print("nothing was proposed")
        return
    rate = total("num_accepted") / tested
    console.print(
        f"accepted {rate:.1%} of {tested:,} proposed tokens; tokens per step: {tokens / steps:.2f} measured, "
        f"{expected_tokens(rate, num_draft_tokens):.2f} expected at this rate with {num_draft_tokens} proposed "
        "each time",
        soft_wrap=True,
    )


def search(lm: "LanguageModel", prompts: Sequence[str], options: Options, sampling: dict[str, Any]) -> None:
    """Search for the answers to all prompts, and print them."""
    sampling.pop("max_new_tokens", None)
    if options.beams:
        sampling["early_stopping"] = {"true": True, "false": False}.get(options.early_stopping, "never")
        names = "beams", "groups", "diversity", "length_penalty"
        sampling |= {name: getattr(options, name) for name in names}
        found = lm.beam_search(prompts, options.max_new_tokens, **sampling)
    else:
        sampling |= {"alpha": options.alpha, "k": options.k}
        found = [[one] for one in lm.contrastive_search(prompts, options.max_new_tokens, **sampling)]
    show = printable if sys.stdout.isatty() else str
    for prompt, answers in zip(prompts, found):
        for answer in answers:
            if options.json:
                print_line({"prompt": prompt} | {k: v for k, v in asdict(answer).items() if v is not None})
            else:
                print(show(prompt + answer.text), flush=True)


def print_line(value: dict[str, Any]) -> None:
    """A value as one line of JSON."""
    print(json.dumps(value), flush=True)
