"""Meshes: what one device holds and sends, against counting by hand."""

import pytest

from onward.config.decoder import AttentionOnly, Experts
from onward.errors import UserError
from onward.planning.memory import training_memory
from onward.planning.mesh import Mesh, device_memory, divided, traffic
from onward.planning.parameters import parameters
from onward.training.step.loss import CrossEntropy

from support.decoders import config

WIDE = config(d_model=64, n_heads=8, n_kv_heads=4, d_ff=128, vocab_size=1000)


def test_tensor_parallel_device_has_its_share_of_every_matrix() -> None:
    norms = 5 * 64
    assert parameters(divided(WIDE, 4)) - norms == (parameters(WIDE) - norms) / 4
    experts = config(d_model=64, n_heads=8, d_ff=128, mlp=Experts(count=4, d_ff=64, d_shared=32))
    assert divided(experts, 2).mlp == Experts(count=4, d_ff=32, d_shared=16)


@pytest.mark.parametrize("inside", ["tensor", "shards"])
def test_a_mesh_of_one_device_is_a_plain_training(inside: str) -> None:
    mesh = Mesh.of("1x1", inside)  # type: ignore[arg-type]
    plain = training_memory(WIDE, 2, 12, CrossEntropy(), precision="bf16")
    assert device_memory(WIDE, mesh, 2, 12, CrossEntropy()).peak == pytest.approx(plain.peak, rel=0.02)
    sent = traffic(WIDE, mesh, 2, 12)
    assert sent.inside == sent.between == 0


def test_shards_divide_weights_gradients_and_state_and_keep_activations() -> None:
    one, many = (device_memory(WIDE, Mesh.of(text, "shards"), 2, 12, CrossEntropy()) for text in ("8x1", "1x8"))
    assert (many.gradients, many.optimizer) == (one.gradients // 8, one.optimizer // 8)
    assert many.activations == one.activations
    assert many.weights > one.weights // 8  # blocks that are gathered


def test_bytes_that_are_sent_follow_from_the_ring() -> None:
    total, vectors = 4 * parameters(WIDE), 2 * 12 * 64 * 2
    tensor = traffic(WIDE, Mesh.of("8x4", "tensor"), 2, 12)
    assert tensor.between == pytest.approx(2 * 7 / 8 * total / 4)
    assert tensor.inside == pytest.approx(2 * 3 / 4 * vectors * (2 * 2 * 2 + 2))
    shards = traffic(WIDE, Mesh.of("8x4", "shards"), 2, 12)
    assert shards.inside == pytest.approx(3 / 4 * (total / 2 * 2 + total))
    assert shards.between == tensor.between
    less = traffic(config(block=AttentionOnly(), n_heads=4), Mesh.of("1x4", "tensor"), 1, 12)
    assert less.inside == pytest.approx(2 * 3 / 4 * 12 * 16 * 2 * (2 * 2 + 2))


REFUSED = {"8by4": "mesh is '8by4': write groups", "0x4": "mesh is '0x4'", "1x3": "which do not divide n_heads 8"}


@pytest.mark.parametrize("text", REFUSED)
def test_meshes_that_cannot_be_are_one_sentence(text: str) -> None:
    three = config(d_model=64, n_heads=8, n_kv_heads=1)
    with pytest.raises(UserError, match=REFUSED[text]):
        divided(three, Mesh.of(text, "tensor").devices)
