"""The parts of a logit add up to it, and each patch restores its share of a metric."""

import dataclasses
from typing import Any

import pytest
import torch

import onward
from onward import AttentionAndMamba2, UserError
from onward.config.decoder import each
from onward.inspection import activation_patching, logit_attribution, logit_difference
from onward.inspection.attribution import attention_rollout
from onward.inspection.patching import attribution_patching
from onward.tracing import add, replace, zero

from support.adapters import stirred
from support.decoders import DECODERS, assert_close, decoder
from support.texts import OTHERS, TOKENS, run

OWN = "own parts", "own block"  # whose layers call a module twice


@pytest.mark.parametrize("name", OWN)
def test_own_blocks_with_other_contributions_are_refused(name: str) -> None:
    with pytest.raises(UserError, match="a module of your own adds something other than heads"):
        logit_attribution(decoder(DECODERS[name], torch.float64), TOKENS, 5)


@pytest.mark.parametrize("name", [name for name in DECODERS if name not in OWN])
def test_parts_of_a_logit_add_up_to_it(name: str) -> None:
    model = decoder(DECODERS[name], torch.float64)
    with torch.no_grad():
        head: Any = model.head
        wanted = head(model.embed_out(model.hidden(torch.tensor([TOKENS]))))[0, 5]
    for against in None, 7:
        found = logit_attribution(model, TOKENS, 5, target=2, against=against)
        assert found.logit == pytest.approx(float(wanted[2] - (0 if against is None else wanted[7])), abs=1e-9)
        # two kinds of heads: the layer counts as one head
        whole = isinstance(model.config.attention, AttentionAndMamba2)
        most = 1 if whole else max(part.heads(model.config).n_heads for part in each(model.config.attention))
        assert found.heads.shape == (model.config.n_layers, most)
    assert logit_attribution(model, TOKENS, 5).target == int(wanted.argmax())


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "opt-350m", "deepseek"])
def test_parts_of_a_logit_of_a_model_with_adapters_add_up_to_it(name: str, dora: bool) -> None:
    model = decoder(DECODERS[name], torch.float64)
    targets = ("attn", "head", *(["embed_out"] if name == "opt-350m" else [])) if dora else ("blocks", "embed", "head")
    stirred(model, "a", lora=onward.LoRA(rank=2, targets=targets, dropout=0.5, dora=dora))
    model.train()
    found = logit_attribution(model, TOKENS, 5, target=2, against=7)
    assert model.training
    model.eval()
    with torch.no_grad():
        logits = model.head(model.embed_out(model.hidden(torch.tensor([TOKENS]))))[0, 5]
    parts = [found.heads.sum(), found.attention_bias.sum(), found.mlps.sum()]
    assert found.logit == pytest.approx(float(logits[2] - logits[7]), abs=1e-9)
    assert found.embedding + found.constant + float(sum(parts)) == pytest.approx(found.logit, abs=1e-9)
    if name == "llama" and not dora:
        onward.merge_lora(model, "a")
        merged = logit_attribution(model, TOKENS, 5, target=2, against=7)
        assert_close(found.heads, merged.heads, 1e-12)
        assert_close(found.mlps, merged.mlps, 1e-12)


def test_parts_of_a_logit_are_the_same_in_inference_mode(model: onward.Decoder) -> None:
    plain = logit_attribution(model, TOKENS)
    with torch.inference_mode():
        assert torch.equal(logit_attribution(model, TOKENS).heads, plain.heads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_that_do_not_add_up_to_the_logit_are_refused(dtype: torch.dtype) -> None:
    model = decoder(DECODERS["gpt"], dtype)
    logit_attribution(model, TOKENS)
    with onward.edit(model, {"blocks.0.attn.heads.1": zero, "blocks.1.mlp.out": add(2.0, at=7)}):
        logit_attribution(model, TOKENS)  # the parts include these edits
    message = r"Cannot attribute the logit .*, because the contributions add up to .*: an edit, a hook"
    with (
        onward.edit(model, {"blocks.1.attn.out": add(torch.ones(16).cumsum(0))}),
        pytest.raises(UserError, match=message),
    ):
        logit_attribution(model, TOKENS)


def test_part_of_a_head_is_its_output_along_the_direction_of_the_token(model: onward.Decoder) -> None:
    with onward.trace(model, "blocks.1.attn.heads.2", "norm.scale") as t, torch.no_grad():
        run(model)
    head, block, norm = (model.get_submodule(n) for n in ("head", "blocks.1", "norm"))
    written: Any = t["blocks.1.attn.heads.2"][0, 4] @ block.attn.out.weight[:, 8:12].T  # type: ignore[union-attr, index, operator]
    wanted = (written * norm.weight / t["norm.scale"][0, 4]) @ head.weight[6]  # type: ignore[index, operator]
    assert float(logit_attribution(model, TOKENS, 4, 6).heads[1, 2]) == pytest.approx(float(wanted))


def test_part_of_a_post_norm_model_goes_through_every_later_norm() -> None:
    model = decoder(DECODERS["gpt"], torch.float64)
    with onward.trace(model) as t, torch.no_grad():
        model(torch.tensor([TOKENS]))
    x: Any = t["blocks.0.attn.out"][0, 4]
    for norm in "blocks.0.attn_norm", "blocks.0.mlp_norm", "blocks.1.attn_norm", "blocks.1.mlp_norm", "norm":
        x = (x - x.mean()) / t[f"{norm}.scale"][0, 4] * model.get_submodule(norm).weight
    found = logit_attribution(model, TOKENS, 4, 6)
    part = found.heads[0].sum() + found.attention_bias[0]
    assert float(part) == pytest.approx(float(model.head.weight[6] @ x))  # type: ignore[index, operator]


def test_rollout_is_the_product_of_mean_attention_with_the_identity(model: onward.Decoder) -> None:
    with onward.trace(model, "blocks.*.attn.weights") as t:
        run(model)
    first, second = (0.5 * t[f"blocks.{i}.attn.weights"][0].mean(0) + 0.5 * torch.eye(8) for i in range(2))
    found = attention_rollout(model, TOKENS).flow
    assert_close(found[0], first, 1e-12)
    assert_close(found[1], second @ first, 1e-12)
    assert_close(found.sum(-1), torch.ones_like(found[..., 0]), 1e-12)


def test_rollout_passes_layers_without_attention_and_refuses_recurrent_ones() -> None:
    tokens = [1, 2, 3, 4]
    flow = attention_rollout(decoder(DECODERS["one branch in each layer"]), tokens).flow
    assert torch.equal(flow[0], flow[1])
    assert torch.equal(flow[0], flow[2])
    with pytest.raises(UserError, match="layer 0, because its part gated_delta has no attention weights"):
        attention_rollout(decoder(DECODERS["gated delta"]), tokens)


@pytest.mark.parametrize("site", ["in", "mid", "attn.out", "mlp.out", "attn.heads"])
def test_patching_is_the_share_of_the_metric_that_an_activation_restores(model: onward.Decoder, site: str) -> None:
    metric = logit_difference(2, 7)
    found = activation_patching(model, TOKENS, OTHERS, metric, site)
    with onward.trace(model, f"blocks.1.{site}") as t:
        run(model)
    value = t[f"blocks.1.{site}"]
    patch = value[:, :, 3] if site == "attn.heads" else replace(value, at=3)
    with onward.edit(model, {f"blocks.1.{site}" + (".3" if site == "attn.heads" else ""): patch}):
        patched = metric(run(model, OTHERS)[None])
    good, bad = metric(run(model)[None]), metric(run(model, OTHERS)[None])
    assert float(found.effects[1, 3]) == pytest.approx(float((patched - bad) / (good - bad)), abs=1e-5)
    if site == "in":
        assert found.effects[0].tolist() == pytest.approx([0, 0, 0, 1, 0, 0, 0, 0], abs=1e-6)


def test_patching_takes_the_heads_of_an_attention_from_its_declaration(model: onward.Decoder) -> None:
    """Patch every site that has heads, head by head, even if layers have different numbers of heads."""
    metric = logit_difference(2, 7)
    own = onward.Decoder(dataclasses.replace(model.config, n_heads=2, n_kv_heads=2, d_head=8)).double()
    mixed = onward.Decoder(model.config).double().eval()
    mixed.load_state_dict(model.state_dict())
    mixed.blocks[1] = own.blocks[1].eval()
    for site, shape in {"attn.q": (2, 4), "attn.heads": (2, 4), "attn.weights": (2, 4), "mlp.post": (2, 8)}.items():
        found = activation_patching(mixed, TOKENS, OTHERS, metric, site)
        assert found.effects.shape == shape
        if site != "mlp.post":
            assert found.effects[1, 2:].tolist() == [0, 0], "the second block has two heads"
            assert attribution_patching(mixed, TOKENS, OTHERS, metric, site).effects.shape == (*shape, 8)
            name = f"blocks.1.{site}"
            with onward.trace(mixed, name) as t:
                run(mixed)
            part = t[name].select(2 if site != "attn.weights" else 1, 1)
            with onward.edit(mixed, {f"{name}.1": part}):
                patched = metric(run(mixed, OTHERS)[None])
            good, bad = metric(run(mixed)[None]), metric(run(mixed, OTHERS)[None])
            assert float(found.effects[1, 1]) == pytest.approx(float((patched - bad) / (good - bad)), abs=1e-5)


def test_attribution_patching_is_difference_times_gradient(model: onward.Decoder) -> None:
    metric = logit_difference(2, 7)
    found = attribution_patching(model, TOKENS, OTHERS, metric)
    assert found.effects.shape == (2, 4, 8)
    name = "blocks.0.attn.heads"
    with onward.trace(model, name) as clean:
        run(model)
    with onward.trace(model, name, gradients=True) as t:
        metric(model(torch.tensor([OTHERS]))).sum().backward()
    model.zero_grad()
    wanted = ((clean[name] - t[name].detach()) * t.grad(name)).sum(-1)[0].T
    scale = found.clean_metric - found.corrupted_metric
    assert_close(found.effects[0], (wanted / scale).float(), 1e-5)
    assert all(p.requires_grad for p in model.parameters())
    assert not any(p.grad is not None for p in model.parameters())


def test_patching_needs_two_texts_of_one_length_that_differ(model: onward.Decoder) -> None:
    with pytest.raises(UserError, match="8 and 7 tokens"):
        activation_patching(model, TOKENS, TOKENS[1:], logit_difference(1, 2))
    with pytest.raises(UserError, match="same for both"):
        attribution_patching(model, TOKENS, TOKENS, logit_difference(1, 2))
