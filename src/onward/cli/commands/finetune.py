"""onward finetune: from a pretrained decoder to an assistant."""

import dataclasses
import inspect
import re
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from onward.base import fields
from onward.base.errors import UserError
from onward.cli.shared.options import read
from onward.cli.shared.parser import Parser
from onward.cli.shared.run_options import from_toml, given_options, join_duration
from onward.cli.shared.training import in_processes, run_command
from onward.hub.folder import DRAFT
from onward.training.finetuning.config import FinetuneConfig, check_readers
from onward.training.methods import Method
from onward.training.methods.answers.sft import SFT

ABOUT = """\
Train a model on examples of answers. The common options, the run folder and --resume work as in onward train.

examples:
  onward finetune runs/mybook chats.jsonl --template chatml --out runs/assistant
  onward finetune runs/mybook questions.parquet --epochs 3 --learning-rate 1e-4
  onward finetune runs/mybook chats.jsonl --show 3
  onward finetune runs/mybook chats.jsonl --lora 16 --quantize int8
  onward finetune runs/mybook chats.jsonl --lora "lora(rank=8, targets=(attn, mlp), dora=true)"
  onward finetune runs/assistant pairs.jsonl --method dpo --beta 0.2
  onward finetune runs/assistant pairs.jsonl --method "dpo(beta=0.2) + 0.1 * sft"
  onward finetune --method dpo --help
  onward finetune runs/assistant pairs.jsonl --method reward --out runs/judge
  onward finetune runs/assistant questions.jsonl --method grpo --reward runs/judge
  onward finetune runs/assistant questions.jsonl --method online_dpo --reward runs/judge
  onward finetune runs/mybook reviews.jsonl --method classify
  onward finetune runs/mybook chats.jsonl --method draft
  onward finetune --resume runs/assistant

Each line of a .jsonl file, or row of a .csv, .parquet or .json file, is an example. Files in the ShareGPT and Alpaca
formats also work:
  {"messages": [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"}]}
  {"prompt": "2 + 3 =", "completion": " 5"}
  {"text": "All of this is trained."}
  {"prompt": "2 + 3 =", "chosen": " 5", "rejected": " 6"}    for methods that train on pairs, such as dpo and reward
  {"prompt": "2 + 3 =", "answer": "5"}                       for methods with a --reward, such as grpo
  {"text": "It rains.", "pair": "It is wet.", "label": "yes"}    for classify; pair may be omitted
"""


@dataclasses.dataclass(frozen=True)
class Options(FinetuneConfig):
    """The options of `onward finetune`: a run's configuration, or where to read it from."""

    positional: ClassVar[tuple[str, ...]] = ("base", "sources")
    part: ClassVar[type[Method] | None] = SFT  # method whose fields are options of the command
    common: ClassVar[tuple[str, ...]] = (
        *("method", "out", "time", "steps", "epochs", "resume", "show", "config", "template", "length", "too_long"),
        *("validation", "batch_size", "learning_rate", "lora", "first", "quantize", "device", "precision", "seed"),
    )
    base: str = ""  # model to start from: a folder or a name on the hub
    sources: tuple[str, ...] = ()  # .jsonl, .json, .csv or .parquet files, their folders or globs, or hf://NAME
    config: str = ""  # a TOML file with any of these options
    resume: str = ""  # folder of a run to continue; only --mesh, --json and --import apply to it
    show: int = 0  # print this many examples, with the trained tokens in color, and exit
    json: bool = False  # print the final figures as JSON


def method_of(argv: Sequence[str]) -> type[Method] | None:
    """The method that the command line or its TOML file names; SFT if none is named, None for a weighted sum of methods
    and for an unknown name. Imports the modules of `--import`, which may define methods."""
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--import", action="append", default=[], dest="imports")
    for name in "method", "config":
        parser.add_argument(f"--{name}", default="")
    first = parser.parse_known_args(argv)[0]
    for module in first.imports:
        fields.import_parts(module)
    named = first.method or (from_toml(Path(first.config), FinetuneConfig).get("method") if first.config else "")
    table = fields.parse(named, "method") if isinstance(named, str) and named else named or {"kind": SFT.kind}
    return Method.choices().get(table.get("kind", "")) if isinstance(table, dict) else None


def about(method: type[Method] | None) -> str:
    """Return the text of `--help`, with the list of methods and the formula of this method's loss."""
    summary, _, examples = ABOUT.partition("\n\n")
    sentences = {kind: summary_of(one) for kind, one in Method.choices().items()}
    table = "\n".join(f"  {kind:<9} {sentence}" for kind, sentence in sentences.items())
    formula = f"\nThe loss of {method.kind}: {method.formula}\n" if method else ""
    return f"{summary}\n{formula}\n{examples}\nmethods (--method NAME --help shows the options of one):\n{table}\n"


def summary_of(method: type[Method]) -> str:
    """The first clause of a method's docstring, without the papers that it cites."""
    text = " ".join((inspect.getdoc(method) or "").split())
    return re.split(r"(?<![ (][A-Z])(?<!et al)[.:;](?: |$)| \(", text)[0]


def configure(argv: Sequence[str]) -> tuple[FinetuneConfig | Path, int, bool, str]:
    """Return (configuration of a new run or folder of the run to resume, number of examples to print instead of
    training, whether to print JSON, new mesh of a resumed run or "")."""
    method = method_of(argv)
    if method:
        check_readers([word[2:].partition("=")[0].replace("-", "_") for word in argv if word[:2] == "--"], method)
    own = type(Options.__name__, (Options,), {"part": method, "__doc__": Options.__doc__})
    values = read(own, join_duration(argv), prog="onward finetune", about=about(method))
    if "show" in values and (unread := values.keys() & {"resume", "json"}):
        raise UserError(
            f"Cannot combine --show, which prints examples and exits, with --{' and --'.join(sorted(unread))}"
        )
    asked, show = "show" in values, fields.convert(int, values.pop("show", 0), "show")
    if asked and show < 1:
        raise UserError(f"show is {show}: give the number of examples to print, at least 1")
    values, folder, as_json = given_options(values, FinetuneConfig)
    if folder:
        return folder, 0, as_json, values.get("mesh", "")
    if "base" not in values:
        raise UserError("no model to fine-tune: name its folder, and then the examples")
    if not values.get("sources"):
        raise UserError(
            f"no examples to train {values['base']} on: name a .jsonl, .json, .csv or .parquet file after it"
        )
    config = FinetuneConfig.of(**values)
    if not config.out:
        beside = config.method.beside and Path(config.base).is_dir()
        out = str(Path(config.base) / DRAFT) if beside else f"runs/{Path(config.base).name}-{config.method.kind}"
        config = dataclasses.replace(config, out=out)
    return config, show, as_json, ""


def main(argv: Sequence[str]) -> int:
    return in_processes(lambda: run(*configure(argv)))


def run(config: FinetuneConfig | Path, show: int, as_json: bool, mesh: str) -> int:
    """Print the first `show` examples or, for 0, train; `mesh` replaces the mesh of a resumed run."""
    if show and isinstance(config, FinetuneConfig):
        from onward.cli.shared.examples import show_examples

        return show_examples(config, show)
    return run_command(config, as_json, mesh)
