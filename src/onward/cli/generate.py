"""onward generate: what follows a prompt."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from shlex import quote

from onward.cli.options import parse
from onward.cli.output import print_json, print_next, printable, warn_of_unknown
from onward.generation.sampling import Sampling

ABOUT = """\
Continue a prompt with a model, word by word as it comes.

examples:
  onward generate runs/mybook "Once upon"
  onward generate runs/mybook "Once upon" --temperature 0 --max-new-tokens 50
  onward generate runs/mybook "Once upon" "In the end" --top-p 0.9 --seed 1 --json
"""


@dataclass(frozen=True, kw_only=True)
class Options(Sampling):
    """What to continue, and how."""

    model: str  # folder of the model
    prompts: tuple[str, ...] = ()  # texts to continue; none: start from nothing
    max_new_tokens: int | None = None  # how many tokens at the most; none: 256, or as many as the context holds
    slide: bool = False  # go on beyond the model's context, from the later half of it
    device: str = "auto"  # auto, cpu, cuda, mps
    allow_nonfinite: bool = False  # load a model although weights of it are NaN or infinite
    json: bool = False  # print prompts and texts as JSON


def main(argv: Sequence[str]) -> None:
    options = parse(Options, argv, prog="onward generate", about=ABOUT, positional=("model", "prompts"))
    import onward

    lm = onward.load(options.model, device=options.device, allow_nonfinite=options.allow_nonfinite)
    prompts = options.prompts or ("",)
    warn_of_unknown(lm.tokenizer, prompts)
    sampling = {name: getattr(options, name) for name in Sampling.__dataclass_fields__}
    how = {"max_new_tokens": options.max_new_tokens, "slide": options.slide} | sampling
    if options.json:
        texts = lm.generate(prompts, **how)
        print_json([{"prompt": prompt, "text": text} for prompt, text in zip(prompts, texts)])
        return
    show = printable if sys.stdout.isatty() else str
    for i, prompt in enumerate(prompts):
        own = {} if options.seed is None else {"seed": options.seed + i}
        waiting = prompt  # until something follows it: where that is a mistake, there is nothing to print
        for piece in lm.stream(prompt, **how | own):
            print(show(waiting + piece), end="", flush=True)
            waiting = ""
        print(waiting, flush=True)
    if sys.stdout.isatty():
        print_next(f"onward evaluate {quote(options.model)}")
