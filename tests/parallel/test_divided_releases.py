"""Every published decoder can be divided over a tensor axis, or is refused with the reason."""

import pytest
import torch

from onward import Decoder, UserError
from onward.checkpoint.source import SizeLimit
from onward.config.decoder import each
from onward.config.mesh import Mesh, undivided
from onward.families import modules, presets
from onward.parallel.tensor import rules_of

NAMES = [name for module in modules().values() for name in module.PRESETS]
FIRST = {next(iter(module.PRESETS)) for module in modules().values() if module.PRESETS}  # first preset of each family


@pytest.mark.parametrize("name", [n if n in FIRST else pytest.param(n, marks=pytest.mark.long) for n in NAMES])
def test_each_parameter_of_every_release_has_a_rule(name: str) -> None:
    config = presets()[name].config
    # falcon-7b has 71 heads, a prime number
    known = [n for n in range(2, config.n_heads + 1) if not undivided(config, n)]
    recurrent = any(part.states(config) for part in each(config.attention))
    if recurrent or not known:
        why = "recurrent layers over the tensor axis: use tensor=1" if recurrent else "the decoder, because 2 does not"
        with pytest.raises(UserError, match=f"^mesh 'tensor=2' cannot divide {why}[^.]*$"):
            Mesh(tensor=2).check_decoder(config)
        return
    n = known[0]
    with torch.device("meta"), SizeLimit(1 << 62):
        model = Decoder(config)
    for branch in (getattr(block, part) for block in model.blocks for part in ("attn", "mlp")):
        rules = rules_of(name, branch, n)
        assert len(rules) == len([*branch.named_parameters()])
        assert any(rules.values()), "a part is divided"
