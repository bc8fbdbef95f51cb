"""Edits replace activations: logits and gradients change accordingly, and the model is unchanged after an edit."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import onward
from onward import Engine, Request, Sampling, UserError
from onward.tracing import add, clamp, mean_of, replace, scale, zero
from onward.tracing.listening import OF_MODELS
from onward.tracing.sites import activations

from support.activations import WITHOUT_GRADIENT, hooks, loss_of
from support.decoders import DECODERS, assert_close, decoder, token_ids

FEW = "llama", "gpt", "gpt-oss", "deepseek"


def instead(value: Tensor, x: Tensor) -> Tensor:
    return value


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FEW else pytest.mark.long) for n in DECODERS])
def test_each_activation_put_back_gives_the_same_logits_and_the_traced_gradient(name: str) -> None:
    model, tokens = decoder(DECODERS[name], torch.float64), token_ids(DECODERS[name])
    with onward.trace(model, gradients=True) as t:
        plain = model(tokens)
    loss_of(plain).backward()
    for activation, described in activations(model).items():
        if not described.editable or activation.endswith(WITHOUT_GRADIENT):
            continue
        leaf = t[activation].detach().requires_grad_()
        with onward.edit(model, {activation: partial(instead, leaf)}):
            edited = model(tokens)
        assert_close(edited, plain, 1e-12)
        loss_of(edited).backward()
        assert leaf.grad is not None
        assert_close(t.grad(activation).nan_to_num(), leaf.grad.nan_to_num(), 1e-10)
        model.zero_grad()


def test_a_model_with_adapters_is_traced_and_edited_as_without() -> None:
    model, tokens = decoder(DECODERS["deepseek"]), token_ids(DECODERS["deepseek"])
    onward.add_lora(model, onward.LoRA(rank=2))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora" in name:
                parameter.add_(0.1)
    plain = model(tokens)
    with onward.trace(model) as t:
        assert torch.equal(model(tokens), plain)
    experts = {"blocks.1.mlp.experts": lambda x: x * 1.0, "blocks.0.attn.weights": lambda x: x * 1.0}
    with onward.edit(model, experts):
        assert_close(model(tokens), plain, 1e-5)
    with onward.edit(model, {name: t[name] for name in experts}):
        assert_close(model(tokens), plain, 1e-5)


def test_edits_do_what_they_say() -> None:
    model, tokens = decoder(DECODERS["llama"]), token_ids(DECODERS["llama"])
    steer = torch.arange(16.0)
    with onward.trace(model, "blocks.0.out") as t:
        model(tokens)
    x = t["blocks.0"]
    other = torch.randn_like(x)
    for change, wanted in (
        (zero, torch.zeros_like(x)),
        (mean_of(t), x.mean((0, 1)).expand_as(x)),
        (mean_of(tokens), x.mean((0, 1)).expand_as(x)),
        (add(steer), x + steer),
        (add(steer, at=[2, 5]), x + steer * torch.tensor([i in (2, 5) for i in range(12)])[:, None]),
        (scale(3), x * 3),
        (clamp(-0.1, 0.1), x.clamp(-0.1, 0.1)),
        (replace(other, at=slice(4, None)), torch.cat([x[:, :4], other[:, 4:]], 1)),
        (other, other),
        (2.0, torch.full_like(x, 2.0)),
        (lambda x: x.flip(1), x.flip(1)),
    ):
        with onward.edit(model, {"blocks.0": change}), onward.trace(model, "blocks.0.out", "blocks.1.in") as edited:
            model(tokens)
        assert_close(edited["blocks.0"], wanted, 1e-6)
        assert torch.equal(edited["blocks.1.in"], edited["blocks.0"])


def test_an_ablated_head_is_one_whose_output_weights_are_zero() -> None:
    model, tokens = decoder(DECODERS["llama"]), token_ids(DECODERS["llama"])
    with onward.edit(model, {"blocks.1.attn.heads.2": zero}):
        ablated = model(tokens)
    block: Any = model.blocks[1]
    block.attn.out.weight.data[:, 8:12] = 0
    assert_close(ablated, model(tokens), 1e-6)


def test_an_edited_share_or_output_of_an_expert_changes_the_mixture() -> None:
    model, tokens = decoder(DECODERS["deepseek"]), token_ids(DECODERS["deepseek"])
    with onward.trace(model, "blocks.1.mlp.out", "blocks.1.mlp.shares", "blocks.1.mlp.experts.3") as t:
        model(tokens)
    part = t["blocks.1.mlp.shares"][..., 3:4] * t["blocks.1.mlp.experts.3"]
    assert part.any()
    for name, change, more in (
        ("shares.3", zero, -part),
        ("experts.3", zero, -part),
        ("experts.3", scale(3), 2 * part),
    ):
        with onward.edit(model, {f"blocks.1.mlp.{name}": change}), onward.trace(model, "blocks.1.mlp.out") as edited:
            model(tokens)
        assert_close(edited["blocks.1.mlp.out"], t["blocks.1.mlp.out"] + more, 1e-5)


def test_edits_of_one_activation_follow_each_other_and_traces_see_the_last() -> None:
    model, tokens = decoder(DECODERS["llama"]), token_ids(DECODERS["llama"])
    first, second = {"blocks.0": 1.0}, {"blocks.*.out": scale(2), "blocks.0": add(3)}
    with onward.trace(model, "blocks.0") as t, onward.edit(model, first), onward.edit(model, second):
        model(tokens)
    assert t["blocks.0"].eq(5).all()


def test_generation_and_training_go_through_edits() -> None:
    model = decoder(DECODERS["llama"])
    engine = Engine(model, compile_after=0)
    request = engine.add(Request([1, 2], Sampling(temperature=0), 5))
    forced = torch.zeros(13)
    forced[7] = 1e4
    with onward.edit(model, {"logits": add(forced)}):
        list(engine.run())
    assert request.tokens == [7] * 5
    with onward.edit(model, {"blocks.0.mlp.out": zero}):
        loss_of(model(token_ids(model.config))).backward()
    assert model.get_submodule("blocks.0.mlp.up").weight.grad is None
    assert model.get_submodule("blocks.1.mlp.up").weight.grad.any()


def test_after_an_exception_the_model_is_as_before() -> None:
    model, tokens = decoder(DECODERS["llama"]), token_ids(DECODERS["llama"])
    before, modules = model(tokens), [dict(vars(m)) for m in model.modules()]
    with (
        pytest.raises(ZeroDivisionError),
        onward.trace(model),
        onward.edit(model, {"blocks.0": lambda x: x / (1 // 0)}),
    ):
        model(tokens)
    assert not hooks(model)
    assert [{*vars(m)} - {"attachments"} for m in model.modules()] == [{*m} for m in modules]
    assert onward.attached(model) == ()
    assert torch.equal(model(tokens), before)
    assert not OF_MODELS[model].listeners


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (
            lambda m: onward.trace(m, "blocks.0.atn.weights"),
            r"not an activation .*nearest are blocks\.0\.attn\.weights",
        ),
        (lambda m: onward.trace(m, "blocks.9.out"), "not an activation"),
        (lambda m: onward.trace(m, "blocks.0.attn.heads.4"), r"blocks\.0\.attn\.heads has only 0 to 3"),
        (
            lambda m: onward.edit(m, {"blocks.0.attn_norm.scale": zero}),
            "computed from other activations: edit those",
        ),
        (
            lambda m: onward.edit(m, {"blocks.0": torch.zeros(5)}),
            r"Cannot fit .*float32 \(5,\).* float32 \(2, 12, 16\)",
        ),
        (
            lambda m: onward.edit(m, {"blocks.0": lambda x: x[:, 1:]}),
            r"returned float32 \(2, 11, 16\) instead of .*12, 16",
        ),
        (lambda m: onward.edit(m, {"blocks.0": lambda x: x @ torch.zeros(3, 3)}), "the edit of blocks.0 failed on flo"),
    ],
)
def test_wrong_names_and_shapes_are_one_sentence(use: Any, message: str) -> None:
    model = decoder(DECODERS["llama"])
    with pytest.raises(UserError, match=message), use(model):
        model(token_ids(model.config))
    assert not hooks(model)
