"""The command `onward`: one file of `commands/` per sub-command, imported when called; `shared/` is common to them."""

import importlib
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from time import sleep
from types import ModuleType

from onward.cli.shared import streams

GROUPS = {
    "begin": {
        "quickstart": "train a small decoder on the built-in text and watch it learn",
        "learn": "the course: from next tokens to alignment, chapter by chapter",
        "help": "a term in one sentence, with its chapter and its name in the code",
    },
    "texts and tokens": {
        "data": "texts of any size as tokens, prepared once; well-known corpora",
        "tokenizer": "learn a tokenizer from text, compare tokenizers, show the pieces of a text",
    },
    "train and compare": {
        "train": "text -> tokens -> windows -> logits -> loss -> weights",
        "finetune": "examples of answers -> an assistant",
        "compare": "variants of a run side by side, and whether they differ by more than noise",
        "sweep": "a run for each value of an option, and the curve of their losses",
        "runs": "the runs in a folder, with their figures",
        "report": "curves, samples, attention and next tokens of a run or a model on one page",
    },
    "use a model": {
        "generate": "prompt -> logits -> next token -> text",
        "chat": "a conversation, turn by turn",
        "serve": "models behind the API of OpenAI",
        "evaluate": "loss, perplexity and bits per byte of a model on a text; its scores at tasks",
        "prompt": "how the probabilities of answers move as examples are added to a prompt",
    },
    "look inside": {
        "inspect": "attention, next tokens, lens, heads and more of a model that reads a text",
        "explain": "the forward pass step by step, with the numbers of a model",
        "draw": "pictures of the ideas: masks, positions, windows, samplers, the cache, a block",
    },
    "check": {
        "doctor": "the usual mistakes in any decoder: yours, or a tutorial's",
        "verify": "every way to run a model, compared with its plain forward",
    },
    "sizes and speed": {
        "plan": "memory, operations, speed and cost of a decoder before it exists, each with its formula",
        "scaling": "the best model size and number of tokens for a compute budget; laws of your runs",
        "models": "published decoders: their parts, and the changes from one to the next",
        "bench": "tokens per second of a model, and its share of the machine's limits",
    },
    "smaller, merged, published": {
        "quantize": "a model's linear layers as int8 or int4: smaller, faster, slightly less exact",
        "merge": "an adapter (LoRA) and its base as one model",
        "convert": "a model as GGUF for llama.cpp and ollama, or as a Hugging Face folder",
        "card": "the model card of a model or a run: README.md for the hub",
        "push": "a model and its card to the Hugging Face hub",
    },
    "the shell": {
        "completion": "a script that lets the shell complete commands and options",
    },
}
COMMANDS = {name: what for group in GROUPS.values() for name, what in group.items()}
IN_PROCESSES = "quickstart", "train", "finetune", "evaluate", "compare", "sweep"  # that torchrun may start
SYNONYMS = {  # names of commands elsewhere -> ours
    **dict.fromkeys(("talk", "ask", "repl"), "chat"),
    **dict.fromkeys(("server", "api", "host"), "serve"),
    **dict.fromkeys(("export", "save", "gguf"), "convert"),
    **dict.fromkeys(("sample", "infer", "inference", "predict", "complete"), "generate"),
    **dict.fromkeys(("eval", "perplexity", "score"), "evaluate"),
    **dict.fromkeys(("pretrain", "fit", "resume"), "train"),
    **dict.fromkeys(("sft", "dpo", "lora", "tune", "grpo"), "finetune"),
    **dict.fromkeys(("prepare", "download", "dataset"), "data"),
    **dict.fromkeys(("tokenize", "encode"), "tokenizer"),
    **dict.fromkeys(("upload", "publish"), "push"),
    **dict.fromkeys(("benchmark", "speed"), "bench"),
    **dict.fromkeys(("check", "test", "lint"), "doctor"),
    **dict.fromkeys(("list", "ls", "status"), "runs"),
    **dict.fromkeys(("plot", "show", "visualize"), "draw"),
    **dict.fromkeys(("memory", "estimate", "cost"), "plan"),
    **dict.fromkeys(("course", "tutorial", "lesson", "chapter"), "learn"),
    **dict.fromkeys(("glossary", "define", "term"), "help"),
}

DATA_FLOW = """\
How data flows, and the command for each step:

  text -> tokens                                               onward data prepare notes/ --out prepared
                                      which tokenizer?         onward tokenizer compare byte char
  text -> tokens -> windows -> logits -> loss -> weights       onward train mybook.txt --out runs/mybook
                                       what has it learned?    onward report runs/mybook
                                      which runs are there?    onward runs
                                             what is better?   onward compare a.toml b.toml --time 60s --seeds 3
                                            how good is it?    onward evaluate runs/mybook other.txt
                               does it learn from examples?    onward prompt runs/mybook "great → good; huge →"
                                             look inside       onward inspect runs/mybook "Once upon a time" lens
                                            is it exact?       onward verify runs/mybook
  examples of answers -> an assistant                          onward finetune runs/mybook answers.jsonl --lora 16
                                       smaller and faster      onward quantize runs/mybook runs/small
                                            how fast is it?    onward bench runs/mybook
                                            will it fit?       onward plan llama-3.1-8b
  prompt -> logits -> next token -> text                       onward generate runs/mybook "Once upon"
                                          turn by turn         onward chat runs/mybook
                                    for other programs         onward serve runs/mybook
  weights -> another program                                   onward convert runs/mybook mybook.gguf
                                      for everybody to use     onward push runs/mybook me/mybook --license mit

All of it at once, on text that every Python brings along:     onward quickstart
Well-known texts to train on:                                  onward data list
Published decoders and their differences:                      onward models
The ideas behind them in pictures:                             onward draw mask
A course that teaches them, and its glossary:                  onward learn, onward help nucleus

onward COMMAND --help explains each command, with examples. The commands:"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line with the words `argv` (None: those of this process); return the exit status: 0, 1 if a check
    failed, 2 for a mistake of the user, 130 for Ctrl-C."""
    words = list(sys.argv[1:] if argv is None else argv)
    streams.prepare()
    with streams.handled_interrupts():
        try:
            status = dispatch(words)
            sys.stdout.flush()  # so that an error of the output is reported here and not when Python ends
            return status
        except KeyboardInterrupt:
            if os.environ.get("RANK", "0") == "0":  # one rank says it
                streams.complain("\nonward: interrupted")
            return 130
        except BrokenPipeError:  # the reader of the output has gone
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        except (RuntimeError, MemoryError, ValueError, OSError) as error:
            message = sentence(error, words)
            if message is None:
                raise
            streams.complain(f"onward: {message}")
            streams.drop_output()
            return 2


def sentence(error: Exception, words: Sequence[str]) -> str | None:
    """Return the one-sentence message to print for an exception; None if it is a bug and not a mistake of the user or a
    lack of memory. `words` are the words of the command line, whose options the message names as typed."""
    from onward.base.errors import UserError
    from onward.cli.shared.options import with_flags
    from onward.cli.shared.output import printable, shortened

    if isinstance(error, UserError):
        return shortened(printable(with_flags(str(error), words)))
    if isinstance(error, OSError):
        return shortened(printable(f"{error.filename or 'standard output or a file'}: {error.strerror or error}"))
    if isinstance(error, MemoryError) or re.search("allocate memory|out of memory", str(error)):
        less = "smaller sizes or a smaller --batch-size" if "train" in words else "a smaller model, or shorter texts"
        return f"there is not enough memory: choose {less}"
    return None


def module_of(name: str) -> ModuleType:
    """Import the module of a command, with its `Options` and its `main`."""
    return importlib.import_module(f"{__name__}.commands.{name}")


def dispatch(words: list[str]) -> int:
    """Run the command that the first of `words` names, with the other words as its arguments, or print the list of
    commands; return the exit status. Raises a UserError for an unknown command."""
    if not words or words[0] in ("-h", "--help") or words == ["help"]:
        print(DATA_FLOW)
        for group, commands in GROUPS.items():
            print(f"\n{group}")
            for name, what in commands.items():
                print(f"  {name:12}{what}")
        return 0
    if words[0] == "--version":
        from importlib.metadata import version

        print(f"onward {version('onward')}")
        return 0
    if words[0] not in COMMANDS:
        from onward.base.errors import UserError
        from onward.base.fields import nearest

        meant = SYNONYMS.get(words[0].lower())
        advice = f"did you mean {meant}?" if meant else nearest(words[0], COMMANDS)
        raise UserError(f"{words[0]!r} is not a command: {advice}")
    if words[0] not in IN_PROCESSES and (count := os.environ.get("WORLD_SIZE", "1")) != "1":
        from onward.base.errors import UserError

        if os.environ.get("RANK", "0") != "0":  # one rank says it; torchrun would end it if this one ended first
            sleep(10)
            return 2
        raise UserError(
            f"onward {words[0]} runs in one process, and torchrun started {count}: call it without torchrun"
        )
    with warnings.catch_warnings():
        warnings.showwarning = partial(show_warning, warnings.showwarning)
        try:
            status: int | None = module_of(words[0]).main(words[1:])
        except SystemExit:  # after --help
            sys.stdout.flush()
            raise
    return status or 0


def show_warning(usual: Callable[..., None], message: object, category: type[Warning], *where: object) -> None:
    """Print a warning on standard error: a warning of Onward as one line; for those of other libraries call `usual`,
    Python's `warnings.showwarning`, with all arguments."""
    if category.__module__.startswith("onward."):
        print(f"onward: {message}", file=sys.stderr)
    else:
        usual(message, category, *where)
