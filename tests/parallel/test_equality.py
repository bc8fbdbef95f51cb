"""Training on any mesh equals training in one process with the same global batch: losses, gradients and weights are
equal up to rounding.

Rounding errors in fp64 are 1e9 times smaller than in fp32, so that fp64 would reveal a difference in the arithmetic.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch._dynamo.utils import counters

from onward import (
    Batch,
    Decoder,
    DecoderConfig,
    Experts,
    LoRA,
    Loss,
    RunConfig,
    StepPlan,
    UserError,
    add_lora,
    mean_loss,
)
from onward.config.decoder import each
from onward.config.mesh import Mesh
from onward.data import IGNORE_INDEX, Encoder, Record
from onward.data.packing import batch_of
from onward.data.tables import tabulated
from onward.families.llama4_text import InputWeightedExperts
from onward.parallel.parts import gathered
from onward.parallel.processes import Processes
from onward.training import DPO, PairLoss
from onward.training.losses.answers import Frozen, Reference
from onward.training.losses.distillation import Distillation
from onward.training.step.build import build_trainer

from support.decoders import DECODERS
from support.finetuning import method, pairs, tokenizer
from support.ranks import Ranks

STEPS, BATCHES = 3, 4
TWO = "replicate=2", "shard=2", "context=2", "tensor=2", "pipeline=2"
FOUR = "replicate=4", "shard=4", "tensor=4", "replicate=2 shard=2", "shard=2 tensor=2", "replicate=2 tensor=2"
CONTEXT = "shard=2 context=2", "replicate=2 context=2", "context=2 tensor=2"
STAGES = "pipeline=2 shard=2", "pipeline=2 replicate=2", "pipeline=2 tensor=2", "pipeline=4"


def windows(config: DecoderConfig) -> list[Batch]:
    """The batches of a step."""
    tokens = torch.randint(config.vocab_size, (BATCHES, 2, 13), generator=torch.Generator().manual_seed(1))
    return [Batch(rows[:, :-1], rows[:, 1:].clone()) for rows in tokens]


def masked(config: DecoderConfig) -> list[Batch]:
    """Batches with different numbers of targets; one batch has none."""
    batches = windows(config)
    for i, batch in enumerate(batches):
        batch.targets[:, 4 * i :] = IGNORE_INDEX
    return batches


def packed(config: DecoderConfig) -> list[Batch]:
    """Batches of two documents in each row."""
    positions = torch.cat([torch.arange(5), torch.arange(7)]).expand(2, -1)
    return [Batch(batch.tokens, batch.targets, positions) for batch in windows(config)]


def odd(config: DecoderConfig) -> list[Batch]:
    """Batches, some with an odd number of tokens, which a tensor axis cannot divide."""
    return [Batch(b.tokens[:, : 12 - i], b.targets[:, : 12 - i]) for i, b in enumerate(windows(config))]


def preferences(config: DecoderConfig) -> list[Batch]:
    """Batches of a pair of answers each."""
    records = [Record(row, f"line {i}") for i, row in enumerate(pairs(BATCHES))]
    table, _ = tabulated(method("dpo").examples(Encoder(tokenizer()), records), 96, "error")
    return [batch_of(table, [[i]], by_example=True) for i in range(BATCHES)]


def frozen_copy(config: DecoderConfig) -> Loss:
    """DPO with the model at the start as the reference."""
    return PairLoss(DPO(beta=0.3).of_pairs, 0.3, Reference(lambda _: initial(config, torch.float64)))


def of_teacher(config: DecoderConfig) -> Loss:
    """Distillation from another model; it needs complete logits, and the number of chunks differs between processes."""
    return Distillation(Frozen(lambda _: initial(replace(config, d_ff=24), torch.float64)), mix=0.5, chunk=5)


@dataclass(frozen=True)
class Case:
    """A training case: a decoder, options of a run, and batches."""

    decoder: DecoderConfig
    options: dict[str, Any] = field(default_factory=dict)
    batches: Callable[[DecoderConfig], list[Batch]] = windows
    loss: Callable[[DecoderConfig], Loss] | None = None
    lora: LoRA | None = None
    dtype: torch.dtype = torch.float64
    backend: str = "aot_eager"  # backend of torch.compile; inductor would take 20 s
    tolerance: float = 1e-8  # relative to the largest value of a tensor


VOCABULARY = 12  # divisible by four processes
EVEN = {name: replace(config, vocab_size=VOCABULARY) for name, config in DECODERS.items()}
LLAMA = EVEN["llama"]
SPEAKER = DecoderConfig(-(-tokenizer().vocab_size // 4) * 4, 16, 2, 4, context_length=96)
MIXTURE = DecoderConfig(
    VOCABULARY, 16, 2, 4, n_kv_heads=1, context_length=12, mlp=Experts(count=4, top_k=2, d_ff=8, d_shared=4)
)
CASES = {name: Case(config) for name, config in EVEN.items()}
CASES |= {
    "a vocabulary that is not divided": Case(DECODERS["gpt2"]),
    "fp32": Case(LLAMA, dtype=torch.float32, tolerance=1e-4),
    "bf16": Case(LLAMA, {"precision": "bf16", "learning_rate": 1e-4}, dtype=torch.float32, tolerance=0.1),
    "packed documents": Case(LLAMA, batches=packed),
    "masked targets": Case(LLAMA, batches=masked),
    "tokens that are not divided": Case(LLAMA, {"recompute": True}, batches=odd),
    "loss in chunks": Case(LLAMA, {"loss_chunk": 5, "z_loss": 0.1, "label_smoothing": 0.1}),
    "recomputed": Case(DECODERS["deepseek"], {"recompute": True}),
    "compiled": Case(LLAMA, {"compile": True}),
    "compiled and recomputed": Case(MIXTURE, {"compile": True, "recompute": True}),
    "compiled latent attention": Case(DECODERS["deepseek"], {"compile": True}),
    "compiled by inductor": Case(LLAMA, {"compile": True, "recompute": True}, backend="inductor"),
    "averaged weights": Case(LLAMA, {"average": 0.5}),
    "muon": Case(DECODERS["deepseek"], {"optimizer": "muon"}),
    "normuon": Case(LLAMA, {"optimizer": "normuon"}),
    "an optimizer of torch": Case(LLAMA, {"optimizer": "torch.optim:NAdam"}),
    "balanced experts": Case(MIXTURE, {"balance_loss": 1.0}),
    "lora": Case(MIXTURE, lora=LoRA(rank=2, full=("norm",))),
    "lora and the whole head": Case(LLAMA, lora=LoRA(rank=2, full=("head",))),
    "lora of head and embedding": Case(LLAMA, lora=LoRA(rank=2, targets=("embed", "head", "attn.q"))),
    "dpo": Case(SPEAKER, batches=preferences, loss=frozen_copy),
    "distillation": Case(LLAMA, loss=of_teacher),
    "dpo of adapters": Case(SPEAKER, batches=preferences, loss=frozen_copy, lora=LoRA(rank=2)),
    "weighted inputs of experts": Case(
        replace(MIXTURE, mlp=InputWeightedExperts(count=4, top_k=2, d_ff=8, d_shared=4))
    ),
}


@dataclass(frozen=True)
class Outcome:
    """The result of training: losses and gradient norms by step, tensors by name."""

    figures: list[float]
    tensors: dict[str, Tensor]


def initial(config: DecoderConfig, dtype: torch.dtype) -> Decoder:
    """A model in which every parameter matters."""
    torch.manual_seed(0)
    model = Decoder(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, dtype=dtype) * 0.2)
    return model


def train(case: Case, processes: Processes) -> Outcome:
    """Make some steps; also returns the gradients of the last step, and the loss of the averaged weights."""
    torch.compiler.reset()  # discards compiled code of other cases
    model = initial(case.decoder, case.dtype)
    if case.lora:
        add_lora(model, case.lora)
        torch.manual_seed(1)
        for name, parameter in model.named_parameters():
            if name.endswith(".b"):
                torch.nn.init.normal_(parameter, std=0.1)
    options: dict[str, Any] = {"precision": "fp32", "steps": 100, "warmup": 0, "learning_rate": 1e-2} | case.options
    trainer = build_trainer(RunConfig(**options), model, processes, case.loss(case.decoder) if case.loss else None)
    tensors: dict[str, Tensor] = {}

    def keep(*_: object) -> None:
        named = model.named_parameters()
        tensors.update({f"gradient of {name}": gathered(p.grad).clone() for name, p in named if p.grad is not None})

    for optimizer in trainer.optimizers:
        optimizer.register_step_pre_hook(keep)
    figures = list[float]()
    batches = case.batches(case.decoder)
    with torch.compiler.set_stance(force_backend=case.backend):
        for _ in range(STEPS):
            step = trainer.train_step(StepPlan(batches[processes.batch_rank :: processes.mesh.data]))
            assert not step.failure
            figures += [step.loss, step.grad_norm, step.tokens, *step.figures.values()]
        if case.loss is None:
            with trainer.averaged():
                figures += mean_loss(model, batches, options["precision"])
    assert not any(module.__dict__.keys() & module._parameters for module in model.modules())
    tensors |= {name: gathered(p) for name, p in model.named_parameters()}
    return Outcome(figures, tensors)


def differences(name: str, mesh: str) -> tuple[str, float]:
    """The maximum difference between a mesh and one process, relative to the largest value of a tensor, and the
    tensor's name."""
    case, processes = CASES[name], Processes.join().arranged(Mesh.parse(mesh)).connected(torch.device("cpu"))
    several = train(case, processes)
    if processes.mesh.pipeline > 1:
        of_stages: Any = [None] * processes.count
        distributed.all_gather_object(of_stages, several.tensors)
        for tensors in of_stages:
            for key, tensor in tensors.items():
                assert torch.equal(several.tensors.setdefault(key, tensor), tensor), key
    if processes.rank:
        return "", 0.0
    one = train(case, Processes())
    assert one.tensors.keys() == several.tensors.keys()
    found = {key: relative(tensor, several.tensors[key]) for key, tensor in one.tensors.items()}
    found["figures"] = relative(torch.tensor(one.figures), torch.tensor(several.figures))
    return max(found.items(), key=lambda item: item[1])


def relative(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / one.abs().max().clamp(min=1e-3))


def assert_equal_to_one_process(ranks: Ranks, name: str, mesh: str) -> None:
    """The shared assertion: a mesh gives the same losses, gradients and weights as one process."""
    where, difference = ranks.run(differences, name, mesh)[0]
    assert difference < CASES[name].tolerance, where


def takes(mesh: Mesh, config: DecoderConfig) -> bool:
    try:
        mesh.check_decoder(config)
    except UserError:
        return False
    return True


def cases(meshes: Sequence[str]) -> list[Any]:
    """The meshes that can divide each decoder; all but one of every second case are `long`."""
    chosen = []
    for i, (name, case) in enumerate(CASES.items()):
        able = [m for m in meshes if takes(Mesh.parse(m), case.decoder)]
        able = [m for m in able if Mesh.parse(m).tensor == 1 or name not in NOT_DIVIDED]
        able = [
            m
            for m in able
            if Mesh.parse(m).context == 1 or not (case.loss or case.batches is odd or "compile" in case.options)
        ]
        # all microbatches of a pipeline need the same length
        stages = 1 if case.loss or case.batches is odd else case.decoder.n_layers
        able = [m for m in able if Mesh.parse(m).pipeline <= stages]
        for j, mesh in enumerate(able):
            quick = meshes is TWO and not i % 2 and i // 2 % len(able) == j and "compile" not in case.options
            marks = () if quick else pytest.mark.long
            chosen.append(pytest.param(name, mesh, id=f"{name}-{mesh}", marks=marks))
    return chosen


NOT_DIVIDED = {"no-output"}  # attention without an output projection


@pytest.mark.parametrize(("name", "mesh"), cases(TWO))
def test_two_processes_train_as_one(name: str, mesh: str, two: Ranks) -> None:
    assert_equal_to_one_process(two, name, mesh)


@pytest.mark.parametrize("axis", ["pipeline", "context", "tensor"])
@pytest.mark.parametrize("name", [name for name, c in EVEN.items() if any(p.states(c) for p in each(c.attention))])
def test_recurrent_layers_are_not_divided_and_the_axis_is_named(name: str, axis: str) -> None:
    message = f"^mesh '{axis}=2' cannot divide recurrent layers over the {axis} axis: use {axis}=1[^.]*$"
    with pytest.raises(UserError, match=message):
        Mesh.parse(f"{axis}=2").check_decoder(EVEN[name])


def graphs() -> int:
    """The number of graphs that torch.compile has made since the last call."""
    return counters["stats"].pop("unique_graphs", 0)


@pytest.mark.long
def test_blocks_of_a_tensor_axis_are_compiled_once_for_all_layers(two: Ranks) -> None:
    two.run(graphs)
    assert_equal_to_one_process(two, "compiled", "tensor=2")
    assert two.run(graphs)[1] == 2, "with gradients, and without"


@pytest.mark.parametrize(("name", "mesh"), cases(FOUR + CONTEXT + STAGES))
def test_four_processes_train_as_one(name: str, mesh: str, four: Ranks) -> None:
    assert_equal_to_one_process(four, name, mesh)
