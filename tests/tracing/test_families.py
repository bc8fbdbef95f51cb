"""Every family can be traced and attributed: its own parts also have the listed activations."""

import re
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedConfig

import onward
from onward import Experts, SigmoidRouting, SoftmaxRouting
from onward.families import read
from onward.inspection import logit_attribution

from support.decoders import decoder, token_ids
from support.families import CASES
from support.wrapped import CASES as WRAPPED

PLACES = ("softmax over all experts (", ")"), ("routing bias is added (", ")"), ("Files of ", " have interleaved")
FEW = "opt: no biases, norms without weights, gelu", "deepseek_v3: groups, a dense layer first"


@pytest.mark.parametrize(
    "hf", [pytest.param(hf, id=name, marks=() if name in FEW else pytest.mark.long) for name, hf in CASES.items()]
)
def test_a_family_is_traced_without_another_bit_and_its_logits_have_parts(hf: PreTrainedConfig) -> None:
    config = read(hf.to_dict())[1]
    length = min(10, config.context_length)
    model, tokens = decoder(config, torch.float64), token_ids(config, 2, length)
    plain = model(tokens)
    for gradients in False, True:
        with onward.trace(model, gradients=gradients) as t:
            assert torch.equal(model(tokens), plain)
    for name, shape in onward.activation_names(model).items():
        assert name == "position" or tuple(t[name].shape) == eval(shape, {"B": 2, "T": length, "S": length}), name
    found = logit_attribution(model, tokens[0].tolist())
    with torch.no_grad():
        logits = model.head(model.embed_out(model.hidden(tokens[:1])))[0, -1]
    assert found.logit == pytest.approx(float(logits[found.target]), abs=1e-8)


def test_the_page_of_names_lists_the_families_with_other_router_scores_or_permuted_queries() -> None:
    page = " ".join(Path(__file__).parents[2].joinpath("docs/inside.md").read_text(encoding="utf-8").split())
    listed = [set(re.findall(r"`([a-z]+\w*)`", page.split(begin)[1].split(end)[0])) for begin, end in PLACES]
    softmax, sigmoid, permuted = set[str](), set[str](), set[str]()
    for case, hf in (CASES | WRAPPED).items():
        name = case.split(":")[0]
        family, config = read(hf.to_dict())
        parts = config.mlp if isinstance(config.mlp, tuple) else (config.mlp,)
        routers = {type(part.router) for part in parts if isinstance(part, Experts)}
        softmax |= {name} if SoftmaxRouting in routers else set()
        sigmoid |= {name} if SigmoidRouting in routers else set()
        fixes = [row[2][0] for row in family.names(config) if len(row) == 3]
        permuted |= {name} if any("interleaved" in fix.__qualname__ for fix in fixes) else set()
    assert listed == [softmax, sigmoid, permuted]
