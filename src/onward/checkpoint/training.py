"""The state of a training run on disk: weights, optimiser, random numbers, and how far it is.

A run folder is a model folder whose weights are those of the newest save; the saves are in `checkpoints/step-N/`.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onward.checkpoint.folder import load_model, save_model
from onward.checkpoint.weights import read_tensors, write_tensors
from onward.errors import UserError
from onward.files import read_json, write_json, written_whole
from onward.model.decoder import Decoder


def save_state(run: Path, model: Decoder, optimiser: torch.optim.Optimizer, progress: dict[str, Any], hf: Any) -> None:
    """Save step `progress["step"]` whole or not at all, show its weights in the run folder, drop the save before."""
    folder = run / "checkpoints" / f"step-{progress['step']:07d}"
    before = saves(run)
    if folder not in before:
        with written_whole(folder) as new:
            new.mkdir()
            save_model(model, new, hf)
            write_tensors(new / "optimiser.safetensors", optimiser_tensors(model, optimiser) | random_state())
            write_json(new / "progress.json", progress)
    for name in "model.safetensors", "config.json":
        with written_whole(run / name) as new:
            try:
                os.link(folder / name, new)
            except OSError:  # a file system without links
                shutil.copyfile(folder / name, new)
    for old in before:
        if old != folder:
            shutil.rmtree(old, ignore_errors=True)


def saves(run: Path) -> list[Path]:
    """The saves of a run, oldest first."""
    return sorted((run / "checkpoints").glob("step-*"))


def load_state(run: Path, device: torch.device) -> tuple[Decoder, dict[str, Tensor], dict[str, Any]]:
    """The newest save: the model, the optimiser's tensors (see `restore`), and the progress."""
    found = saves(run)
    if not found:
        raise UserError(f"{run} has no save to resume from: train it with --out {run}")
    model, _ = load_model(found[-1], device=device)
    return model, read_tensors(found[-1] / "optimiser.safetensors"), read_json(found[-1] / "progress.json")


def optimiser_tensors(model: Decoder, optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimiser's tensors, named by what they are and the parameter they belong to."""
    return {
        f"{key}/{name}": value
        for name, parameter in model.named_parameters()
        for key, value in optimiser.state.get(parameter, {}).items()
    }


def random_state() -> dict[str, Tensor]:
    """The state of torch's random generators."""
    state = {"random/cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["random/cuda"] = torch.cuda.get_rng_state()
    return state


def restore(tensors: dict[str, Tensor], model: Decoder, optimiser: torch.optim.Optimizer) -> None:
    """Give an optimiser, and torch's random generators, the state that `save_state` wrote."""
    for name, parameter in model.named_parameters():
        keys = {key.removesuffix(f"/{name}"): key for key in tensors if key.endswith(f"/{name}")}
        optimiser.state[parameter] = {key: tensors[full].clone().to(parameter.device) for key, full in keys.items()}
    torch.set_rng_state(tensors["random/cpu"].clone())
    if torch.cuda.is_available() and "random/cuda" in tensors:
        torch.cuda.set_rng_state(tensors["random/cuda"].clone())
