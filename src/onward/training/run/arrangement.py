"""The mesh of a run: as configured, or the first that fits the memory of the devices."""

import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from onward.base.errors import UserError
from onward.checkpoint.source import SizeLimit
from onward.config.decoder import DecoderConfig
from onward.config.lora import LoRA
from onward.config.mesh import Mesh
from onward.generation.cache.manager import STEP
from onward.model.decoder import Decoder
from onward.planning import choice
from onward.planning.arrangements import arrangements
from onward.planning.device_memory import device_memory, with_engine
from onward.planning.memory import TrainingMemory
from onward.training.config import RunConfig
from onward.training.finetuning.config import FinetuneConfig
from onward.training.inputs.examples import row_length
from onward.training.losses.completions import ROWS
from onward.training.methods.answers.distill import Distill
from onward.training.methods.completions.policy import PolicyMethod
from onward.training.step.loss import CrossEntropy
from onward.transforms.lora import add_adapters

if TYPE_CHECKING:
    from onward.parallel.processes import Processes


def arranged(config: RunConfig, decoder: DecoderConfig, processes: "Processes", mesh: str = "") -> "Processes":
    """Return the processes of a run with a mesh that replicates or shards the model `decoder`; see
    `together.planned`."""
    if not mesh:
        processes = processes.arranged(chosen(config, decoder, processes.count))
    else:
        processes = processes.arranged(Mesh.parse(mesh))
        check(config, processes.mesh, decoder)
    processes.check_batches(config.accumulation)
    return processes


def check(config: RunConfig, mesh: Mesh, decoder: DecoderConfig) -> None:
    """Raise a UserError if a mesh cannot divide the decoder, or if it divides the decoder and the run has options that
    a divided model does not support."""
    mesh.check_decoder(decoder)
    mesh.check_length(decoder.context_length)
    if not mesh.divides:
        return
    refused = {
        "precision fp16": config.precision == "fp16",
        "time": bool(config.time),
        "evaluate_tasks": bool(config.evaluate_tasks),
        f"optimizer {config.optimizer}": ":" in config.optimizer and mesh.tensor > 1,
    }
    if isinstance(config, FinetuneConfig):
        refused["quantize"] = bool(config.quantize)
        refused[f"method {config.method.kind}"] = config.method.beside
    if mesh.pipeline * mesh.context > 1 and isinstance(config, FinetuneConfig):
        axis = "the stages of a pipeline" if mesh.pipeline > 1 else "a context axis"
        raise UserError(f"Cannot fine-tune over {axis} (mesh {str(mesh)!r}): use a shard or tensor axis")
    if mesh.context > 1 and config.compile:
        raise UserError(f"Cannot compile over a context axis (mesh {str(mesh)!r}): leave out compile, or use context=1")
    if mesh.tensor > 1 and isinstance(config, FinetuneConfig) and config.method.samples_itself:
        raise UserError(
            f"Cannot sample for {config.method.kind} over a tensor axis (mesh {str(mesh)!r}): use a shard axis"
        )
    if given := [name for name, is_given in refused.items() if is_given]:
        raise UserError(
            f"Cannot use {given[0]} with a divided model (mesh {str(mesh)!r}): leave it out, or use replicas only"
        )


def chosen(config: RunConfig, decoder: DecoderConfig, count: int) -> Mesh:
    """Return the default mesh for `count` processes: replicas if the training in fp32 fits on one device, or if
    the run has a time limit or quantizes its weights; else shards over the processes of each machine or, if these are
    too few, over all processes."""
    plain = replace(config, precision="fp32")
    meshes = arrangements(count, int(os.environ.get("LOCAL_WORLD_SIZE", count)))
    tuned = config if isinstance(config, FinetuneConfig) else None
    if config.time or (tuned and tuned.quantize):
        return meshes[0]
    return choice.first_that_fits(meshes, lambda mesh: memory_per_process(plain, decoder, mesh).peak, config.device)


def memory_per_process(config: RunConfig, decoder: DecoderConfig, mesh: Mesh) -> TrainingMemory:
    """Compute the memory that training takes in one process of a mesh. Methods that sample are planned with completions
    of the maximum length and prompts of at most 256 tokens."""
    tuned = config if isinstance(config, FinetuneConfig) else None
    holes = choice.holes_on(config.device)
    options: dict[str, Any] = {
        "optimizer": config.optimizer or "adamw",
        "recompute": config.recompute,
        "precision": {"auto": "fp32"}.get(config.precision, config.precision),
        "holes": holes,
    }
    length = row_length(tuned, decoder.context_length) if tuned else decoder.context_length
    rows = config.batch_size or 8
    memory = device_memory(decoder, mesh, rows, length, CrossEntropy(), **options)
    if tuned and tuned.adapters:
        memory = with_frozen_weights(memory, -(-trained_with(tuned.adapters, decoder) // mesh.shard), mesh, holes)
    method = tuned.method if tuned and tuned.method.samples_itself else None
    if not isinstance(method, PolicyMethod | Distill):
        return memory
    if isinstance(method, PolicyMethod):  # the engine samples the completions of all batches together
        rows *= -(-config.accumulation // mesh.data) * method.samples
    return with_engine(memory, decoder, mesh, min(rows, ROWS), STEP + method.completion_length)


def trained_with(lora: LoRA, decoder: DecoderConfig) -> int:
    """Count the parameters that a run with these adapters trains."""
    with torch.device("meta"), SizeLimit(sys.maxsize):
        model = Decoder(decoder)
        add_adapters(model, lora)
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def with_frozen_weights(memory: TrainingMemory, trained: int, mesh: Mesh, holes: float) -> TrainingMemory:
    """Convert `memory`, of a run that trains all weights, to that of a run in which each process trains only `trained`
    adapter parameters in fp32 with AdamW. The frozen weights need no gradients or optimizer state; the memory of
    activations is an upper bound."""
    before = memory.at_loss - (0 if mesh.divides else memory.gradients)  # replicas allocate gradients at the start
    transient = max(before, memory.transient - memory.gradients) + 4 * trained
    return replace(
        memory,
        weights=memory.weights + 4 * trained,
        gradients=4 * trained,
        optimizer=8 * trained,
        at_loss=before,
        transient=transient,
        holes=int(holes * transient),
    )


def in_words(config: RunConfig, decoder: DecoderConfig, mesh: Mesh) -> str:
    """Describe the mesh of a run in a sentence for the log; see `planning.choice.in_words`."""
    return choice.in_words(mesh, memory_per_process(config, decoder, mesh), decoder, config.device)
