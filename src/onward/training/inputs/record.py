"""The records of how a run was started, run.json and inputs.json, and a check that the inputs are unchanged."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from onward.base import fields
from onward.base.errors import UserError
from onward.base.files import file_sha256, read_json
from onward.config.decoder import DecoderConfig
from onward.data.tokens import INDEX
from onward.training.config import RunConfig
from onward.training.finetuning.config import config_class
from onward.training.finetuning.quantization import QuantizationError


@dataclass(frozen=True)
class InputsRecord:
    """The content of inputs.json in a run folder: the tokens, tokenizer and model of the run, with the checksums that a
    resumed run verifies."""

    train: tuple[tuple[str, int | None], ...]  # folder or file of each source, and its number there (None: all)
    validation: str  # folder or file of the validation text; "" if there is none, or it is a share of texts
    data: Mapping[str, Any]  # checksum of each file or, for a folder, of its index
    tokenizer: str  # checksum of tokenizer.json
    model: Mapping[str, Any]  # fields of the model's DecoderConfig
    base: str = ""  # checksum of the weights to compare the model with; "": no comparison
    labels: tuple[str, ...] = ()  # labels of the output head, if the run trains one
    notes: tuple[str, ...] = ()  # messages to the user: the recognized record formats, and examples that were too long
    too_long: Mapping[str, Any] = field(default_factory=dict)  # counts of examples that were cut or left out
    quantization: QuantizationError | None = None  # quantization error of the base, if it is quantized

    @property
    def checksums(self) -> tuple[str, ...]:
        return (*self.data.values(), self.tokenizer)


def read_record(folder: Path) -> InputsRecord:
    """Return the content of a run's inputs.json. Raises a UserError for a missing key or a value of the wrong type."""
    path = folder / "inputs.json"
    record = fields.build(InputsRecord, read_json(path), str(path))
    for name in {*(name for name, _ in record.train), record.validation} - {""}:
        if name not in record.data:
            raise UserError(f"{path}.data has no {name!r}: restore the entry, or start another run")
    return record


def read_config(folder: Path) -> RunConfig:
    """Return the configuration in a run's run.json. Raises a UserError if the folder is not that of a run."""
    if not (folder / "run.json").exists():
        file, there = f"{folder} is a file", f"there is no {'run.json in' if folder.is_dir() else 'folder'} {folder}"
        raise UserError(f"{file if folder.is_file() else there}: name the folder of a run")
    values = read_json(path := folder / "run.json")
    config = fields.build(config_class(values), values, str(path))
    if not (values.get("steps") or values.get("time")):
        raise UserError(f"{path}.steps is 0, and {path}.time is empty: one of them must be set")
    return replace(config, out=str(folder))


def same_tokens(folder: Path, config: RunConfig) -> dict[str, Any]:
    """Return the options (sources, validation, pack) that let another run train on the tokens prepared by the run in
    `folder`, whose configuration is `config`."""
    record = read_record(folder)
    validation = str(folder / record.validation) if record.validation else config.validation
    sources = dict.fromkeys(str(folder / name) for name, _ in record.train)
    return {"sources": [*sources], "validation": validation, "pack": config.pack}


def index_of(data: Path) -> Path:
    return data / INDEX if data.is_dir() else data


def completed(cls: type, values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the plain values of a dataclass, possibly written by an earlier version, with defaults added for fields
    that are new in this version."""
    result: dict[str, Any] = fields.plain(fields.build(cls, values, where))
    return result


def changed_tokens(folder: Path) -> list[str]:
    """List the prepared tokens of the run in `folder` that have changed since the run was started, in words."""
    return [
        f"the tokens in {name}" + ("" if index.exists() else " (which are gone)")
        for name, known in read_record(folder).data.items()
        if not (index := index_of(folder / name)).exists() or file_sha256(index) != known
    ]


def check_inputs(folder: Path, model: DecoderConfig) -> None:
    """Raise a UserError that lists the inputs of the run in `folder` (tokens, tokenizer, and `model`, the configured
    decoder) that have changed since the run was started."""
    record = read_record(folder)
    differ = changed_tokens(folder)
    if not (path := folder / "tokenizer.json").exists() or file_sha256(path) != record.tokenizer:
        differ.append("the tokenizer")
    where = f"{folder / 'inputs.json'}.model"
    now, then = fields.plain(model), completed(DecoderConfig, record.model, where)
    differ += [f"model.{name} ({then.get(name)} then, {now[name]} now)" for name in now if now[name] != then.get(name)]
    if differ:
        raise UserError(
            f"Cannot continue {folder}, because its inputs have changed since it was started: {', '.join(differ)}; "
            "restore them, or start another run"
        )
