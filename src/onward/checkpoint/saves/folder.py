"""Saves (checkpoints) in the folder of a run: writing their files, checking them, and copying the model of a save into
the run folder."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onward.base.errors import UserError
from onward.base.files import atomic_write, file_sha256, read_json
from onward.checkpoint.huggingface.save import save_weights
from onward.checkpoint.part_files import PartFiles, write_part
from onward.checkpoint.peft.adapters import ADAPTER_FILES
from onward.checkpoint.peft.bases import CONFIG as ADAPTER_CONFIG
from onward.checkpoint.weights import SINGLE, fill
from onward.config.decoder import DecoderConfig

CONFIG, STATE, PROGRESS, CHECKSUMS = "config.json", "state.safetensors", "progress.json", "checksums.json"
KINDS = "weight/", "average/"


def saves(run: Path) -> list[Path]:
    """Folders of a run's saves, oldest first."""
    return sorted((p for p in (run / "checkpoints").glob("step-*") if p.name[5:].isdecimal()), key=step_of)


def step_of(save: Path) -> int:
    return int(save.name.removeprefix("step-"))


def write_save(
    folder: Path,
    config: DecoderConfig,
    tensors: Mapping[str, Tensor],
    frozen: Mapping[str, Tensor],
    progress: dict[str, Any],
    hf: Mapping[str, Any],
) -> None:
    """Write a save atomically, from the tensors and `progress` of a TrainerState and the frozen parameters; `hf` are
    keys for config.json."""
    dtypes = {tensor.dtype for name, tensor in tensors.items() if name.startswith("average/")}
    weights, state = by_file(tensors, frozen, next(iter(dtypes), None))
    with atomic_write(folder) as new:
        new.mkdir()
        save_weights(config, weights, new, hf)
        write_state(new, state, progress)


def by_file(
    tensors: Mapping[str, Tensor], frozen: Mapping[str, Tensor], average: torch.dtype | None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return (tensors of the model's file, tensors of the state's file). `average` is the dtype of weight averages, to
    which parameters without an average are converted, since the model's file has one dtype."""
    own, averages = ({n.removeprefix(kind): t for n, t in tensors.items() if n.startswith(kind)} for kind in KINDS)
    # the model's file has the averages, if any, and the state's file the weights with which training continues
    own = {name: t for name, t in own.items() if name not in averages}
    weights = {**{name: t.to(average or t.dtype) for name, t in {**frozen, **own}.items()}, **averages}
    in_model = {f"average/{name}" for name in averages} | {f"weight/{name}" for name in own}
    return weights, {name: tensor for name, tensor in tensors.items() if name not in in_model}


def write_part_save(folder: Path, part: PartFiles, tensors: Mapping[str, Tensor], progress: dict[str, Any]) -> None:
    with atomic_write(folder) as new:
        new.mkdir()
        write_part(new, part)
        write_state(new, tensors, progress)


def write_state(new: Path, state: Mapping[str, Tensor], progress: dict[str, Any]) -> None:
    fill(new / STATE, state, state.items())
    write_progress(new, progress)


def write_progress(new: Path, progress: dict[str, Any]) -> None:
    """Write `progress`, and then the checksums of all files."""
    (new / PROGRESS).write_text(json.dumps(progress))
    sums = {path.name: file_sha256(path) for path in sorted(new.iterdir())}
    (new / CHECKSUMS).write_text(json.dumps(sums, indent=2) + "\n")


def show(folder: Path, run: Path) -> None:
    """Link or copy the model of a save into the run folder, which can then be loaded as a model."""
    for name in ADAPTER_FILES if (folder / ADAPTER_CONFIG).exists() else (SINGLE, CONFIG):
        with atomic_write(run / name) as new:
            try:
                os.link(folder / name, new)
            except OSError:  # a file system without links
                shutil.copyfile(folder / name, new)


def damage(folder: Path) -> str:
    """Name the file that is missing, cannot be read or differs from its checksum; "" if there is none."""
    name = CHECKSUMS
    try:
        sums = read_json(folder / name)
        model = ADAPTER_FILES if ADAPTER_CONFIG in sums else (CONFIG, SINGLE)
        for name in *model, STATE, PROGRESS:
            if sums.get(name) != file_sha256(folder / name):
                return f"{name} differs from its checksum"
    except (UserError, OSError):
        return f"{name} is missing or cannot be read"
    return ""
