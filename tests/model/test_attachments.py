"""Behavior is attached to a finished model in one fixed order, is listed, and leaves nothing behind when detached."""

import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from copy import deepcopy
from functools import partial
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor

import onward
from onward import Decoder, LoRA, UserError, attached
from onward.model.attachments import KINDS, attach, detach, version
from onward.parallel.context import DividedTokens
from onward.tracing import scale
from onward.transforms import compile_blocks, quantize_model, recompute_blocks

from support.decoders import DECODERS, decoder, token_ids

pytestmark = pytest.mark.filterwarnings("ignore::onward.tracing.listening.Uncompiled")
CONFIG = DECODERS["llama"]
Way = Callable[[Decoder, ExitStack], object]
WAYS: dict[str, Way] = {
    "quantization": lambda model, _: quantize_model(model, "int8"),
    "adapters": lambda model, _: adapt(model),
    "compilation": lambda model, _: compile_blocks(model),
    "context": lambda model, _: DividedTokens(model, 0, 1, lambda x: x),
    "recomputation": lambda model, _: recompute_blocks(model),
    "traces": lambda model, stack: stack.enter_context(onward.edit(model, {"blocks.0.attn.q": scale(2.0)})),
}
ORDERS = [[*WAYS], [*reversed(WAYS)], ["traces", "recomputation", "adapters", "quantization", "context", "compilation"]]


@pytest.fixture(autouse=True)
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile returns the function unchanged, since importing the compiler takes seconds."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


def adapt(model: Decoder) -> None:
    torch.manual_seed(1)
    onward.add_lora(model, LoRA(rank=2))
    for name, parameter in model.named_parameters():
        if name.endswith("_lora.default.b"):
            parameter.data.normal_()


def hooks(model: Decoder) -> list[list[str]]:
    """The hooks of each module, in order."""
    return [
        [
            f"{hook.__module__}.{hook.__qualname__}"
            for hook in (*m._forward_pre_hooks.values(), *m._forward_hooks.values())
        ]
        for m in model.modules()
    ]


def layers(model: Decoder) -> list[str]:
    """The functions that wrap the forward method of the first block, from the outermost to the method of the class."""
    found, function = list[str](), model.blocks[0].forward
    while isinstance(function, partial):
        found.append(function.func.__qualname__)
        function = next(one for one in reversed(function.args) if callable(one))
    return [*found, function.__qualname__]


def numbers(model: Decoder) -> Tensor:
    return model(token_ids(model.config)).detach()


def test_any_order_of_calls_gives_one_order_of_layers_and_the_same_numbers() -> None:
    results = []
    for order in ORDERS:
        model = decoder(CONFIG)
        with ExitStack() as stack:
            for name in order:
                WAYS[name](model, stack)
            results.append((str(attached(model)), layers(model), hooks(model), numbers(model)))
    assert layers(model) == ["checkpoint", "instead", "PreNormModule.forward"]
    for listed, order_of_layers, order_of_hooks, logits in results[1:]:
        assert (listed, order_of_layers, order_of_hooks) == results[0][:3]
        assert torch.equal(logits, results[0][3])


@pytest.mark.parametrize("name", [name for name in WAYS if name != "quantization"])
def test_detaching_restores_the_methods_of_the_class(name: str) -> None:
    model = decoder(CONFIG)
    before, known, versions = numbers(model), [{*vars(m)} for m in model.modules()], [version(model)]
    with ExitStack() as stack:
        WAYS[name](model, stack)
        versions.append(version(model))
        assert [one.kind for one in attached(model)] == [name]
        assert str(model).splitlines()[1] == f"  {attached(model)[0]}"
    onward.remove_lora(model)
    detach(model, name)
    versions.append(version(model))
    assert versions[0] == 0 < versions[1] < versions[2]
    assert [{*vars(m)} - {"attachments"} for m in model.modules()] == known
    assert not attached(model)
    assert not any(hooks(model))
    assert not {"forward", "hidden", "hidden_of_checked", "contexts", "logits"} & {*vars(model)}
    assert torch.equal(numbers(model), before)


def test_copy_of_a_model_calls_and_detaches_its_own_modules() -> None:
    model = decoder(CONFIG)
    for name in "adapters", "compilation", "context", "recomputation":
        WAYS[name](model, ExitStack())
    copy, before = deepcopy(model), numbers(model)
    for parameter in copy.parameters():
        parameter.data.zero_()
    assert not numbers(copy).any()
    for kind in KINDS:
        detach(copy, kind)
    assert [one.kind for one in attached(model)] == ["adapters", "compilation", "context", "recomputation"]
    assert torch.equal(numbers(model), before)


def test_methods_that_a_user_replaced_are_kept_or_refused_by_name() -> None:
    model = decoder(CONFIG)
    mine: Any = lambda x, context: x
    model.blocks[0].forward = mine  # type: ignore[method-assign]
    recompute_blocks(model)
    assert layers(model) == ["checkpoint", mine.__qualname__]
    with pytest.raises(UserError, match=r"^Cannot attach compilation, because PreNormModule\.forward was replaced"):
        compile_blocks(model)
    detach(model, "recomputation")
    assert model.blocks[0].forward is mine
    recompute_blocks(model)
    model.blocks[0].forward = mine  # type: ignore[method-assign]
    with pytest.raises(UserError, match="was replaced by hand: restore it first"):
        recompute_blocks(model)


@pytest.mark.parametrize("kinds", list(permutations(["adapters", "tensor", "traces"])))
def test_hooks_run_in_the_order_of_kinds_and_around_those_of_users(kinds: list[str]) -> None:
    model, seen = decoder(CONFIG), list[str]()
    model.norm.register_forward_hook(lambda *_: seen.append("user"))
    for kind in kinds:
        attach(model, kind, "").after(model.norm, lambda *_, kind=kind: seen.append(kind), prepend=kind == "adapters")
    model(token_ids(model.config))
    assert [one for one in seen if one != "user"] == ["adapters", "tensor", "traces"]
    assert seen[:2] == ["adapters", "user"]


def test_plain_model_imports_nothing_that_could_be_attached() -> None:
    code = """
import sys, torch, onward
model = onward.Decoder(onward.DecoderConfig(vocab_size=10, d_model=16, n_layers=1, n_heads=2))
model(torch.tensor([[1, 2]]))
optional = "onward.model.attachments", "onward.transforms", "onward.parallel", "onward.tracing"
print(repr(str(model).splitlines()[1]), [name for name in sys.modules if name.startswith(optional)])
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "'  (embed): Embedding(10, 16)' []\n"
