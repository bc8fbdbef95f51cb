"""Meshes: their text format, invalid meshes, and sizes that a tensor axis cannot divide."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward import DecoderConfig, Experts, Gated, UserError
from onward.config.mesh import Mesh, undivided

SIZES = st.integers(1, 64)


@given(SIZES, SIZES, SIZES, SIZES)
def test_a_mesh_is_read_back_from_its_text(pipeline: int, replicate: int, shard: int, tensor: int) -> None:
    mesh = Mesh(pipeline, replicate, shard, tensor)
    assert Mesh.parse(str(mesh)) == mesh
    assert mesh.count == pipeline * replicate * shard * tensor


def test_axes_may_come_in_any_order_and_be_left_out() -> None:
    assert Mesh.parse("tensor=2, replicate=3") == Mesh(replicate=3, tensor=2)
    assert str(Mesh(replicate=3, tensor=2)) == "replicate=3 tensor=2"
    assert str(Mesh()) == "replicate=1"


@pytest.mark.parametrize(
    "text", ["", "2", "shard", "shard=", "shard=0", "shard=-1", "shard=2 shard=2", "shard=²", "shard=1e3"]
)
def test_other_texts_are_refused_in_a_sentence(text: str) -> None:
    with pytest.raises(UserError, match=r"^mesh (is )?'"):
        Mesh.parse(text)


def test_an_unknown_axis_gets_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean shard"):
        Mesh.parse("shards=2")


def test_a_mesh_of_another_number_of_processes_is_refused() -> None:
    with pytest.raises(UserError, match="takes 2 x 2 = 4 processes, but there are 3"):
        Mesh.parse("shard=2 tensor=2").check_count(3)


SIZED = {"vocab_size": 10, "d_model": 24, "n_layers": 2, "n_heads": 12, "n_kv_heads": 4}


@pytest.mark.parametrize(
    ("changes", "uneven"),
    [
        ({}, {5: "n_heads 12", 6: "n_kv_heads 4", 3: "n_kv_heads 4"}),
        ({"n_kv_heads": 2}, {3: "n_kv_heads 2", 8: "n_heads 12"}),
        ({"d_ff": 30}, {4: "d_ff 30"}),
        ({"mlp": (Gated(), Experts(count=4, top_k=2, d_ff=6))}, {4: "d_ff of experts 6"}),
    ],
)
def test_sizes_that_a_tensor_axis_cannot_divide_are_named(changes: dict[str, object], uneven: dict[int, str]) -> None:
    config = DecoderConfig(**SIZED | changes)  # type: ignore[arg-type]
    assert {n: undivided(config, n) for n in uneven} == uneven
    with pytest.raises(UserError, match="choose tensor among 1, 2"):
        Mesh(tensor=next(iter(uneven))).check_decoder(config)
