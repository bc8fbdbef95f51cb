"""A family whose experts are single tensors in its files and stacks in the model, for as long as the tests need one."""

from collections.abc import Iterator
from typing import Any

from onward.families import Row, onward
from onward.model.config import DecoderConfig, Experts, at

ARCHITECTURES = {"stacks": "Decoder"}
BASE = "base."
IGNORED = r"\.mask$"
PRESETS: dict[str, Any] = {}
ANCESTORS: dict[str, str] = {}
config, to_hf = onward.config, onward.to_hf


def names(c: DecoderConfig) -> Iterator[Row]:
    turn = lambda t: t.mT
    yield "base.wte", "embed.weight"
    for i in range(c.n_layers):
        mlp = at(c.mlp, i)
        assert isinstance(mlp, Experts)
        for name in "gate", "up", "down":
            theirs = [f"base.{i}.experts.{e}.{name}" for e in range(mlp.count)]
            yield (
                (theirs, f"blocks.{i}.mlp.{name}", (turn, turn)) if name == "up" else (theirs, f"blocks.{i}.mlp.{name}")
            )
        yield f"base.{i}.kv", [f"blocks.{i}.attn.{name}.weight" for name in "kv"]
