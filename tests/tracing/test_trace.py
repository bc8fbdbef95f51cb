import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import onward
from onward.config.decoder import DecoderConfig
from onward.data.windows import Batch
from onward.errors import UserError
from onward.generation.cache.blocks import BlockManager
from onward.generation.cache.manager import CacheManager
from onward.generation.engine.engine import Engine
from onward.generation.request import Request
from onward.generation.sampling import Sampling
from onward.model.activations import Activation, ContextVectors, Declarations, Output, Scores, attention
from onward.model.attention import Attend
from onward.model.blocks import BranchNormModule, ParallelModule, PostNormModule, PreNormModule
from onward.model.build import build_branches
from onward.model.cache import KVCache
from onward.model.context import AttentionContext
from onward.model.decoder import Decoder
from onward.model.paged import PagedKVCache
from onward.tracing.edit import add, clamp, mean_of, replace, scale, zero
from onward.tracing.listening import OF_MODELS
from onward.tracing.sites import activations
from onward.training.step.health import measure
from onward.transforms.compiling import compile_blocks
from onward.transforms.quantize import quantize_model
from onward.transforms.recompute import recompute_blocks

from support.adapters import stirred
from support.decoders import DECODERS, assert_close, decoder, token_ids

every_decoder = pytest.mark.parametrize("name", DECODERS)
FEW = "llama", "gpt", "gpt-oss", "deepseek"
WITHOUT_GRADIENT = (".scale", ".choices", "position")


def hooks(model: Decoder) -> list[Any]:
    return [hook for m in model.modules() for hook in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]


def instead(value: Tensor, x: Tensor) -> Tensor:
    return value


def count(calls: Counter[str], name: str, x: Tensor) -> None:
    calls[name] += 1


def loss_of(logits: Tensor) -> Tensor:
    """A scalar on which every logit has another effect."""
    weights = torch.linspace(-1, 1, logits.numel(), device=logits.device).view_as(logits)
    return (logits * weights.cos()).sum()


@every_decoder
@pytest.mark.parametrize("gradients", [False, True])
def test_trace_of_everything_changes_no_bit_and_has_the_listed_shapes(name: str, gradients: bool) -> None:
    model, tokens = decoder(DECODERS[name]), token_ids(DECODERS[name])
    plain = model(tokens)
    with onward.trace(model, gradients=gradients) as t:
        traced = model(tokens)
    assert torch.equal(traced, plain)
    assert not hooks(model)
    sizes = {"B": len(tokens), "T": tokens.size(1), "S": tokens.size(1)}
    for activation, shape in onward.activation_names(model).items():
        if activation != "position":  # made once for all rows
            assert tuple(t[activation].shape) == eval(shape, sizes), activation


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


def test_activations_follow_the_formulas_of_a_llama_block() -> None:
    model, tokens = decoder(DECODERS["llama"], torch.float64), token_ids(DECODERS["llama"])
    with onward.trace(model) as t:
        model(tokens)
    block: Any = model.blocks[1]
    x = lambda name: t[f"blocks.1.{name}"]
    assert_close(t["blocks.0.out"], x("in"), 0)
    assert_close(x("attn_norm"), x("in") / x("attn_norm.scale") * block.attn_norm.weight, 1e-12)
    assert_close(x("attn.q"), block.attn.q(x("attn_norm")).view(2, 12, 4, 4), 1e-12)
    keys = x("attn.k_rotated").repeat_interleave(2, 2)
    assert_close(x("attn.scores"), torch.einsum("bthe,bshe->bhts", x("attn.q_rotated"), keys) / 2, 1e-12)
    assert (x("attn.q_rotated") - x("attn.q")).abs().amax((0, 2, 3)).argmin() == 0  # position 0 is not rotated
    future = torch.ones(12, 12).triu(1).bool()
    assert x("attn.masked_scores")[..., future].eq(-torch.inf).all()
    assert_close(x("attn.weights"), x("attn.masked_scores").softmax(-1), 1e-12)
    values = x("attn.v").repeat_interleave(2, 2)
    assert_close(x("attn.heads"), torch.einsum("bhts,bshe->bthe", x("attn.weights"), values), 1e-12)
    assert_close(x("attn.out"), block.attn.out(x("attn.heads").flatten(-2)), 1e-12)
    assert_close(x("mid"), x("in") + x("attn.out"), 1e-12)
    assert_close(x("mlp.post"), torch.nn.functional.silu(x("mlp.pre")) * x("mlp.up"), 1e-12)
    assert_close(x("out"), x("mid") + x("mlp.out"), 1e-12)
    assert_close(t["logits"], model.head(t["norm"]), 1e-12)


@pytest.mark.parametrize("cached", [False, True], ids=["expanded", "absorbed"])
def test_queries_keys_and_values_of_latent_attention_follow_its_formulas(cached: bool) -> None:
    model, tokens = decoder(DECODERS["deepseek"], torch.float64), token_ids(DECODERS["deepseek"])
    cache = KVCache(model.config, len(tokens), tokens.size(1), tokens.size(1), dtype=model.dtype) if cached else None
    calls = tokens.split([tokens.size(1) - 1, 1] if cached else [tokens.size(1)], 1)
    with onward.edit(model, {"blocks.1.attn.q": scale(2.0)}), onward.trace(model, "blocks.1.attn.*") as t:
        for i, call in enumerate(calls):
            model(call, i * calls[0].size(1) + torch.arange(call.size(1)).expand_as(call), cache)
    x = lambda name: torch.cat([call[f"blocks.1.attn.{name}"] for call in t.calls], 1)
    last = t.calls[-1]["blocks.1.attn.weights"]
    attn: Any = model.blocks[1].attn
    key, value = attn.kv.weight.view(attn.n_heads, -1, attn.part.d_latent).split(
        [attn.part.d_nope, attn.part.d_value], 1
    )
    nope = attn.part.d_nope
    assert_close(x("k")[..., :nope], torch.einsum("bsl,hpl->bshp", x("latent"), key), 1e-12)
    assert_close(x("v"), torch.einsum("bsl,hfl->bshf", x("latent"), value), 1e-12)
    assert_close(x("k_rotated")[..., nope:], x("rotary")[:, :, None].expand(-1, -1, attn.n_heads, -1), 0)
    for one in "q", "k":
        assert torch.equal(x(f"{one}_rotated")[..., :nope], x(one)[..., :nope])
        before, after = x(one)[..., nope:], x(f"{one}_rotated")[..., nope:]
        assert_close(after[:, 0], before[:, 0], 1e-12)  # position 0 is not rotated
        assert_close(after.norm(dim=-1), before.norm(dim=-1), 1e-12)
        assert not torch.allclose(after[:, 1:], before[:, 1:])
    queries = x("q_rotated")[:, -last.size(2) :]
    scores = torch.einsum("bthe,bshe->bhts", queries, x("k_rotated")) * attn.attend.scale
    keys = tokens.size(1)  # the cache has more slots
    assert_close(t.calls[-1]["blocks.1.attn.scores"][..., :keys], scores, 1e-12)
    assert_close(t.calls[-1]["blocks.1.attn.heads"], torch.einsum("bhts,bshf->bthf", last[..., :keys], x("v")), 1e-12)


@pytest.mark.parametrize("name", ["gpt-oss", "deepseek"])
def test_experts_and_their_shares_give_the_output_of_the_mixture(name: str) -> None:
    model, tokens = decoder(DECODERS[name], torch.float64), token_ids(DECODERS[name])
    with onward.trace(model, "blocks.1.mlp.*") as t:
        model(tokens)
    x = lambda name: t[f"blocks.1.mlp.{name}"]
    shares = x("shares").gather(2, x("router.choices"))
    wanted = (x("experts") * shares[..., None]).sum(2)
    assert_close(x("out"), wanted + (x("shared.out") if "blocks.1.mlp.shared.out" in t else 0), 1e-12)
    assert (x("shares") > 0).sum(-1).eq(x("router.choices").size(-1)).all()


def test_patterns_keep_only_what_they_name() -> None:
    model, tokens = decoder(DECODERS["gpt-oss"]), token_ids(DECODERS["gpt-oss"])
    with onward.trace(model) as everything:
        model(tokens)
    patterns = "blocks.1", "blocks.*.attn.weights.2", "blocks.0.mlp.experts.3", "blocks.0.attn.heads.1"
    with onward.trace(model, *patterns) as t:
        model(tokens)
    wanted = {"blocks.1.out", "blocks.0.attn.weights.2", "blocks.1.attn.weights.2"}
    assert {*t.call.activations} == wanted | {"blocks.0.mlp.experts.3", "blocks.0.attn.heads.1"}
    assert torch.equal(t["blocks.1.attn.weights.2"], everything["blocks.1.attn.weights"][:, 2])
    assert t["blocks.1.attn.weights.2"].untyped_storage().nbytes() == t["blocks.1.attn.weights.2"].nbytes
    third = everything["blocks.0.mlp.router.choices"] == 3
    assert torch.equal(t["blocks.0.mlp.experts.3"].any(-1), third.any(-1))
    with onward.trace(model, "blocks.1", keep=lambda name, x: x.norm()) as norms:
        model(tokens)
    assert norms["blocks.1"] == everything["blocks.1"].norm()


def paged(model: Decoder) -> BlockManager:
    return BlockManager(PagedKVCache(model.config, 2, 12, 6, blocks=12, block_size=4, device=model.device))


def codes(model: Decoder) -> CacheManager:
    return CacheManager(KVCache(model.config, 2, 12, 6, quantized=True, device=model.device))


@pytest.mark.parametrize(
    ("cache", "precision", "share"),
    [(lambda model: None, "", 1e-5), (lambda model: None, "int8", 1e-5), (paged, "", 1e-5), (codes, "", 0.05)],
    ids=["growing cache", "quantized model", "paged cache", "quantized cache"],
)
def test_activations_of_requests_in_an_engine_are_those_of_the_plain_model(
    cache: Callable[[Decoder], CacheManager | None], precision: str, share: float
) -> None:
    model = decoder(DECODERS["gemma2"])
    if precision:
        quantize_model(model, precision)
    engine = Engine(model, rows=2, cache=cache(model), compile_after=0)
    prompts = [[1, 2, 3, 4, 5], [6, 7], [3, 1, 4]]
    requests = [engine.add(Request(p, Sampling(temperature=0), 4)) for p in prompts]
    names = "blocks.1.out", "blocks.1.attn.heads.2", "logits"
    with onward.trace(model, *names) as t:
        list(engine.run())
    assert [row.step for call in t.calls for row in call.rows if row.request is requests[0]] == [0, 1, 2, 3]
    for request in requests:
        context = torch.tensor([[*request.prompt, *request.tokens[:-1]]])
        with onward.trace(model, *names) as plain:
            model(context)
        steps = t.of(request)
        for name in names[:2]:
            assert_close(torch.cat([step[name] for step in steps]), plain[name][0], share)
        logits = torch.cat([step["logits"] for step in steps])
        assert_close(logits, plain["logits"][0, len(request.prompt) - 1 :], share)


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


def test_experts_of_rows_with_different_adapters_are_refused_in_one_sentence() -> None:
    model, tokens = stirred(decoder(DECODERS["deepseek"]), "a", "b"), token_ids(DECODERS["deepseek"])
    with onward.use_adapter(model, ["a", "b"]):
        for name in "blocks.1.mlp.experts", "blocks.1.mlp.shared.pre":
            with onward.trace(model, name), pytest.raises(UserError, match="rows use different adapters"):
                model(tokens)
        with onward.trace(model, "blocks.1.mlp.out", "blocks.1.attn.*") as t:
            model(tokens)
    for row, adapter in enumerate("ab"):
        with onward.use_adapter(model, adapter), onward.trace(model, "blocks.1.mlp.out") as alone:
            model(tokens[row : row + 1])
        assert_close(t["blocks.1.mlp.out"][row], alone["blocks.1.mlp.out"][0], 1e-5)


def test_trace_under_activation_checkpointing_records_each_block_once_and_all_gradients() -> None:
    found = []
    for recompute in False, True:
        model, tokens = decoder(DECODERS["gpt-oss"]), token_ids(DECODERS["gpt-oss"])
        if recompute:
            recompute_blocks(model)
        calls = Counter[str]()
        with (
            onward.edit(model, {"blocks.0.attn.weights.1": scale(0.5), "blocks.1.mlp.shares.0": zero}),
            onward.trace(model, gradients=True) as t,
            onward.trace(model, keep=partial(count, calls)),
        ):
            loss_of(model(tokens)).backward()
        assert {*calls.values()} == {1}
        names = [name for name in t.call.activations if not name.endswith(WITHOUT_GRADIENT)]
        found.append([t.grad(n).nan_to_num() for n in names] + [p.grad for p in model.parameters()])
    for plain, recomputed in zip(*found, strict=True):
        assert torch.equal(plain, recomputed)


def test_compiled_blocks_are_traced_and_edited_with_a_message() -> None:
    model, tokens = decoder(DECODERS["llama"]), token_ids(DECODERS["llama"])
    with onward.edit(model, {"blocks.0.attn.heads.1": zero}), onward.trace(model, "blocks.0.out") as wanted:
        model(tokens)
    compile_blocks(model, backend="eager")
    recompute_blocks(model)
    model(tokens)
    with (
        pytest.warns(UserWarning, match="run uncompiled while they are traced"),
        onward.trace(model, "blocks.0") as t,
        onward.edit(model, {"blocks.0.attn.heads.1": zero}),
    ):
        model(tokens)
    assert torch.equal(t["blocks.0"], wanted["blocks.0"])


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
    """Attention of one head, written without a class of ours but `Attend`."""

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
    """A block without declarations, around an attention with them and a feed-forward without."""

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
            "Contradicting declares two different ContextVectors: give all of its activ",
        ),
    ],
)
def test_declarations_that_cannot_be_met_are_refused(own: type[OwnAttention], message: str) -> None:
    model = decoder(DECODERS["llama"])
    model.blocks[0].attn = own(model.config.d_model)  # type: ignore[assignment]
    with pytest.raises(UserError, match=message):
        onward.activation_names(model)


class Skipped(torch.nn.Module):
    """A block that leaves the residual stream as it is."""

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
    assert [{*vars(m)} for m in model.modules()] == [{*m} for m in modules]
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
        (lambda m: onward.trace(m, "blocks.0.attn.heads.4"), r"blocks\.0\.attn\.heads has 4 of them, from 0 to 3"),
        (lambda m: onward.edit(m, {"blocks.0.attn_norm.scale": zero}), "edit those that it is made of"),
        (
            lambda m: onward.edit(m, {"blocks.0": torch.zeros(5)}),
            r"float32 \(5,\).* does not fit float32 \(2, 12, 16\)",
        ),
        (
            lambda m: onward.edit(m, {"blocks.0": lambda x: x[:, 1:]}),
            r"gives float32 \(2, 11, 16\) in place of .*12, 16",
        ),
        (lambda m: onward.edit(m, {"blocks.0": lambda x: x @ torch.zeros(3, 3)}), "the edit of blocks.0 failed on flo"),
    ],
)
def test_wrong_names_and_shapes_are_one_sentence(use: Any, message: str) -> None:
    model = decoder(DECODERS["llama"])
    with pytest.raises(UserError, match=message), use(model):
        model(token_ids(model.config))
    assert not hooks(model)


def test_a_trace_says_what_it_does_not_have() -> None:
    model, tokens = decoder(DECODERS["llama"]), token_ids(DECODERS["llama"])
    with onward.trace(model, "blocks.0") as t:
        with pytest.raises(UserError, match="was not called"):
            t["blocks.0"]
        model(tokens)
        with pytest.raises(UserError, match=r"blocks\.1\.out was not traced: this trace has blocks\.0\.out"):
            t["blocks.1"]
        with pytest.raises(UserError, match="has no gradient"):
            t.grad("blocks.0")
        model(tokens)
    with pytest.raises(UserError, match=r"called 2 times: .*trace\.calls\[-1\]"):
        t["blocks.0"]
    assert torch.equal(t.calls[0]["blocks.0"], t.calls[1]["blocks.0"])
    assert t.calls[0].positions is not None


def test_only_compiled_models_warn() -> None:
    model = Decoder(DecoderConfig(vocab_size=5, d_model=8, n_layers=1, n_heads=2))
    with warnings.catch_warnings(), onward.trace(model):
        warnings.simplefilter("error")
        model(torch.tensor([[1, 2]]))
