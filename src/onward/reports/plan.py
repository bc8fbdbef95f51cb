"""The plan of a decoder (`onward plan`): its memory, operations and speed as lines of text, each with its formula."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch

from onward.base.own import own_parts
from onward.config.decoder import DecoderConfig, at
from onward.config.mesh import Mesh
from onward.config.optimizers import MATRIX_OPTIMIZERS
from onward.hub.names import size_of
from onward.planning.arrangements import (
    SAFE,
    StepTime,
    arrangements,
    context_axes,
    pipelines,
    step_time,
    tensor_sizes,
)
from onward.planning.device_memory import device_memory
from onward.planning.flops import (
    attention_flops,
    causal_attention_flops,
    part_sizes,
    training_flops,
    weight_flops,
)
from onward.planning.machine import Machine
from onward.planning.memory import (
    DTYPES,
    HOLES,
    GenerationMemory,
    TrainingMemory,
    cache_bytes,
    generation_memory,
    most,
    training_memory,
)
from onward.planning.parameters import active_parameters, cache_bytes_per_token, parameters, state_bytes
from onward.planning.traffic import Collective, collectives
from onward.reports.plan_lines import Line, memory_lines, number, size, time_lines, traffic_lines, vocabulary_line
from onward.training.step.loss import CrossEntropy

UNUSED = 0.001  # share of memory that the largest batch of training may leave
BATCHES = 1 << 20  # largest batch size that the search tries, in rows


@dataclass(frozen=True)
class Proposal:
    """A mesh to choose from, with the training memory of the device that needs the most, and the tokens per second of
    all devices."""

    mesh: Mesh
    memory: TrainingMemory
    speed: float


@dataclass(frozen=True)
class Planned:
    """The input of `onward plan`: a decoder, its use, and the machine. The methods compute the lines of the plan."""

    config: DecoderConfig
    machine: Machine
    context: int  # tokens per text
    batch: int = 1  # texts generated together, and windows of a training batch
    dtype: str = "bfloat16"  # dtype of the weights in generation
    quantize: str | None = None
    quantized_cache: bool = False
    precision: str = "bf16"  # precision of matrix products in training
    optimizer: str = "adamw"
    recompute: bool = False
    tokens: float = 0.0  # tokens of the entire training
    price: float = 0.0  # price per device and hour
    count: int = 1  # number of devices that train together
    mesh: Mesh | None = None  # arrangement of the devices
    proposed: Sequence[Proposal] = ()  # arrangements to choose from

    @property
    def holes(self) -> float:
        """Share of memory that the allocator loses to gaps between tensors."""
        return HOLES if self.machine.is_cpu else 0.0

    def generation(self, batch: int, context: int) -> GenerationMemory:
        options = {"quantize": self.quantize, "quantized_cache": self.quantized_cache}
        return generation_memory(self.config, batch, context, DTYPES[self.dtype], holes=self.holes, **options)  # type: ignore[arg-type]

    @cached_property
    def trained(self) -> DecoderConfig:
        # without dropout, except on a CPU: fused attention kernels store no dropped attention weights
        return self.config if self.machine.is_cpu else replace(self.config, dropout=0.0)

    @property
    def step_options(self) -> dict[str, Any]:
        return {**self.mesh_options, "holes": self.holes}

    def training(self, batch: int) -> TrainingMemory:
        return training_memory(self.trained, batch, self.context, CrossEntropy(), **self.step_options)

    @cached_property
    def here(self) -> GenerationMemory:
        return self.generation(self.batch, self.context)

    def cache(self, batch: int, context: int) -> int:
        chunk = self.here.chunk
        return cache_bytes(
            self.config, batch, context, DTYPES[self.dtype], quantized=self.quantized_cache, chunk=min(chunk, context)
        )

    def lines(self) -> Iterator[Line]:
        yield from self.operations()
        yield from self.generation_lines()
        yield from self.training_lines()
        yield from self.proposal_lines()
        if self.mesh:
            yield from self.mesh_lines(self.mesh)
        yield from self.speeds()

    def operations(self) -> Iterator[Line]:
        line = partial(number, "operations per token")
        config, count, active = self.config, parameters(self.config), active_parameters(self.config)
        products, attention = weight_flops(config), causal_attention_flops(config, self.context)
        by = "2 x inputs x outputs of each matrix that a token uses", "4 x heads x d_head"
        by = ("counted by PyTorch in a dry run",) * 2 if own_parts(config) else by
        yield line("forward, products with weights", products, by[0])
        yield line("forward, attention", attention, f"{by[1]} x mean keys of {self.context:,} tokens")
        yield line("forward", products + attention, "their sum")
        again = (
            "4 x forward - head: blocks are recomputed"
            if self.recompute
            else "3 x forward: the backward pass costs 2 x forward"
        )
        yield line("training", training_flops(config, self.context, self.recompute), again)
        yield line("training by the rule 6 N", 6 * active, "6 x parameters" + ", active ones" * (active != count))
        rest = active - sum(part.active for part in part_sizes(config) if part.name in ("embedding", "positions"))
        yield line("6 N without embeddings", 6 * rest, "6 x parameters of layers and untied head")

    def generation_lines(self) -> Iterator[Line]:
        section = f"memory of generation, {self.batch} x {self.context:,} tokens"
        line, config, memory = partial(size, section), self.config, self.here
        dtype = DTYPES[self.dtype]
        kept = self.quantize or self.dtype
        yield line("weights", memory.weights, f"parameters x bytes in {kept}")
        states = state_bytes(config, dtype.itemsize)
        per_token = cache_bytes(config, 1, 1, dtype, quantized=self.quantized_cache) - states
        how = "int8 and a scale for each vector" if self.quantized_cache else f"{dtype.itemsize} bytes"
        yield line("KV cache per token", per_token, f"cached numbers of all layers x {how}")
        if any(0 < at(config.attention, layer).window < self.context for layer in range(config.n_layers)):
            last = cache_bytes_per_token(config, dtype.itemsize, self.context)
            yield line("KV cache per token, windows full", last, "layers with a window overwrite their oldest entry")
        if states:
            yield line("states of a row", states, "recurrent layers, the same at any length; in fp32")
        yield line(
            "KV cache",
            memory.cache,
            f"per token x (tokens + a chunk of {memory.chunk}) x rows{' + states' * (states > 0)}; "
            "layers with a window keep fewer tokens",
        )
        yield line("activations", memory.activations, f"dry run of {memory.chunk} tokens of a prompt{self.allocator}")
        yield from self.fit(line, memory.peak, "weights + KV cache + activations")
        fixed = memory.weights + memory.activations
        if fixed < self.machine.memory:
            limit = self.config.context_length
            longest = most(lambda n: fixed + self.cache(self.batch, n), self.machine.memory, limit)
            all_of = " (all of the model's)" if longest == limit else ""
            yield Line(
                section, "longest context", longest, f"{longest:,} tokens{all_of}", "memory left / KV cache per token"
            )
            rows = most(lambda n: fixed + self.cache(n, self.context), self.machine.memory, BATCHES)
            yield Line(section, "largest batch", rows, f"{rows:,} rows", "memory left / KV cache of a row")

    @property
    def allocator(self) -> str:
        return f", plus {HOLES:.0%} for fragmentation of CPU memory" if self.holes else ""

    def fit(self, line: partial[Line], peak: int, by: str) -> Iterator[Line]:
        """The peak, and the memory left or missing."""
        yield line("peak", peak, by)
        left = self.machine.memory - peak
        what = "left" if left >= 0 else "does not fit, exceeds memory by"
        yield line(what, abs(left), f"{size_of(int(self.machine.memory))} of {self.machine.name}")

    def training_lines(self) -> Iterator[Line]:
        section = f"memory of training, {self.batch} x {self.context:,} tokens in {self.precision}"
        line, memory = partial(size, section), self.training(self.batch)
        yield line("weights", memory.weights, "4 bytes x parameters")
        yield line("gradients", memory.gradients, "4 bytes x parameters")
        matrices = "4 bytes x matrices of blocks, 8 bytes x the rest"
        per = {"adamw": "8 bytes x parameters: two moments"} | dict.fromkeys(MATRIX_OPTIMIZERS, matrices)
        yield line("optimizer", memory.optimizer, per.get(self.optimizer, f"a step of {self.optimizer}, run"))
        yield line("activations", memory.activations, "dry run: tensors saved for the backward pass")
        if memory.holes:
            yield line(
                "allocator", memory.holes, f"{HOLES:.0%} of gradients and activations: fragmentation of CPU memory"
            )
        yield from self.fit(
            line, memory.peak, "largest sum at one time: activations are freed as gradients are computed"
        )
        if memory.peak < self.machine.memory:
            peak = lambda batch: memory.peak if batch == self.batch else self.training(batch).peak  # a second each
            available = self.machine.memory
            windows = most(peak, available, BATCHES, start=self.batch, unused=UNUSED * available)
            by = f"the peak fits and leaves less than one window or {UNUSED:.1%} of memory"
            yield Line(section, "largest batch", windows, f"{windows:,} windows", by)

    def proposal_lines(self) -> Iterator[Line]:
        section = f"meshes of {self.count} {self.machine.name}" + ", with --recompute" * self.recompute
        for one in self.proposed:
            text = f"{one.speed / self.count:,.0f} tokens/s of each device, {size_of(one.memory.peak)}"
            beyond = f"does not fit {SAFE:.0%} of {size_of(int(self.machine.memory))}"
            yield Line(section, str(one.mesh), one.speed, text, "fits" if self.fits(one) else beyond)

    def mesh_lines(self, mesh: Mesh) -> Iterator[Line]:
        section = f"one device of mesh {mesh}, training in {self.precision}"
        memory, windows = self.on_mesh(mesh), self.batch * mesh.data * mesh.pipeline
        yield from memory_lines(section, memory, mesh)
        if mesh.tensor > 1:
            yield vocabulary_line(section, self.config, mesh)
        yield from self.fit(
            partial(size, section), memory.peak, "largest sum of these and temporary tensors at one time"
        )
        if mesh.pipeline > 1:
            yield from self.stage_lines(section, mesh)
        times = f" x {mesh.pipeline} one after the other" * (mesh.pipeline > 1)
        by = f"batch x {mesh.data} with their own{times}"
        yield Line(section, "windows of a step", windows, f"{windows:,} windows", by)
        yield from traffic_lines(section, self.sent(mesh), mesh)
        if self.machine.link:
            yield from time_lines(section, self.time(mesh), windows * self.context, mesh)

    def stage_lines(self, section: str, mesh: Mesh) -> Iterator[Line]:
        """The peak memory of each stage, and the share of a step for which a stage waits."""
        p = mesh.pipeline
        for stage in range(p):
            peak = self.on_mesh(mesh, stage).peak
            yield size(section, f"peak in stage {stage}", peak, "its blocks, and a batch for each stage from it on")
        bubble, by = (p - 1) / (2 * p - 1), f"({p} - 1) / (m + {p} - 1), for m = {p} batches one after the other"
        yield Line(section, "bubble", bubble, f"{bubble:.1%} of the arithmetic", by)

    def on_mesh(self, mesh: Mesh, stage: int | None = None) -> TrainingMemory:
        """Training memory of the device that needs the most, or of a device in `stage`."""
        options = self.step_options | {"stage": stage}
        return device_memory(self.trained, mesh, self.batch, self.context, CrossEntropy(), **options)

    @property
    def mesh_options(self) -> dict[str, Any]:
        return {"precision": self.precision, "optimizer": self.optimizer, "recompute": self.recompute}

    def sent(self, mesh: Mesh) -> list[Collective]:
        return collectives(self.config, mesh, self.batch, self.context, **self.mesh_options)

    def time(self, mesh: Mesh) -> StepTime:
        return step_time(self.config, mesh, self.machine, self.batch, self.context, **self.mesh_options)

    def speed(self, mesh: Mesh) -> float:
        return self.batch * mesh.data * mesh.pipeline * self.context / self.time(mesh).seconds

    def proposed_for(self, count: int) -> Planned:
        """A copy of this plan that lists the meshes of `count` devices as `proposed` and uses the first of them; if
        none fits, blocks recompute their activations."""
        found = self.proposals(count)
        if not self.fits(found[0]) and not self.recompute:
            return replace(self, recompute=True).proposed_for(count)
        return replace(self, mesh=found[0].mesh, proposed=found)

    def fits(self, proposal: Proposal) -> bool:
        return proposal.memory.peak <= SAFE * self.machine.memory

    def proposals(self, count: int) -> list[Proposal]:
        """Meshes of `count` devices: first those that fit, the fastest first, then the others, by memory. Pipelines are
        tried if no other mesh fits, or if the network limits the fastest one, and a context axis if no other fits."""
        sizes, limit = tensor_sizes(self.config, count), SAFE * self.machine.memory
        found = [Proposal(mesh, self.on_mesh(mesh), self.speed(mesh)) for mesh in arrangements(count, tensor=sizes)]
        able = [one for one in found if self.fits(one)]
        best = max(able, key=lambda one: one.speed, default=None)
        time = self.time(best.mesh) if best else None
        if time is None or time.meanwhile > time.arithmetic:
            state = found[0].memory.weights + found[0].memory.optimizer  # bytes of a full replica
            for mesh in sorted(pipelines(self.config, count, {1, sizes[-1]}), key=self.speed, reverse=True):
                if best and self.speed(mesh) <= best.speed:
                    break
                if state * mesh.replicate / mesh.count <= limit:  # avoids a dry run, which takes seconds
                    found.append(Proposal(mesh, self.on_mesh(mesh), self.speed(mesh)))
                    best = found[-1] if self.fits(found[-1]) else best
        for mesh in () if best else context_axes(count, {1, sizes[-1]}, self.context):
            found.append(Proposal(mesh, self.on_mesh(mesh), self.speed(mesh)))
        return sorted(found, key=lambda one: (0, -one.speed) if self.fits(one) else (1, one.memory.peak))

    def speeds(self) -> Iterator[Line]:
        section = f"speed on {self.machine.name} ({self.machine.source})"
        machine, config, memory = self.machine, self.config, self.here
        line = partial(Line, section)
        keys, dtype = self.context / 2, DTYPES[self.dtype]
        prompt = weight_flops(config) + causal_attention_flops(config, self.context)
        prefill = machine.prefill_share * machine.peak(self.dtype) / prompt
        yield line(
            "prefill", prefill, f"{prefill:,.0f} tokens/s", f"{machine.prefill_share:.0%} of arithmetic / forward"
        )
        cache = cache_bytes(config, self.batch, int(keys) or 1, dtype, quantized=self.quantized_cache)
        read, products = cache, self.batch * attention_flops(config, keys, decoding=True)
        how = "bytes of weights and of half the cache"
        if machine.step_seconds:
            how = f"{1e3 * machine.step_seconds:,.3g} ms measured with few keys, and bytes of half the cache"
        else:
            read += memory.weights - unread(config, dtype)
            products += self.batch * weight_flops(config)
        step = (read / machine.bandwidth + products / machine.peak(self.dtype)) / machine.decode_share
        step += machine.step_seconds
        how += f" / bandwidth + operations / arithmetic, {machine.decode_share:.0%} of it"
        yield line("decode", self.batch / step, f"{self.batch / step:,.1f} tokens/s", how)
        per_token = training_flops(config, self.context)
        trained = machine.training_share * machine.peak(self.precision) * self.count / per_token
        how = (
            f"{machine.training_share:.0%} of arithmetic{f' of {self.count}' * (self.count > 1)} / training operations"
        )
        if self.mesh:
            trained, how = self.speed(self.mesh), f"tokens / step, on mesh {self.mesh}"
        yield line("training", trained, f"{trained:,.0f} tokens/s", how)
        if self.tokens:
            hours = self.tokens / trained / 3600
            yield line(
                "hours", hours, f"{hours:,.2f} h" if hours < 100 else f"{hours:,.0f} h", "tokens / training tokens/s"
            )
            if self.price:
                cost = hours * self.price * self.count
                yield line(
                    "cost", cost, f"{cost:,.2f}", f"hours x {self.price:g}{f' x {self.count}' * (self.count > 1)}"
                )


def unread(config: DecoderConfig, dtype: torch.dtype) -> int:
    """Bytes that decoding a token does not read: the embedding, unless it is the head, and the experts to which the
    token is not assigned."""
    table = 0 if config.tied else config.vocab_size * config.d_embed
    return (table + parameters(config) - active_parameters(config)) * dtype.itemsize
