"""Traces leave outputs bit-for-bit unchanged and follow the formulas, also in engines, with checkpointing and in
compiled blocks."""

import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import onward
from onward import (
    BlockManager,
    CacheManager,
    Decoder,
    DecoderConfig,
    Engine,
    KVCache,
    PagedKVCache,
    Request,
    Sampling,
    UserError,
)
from onward.tracing import scale, zero
from onward.transforms import compile_blocks, quantize_model, recompute_blocks

from support.activations import WITHOUT_GRADIENT, hooks, loss_of
from support.adapters import stirred
from support.decoders import DECODERS, assert_close, decoder, token_ids

every_decoder = pytest.mark.parametrize("name", DECODERS)


def count(calls: Counter[str], name: str, x: Tensor) -> None:
    calls[name] += 1


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
        if activation != "position":  # computed once for all rows
            assert tuple(t[activation].shape) == eval(shape, sizes), activation


def test_trace_iterates_over_the_names_it_recorded() -> None:
    model, tokens = decoder(DECODERS["llama"]), token_ids(DECODERS["llama"])
    with onward.trace(model, "embed", "blocks.0", "blocks.1.out") as t:
        model(tokens)
    assert [*t] == ["embed", "blocks.0.out", "blocks.1.out"]


@pytest.mark.parametrize("wrong", [3, None, ["embed"]])
def test_trace_takes_each_name_as_its_own_string(wrong: Any) -> None:
    with (
        pytest.raises(UserError, match="give each name as its own string"),
        onward.trace(decoder(DECODERS["llama"]), wrong),
    ):
        pass


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
