"""How a new run of fine-tuning begins: the first values of its adapters."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from onward.config.lora import EVA
from onward.data.windows import IGNORE_INDEX
from onward.errors import UserError
from onward.model.decoder import Decoder
from onward.training.finetuning.config import FinetuneConfig
from onward.training.inputs.texts import Inputs
from onward.transforms.eva import Rows, explained_variance
from onward.transforms.lora import initialize

PASSES = 2  # over the data, at most, until the components of EVA have converged


def begin(config: FinetuneConfig, model: Decoder, inputs: Inputs) -> FinetuneConfig:
    """Initialize the adapters that a new run trains. Returns the configuration with the ranks that EVA gives them."""
    lora = config.adapters
    if lora is None:
        return config
    if not isinstance(lora.init, EVA):
        initialize(model, lora)
        return config
    if lora.ranks:
        raise UserError("ranks are given, and eva distributes them: leave them out")
    ranks = explained_variance(model, lora, rows(config, model, inputs))
    return replace(config, lora=replace(lora, ranks={name: r for name, r in ranks.items() if r != lora.rank}))


def rows(config: FinetuneConfig, model: Decoder, inputs: Inputs) -> Iterator[Rows]:
    """Yield the training examples in the order of the run, in batches: tokens, positions, and which tokens are trained;
    of prompts, all but each first one."""
    windows, size = inputs.windows(config, model.config.context_length), config.batch_size
    for start in range(0, PASSES * len(windows), size):
        batch = windows.read(range(start, start + size)).to(model.device)
        trained = torch.zeros_like(batch.tokens, dtype=torch.bool)
        trained[:, 1:] = batch.targets[:, :-1] != IGNORE_INDEX
        if not trained.any() and batch.positions is not None:
            trained = batch.positions > 0
        yield batch.tokens, batch.positions, trained
