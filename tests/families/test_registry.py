"""Families are discovered from their files: their parts are found whatever was imported before, and configurations do
not import torch."""

import subprocess
import sys

import pytest

from onward import Attention, DecoderConfig, FeedForward, Position, UserError
from onward.base.arguments import field_types
from onward.base.fields import Part, part
from onward.cli.shared.arguments import metavar
from onward.families import modules


def run(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", ["clamped_experts(limit=3)", "experts"])
def test_a_kind_is_known_in_a_fresh_process(kind: str) -> None:
    run(f"""
import sys
from onward.base.fields import part
from onward.config.part_types import FeedForward
assert part(FeedForward, {kind!r}, "mlp").kind == {kind.partition("(")[0]!r}
assert "torch" not in sys.modules
""")


def test_configurations_of_families_and_presets_import_no_torch() -> None:
    run("""
import importlib, sys
import onward.config.decoder, onward.training.config, onward.training.presets
from onward.families import modules, presets, read
for name in modules():
    assert "torch" not in sys.modules, f"torch is loaded before {name}"
for name, preset in presets().items():
    assert preset.config.n_layers
    assert "torch" not in sys.modules, f"torch is loaded by {name}"
""")


INTERNAL = {
    *("falcon_alibi", "latent_halves", "clamped_experts"),
    *("post_normed_feed_forward", "sparse_mixer", "depth_mix", "gemma4", "stream_softmax", "stream_experts"),
}


def test_internal_kinds_are_read_and_not_offered() -> None:
    assert modules()
    offered = " ".join(metavar(kind) for kind in field_types(DecoderConfig).values())
    assert not [kind for kind in INTERNAL if kind in offered]
    with pytest.raises(UserError, match=r"choose from alibi, learned, none, rotary, sinusoidal"):
        part(Position, "zzz", "position")
    assert {
        part(FeedForward, "clamped_experts", "mlp").kind,
        part(Position, "falcon_alibi", "position").kind,
    } < INTERNAL


@pytest.mark.parametrize("slot", [Position, Attention, FeedForward])
def test_an_unknown_kind_names_its_class_and_the_way_to_import_one(slot: type[Part]) -> None:
    with pytest.raises(
        UserError, match=rf"x is 'same_slope', which is not a known kind of {slot.__name__}: .*--import"
    ):
        part(slot, "same_slope", "x")
