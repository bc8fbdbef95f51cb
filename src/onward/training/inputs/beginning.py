"""Setup of a new fine-tuning run: the initial values of its adapters, and the error of a quantized base model."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import torch

from onward.base.errors import UserError
from onward.base.files import read_json, write_json
from onward.checkpoint.load import load_model
from onward.config.lora import EVA
from onward.data.windows import IGNORE_INDEX, Batch
from onward.model.decoder import Decoder
from onward.training.finetuning.base import weights_folder
from onward.training.finetuning.config import FinetuneConfig
from onward.training.finetuning.quantization import QuantizationError
from onward.training.inputs.texts import Inputs
from onward.training.step.loss import CrossEntropy, mean_figures
from onward.transforms.eva import Rows, explained_variance
from onward.transforms.lora import initialize, untrained, use_adapter
from onward.transforms.quantize import ratio, squared_errors

PASSES, BATCHES = 2, 1000  # maximum passes over the data, and batches, for EVA
TOKENS = 512  # approximate number of training tokens for the loss of a quantized base


def begin(config: FinetuneConfig, folder: Path, model: Decoder, inputs: Inputs) -> tuple[FinetuneConfig, list[str]]:
    """Complete the setup of a new fine-tuning run: initialize the adapters that it trains and, if the base model is
    quantized, record in inputs.json how much quantization changes it. Returns the configuration, with the rank of each
    adapter if EVA (Paischer et al. 2024) initializes them, and messages for the user. Raises a UserError if the user
    gives ranks to EVA."""
    lora, notes = config.adapters, []
    if config.quantize and (error := quantization_error(config, model, inputs)):
        write_json(folder / "inputs.json", read_json(folder / "inputs.json") | {"quantization": asdict(error)})
        notes.append(str(error))
    if lora is None or not untrained(model):  # adapters that the caller passed in or loaded keep their values
        return config, notes
    if not isinstance(lora.init, EVA):
        initialize(model, lora)
        return config, notes
    if lora.ranks:
        raise UserError("Cannot use the given ranks, because eva chooses the ranks: leave them out")
    ranks = explained_variance(model, lora, rows(config, model, inputs))
    lora = replace(lora, ranks={name: rank for name, rank in ranks.items() if rank != lora.rank})
    return replace(config, lora=lora), notes


def quantization_error(config: FinetuneConfig, model: Decoder, inputs: Inputs) -> QuantizationError | None:
    """Compare the weights and the loss of a quantized base model with those of the original, which is mapped into
    memory and computes on the CPU; None if no layer is quantized."""
    plain, _ = load_model(weights_folder(config))
    if not (squares := squared_errors(plain, model)):
        return None
    layer = max(squares, key=lambda name: ratio(squares[name]))
    windows = inputs.windows(config, model.config.context_length)
    read = windows.read(range(max(1, min(len(windows), TOKENS // windows.read([0]).tokens.size(1)))))
    targets = read.targets
    if not read.num_targets and read.positions is not None:  # examples are only prompts: all tokens are targets
        following, inside = read.tokens.roll(-1, 1), read.positions.roll(-1, 1) > 0
        targets = torch.where(inside, following, IGNORE_INDEX)
    batch = Batch(read.tokens, targets, read.positions)
    with use_adapter(model, ""):
        losses = [mean_figures(m, [batch.to(m.device)], CrossEntropy()).loss for m in (model, plain)]
    total = ratio(torch.stack([*squares.values()]).sum(0))
    return QuantizationError(config.quantize, total, layer, ratio(squares[layer]), batch.num_targets, *losses)


def rows(config: FinetuneConfig, model: Decoder, inputs: Inputs) -> Iterator[Rows]:
    """Yield (tokens, positions, mask) for batches of the training examples, in the order of the run, from which EVA
    initializes adapters. The mask is True for the trained tokens or, if the examples are only prompts, for all tokens
    but the first of each example."""
    windows, size = inputs.windows(config, model.config.context_length), config.batch_size
    for start in range(0, min(PASSES * len(windows), BATCHES * size), size):
        batch = windows.read(range(start, start + size)).to(model.device)
        trained = torch.zeros_like(batch.tokens, dtype=torch.bool)
        trained[:, 1:] = batch.targets[:, :-1] != IGNORE_INDEX
        if not trained.any() and batch.positions is not None:
            trained = batch.positions > 0
        yield batch.tokens, batch.positions, trained
