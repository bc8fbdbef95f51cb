"""Options of the commands that train: from the command line, from a TOML file, and by default."""

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onward.base.arguments import field_types
from onward.base.errors import UserError
from onward.training.config import NUMBER, UNITS, RunConfig
from onward.training.presets import merge

COMMON = (  # options that `--help` shows for the commands that train several runs
    *("preset", "tokenizer", "validation", "batch_size", "learning_rate", "optimizer", "schedule", "device"),
    *("precision", "seed", "json", "model.d_model", "model.n_layers", "model.n_heads", "model.context_length"),
)


def given_options(values: dict[str, Any], cls: type[RunConfig]) -> tuple[dict[str, Any], Path | None, bool]:
    """Remove --resume, --config and --json from the options of a command line. Return the run's options, including
    those of the TOML file; the folder of the run to resume (None for a new run); and whether to print JSON."""
    resume, toml, as_json = (values.pop(name, "") for name in ("resume", "config", "json"))
    if resume:
        values.pop("imports", None)  # these modules are already imported
    if not values.get("sources"):
        values.pop("sources", None)
    if resume and (toml or values.keys() - {"mesh"}):
        given = ", ".join(["config"] * bool(toml) + sorted(values.keys() - {"mesh"}))
        raise UserError(f"--resume continues the run with its own options: leave out {given}")
    if resume:
        return values, Path(resume), as_json
    return merge(from_toml(Path(toml), cls) if toml else {}, values), None, as_json


def join_duration(argv: Sequence[str]) -> list[str]:
    """Return the words of a command line with a duration of two words, as in --time 10 seconds, joined to one word."""
    words = list(argv)
    for i in range(len(words) - 2, 0, -1):
        number, unit = words[i], words[i + 1]
        if words[i - 1] == "--time" and re.fullmatch(NUMBER, number) and unit in UNITS and not Path(unit).exists():
            words[i : i + 2] = [f"{number} {unit}"]
    return words


def from_toml(path: Path, cls: type[RunConfig]) -> dict[str, Any]:
    """Read options of `cls` in a TOML file. A number is accepted for a text (time = 100), and one text for a list."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"there is no file {path}: name a TOML file") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as TOML: {error}") from None
    for name, kind in field_types(cls).items():
        value = values.get(name)
        if kind.annotation is str and type(value) in (int, float):
            values[name] = str(value)
        if kind.origin is tuple and isinstance(value, str):
            values[name] = [value]
    return values


def default_name(source: str) -> str:
    """The name of a run by its first source: the file without suffix, the folder of a glob, or stdin; otherwise
    "run"."""
    parts = (part for part in Path(source).parts if not {"*", "?"} & set(part))
    return "stdin" if source == "-" else Path(*parts).name.split(".")[0] or "run"
