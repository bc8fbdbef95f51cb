"""Pipeline parallelism for an existing decoder. Each stage holds a range of blocks; the first stage also has the
embedding, the last stage the final norm and the head. The batches of a step are its microbatches, in the schedule 1F1B
of torch.distributed.pipelining (Narayanan et al. 2021, Megatron-LM, section 2.2).

Every process of a pipeline reads the same batches, so only hidden states and their gradients are sent. The first and
the last stage both hold a tied weight. They exchange its gradients after the backward passes of each step, and
therefore make the same updates.

Shapes: B windows, T tokens of each, D d_model, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from onward.base.errors import UserError
from onward.config.decoder import DecoderConfig
from onward.config.mesh import layers_of_stage
from onward.model.attachments import attach
from onward.model.decoder import Decoder, check, check_tokens
from onward.parallel.parts import local

FIRST = "embed_in", "embed_scale", "embed_norm", "dropout"  # modules of the first stage besides embedding and position
LAST = "norm", "embed_out", "logit_scale", "logit_softcap"  # modules of the last stage besides the head


def holds(name: str, config: DecoderConfig, stage: int, stages: int) -> bool:
    module, is_first, is_last = name.partition(".")[0], stage == 0, stage == stages - 1
    if module == "embed":
        return is_first or (is_last and config.tied)
    return is_last if module in ("head", *LAST) else is_first


class Absent(nn.Module):
    """Replaces a module of another stage and returns its input, the hidden states. `weight` is empty and has the dtype
    and the device of the model. If the module is an output head, `out_features` is the number of its logits in this
    process."""

    def __init__(self, weight: Tensor, out_features: int = 0) -> None:
        super().__init__()
        self.weight, self.out_features = weight, out_features

    def forward(self, x: Tensor, *_: object) -> Tensor:
        return x


class Pipeline:
    """This process's stage of a decoder in a pipeline; `split` creates it.

    Outside of `backward`, all processes of a pipeline must call the decoder's `hidden` and `logits` together, and each
    gets the decoder's logits. `outlines` has all parameters of the decoder on the meta device, by name.
    """

    def __init__(self, model: Decoder, mesh: DeviceMesh) -> None:
        self.model, self.group = model, mesh.get_group()
        self.stage, self.stages = mesh.get_local_rank(), mesh.size()
        self.outlines = {
            name: torch.empty(p.shape, dtype=p.dtype, device="meta", requires_grad=p.requires_grad)
            for name, p in model.named_parameters()
        }
        self.in_step = False
        self.schedules: dict[tuple[int, ...], Schedule1F1B] = {}
        self.microbatches = Microbatches(self)

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1

    def is_copy(self, parameter: Tensor) -> bool:
        """Whether a parameter is the copy of the tied weight in the last stage."""
        return self.model.config.tied and self.is_last and parameter is self.model.embed.weight

    def hidden(self, _: Any, tokens: Tensor, positions: Tensor | None = None, cache: None = None) -> Tensor:
        """Compute the output of this stage (B, T, D) from that of the previous stage or, in the first stage, from
        `tokens`; replaces `Decoder.hidden`."""
        compute = self.model.hidden_of_checked
        if self.in_step:
            return compute(tokens, positions, None)
        check_tokens(tokens, self.model.config)
        check(self.model.config, positions, tokens.size(1), None)
        if not self.is_first:
            tokens = self.empty(*tokens.shape[:2])
            distributed.recv(tokens, group=self.group, group_src=self.stage - 1)
        output = compute(tokens, positions, None)
        if not self.is_last:
            distributed.send(output.to(self.model.dtype), group=self.group, group_dst=self.stage + 1)
        return output

    def logits(self, plain: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        """Compute the logits (B, T, V) in the last stage and, outside of `backward`, return them in all stages; if the
        vocabulary is divided, only the columns of this process's part. In other stages, only the shape of `hidden` is
        used."""
        if self.in_step:
            return plain(hidden)
        if self.is_last:
            logits = plain(hidden).to(self.model.dtype).contiguous()
        else:
            logits = hidden.new_empty(*hidden.shape[:-1], self.model.head.out_features, dtype=self.model.dtype)
        distributed.broadcast(logits, group=self.group, group_src=self.stages - 1)
        return logits

    def of_stages(self, value: Any) -> list[Any]:
        values = [None] * self.stages
        distributed.all_gather_object(values, value, group=self.group)
        return values

    def empty(self, rows: int, length: int, device: torch.device | str | None = None) -> Tensor:
        """Allocate a tensor for the hidden states of `rows` windows."""
        model = self.model
        return torch.empty(rows, length, model.config.d_model, dtype=model.dtype, device=device or model.device)

    def backward(
        self,
        module: nn.Module,
        batches: Sequence[Any],
        count: int,
        precision: Callable[[], AbstractContextManager[object]],
        auxiliary: Callable[[], Tensor | float],
    ) -> dict[str, Tensor]:
        """Accumulate the gradients of the batches of a step. The batches have equal shapes, and there are at least as
        many as stages. Returns the sum that `module`, the loss, reports in the last stage.

        `count` divides the losses, `precision` makes the context of a forward pass, and `auxiliary` returns the
        auxiliary loss of the experts of a stage in its last forward pass. Raises a UserError for a loss that reports
        more than one sum.
        """
        rows, length = batches[0].tokens.shape
        key = len(batches), rows, length
        if key not in self.schedules:
            self.schedules = {key: self.schedule(*key)}  # buffers of other shapes are freed
        self.microbatches.step = step = PipelineStep(module, batches, count, precision, auxiliary)
        numbers = torch.arange(len(batches))
        self.in_step = True
        try:
            self.schedules[key].step(index=numbers, target=numbers, return_outputs=False)
        finally:
            self.in_step = False
            del self.microbatches.step
        self.sum_tied()
        sums = [one["loss"] for one in step.reported]
        if others := [name for one in step.reported[:1] for name in one if name != "loss"]:
            raise UserError(f"Cannot report {others[0]} from a pipeline, which reports only the loss: use pipeline=1")
        loss = torch.stack([torch.zeros((), device=self.model.device), *sums]).sum().double()
        distributed.broadcast(loss, group=self.group, group_src=self.stages - 1)
        return {"loss": loss}

    def schedule(self, count: int, rows: int, length: int) -> Schedule1F1B:
        states = self.empty(rows, length, "meta").requires_grad_()
        stage = AccumulatingStage(
            self.microbatches,
            self.stage,
            self.stages,
            self.model.device,
            input_args=() if self.is_first else (states,),
            output_args=(states.new_empty(()) if self.is_last else states,),
            group=self.group,
        )
        return Schedule1F1B(stage, count, loss_fn=lambda loss, _: loss, scale_grads=False)

    def sum_tied(self) -> None:
        weight: Any = self.model.embed.weight
        if not self.model.config.tied or weight.grad is None or not (self.is_first or self.is_last):
            return
        grad, peer = local(weight.grad), 0 if self.is_last else self.stages - 1
        other = torch.empty_like(grad)
        for work in distributed.batch_isend_irecv(
            [
                distributed.P2POp(distributed.isend, grad.contiguous(), group=self.group, group_peer=peer),
                distributed.P2POp(distributed.irecv, other, group=self.group, group_peer=peer),
            ]
        ):
            work.wait()
        grad.add_(other)


@dataclass(frozen=True)
class PipelineStep:
    """The arguments of `Pipeline.backward`, and the sums that the last stage reports for each batch."""

    module: nn.Module
    batches: Sequence[Any]
    count: int
    precision: Callable[[], AbstractContextManager[object]]
    auxiliary: Callable[[], Tensor | float]
    reported: list[dict[str, Tensor]] = field(default_factory=list)


class WithLoss(torch.autograd.Function):
    """The identity of the hidden states `x`, whose backward pass also starts that of `loss`, a scalar tensor (or a
    float, which has none)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor | float) -> Tensor:
        ctx.device = x.device
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        return grad, torch.ones((), device=ctx.device) if ctx.needs_input_grad[1] else None


class AccumulatingStage(PipelineStage):
    """A stage whose shards sum gradients over replicas only in the last backward pass of a step."""

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        model: Any = self.submod.pipeline.model  # type: ignore[union-attr]
        if isinstance(model, FSDPModule):
            model.set_requires_all_reduce(last_backward)
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)


class Microbatches(nn.Module):
    """The module of a stage for torch's schedule. It computes a microbatch, given its index and, except in the first
    stage, the hidden states (B, T, D) from the previous stage."""

    def __init__(self, pipeline: Pipeline) -> None:
        super().__init__()
        self.pipeline = pipeline
        self.step: PipelineStep

    def forward(self, *received: Tensor, index: Tensor) -> Tensor:
        """Return the hidden states to send or, in the last stage, the batch's part of the mean loss."""
        pipeline, step, model = self.pipeline, self.step, self.pipeline.model
        batch = step.batches[int(index)]
        torch.manual_seed(batch.seed + pipeline.stage)  # seeds dropout
        if received:
            batch = batch.changed(tokens=received[0])
        with step.precision():
            if not pipeline.is_last:
                hidden = model.hidden(batch.tokens, batch.positions).to(model.dtype)
                return WithLoss.apply(hidden, step.auxiliary() * batch.divisor / step.count)  # type: ignore[no-any-return]
            loss, reported = step.module(batch)
        step.reported.append(reported)
        return loss / step.count  # type: ignore[no-any-return]


def split(model: Decoder, mesh: DeviceMesh) -> None:
    """Replace the modules of other stages in a decoder, in place; `mesh` has only the axis `pipeline`. Parameters keep
    their names."""
    if model.layer_inputs is not None:
        raise UserError(
            "Cannot divide layers that embed the tokens themselves among stages: use a mesh with pipeline=1"
        )
    pipeline = Pipeline(model, mesh)
    absent = Absent(torch.empty(0, dtype=model.dtype, device=mesh.device_type))
    layers = layers_of_stage(model.config.n_layers, pipeline.stages, pipeline.stage)
    if stream := getattr(model, "stream", None):
        stream.between(model.blocks[layers[0]], model.blocks[layers[-1]])
    for layer in range(model.config.n_layers):
        if layer not in layers:
            model.blocks[layer] = absent
    if not pipeline.is_first:
        if not (pipeline.is_last and model.config.tied):
            model.embed = absent  # type: ignore[assignment]
        model.position = None
        for name in FIRST:
            setattr(model, name, nn.Identity())
    if not pipeline.is_last:
        model.head = Absent(absent.weight, model.head.out_features)  # type: ignore[assignment]
        for name in LAST:
            setattr(model, name, nn.Identity())
    any_model: Any = model
    any_model.pipeline = pipeline
    attachment = attach(model, "pipeline", f"stage {pipeline.stage + 1} of {pipeline.stages}")
    attachment.wrap(model, "hidden", pipeline.hidden)
    attachment.wrap(model, "logits", pipeline.logits)
