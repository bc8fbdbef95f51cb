"""The memory that a run of one process needs on a CPU, compared with the memory that the process may use."""

from dataclasses import replace

import torch

from onward.base.errors import UserError
from onward.base.limits import in_bytes, memory_size, resident_memory
from onward.config.decoder import DecoderConfig
from onward.config.mesh import Mesh
from onward.planning.parameters import parameters
from onward.training.config import RunConfig
from onward.training.finetuning.config import FinetuneConfig

STATE = {"": 8, "adamw": 8, "muon": 4, "normuon": 4}  # minimum bytes of state per trained parameter, by optimizer
ACTIVATIONS = 160  # approximate bytes per token, layer and hidden unit; used only to decide whether to plan exactly
AMPLE = 0.5  # fraction of the memory; a run that needs less is not planned exactly


def check_room(config: RunConfig, decoder: DecoderConfig, device: torch.device) -> list[str]:
    """Return a list with one warning if a run in this process is planned to need more memory than the process may use,
    else an empty list. Raises a UserError if the weights, gradients and optimizer states alone do not fit. Checks only
    CPUs (other devices raise an error when their memory is full), and no runs with quantized weights."""
    size, used = memory_size(), resident_memory()
    if device.type != "cpu" or not size:
        return []
    count, tuned = parameters(decoder), config if isinstance(config, FinetuneConfig) else None
    frozen = bool(tuned and tuned.adapters)
    if frozen and tuned and tuned.quantize:
        return []
    least = count * (4 if frozen else 8 + STATE.get(config.optimizer, 0))
    if least + used > size:
        what = "weights" if frozen else "weights, gradients and optimizer states"
        raise UserError(
            f"Cannot train {count:,} parameters, because their {what} need {in_bytes(least)} and this process may use "
            f"{in_bytes(size)} ({in_bytes(used)} are in use): train a smaller model, or raise the memory limit"
        )
    tokens = (config.batch_size or 8) * decoder.context_length
    rough = least + tokens * (ACTIVATIONS * decoder.n_layers * decoder.d_model + 12 * decoder.vocab_size)
    if rough + used < AMPLE * size:
        return []
    from onward.training.run.arrangement import memory_per_process

    peak = memory_per_process(replace(config, batch_size=config.batch_size or 8), decoder, Mesh()).peak + used
    if peak < size:
        return []
    return [
        f"this run needs about {in_bytes(peak)} of memory, but the system kills this process if it uses more than "
        f"{in_bytes(size)}: lower --batch-size, or set --recompute"
    ]
