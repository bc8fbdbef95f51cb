"""User-defined blocks and attentions have the activations that they declare; blocks without declarations have the
default ones."""

from typing import Any

import pytest
import torch
from torch import Tensor

import onward
from onward import Batch, UserError
from onward.model import (
    Activation,
    AttentionContext,
    BranchNormModule,
    Output,
    ParallelModule,
    PostNormModule,
    PreNormModule,
    build_branches,
)
from onward.model.activations import ContextVectors, Declarations, Scores, attention
from onward.model.attention import Attend
from onward.tracing import zero
from onward.training.step.layers import measure

from support.decoders import DECODERS, assert_close, decoder, token_ids


class OwnPreNorm(PreNormModule):
    pass


class OwnPostNorm(PostNormModule):
    pass


class OwnBranchNorm(BranchNormModule):
    pass


class OwnParallel(ParallelModule):
    pass


@pytest.mark.parametrize("own", [OwnPreNorm, OwnPostNorm, OwnBranchNorm, OwnParallel])
def test_a_subclass_of_a_block_has_the_activations_of_its_class(own: Any) -> None:
    model, tokens = decoder(DECODERS["llama"], torch.float64), token_ids(DECODERS["llama"])
    for mine in own.__base__, own:
        model.blocks[1] = mine(*build_branches(model.config, 1)).double()
        names = onward.activation_names(model)
        assert ("blocks.1.mid" in names) == (own is not OwnParallel)
        if mine is own.__base__:
            wanted = names
    assert names == wanted
    if own is OwnPreNorm:
        with onward.trace(model, "blocks.1.in", "blocks.1.mid", "blocks.1.attn.out") as t:
            model(tokens)
        assert_close(t["blocks.1.mid"], t["blocks.1.in"] + t["blocks.1.attn.out"], 1e-12)
        with onward.edit(model, {"blocks.1.mid": t["blocks.1.in"]}):
            without = model(tokens)
        with onward.edit(model, {"blocks.1.attn.out": zero}):
            assert_close(without, model(tokens), 1e-12)


class OwnAttention(torch.nn.Module):
    """Attention with one head, written without Onward's classes except `Attend`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.attend = torch.nn.Linear(width, 3 * width), Attend(0.5, 0.0)
        self.out = torch.nn.Linear(width, width)

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        q, k, v = (one[:, :, None] for one in self.qkv(x).chunk(3, -1))
        keys, values = context.update(k=context.rotate(k), v=v)
        return self.out(self.attend(context.rotate(q), keys, values, context).flatten(-2))

    def activations(self) -> Declarations:
        width = self.out.in_features
        vectors = ContextVectors(("k", "q"), {"v": "v"})
        names: Declarations = {name: Activation(vectors, ("B", "T", 1, width), 2) for name in ("k", "q", "v")}
        return {"qkv": Activation(Output("qkv"), ("B", "T", 3 * width)), **names, **attention(1, width)}


class OwnBlock(torch.nn.Module):
    """A block without declarations, with an attention that has declarations and a feed-forward that has none."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attn, self.mlp = OwnAttention(width), torch.nn.Linear(width, width)

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        x = x + self.attn(x, context)
        return x + self.mlp(x)


def test_modules_of_the_user_are_traced_edited_and_patched_by_their_declarations() -> None:
    model, tokens = decoder(DECODERS["llama"], torch.float64), token_ids(DECODERS["llama"])
    width = model.config.d_model
    model.blocks[1] = OwnBlock(width).double()
    names = [name.removeprefix("blocks.1.") for name in onward.activation_names(model) if name.startswith("blocks.1.")]
    steps = "attn.scores", "attn.masked_scores", "attn.weights", "attn.heads"
    own = ["in", "attn.qkv", "attn.k", "attn.q", "attn.v", *steps, "attn.out", "mlp.out", "out"]
    assert names == own
    with onward.trace(model, "blocks.1.*") as t:
        plain = model(tokens)
    for name, shape in onward.activation_names(model).items():
        if name.startswith("blocks.1."):
            assert t[name].dim() == shape.count(",") + 1
    x, block = t["blocks.1.in"], model.blocks[1]
    assert_close(t["blocks.1.attn.qkv"], block.attn.qkv(x), 1e-12)
    assert_close(t["blocks.1.attn.k"].flatten(2), block.attn.qkv(x).chunk(3, -1)[1], 1e-12)
    assert_close(t["blocks.1.attn.weights"].sum(-1), torch.ones_like(t["blocks.1.attn.weights"][..., 0]), 1e-12)
    assert_close(t["blocks.1.out"], x + t["blocks.1.attn.out"] + t["blocks.1.mlp.out"], 1e-12)
    with onward.edit(model, {"blocks.1.attn.v": zero}):
        without = model(tokens)
    block.attn.qkv.weight.data[2 * width :], block.attn.qkv.bias.data[2 * width :] = 0.0, 0.0
    assert_close(model(tokens), without, 1e-12)
    with onward.edit(model, {"blocks.1.attn.heads": t["blocks.1.attn.heads"]}):
        assert_close(model(tokens), plain, 1e-12)


class Renamed(OwnAttention):
    def activations(self) -> Declarations:
        return {"pattern": Activation(Scores(), ("B", 1, "T", "S"), 1)}


class Contradicting(OwnAttention):
    def activations(self) -> Declarations:
        vectors = {name: ContextVectors((name,), {}) for name in ("k", "q")}
        return {name: Activation(where, ("B", "T", 1, 16), 2) for name, where in vectors.items()}


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (
            Renamed,
            "Renamed declares the activation 'pattern' of Scores, whose steps are scores, ",
        ),
        (
            Contradicting,
            "Contradicting declares two different ContextVectors: all of its activ",
        ),
    ],
)
def test_declarations_that_cannot_be_met_are_refused(own: type[OwnAttention], message: str) -> None:
    model = decoder(DECODERS["llama"])
    model.blocks[0].attn = own(model.config.d_model)  # type: ignore[assignment]
    with pytest.raises(UserError, match=message):
        onward.activation_names(model)


class Skipped(torch.nn.Module):
    """A block that does not change the residual stream."""

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        return x


def test_health_is_measured_of_layers_that_have_the_activations() -> None:
    model, tokens = decoder(DECODERS["llama"]), token_ids(DECODERS["llama"])
    model.blocks[1] = Skipped()
    found = measure(model, Batch(tokens, tokens))
    assert "attention_entropy/0" in found
    assert "attention_entropy/1" not in found


def test_a_block_without_declarations_has_its_own_activations() -> None:
    model = decoder(DECODERS["llama"])
    model.blocks[0] = torch.nn.Identity()
    names = [name for name in onward.activation_names(model) if name.startswith("blocks.0.")]
    assert names == ["blocks.0.in", "blocks.0.out"]
