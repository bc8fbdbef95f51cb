"""A tensor axis can divide every published decoder."""

import pytest
import torch

from onward import Decoder
from onward.checkpoint.source import SizeLimit
from onward.config.mesh import undivided
from onward.families import modules, presets
from onward.parallel.tensor import rules_of

NAMES = [name for module in modules().values() for name in module.PRESETS]
FIRST = {next(iter(module.PRESETS)) for module in modules().values() if module.PRESETS}  # of each family


@pytest.mark.parametrize("name", [n if n in FIRST else pytest.param(n, marks=pytest.mark.long) for n in NAMES])
def test_each_parameter_of_every_release_has_a_rule(name: str) -> None:
    config = presets()[name].config
    n = next(n for n in range(2, config.n_heads + 1) if not undivided(config, n))  # falcon-7b has 71 heads
    with torch.device("meta"), SizeLimit(1 << 62):
        model = Decoder(config)
    for branch in (getattr(block, part) for block in model.blocks for part in ("attn", "mlp")):
        rules = rules_of(name, branch, n)
        assert len(rules) == len([*branch.named_parameters()])
        assert any(rules.values()), "a part is divided"
