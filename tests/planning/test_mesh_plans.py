"""Meshes: the planned memory and communication of a device, compared with a Trainer's step in one rank of torch's fake
process group, on fake tensors."""

from dataclasses import replace
from typing import Any

import pytest

from onward import DecoderConfig, Experts, UserError
from onward.config.decoder import each
from onward.config.mesh import Mesh, undivided
from onward.families import presets
from onward.measuring.machine import machine_for
from onward.planning import training_memory
from onward.planning.arrangements import StepTime, arrangements, step_time, tensor_sizes
from onward.planning.device_memory import device_memory
from onward.planning.divided_parameters import groups
from onward.training import CrossEntropy

from support.decoders import DECODERS, config
from support.simulated import planned, simulated

KINDS = "weights", "gradients", "optimizer", "activations"
MESHES = "replicate=4", "shard=8", "tensor=2", "replicate=2 shard=2", "shard=3 tensor=2", "replicate=2 shard=2 tensor=4"
CONTEXT = "context=2", "replicate=2 shard=2 context=3", "context=2 tensor=2"
OPTIONS: list[dict[str, Any]] = [{}, {"recompute": True}, {"precision": "fp32"}, {"optimizer": "muon"}]
# divisible, like the vocabularies of releases
EVEN = {name: replace(decoder, vocab_size=12) for name, decoder in DECODERS.items()}
NOT_DIVIDED = {"no-output"}  # attention without an output projection


def assert_planned(decoder: DecoderConfig, mesh: Mesh, length: int, share: float = 0.05, **options: Any) -> float:
    """The shared assertion: communication is planned exactly, and each kind of memory within a relative error of
    `share`. Returns the planned peak divided by the peak of the rank."""
    done = simulated(decoder, mesh, 2, length, **options)
    assert planned(decoder, mesh, 2, length, **options) == (done.calls, done.bytes)
    memory = device_memory(decoder, mesh, 2, length, CrossEntropy(), holes=0.0, **options)
    assert {kind: getattr(memory, kind) for kind in KINDS} == {
        kind: pytest.approx(getattr(done, kind), rel=share) for kind in KINDS
    }
    return memory.peak / done.peak


def cases() -> list[Any]:
    """Every decoder with each mesh that divides it and each option."""
    found = []
    for name, decoder in EVEN.items():
        able = [m for m in MESHES if not undivided(decoder, Mesh.parse(m).tensor)]
        able = [m for m in able if "tensor" not in m or name not in NOT_DIVIDED]
        both = [(mesh, options) for options in OPTIONS for mesh in able]
        found += [pytest.param(name, mesh, options, id=f"{name}-{mesh}-{options}") for mesh, options in both]
    return found


@pytest.mark.long
@pytest.mark.parametrize(("name", "mesh", "options"), cases())
def test_plan_of_a_mesh_is_what_a_rank_does(name: str, mesh: str, options: dict[str, Any]) -> None:
    assert_planned(EVEN[name], Mesh.parse(mesh), 12, **options)


def of_context() -> list[Any]:
    """Every decoder with each mesh with a context axis that divides it; all but two are `long`."""
    able = [
        (n, m) for n in EVEN for m in CONTEXT if n not in NOT_DIVIDED and not undivided(EVEN[n], Mesh.parse(m).tensor)
    ]
    options = [OPTIONS[i % len(OPTIONS)] for i in range(len(able))]
    return [
        pytest.param(*both, more, marks=() if i in (0, 16) else pytest.mark.long)
        for i, (both, more) in enumerate(zip(able, options))
    ]


@pytest.mark.parametrize(("name", "mesh", "options"), of_context())
def test_plan_of_a_context_axis_is_what_a_rank_does(name: str, mesh: str, options: dict[str, Any]) -> None:
    small = "tensor" in mesh or "recompute" in options  # token ids are then a large share of the stored bytes
    assert_planned(EVEN[name], Mesh.parse(mesh), 24, 0.1 if small else 0.05, **options)


@pytest.mark.long
def test_plan_of_a_vocabulary_that_is_not_divided_is_what_a_rank_does() -> None:
    assert_planned(DECODERS["gemma2"], Mesh(shard=2, tensor=2), 12)


@pytest.mark.long
def test_plan_of_tokens_that_are_not_divided_is_what_a_rank_does() -> None:
    assert_planned(EVEN["llama"], Mesh(tensor=2), 11, recompute=True)


def test_plan_of_a_loss_in_chunks_is_what_a_rank_does() -> None:
    assert_planned(config(vocab_size=1 << 21), Mesh(tensor=2), 24)


STAGES: list[tuple[str, dict[str, Any]]] = [
    *((mesh, {}) for mesh in ("pipeline=2 shard=2", "pipeline=2 replicate=2", "pipeline=2 shard=2 tensor=2")),
    *(("pipeline=2", options) for options in ({}, {"precision": "fp32"}, {"optimizer": "muon"})),
]


def of_stages() -> list[Any]:
    """Every decoder with each mesh with pipeline stages that divides it; all but two are `long`."""
    found = []
    for i, (name, decoder) in enumerate(DECODERS.items()):
        for j, (mesh, options) in enumerate(STAGES):
            if not undivided(decoder, Mesh.parse(mesh).tensor) and not ("tensor" in mesh and name in NOT_DIVIDED):
                marks = () if (i, j) in [(1, 0), (0, 5)] else pytest.mark.long
                found.append(pytest.param(name, mesh, options, id=f"{name}-{mesh}-{options}", marks=marks))
    return found


@pytest.mark.parametrize(("name", "mesh", "options"), of_stages())
def test_plan_of_stages_is_what_their_ranks_do(name: str, mesh: str, options: dict[str, Any]) -> None:
    for stage in range(2):  # hidden states are a large share of the memory of small decoders
        assert_planned(EVEN[name], Mesh.parse(mesh), 12, 0.15, **options, stage=stage)


RELEASES = [
    ("llama-3.1-8b", "shard=8", False),
    ("llama-3.1-8b", "replicate=16 shard=8", True),
    ("llama-3.1-70b", "shard=64", True),
    ("llama-3.1-70b", "shard=32 tensor=8", True),
    ("mixtral-8x22b", "shard=64", True),
    ("mixtral-8x22b", "replicate=2 shard=64 tensor=8", True),
]


def release(name: str, layers: int | None = None) -> DecoderConfig:
    """A release, or its first `layers` layers, with experts that are computed one after the other."""
    decoder = presets()[name].config
    mlp = tuple(replace(part, backend="loop") if isinstance(part, Experts) else part for part in each(decoder.mlp))
    return replace(decoder, mlp=mlp, n_layers=layers or decoder.n_layers)


@pytest.mark.long
@pytest.mark.parametrize(("name", "mesh", "recompute"), [RELEASES[0], RELEASES[5]])
def test_plan_of_two_layers_of_a_release_is_what_a_rank_does(name: str, mesh: str, recompute: bool) -> None:
    assert 0.99 < assert_planned(release(name, 2), Mesh.parse(mesh), 256, recompute=recompute) < 1.15


OF_STAGES = [
    ("pipeline=2", True, 0),
    *(pytest.param("pipeline=2 shard=2", False, stage, marks=pytest.mark.long) for stage in (0, 1)),
    *(pytest.param("pipeline=2 shard=2 tensor=2", False, stage, marks=pytest.mark.long) for stage in (0, 1)),
    pytest.param("pipeline=2", False, 1, marks=pytest.mark.long),
]


@pytest.mark.parametrize(("mesh", "recompute", "stage"), OF_STAGES)
def test_plan_of_a_stage_of_a_release_is_what_a_rank_does(mesh: str, recompute: bool, stage: int) -> None:
    decoder = release("llama-3.1-8b", 4)
    ratio = assert_planned(decoder, Mesh.parse(mesh), 256, share=0.1, recompute=recompute, stage=stage)
    assert 0.99 < ratio < 1.15


@pytest.mark.long
@pytest.mark.parametrize(("name", "mesh", "recompute"), RELEASES)
def test_plan_of_a_release_is_what_a_rank_does(name: str, mesh: str, recompute: bool) -> None:
    assert 0.99 < assert_planned(release(name), Mesh.parse(mesh), 2048, recompute=recompute) < 1.1


def test_a_mesh_of_one_device_is_a_plain_training() -> None:
    plain = training_memory(config(), 2, 12, CrossEntropy(), precision="bf16")
    assert device_memory(config(), Mesh(), 2, 12, CrossEntropy()) == plain
    assert planned(config(), Mesh(), 2, 12) == ({}, {})


def test_more_shards_than_experts_hold_a_part_of_each() -> None:
    *_, experts, _ = groups(config(mlp=Experts(count=4, d_ff=64)), Mesh(shard=16))
    stacks = [piece for piece in experts.pieces if len(piece.shape) == 3]
    assert [(piece.local * 16, piece.gathered) for piece in stacks] == [(piece.size, piece.size) for piece in stacks]


def test_arrangements_divide_more_and_more() -> None:
    assert [str(mesh) for mesh in arrangements(16)] == ["replicate=16", "replicate=2 shard=8", "shard=16"]
    assert [str(mesh) for mesh in arrangements(4)] == ["replicate=4", "shard=4"]
    assert [str(mesh) for mesh in arrangements(16, 8, [1, 4])][3:] == [
        *("replicate=2 shard=2 tensor=4", "shard=4 tensor=4")
    ]
    assert tensor_sizes(config(n_heads=4, n_kv_heads=2), 64) == [1, 2, 4]
    assert tensor_sizes(config(), 6) == [1, 2]


def test_time_of_a_step_is_arithmetic_and_what_is_sent_over_links() -> None:
    decoder, h100 = release("llama-3.1-8b"), machine_for(DECODERS["llama"], "h100", context=64)
    near, far = (step_time(decoder, Mesh.parse(mesh), h100, 1, 8192) for mesh in ("shard=8", "shard=16"))
    assert near.arithmetic == far.arithmetic
    assert near.waiting < 1e-5
    assert far.meanwhile / near.meanwhile == pytest.approx(450 / 50 * (15 / 16) / (7 / 8), rel=1e-3)
    halves = step_time(decoder, Mesh.parse("tensor=2"), h100, 1, 8192)
    assert halves.arithmetic == near.arithmetic / 2
    odd = replace(decoder, vocab_size=decoder.vocab_size + 1)
    # the head is not divided
    assert step_time(odd, Mesh(tensor=2), h100, 1, 8192).arithmetic > 1.05 * halves.arithmetic
    assert halves.waiting > 0 == halves.meanwhile
    assert StepTime(3.0, 2.0, 0.5).seconds == StepTime(2.0, 3.0, 0.5).seconds == 3.5


REFUSED = {"tensor=3": "3 does not divide n_heads 4", "shards=2": "did you mean shard"}


@pytest.mark.parametrize("text", REFUSED)
def test_meshes_that_cannot_be_are_one_sentence(text: str) -> None:
    with pytest.raises(UserError, match=REFUSED[text]):
        device_memory(config(), Mesh.parse(text), 2, 12, CrossEntropy())


def test_parts_without_a_rule_are_refused_in_a_plan_as_in_a_training() -> None:
    with pytest.raises(UserError, match="has no rule for tensor parallelism"):
        device_memory(DECODERS["no-output"], Mesh(tensor=2), 2, 12, CrossEntropy())
