"""onward assistant: documents -> examples -> an adapter -> its evaluation against the base."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import join, quote
from typing import Any, ClassVar, Literal

from onward.base.errors import UserError
from onward.base.files import read_json, write_json
from onward.cli import module_of
from onward.cli.shared.options import parse
from onward.cli.shared.output import console, print_json, print_next
from onward.cli.shared.sources import announce
from onward.config.ranges import Share, Size, SizeOrZero

ABOUT = """\
Make an assistant that knows your documents: examples from their passages, an adapter (QLoRA) on a model, and an
evaluation against this model. Training and evaluation are commands, which are printed. To continue an interrupted
command, run it again.

examples:
  onward assistant docs/ --base runs/quickstart --time 3m
  onward assistant docs/ --base qwen3-0.6b --out runs/helper
  onward assistant docs/ --base qwen3-4b --judge http://localhost:9000/v1 --judge-model large    judge writes questions
  onward plan qwen3-4b --quantize int4 --memory 16GiB          check whether a base fits into memory
"""
# above LARGE parameters, the options SPARING are used
LARGE, SPARING = 200_000_000, ["--batch-size", "1", "--accumulation", "8", "--recompute"]
ANSWERS = 8  # held-out questions that both models answer on the page


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `onward assistant`, which fine-tunes a model on documents."""

    positional: ClassVar[tuple[str, ...]] = ("sources",)
    reads: ClassVar[dict[str, tuple[str, ...]]] = {"judge": ("judge_model",)}
    sources: tuple[str, ...] = ()  # files, folders or globs of documents: HTML, PDF, Markdown, text and others
    base_model: str = ""  # model to start from: a folder or a name on the hub
    out: str = ""  # folder for examples, adapter and page; default: runs/NAME-assistant, named after the first source
    time: str = "3m"  # how long to train
    lora: Size = 16  # rank of the adapter
    quantize: Literal["int4", "int8", "none"] = "int4"  # precision of the base's frozen weights (QLoRA)
    learning_rate: float | None = None  # peak learning rate; default: that of onward finetune
    examples: SizeOrZero = 0  # maximum number of examples; 0: one for each passage
    judge: str = ""  # OpenAI API (address up to /v1) of a model that writes questions; default: base if it can chat
    judge_model: str = ""  # name of the model that writes questions
    field: str = "text"  # field of .jsonl, .parquet and hf:// records that holds the text
    encoding: str = "utf-8"  # encoding of text files
    raw: bool = False  # read HTML, XML, Markdown and notebooks with their markup
    repeated_lines: Share = 0.3  # leave out lines on at least this fraction of a source's pages; 0: keep all
    device: str = "auto"  # auto, cpu, cuda, mps
    seed: int = 0  # seed of the data order
    serve: bool = False  # serve the result at the end
    json: bool = False  # print the figures as JSON


def main(argv: Sequence[str]) -> int:
    options = parse(Options, argv, prog="onward assistant", about=ABOUT)
    if not options.sources:
        raise UserError("no documents: name their folder, such as onward assistant docs/ --base runs/quickstart")
    if not options.base_model:
        raise UserError("no model to start from: name one with --base, such as runs/quickstart")
    from onward.cli.shared.run_options import default_name
    from onward.hub.folder import is_adapter, locate

    if is_adapter(locate(options.base_model)):
        raise UserError(f"base is {options.base_model}, an adapter: name its base, or merge it")
    out = Path(options.out or f"runs/{default_name(options.sources[0])}-assistant")
    words = finetuning(options, out)
    module_of("finetune").configure(words)  # refuses wrong values before anything is written
    settle(options, out)
    examples = examples_of(options, out)
    if status := trained(options, out / "adapter", words):
        return status
    base, adapter, held_out = options.base_model, str(out / "adapter"), str(out / "held-out.jsonl")
    more = ["--device", options.device] if options.device != "auto" else []
    compared = called(options, "evaluate", [base, adapter, held_out, *more])
    pages = called(
        options,
        "evaluate",
        [base, adapter, "--answers", held_out, "--page", str(out / "answers.html"), "--limit", str(ANSWERS), *more],
    )
    if options.json:
        training = read_json(out / "adapter" / "result.json")
        page = {name: pages[name] for name in ("page", "prompts", "equal_answers")}
        print_json({"folder": str(out), "examples": examples, "training": training, "evaluation": compared, **page})
    serve = ["serve", base, "--adapter", adapter]
    if options.serve:
        called(options, "serve", serve[1:])
    else:
        pages_in_words = f"open {quote(str(out / 'answers.html'))} in a browser"
        print_next(join(["onward", *serve]), join(["onward", "chat", adapter]), pages_in_words)
    return 0


def settle(options: Options, out: Path) -> None:
    """Write the options that determine the result, or compare them with those of an earlier command in the folder."""
    shown = ("json", "serve", "out", "device")
    settings = json.loads(json.dumps({name: value for name, value in asdict(options).items() if name not in shown}))
    file = out / "assistant.json"
    if file.exists():
        earlier = read_json(file)
        if differ := [name for name in settings if earlier.get(name) != settings[name]]:
            raise UserError(
                f"{out} was begun with another {' and '.join(differ)}: give the same values, or another --out"
            )
        return
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out} contains other files: choose another --out")
    out.mkdir(parents=True, exist_ok=True)
    write_json(file, settings)


def examples_of(options: Options, out: Path) -> dict[str, Any]:
    """Make the examples, unless they already exist."""
    from onward.api.asking import ask
    from onward.cli.shared.progress import progress_bars
    from onward.data.reading import Reading

    figures = out / "examples.json"
    if figures.exists():
        return read_json(figures)
    announce(options.sources)
    reading = Reading(options.field, options.encoding, options.raw, options.repeated_lines)
    judged: dict[str, Any] = {"judge": options.judge, "judge_model": options.judge_model, "most": options.examples}
    say("making examples from the documents")
    try:
        with progress_bars(counted=True) as progress:
            made = ask(options.sources, out, options.base_model, reading=reading, progress=progress, **judged)
    except UserError:
        if [*out.iterdir()] == [out / "assistant.json"]:  # nothing to continue from
            (out / "assistant.json").unlink()
            out.rmdir()
        raise
    write_json(figures, asdict(made))
    by = f"; a model wrote {made.written:,} questions" if made.written else "; the questions are from headings"
    say(
        f"{made.documents:,} documents, {made.passages:,} passages: {made.examples:,} examples in "
        f"{out / 'examples.jsonl'} and {made.held_out:,} held-out examples in {out / 'held-out.jsonl'}{by}"
    )
    return asdict(made)


def trained(options: Options, adapter: Path, words: Sequence[str]) -> int:
    """Train the adapter, or continue its training, or return at once if it is trained; return the exit status."""
    if (adapter / "result.json").exists():
        return 0
    if (adapter / "run.json").exists():
        return status_of(options, "finetune", ["--resume", str(adapter)])
    shutil.rmtree(adapter, ignore_errors=True)  # the run was killed before its first step
    return status_of(options, "finetune", words)


def finetuning(options: Options, out: Path) -> list[str]:
    """The words after `onward finetune` in the command that trains the adapter."""
    from onward.api.asking import ROW, TEMPLATE
    from onward.checkpoint.load import open_source
    from onward.hub.folder import locate
    from onward.planning.parameters import parameters

    source = open_source(locate(options.base_model))
    tokenizer, config = source.required_tokenizer(), source.family()[1]
    words = [options.base_model, str(out / "examples.jsonl"), "--validation", str(out / "held-out.jsonl")]
    rank = str(options.lora)
    if not tokenizer.templates:
        words += ["--template", TEMPLATE]
        # a model without a chat template has rarely seen the end of an answer
        rank = f"lora(rank={rank}, tokens=({tokenizer.eos_id},))" if tokenizer.eos_id is not None else rank
    words += ["--lora", rank, "--time", options.time, "--out", str(out / "adapter"), "--seed", str(options.seed)]
    words += ["--quantize", options.quantize] if options.quantize != "none" else []
    words += ["--length", str(ROW)] if config.context_length > ROW else []
    words += SPARING if parameters(config) > LARGE else []
    words += ["--device", options.device] if options.device != "auto" else []
    words += ["--learning-rate", f"{options.learning_rate:g}"] if options.learning_rate is not None else []
    return words


def called(options: Options, command: str, words: Sequence[str]) -> dict[str, Any]:
    """Run a command; with --json, return the JSON that it prints, if any; otherwise {}."""
    main = module_of(command).main
    words = [*words, *(["--json"] if options.json and command == "evaluate" else [])]
    say(f"$ {join(['onward', command, *words])}")
    if not options.json:
        main(words)
        return {}
    with redirect_stdout(io.StringIO()) as printed:
        main(words)
    return json.loads(printed.getvalue() or "{}")


def status_of(options: Options, command: str, words: Sequence[str]) -> int:
    say(f"$ {join(['onward', command, *words])}")
    with redirect_stdout(io.StringIO()) if options.json else nullcontext():
        status: int = module_of(command).main(words)
    return status


def say(sentence: str) -> None:
    console.print(f"\n{sentence}", style="bold", markup=False, soft_wrap=True)
