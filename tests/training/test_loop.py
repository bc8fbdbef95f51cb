"""The trainer: steps in memory give the same result however they are split, wrapped or interrupted."""

import math
import os
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from onward import (
    Batch,
    Decoder,
    DecoderConfig,
    Experts,
    Gated,
    Step,
    StepConfig,
    StepPlan,
    Trainer,
    UserError,
    mean_loss,
)
from onward.data import IGNORE_INDEX
from onward.kernels import causal, cross_entropy, fused, operations
from onward.training import Average, Balance, CrossEntropy, optimizers

from support.devices import on_device

CONFIG = DecoderConfig(vocab_size=20, d_model=32, n_layers=2, n_heads=4, context_length=16)


def fresh() -> Decoder:
    torch.manual_seed(0)
    return on_device(Decoder(CONFIG))


def adamw(model: Decoder) -> list[torch.optim.Optimizer]:
    return optimizers(model, "adamw", 1e-2, 0.1, (0.9, 0.99))


def windows(count: int, length: int = 16) -> Batch:
    ids = torch.randint(20, (count, length + 1), generator=torch.Generator().manual_seed(1))
    return Batch(ids[:, :-1].clone(), ids[:, 1:].clone())


def gradients(parts: list[Batch]) -> list[torch.Tensor]:
    """The gradients that the optimizer gets in one step."""
    model, seen = fresh(), []

    class Watch(torch.optim.SGD):
        def step(self, *_: object) -> None:
            seen.extend(p.grad.clone() for p in model.parameters())

    step = Trainer(model, [Watch(model.parameters(), lr=0.1)], lambda _: 0.1).train_step(StepPlan(parts))
    assert step.loss == pytest.approx(mean_loss(model, parts)[0], rel=1e-5)
    return seen


@pytest.mark.parametrize("sizes", [[4, 4], [1, 7], [2, 2, 2, 2], [1] * 8])
def test_accumulation_equals_the_whole_batch(sizes: list[int]) -> None:
    whole = windows(8)
    whole.targets[3, 5:] = IGNORE_INDEX  # a mean of means would then differ
    parts = [Batch(*pair) for pair in zip(whole.tokens.split(sizes), whole.targets.split(sizes))]
    for one, many in zip(gradients([whole]), gradients(parts)):
        torch.testing.assert_close(many, one, rtol=1e-4, atol=1e-6)


def test_the_loss_is_the_mean_over_all_targets() -> None:
    model, batch = fresh(), windows(3)
    batch.targets[0, :9] = IGNORE_INDEX
    logits = model(batch.tokens).detach().double()
    expected = [
        math.log(sum(math.exp(z) for z in logits[b, t].tolist())) - float(logits[b, t, batch.targets[b, t]])
        for b in range(3)
        for t in range(16)
        if batch.targets[b, t] != IGNORE_INDEX
    ]
    loss, count = mean_loss(model, [Batch(*pair) for pair in zip(batch.tokens.split(2), batch.targets.split(2))])
    assert count == len(expected) == 39
    assert loss == pytest.approx(math.fsum(expected) / 39, rel=1e-6)
    assert CrossEntropy()(model, batch)[0].item() == pytest.approx(math.fsum(expected), rel=1e-6)


def test_clipping_bounds_the_gradient_and_reports_the_norm_before() -> None:
    model = fresh()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = [p.detach().clone() for p in model.parameters()]
    step = Trainer(model, [optimizer], lambda _: 1.0, StepConfig(clip=1e-3)).train_step(StepPlan([windows(4)]))
    moved = math.sqrt(sum(float((p - b).detach().square().sum()) for p, b in zip(model.parameters(), before)))
    assert step.grad_norm > 1e-2
    assert moved == pytest.approx(1e-3, rel=1e-2)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_loss_falls_on_a_batch_that_is_repeated(precision: Any) -> None:
    model, batch = fresh(), windows(4)
    trainer = Trainer(model, adamw(model), lambda _: 1e-2, StepConfig(clip=1.0, precision=precision))
    steps = list(trainer.train([StepPlan([batch])] * 60))
    assert steps[0].loss == pytest.approx(math.log(20), abs=0.3)
    assert steps[-1].loss < 0.5
    assert [s.step for s in steps] == list(range(1, 61))
    assert {s.tokens for s in steps} == {64}


class Interrupted(CrossEntropy):
    """The cross-entropy, interrupted once, in its call number `at`."""

    at = 2

    def __call__(self, model: Any, batch: Batch) -> Any:
        type(self).at -= 1
        if self.at == 0:
            raise KeyboardInterrupt
        return super().__call__(model, batch)


def test_step_after_an_interrupted_step_has_only_its_own_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plan = fresh(), StepPlan([windows(2), windows(3)])
    wanted = [step.grad_norm for step in Trainer(model, adamw(model), lambda _: 1e-2).train([plan] * 2)]
    monkeypatch.setattr(Interrupted, "at", 2)
    model = fresh()
    trainer = Trainer(model, adamw(model), lambda _: 1e-2, loss=Interrupted())
    with pytest.raises(KeyboardInterrupt):
        trainer.train_step(plan)
    assert model.embed.weight.grad is not None, "the first batch has gradients"
    assert [step.grad_norm for step in trainer.train([plan] * 2)] == wanted


def test_gradients_from_outside_a_step_do_not_enter_it() -> None:
    def norms(zero: Callable[[Decoder], object]) -> list[float]:
        model, plan, found = fresh(), StepPlan([windows(4)]), []
        parts = [*model.blocks.parameters()], [*model.embed.parameters()]
        trainers = [Trainer(model, [torch.optim.SGD(part, lr=0.1)], lambda _: 0.1) for part in parts]
        for trainer in trainers * 2:
            CrossEntropy()(model, windows(1))[0].backward()
            zero(model)
            found.append(trainer.train_step(plan).grad_norm)
            assert all(p.grad is None for p in model.parameters())
        return found

    assert norms(lambda model: None) == norms(Decoder.zero_grad)


@pytest.mark.parametrize("wrong", [{"precision": "bfloat16"}, {"precision": "fp8"}, {"clip": -1.0}, {"clip": math.nan}])
def test_step_config_refuses_unknown_precisions_and_negative_limits(wrong: dict[str, Any]) -> None:
    [name] = wrong
    with pytest.raises(UserError, match=f"^{name} is .*: it "):
        StepConfig(**wrong)


def test_mean_loss_refuses_an_unknown_precision() -> None:
    with pytest.raises(UserError, match=r"^precision is 'fp8': it must be"):
        mean_loss(fresh(), [windows(1)], "fp8")


def test_step_without_batches_is_refused() -> None:
    model = fresh()
    with pytest.raises(UserError, match="step without batches"):
        Trainer(model, adamw(model), lambda _: 1e-2).train_step(StepPlan([]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_failed_step_leaves_weights_and_optimizer_as_they_were(bad: float) -> None:
    model = fresh()
    with torch.no_grad():
        model.blocks[1].mlp.down.weight[0, 0] = bad
    before = [p.detach().clone() for p in model.parameters()]
    trainer = Trainer(model, adamw(model), lambda _: 1e-2)
    step = trainer.train_step(StepPlan([windows(2)]))
    assert "loss is" in step.failure
    assert (step.step, trainer.step) == (1, 0)
    assert not any(optimizer.state for optimizer in trainer.optimizers)
    for p, b in zip(model.parameters(), before):
        assert p.grad is None
        assert torch.equal(p.detach().nan_to_num(7), b.nan_to_num(7))


def test_fp16_overflow_skips_the_update_and_lowers_the_scale() -> None:
    model, scaler = fresh(), torch.amp.GradScaler("cpu", init_scale=2.0**40)
    before = model.embed.weight.detach().clone()
    trainer = Trainer(model, adamw(model), lambda _: 1e-2, StepConfig(precision="fp16"), scaler=scaler)
    step = trainer.train_step(StepPlan([windows(2)]))
    assert not step.failure
    assert torch.equal(model.embed.weight, before)
    assert scaler.get_scale() < 2.0**40


def test_dropout_is_a_function_of_the_seed_of_the_batch() -> None:
    torch.manual_seed(0)
    model = on_device(Decoder(replace(CONFIG, dropout=0.5)))
    losses = []
    for state, seed in (1, 7), (2, 7), (1, 8):
        torch.manual_seed(state)
        step = Trainer(model, [], lambda _: 0.0).train_step(StepPlan([replace(windows(4), seed=seed)]))
        losses.append(step.loss)
        model.zero_grad()
    assert losses[0] == losses[1] != losses[2]


def test_fp16_gradients_that_are_never_finite_fail_the_step() -> None:
    model: Any = fresh()
    model.blocks[0].mlp.down.weight.register_hook(lambda gradient: gradient * float("nan"))
    trainer = Trainer(model, adamw(model), lambda _: 1e-3, StepConfig(precision="fp16"))
    steps = list(trainer.train([StepPlan([windows(2)])] * 40))
    assert not steps[0].failure
    assert "gradient is not finite" in steps[-1].failure


@dataclass(frozen=True)
class Pairs(Batch):
    """A batch in which each even row is preferred to the next row."""

    margin: float = 0.0

    @property
    def num_targets(self) -> int:  # type: ignore[override]
        return len(self.tokens) // 2


def preference_loss(model: Decoder, batch: Pairs) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs = model(batch.tokens).log_softmax(-1).gather(-1, batch.targets[..., None]).sum((1, 2))
    loss = -torch.nn.functional.logsigmoid(logprobs[::2] - logprobs[1::2] - batch.margin).sum()
    return loss, loss.detach()


def test_trainer_minimizes_any_loss_over_the_targets_of_its_batches() -> None:
    model, whole = fresh(), windows(8)
    pairs = [Pairs(whole.tokens[rows], whole.targets[rows], margin=0.5) for rows in (slice(6), slice(6, 8))]
    trainer = Trainer(model, adamw(model), lambda _: 1e-2, loss=preference_loss)
    steps = list(trainer.train([StepPlan(pairs)] * 20))
    assert {step.tokens for step in steps} == {4}
    assert steps[0].loss == pytest.approx(math.log(1 + math.exp(0.5)), abs=0.5)
    assert steps[-1].loss < 0.1


class Wrapped(torch.nn.Module):
    """A wrapper like those for compilation and sharding, which calls the wrapped module in its own forward."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module, self.calls = module, 0

    def forward(self, *inputs: Any) -> Any:
        self.calls += 1
        return self.module(*inputs)


def trained(config: DecoderConfig, **options: Any) -> tuple[Trainer, list[Step]]:
    torch.manual_seed(0)
    model = on_device(Decoder(config))
    trainer = Trainer(model, adamw(model), lambda _: 1e-2, balance=Balance(model, 0.1, 0.1), **options)
    return trainer, list(trainer.train([StepPlan([windows(4), windows(2)])] * 5))


MLPS: dict[str, Any] = {"gated": Gated(), "experts": Experts(count=2, top_k=2, backend="loop")}


def assert_trains_as_the_plain_one(wrap: Callable[[torch.nn.Module], torch.nn.Module], mlp: str, chunk: int) -> Trainer:
    options: dict[str, Any] = {"config": replace(CONFIG, mlp=MLPS[mlp]), "loss": CrossEntropy(chunk=chunk)}
    plain, steps = trained(**options)
    found, others = trained(**options, wrap=wrap)
    assert [step.loss for step in others] == [step.loss for step in steps]
    assert all(map(torch.equal, found.model.parameters(), plain.model.parameters()))
    return found


@pytest.mark.parametrize("mlp", MLPS)
@pytest.mark.parametrize("chunk", [0, 5])
def test_wrapped_module_trains_as_the_plain_one(chunk: int, mlp: str) -> None:
    found = assert_trains_as_the_plain_one(Wrapped, mlp, chunk)
    assert isinstance(found.module, Wrapped)
    assert found.module.calls == 10, "each batch goes through one forward pass"


def distributed_data_parallel(folder: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)
    kept = [assert_trains_as_the_plain_one(DistributedDataParallel, mlp, chunk) for chunk in (0, 5) for mlp in MLPS]
    print(len(kept), "are equal", flush=True)
    # the exit could hang: DistributedDataParallel's destructor may wait forever for a thread that needs the GIL
    os._exit(0)


@pytest.mark.long
def test_distributed_data_parallel_trains_as_the_plain_module(tmp_path: Path) -> None:
    program = f"from pathlib import Path; from test_loop import *; distributed_data_parallel(Path({str(tmp_path)!r}))"
    path = os.pathsep.join([*sys.path, str(Path(__file__).parent)])
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.stdout == "4 are equal\n", done.stderr


@pytest.mark.parametrize("stop", [1, 3])
def test_trainer_goes_on_from_its_state_bit_for_bit(stop: int) -> None:
    def made() -> Trainer:
        model = fresh()
        model.embed.weight.requires_grad_(False)
        average, config = Average(model, 0.9), StepConfig(precision="fp16", clip=1.0)
        return Trainer(model, adamw(model), lambda step: 1e-2 / (step + 1), config, average=average)

    plans = [StepPlan([replace(windows(4), seed=seed)]) for seed in range(6)]
    whole, first, second = made(), made(), made()
    wanted = [replace(step, seconds=0) for step in whole.train(plans)]
    found = list(first.train(plans[:stop]))
    state = deepcopy(first.state_dict())
    assert not [name for name in state.tensors if "embed" in name], "frozen parameters are not part of the state"
    list(first.train(plans[stop:]))  # further steps of the first trainer must not change the copy
    second.load_state(state)
    found += second.train(plans[stop:])
    assert [replace(step, seconds=0) for step in found] == wanted
    assert all(map(torch.equal, second.model.parameters(), whole.model.parameters()))
    for name, tensor in whole.state_dict().tensors.items():
        assert torch.equal(second.state_dict().tensors[name], tensor), name


WITH_KERNELS = replace(CONFIG, d_head=16)  # head size that causal attention needs
FUNCTIONS: list[Any] = [
    fused.RMSNorm,
    fused.Rotation,
    causal.CausalAttention,
    fused.Gate,
    cross_entropy.KernelCrossEntropy,
]


def step_with_kernels(monkeypatch: pytest.MonkeyPatch, anomalies: bool) -> tuple[float, list[torch.Tensor]]:
    """The loss of a step on the CPU, with all of its kernels, and the weights after it."""
    monkeypatch.setattr(operations, "MIN_PARALLEL", 1)
    monkeypatch.setattr(cross_entropy, "MIN_KERNEL", 1)
    torch.manual_seed(0)
    model = Decoder(WITH_KERNELS)
    with torch.autograd.set_detect_anomaly(anomalies):
        step = Trainer(model, adamw(model), lambda _: 1e-2).train_step(StepPlan([windows(4)]))
    return step.loss, [weight.detach() for weight in model.parameters()]


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_a_healthy_step_in_anomaly_mode_equals_one_without(monkeypatch: pytest.MonkeyPatch) -> None:
    (loss, weights), (wanted, wanted_weights) = (step_with_kernels(monkeypatch, mode) for mode in (True, False))
    assert loss == wanted
    assert all(map(torch.equal, weights, wanted_weights))


@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:Error detected in")
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_anomaly_mode_names_the_kernel_whose_gradients_are_nan(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = function.apply

    def with_nan(*arguments: object) -> torch.Tensor:
        y = plain(*arguments)
        y.register_hook(lambda gradient: gradient * math.nan)
        return y

    monkeypatch.setattr(function, "apply", with_nan)
    with pytest.raises(RuntimeError, match=f"Function '{function.__name__}Backward' returned nan values"):
        step_with_kernels(monkeypatch, True)
