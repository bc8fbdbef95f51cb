"""onward train: a model from text."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from onward.base import fields
from onward.base.errors import UserError
from onward.cli.shared.options import read
from onward.cli.shared.run_options import default_name, given_options, join_duration
from onward.cli.shared.sources import check_texts
from onward.cli.shared.training import in_processes, run_command
from onward.training.config import RunConfig

ABOUT = """\
Train a decoder on text. The run folder is a Hugging Face folder that also holds the training state.

examples:
  onward train mybook.txt --out runs/mybook
  onward train notes/ 'more/*.md' talks.jsonl.gz --field body --time 10m
  onward train tinyshakespeare --tokenizer char --time 100s --out runs/shakespeare
  cat mybook.txt | onward train - --out runs/piped --epochs 3
  onward train mybook.txt --preset small --model.position learned --model.dropout 0.1
  onward train mybook.txt --preset llama-2-7b --model.d-model 256 --model.n-heads 8 --model.n-layers 4
  onward train mybook.txt --model.attention "(self(window=64), self)" --learning-rate 1e-3
  onward train prepared/web prepared/books --weights 0.7 --weights 0.3 --pack documents --optimizer muon --schedule wsd
  onward train mybook.txt --evaluate-tasks "cloze, copying" --validate-every 500
  onward train mybook.txt --config myrun.toml
  onward train --resume runs/mybook
  onward train --from runs/mybook --steps 1000
  onward train more.txt --from runs/mybook --out runs/more
  torchrun --standalone --nproc-per-node 2 -m onward train mybook.txt --accumulation 4

SIGTERM saves and exits with 143, SIGHUP with 129, Ctrl-C with 130. SIGUSR1 saves and continues. --resume continues a
killed run from its newest save, and yields the same weights as an uninterrupted run.

--preset takes tiny, mini, small, medium or a published release, which `onward models` lists, with new weights and the
tokenizer's vocabulary. If you change its width or heads, the sizes derived from them change too.

A TOML file for --config uses the same names: learning_rate = 1e-3, [model] n_layers = 8,
[model.position] kind = "rotary", theta = 500000.0. Command-line options take precedence over the file.
"""


@dataclasses.dataclass(frozen=True)
class Options(RunConfig):
    """The options of `onward train`: the configuration of a run, or the folder of a run to resume."""

    positional: ClassVar[tuple[str, ...]] = ("sources",)
    common: ClassVar[tuple[str, ...]] = (
        *("out", "time", "steps", "epochs", "resume", "preset", "config", "tokenizer", "validation"),
        *("batch_size", "learning_rate", "optimizer", "schedule", "device", "precision", "seed", "evaluate_tasks"),
        *("model.d_model", "model.n_layers", "model.n_heads", "model.context_length", "model.dropout"),
        *("model.position", "model.attention", "model.mlp"),
    )
    config: str = ""  # a TOML file with any of these options
    resume: str = ""  # folder of a run to continue; only --mesh, --json and --import apply to it
    json: bool = False  # print the final figures as JSON


def main(argv: Sequence[str]) -> int:
    return in_processes(lambda: run_command(*configure(argv)))


def configure(argv: Sequence[str]) -> tuple[RunConfig | Path, bool, str]:
    """Return (configuration of a new run or folder of the run to resume, whether to print JSON, new mesh of a resumed
    run or "")."""
    values = read(Options, join_duration(argv), prog="onward train", about=ABOUT)
    values, folder, as_json = given_options(values, RunConfig)
    if folder:
        return folder, as_json, values.get("mesh", "")
    if "base" in values and (unused := values.keys() & {"preset", "model", "tokenizer"}):
        raise UserError(
            f"Cannot combine --{' and --'.join(sorted(unused))} with --from, which already has a model and a tokenizer"
        )
    if "sources" in values:
        check_texts([*map(str, values["sources"])])
    if "sources" not in values and (Path(values.get("base", "")) / "inputs.json").exists():
        values = old_data(Path(values["base"])) | values
    if "sources" not in values and "base" in values:
        raise UserError(
            f"no text to train {values['base']} on: it is not a run with its own tokens, so name text files"
        )
    if "sources" not in values:
        raise UserError("no text to train on: name files or folders, or `embedded` for the built-in corpus")
    config = fields.build(RunConfig, values)
    out = config.out or f"runs/{default_name(config.sources[0])}"
    return dataclasses.replace(config, out=out), as_json, ""


def old_data(run: Path) -> dict[str, Any]:
    """Return options for a new run on the tokens of an earlier run, in another order."""
    from onward.training.inputs.record import read_config, same_tokens

    config = read_config(run)
    if config.fixed:
        raise UserError(f"{run} was trained on examples, but onward train needs texts: name text files or folders")
    again = {"out": f"{run}-longer", "seed": config.seed + 1}  # a new seed, for another order of windows
    return same_tokens(run, config) | again
