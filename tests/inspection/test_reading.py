import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import onward
from onward.data.tokens import Tokens
from onward.errors import UserError
from onward.generation.distribution import next_token_distribution
from onward.generation.sampling import Sampling
from onward.inspection.attribution import attention_rollout, logit_attribution
from onward.inspection.features import ReconstructionLoss, autoencoder_of, feature_effect
from onward.inspection.fitting import fit, windows_of
from onward.inspection.heads import head_roles, rarity_of, repeated_tokens
from onward.inspection.layers import kind_of, residual_stream, router_load, singular_values, units
from onward.inspection.lens import LensLoss, TunedLens, logit_lens
from onward.inspection.patching import activation_patching, attribution_patching, logit_difference
from onward.inspection.tokens import loss_by_position, sampling_steps, score_alternatives, token_statistics
from onward.tracing.edit import add, replace, zero

from support.adapters import stirred
from support.decoders import DECODERS, assert_close, config, decoder, token_ids

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]
OTHERS = [3, 1, 4, 7, 5, 9, 2, 6]


@pytest.fixture(scope="module")
def model() -> onward.Decoder:
    return decoder(DECODERS["llama"], torch.float64)


def run(model: onward.Decoder, tokens: list[int] = TOKENS) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens]))[0]


def test_sampling_steps_go_from_the_model_to_the_whole_sampling(model: onward.Decoder) -> None:
    sampling = Sampling(temperature=0.7, top_k=6, top_p=0.9, repetition_penalty=1.5, logit_bias={2: 1.0})
    found = sampling_steps(model, TOKENS, sampling, top=13)
    assert found.steps == ["model", "bias", "penalties", "temperature", "top_k", "top_p"]
    last = run(model)[-1:]
    assert_close(found.probabilities[0], last.softmax(-1)[0, found.candidates].float(), 1e-6)
    wanted = next_token_distribution(last, sampling, [TOKENS])
    assert_close(found.probabilities[-1], wanted[0, found.candidates].float(), 1e-6)
    assert found.kept.tolist()[-2] == 6
    assert found.rest.abs().max() < 1e-6
    assert sampling_steps(model, TOKENS, Sampling(temperature=1.0)).steps == ["model"]


def test_token_statistics_follow_their_definitions(model: onward.Decoder) -> None:
    found, logits = token_statistics(model, TOKENS), run(model)
    assert math.isnan(found.logprobs[0])
    for t in range(1, len(TOKENS)):
        p = logits[t - 1].softmax(-1)
        assert found.logprobs[t].item() == pytest.approx(math.log(p[TOKENS[t]]))
        assert found.ranks[t] == sorted(p.tolist(), reverse=True).index(p[TOKENS[t]].item()) + 1
        assert found.entropies[t].item() == pytest.approx(-sum(x * math.log(x) for x in p.tolist()))


def test_loss_by_position_is_the_mean_over_windows_also_beyond_the_context(model: onward.Decoder) -> None:
    windows = token_ids(model.config, 5, 21)  # the context is 12
    found = loss_by_position(model, windows.split(2))
    with torch.no_grad():
        wanted = F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten(), reduction="none")
    assert_close(found.loss, wanted.view(5, 20).mean(0), 1e-12)
    assert (found.windows, found.trained) == (5, 12)
    with pytest.raises(UserError, match="position 12 is outside"):
        loss_by_position(decoder(DECODERS["gpt2"]), [token_ids(model.config, 1, 14)])


def test_alternatives_are_scored_as_the_text_after_the_question() -> None:
    tokenizer = onward.train_tokenizer("char", ["the cat sat on the mat. " * 5])
    lm = onward.LanguageModel(decoder(config(vocab_size=tokenizer.vocab_size, context_length=64)), tokenizer)
    examples = [("the", " cat"), ("on", " mat")]
    for shots in range(3):
        found = score_alternatives(lm.model, tokenizer, "sat", [" on", " the mat"], examples[:shots], ". ")
        prompt = "".join(f"{q}{a}. " for q, a in examples[:shots]) + "sat"
        for text, total, each in zip(found.texts, found.logprobs, found.per_token):
            values = [p for p in lm.score(prompt + text).logprobs if p is not None][-len(text) :]
            assert total == pytest.approx(sum(values), rel=1e-5)
            assert each == pytest.approx(sum(values) / len(text), rel=1e-5)
        assert found.best in found.texts
    with pytest.raises(UserError, match="adds no token"):
        score_alternatives(lm.model, tokenizer, "sat", [""])


@pytest.mark.parametrize("name", ["llama", "gemma2", "opt-350m"])
def test_logit_lens_reads_every_residual_stream_through_norm_and_head(name: str) -> None:
    model = decoder(DECODERS[name], torch.float64)
    found = logit_lens(model, TOKENS, top=3)
    with onward.trace(model, "blocks.*.in") as t:
        logits = run(model)
    p = model.logits(model.norm(t["blocks.1.in"]))[0].softmax(-1)
    assert_close(found.probabilities[1], p.topk(3).values, 1e-12)
    assert torch.equal(found.ids[-1], logits.topk(3).indices)
    assert_close(found.next_probability[1], p[range(7), TOKENS[1:]], 1e-12)
    last = logits.softmax(-1)
    assert_close(found.divergence[1], (last * (last / p).log()).sum(-1), 1e-10)
    assert found.divergence[-1].abs().max() < 1e-12
    untrained = logit_lens(model, TOKENS, top=3, tuned=TunedLens(model))
    assert torch.equal(untrained.probabilities, found.probabilities)


def trained(module: torch.nn.Module, loss: Any, model: onward.Decoder, steps: int = 40) -> tuple[float, float]:
    """The loss before and after some steps on windows of a text."""
    text = Tokens.of(token_ids(model.config, 1, 200)[0].numpy())
    losses = [step.loss for step in fit(module, loss, windows_of(model, text), steps=steps, rate=1e-2)]
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    return losses[0], losses[-1]


def test_tuned_lens_trained_by_the_trainer_is_nearer_to_the_last_layer() -> None:
    model = decoder(DECODERS["llama"])
    lens, ids = TunedLens(model), token_ids(model.config, 4)
    before, after = trained(lens, LensLoss(model), model)
    assert after < 0.7 * before
    mean = lambda **options: logit_lens(model, ids[0].tolist(), **options).divergence[:-1].mean()
    assert mean(tuned=lens) < 0.7 * mean()


@pytest.mark.parametrize("name", DECODERS)
def test_parts_of_a_logit_add_up_to_it(name: str) -> None:
    model = decoder(DECODERS[name], torch.float64)
    with torch.no_grad():
        head: Any = model.head
        wanted = head(model.embed_out(model.hidden(torch.tensor([TOKENS]))))[0, 5]
    for against in None, 7:
        found = logit_attribution(model, TOKENS, 5, target=2, against=against)
        assert found.logit == pytest.approx(float(wanted[2] - (0 if against is None else wanted[7])), abs=1e-9)
        assert found.heads.shape == (model.config.n_layers, model.config.n_heads)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_that_do_not_add_up_to_the_logit_are_refused(dtype: torch.dtype) -> None:
    model = decoder(DECODERS["gpt"], dtype)
    logit_attribution(model, TOKENS)
    with onward.edit(model, {"blocks.0.attn.heads.1": zero, "blocks.1.mlp.out": add(2.0, at=7)}):
        logit_attribution(model, TOKENS)  # which the parts show
    message = r"contributions to the logit add up to .*, and the logit is .*: an edit, a hook"
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
    """Every site with heads, by head: also one whose heads another attention declares in another number."""
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


ROLES = {"previous": 1, "back 2": 2, "self": 0, "duplicate": 6, "induction": 5}


@pytest.mark.parametrize("role", ROLES)
def test_a_head_that_attends_as_a_role_says_has_that_role_alone(model: onward.Decoder, role: str) -> None:
    pattern = torch.eye(12).roll(-ROLES[role], 1).tril()
    pattern[pattern.sum(1) == 0, 0] = 1
    with onward.edit(model, {"blocks.1.attn.weights.2": pattern}):
        found = head_roles(model, length=6)
    assert {name for name, scores in found.scores.items() if scores[1, 2] > 0.9} == {role}
    assert found.map(0.9)[1][2] == role
    assert found.strongest(role, 1)[0][:2] == (1, 2)


def test_rare_words_first_tokens_and_labeled_pairs_have_their_scores(model: onward.Decoder) -> None:
    text = [1, 2, 1, 1, 1, 1, 1, 1]
    rare = torch.zeros(8, 8)
    rare[0, 0] = rare[1:, 1] = 1  # attends to the only token 2
    with onward.edit(model, {"blocks.0.attn.weights.1": rare}):
        found = head_roles(model, text, pairs={"object": [(3, 1), (5, 1)], "none": [(3, 0)]}, length=4)
    assert found.scores["rare"][0].argmax() == 1
    r = rarity_of(text)
    assert r[1] == 1
    uniform = sum(float(r[: t + 1].mean()) for t in range(8)) / 8
    assert float(found.scores["rare"][0, 1]) == pytest.approx((float(r[0]) + 7) / 8 - uniform, abs=1e-6)
    assert float(found.scores["object"][0, 1]) == 1
    assert float(found.scores["none"][0, 1]) == 0
    first = torch.zeros(8, 8)
    first[:, 0] = 1
    with onward.edit(model, {"blocks.*.attn.weights": first}):
        assert head_roles(model, length=4).scores["first"].eq(1).all()
    with pytest.raises(UserError, match=r"pair \(1, 3\)"):
        head_roles(model, text, pairs={"later": [(1, 3)]}, length=4)


def test_repeated_tokens_are_two_equal_halves(model: onward.Decoder) -> None:
    ids = repeated_tokens(model)
    assert ids.shape == (4, 12)
    assert torch.equal(ids[:, :6], ids[:, 6:])
    assert all(len(set(row[:6].tolist())) == 6 for row in ids)
    with pytest.raises(UserError, match="length is 7"):
        repeated_tokens(model, 7)


def test_residual_stream_has_norms_and_cosines(model: onward.Decoder) -> None:
    found = residual_stream(model, TOKENS)
    with onward.trace(model, "blocks.*.in", "blocks.*.out") as t:
        run(model)
    a, b, c = t["blocks.0.in"][0, 4], t["blocks.1.in"][0, 4], t["blocks.1.out"][0, 4]
    assert [float(x) for x in found.norms[:, 4]] == pytest.approx([float(x.norm()) for x in (a, b, c)])
    assert float(found.to_next[0, 4]) == pytest.approx(float(a @ b / a.norm() / b.norm()))
    assert float(found.to_last[0, 4]) == pytest.approx(float(a @ c / a.norm() / c.norm()))


def test_units_have_the_texts_that_excite_them_most(model: onward.Decoder) -> None:
    texts = [TOKENS, OTHERS, [5, 5, 5], [12, 0]]
    name = "blocks.1.mlp.post"
    with onward.edit(model, {f"{name}.7": zero}):
        found = units(model, texts, name, top=2)
    assert 7 in found.dead
    assert found.dead == [i for i in range(len(found.share)) if found.peaks[i, 0] <= 0]
    values = []
    for tokens in texts:
        with onward.trace(model, name) as t:
            run(model, tokens)
        values.append(t[name][0, :, 3])
    best = sorted(range(4), key=lambda i: -float(values[i].max()))[:2]
    assert found.texts[3].tolist() == best
    assert found.positions[3].tolist() == [int(values[i].argmax()) for i in best]
    assert float(found.share[3]) == pytest.approx(float((torch.cat(values) > 0).double().mean()))
    assert found.peaks[found.most_active(1)[0], 0] == found.peaks.max()


def test_singular_values_of_matrices_and_stacks(model: onward.Decoder) -> None:
    found = singular_values(model, "blocks.0.attn.*.weight")
    assert {*found} == {f"blocks.0.attn.{m}.weight" for m in ("q", "k", "v", "out")}
    weight = model.get_parameter("blocks.0.attn.q.weight")
    assert float(found["blocks.0.attn.q.weight"].square().sum()) == pytest.approx(float(weight.square().sum()))
    assert singular_values(decoder(DECODERS["gpt-oss"]), "blocks.0.mlp.gate")["blocks.0.mlp.gate"].shape == (5, 12)
    with pytest.raises(UserError, match="no matrix"):
        singular_values(model, "nothing")
    adapted = stirred(decoder(DECODERS["gpt-oss"]), "a")
    found = singular_values(adapted, "*")
    onward.merge_lora(adapted, "a")
    for name in "embed.weight", "head.weight", "blocks.0.attn.q.weight", "blocks.0.mlp.gate":
        assert_close(found[name], singular_values(adapted, name)[name], 1e-5)


def test_router_load_is_the_share_of_choices_by_kind_of_token(model: onward.Decoder) -> None:
    moe = decoder(DECODERS["gpt-oss"])
    found = router_load(moe, [TOKENS, OTHERS], lambda token: "odd" if token % 2 else "even")
    assert (found.kinds, found.layers) == (["even", "odd"], [0, 1])
    counts = torch.zeros(2, 5)
    for tokens in TOKENS, OTHERS:
        with onward.trace(moe, "blocks.1.mlp.router.choices") as t:
            run(moe, tokens)
        for token, row in zip(tokens, t["blocks.1.mlp.router.choices"][0].tolist()):
            for expert in row:
                counts[token % 2, expert] += 1
    assert_close(found.shares[1], counts / counts.sum(-1, keepdim=True), 1e-6)
    assert [kind_of(p) for p in (" ", " 12", "the", "The", ".")] == ["space", "number", "word", "capital", "symbol"]
    with pytest.raises(UserError, match="no experts"):
        router_load(model, [TOKENS], str)


def test_sparse_autoencoder_learns_an_activation_and_its_features_can_be_edited() -> None:
    model, name = decoder(DECODERS["llama"]), "blocks.0.mlp.out"
    ids = token_ids(model.config, 8)
    autoencoder = autoencoder_of(model, name, features=64, active=4)
    before, after = trained(autoencoder, ReconstructionLoss(model, name), model)
    assert after < before / 3
    found = units(model, ids.tolist(), name, encode=autoencoder.encode)
    feature = found.most_active(1)[0]
    text, position = ids[found.texts[feature, 0]], found.positions[feature, 0]
    with onward.trace(model, name) as t:
        model(text[None])
    features = autoencoder.encode(t[name][0, position])
    assert float(features[feature]) == pytest.approx(float(found.peaks[feature, 0]), rel=1e-5)
    assert int((features > 0).sum()) <= 4
    with onward.edit(model, {name: autoencoder.changing(feature, 0.0)}), onward.trace(model, name) as edited:
        edited_logits = model(text[None])[0, position]
    change = edited[name][0, position] - t[name][0, position]
    assert_close(change, -features[feature].detach() * autoencoder.decoder[feature].detach(), 1e-5)
    effect = feature_effect(model, name, autoencoder, feature, text.tolist(), int(position))
    p, without = model(text[None])[0, position].softmax(-1), edited_logits.softmax(-1)
    assert effect.divergence == pytest.approx(float((p * (p / without).log()).sum()), rel=1e-3)
    assert effect.raised[0] == int((p - without).argmax())
    assert effect.lowered[0] == int((p - without).argmin())


def test_directions_of_features_keep_length_1_and_peaks_can_be_compared() -> None:
    model, name = decoder(DECODERS["llama"]), "blocks.0.mlp.out"
    autoencoder, loss = autoencoder_of(model, name, features=32, active=4), ReconstructionLoss(model, name)
    text = windows_of(model, Tokens.of(token_ids(model.config, 1, 200)[0].numpy()))
    optimizer = torch.optim.Adam(autoencoder.parameters(), lr=0.1)  # a loop of the user's own
    for first in range(5):
        optimizer.zero_grad()
        loss(autoencoder, text.read([first]))[0].backward()
        gradient, along = autoencoder.directions.grad, autoencoder.decoder.detach()
        assert gradient is not None
        assert gradient.abs().max() > 1e-3
        assert (gradient * along).sum(1).abs().max() < 1e-6
        optimizer.step()
        assert_close(autoencoder.decoder.norm(dim=1).detach(), torch.ones(32), 1e-6)
    trained(autoencoder, loss, model, steps=5)
    assert_close(autoencoder.decoder.norm(dim=1).detach(), torch.ones(32), 1e-6)


def test_fitting_ends_with_its_time_and_is_the_same_again() -> None:
    model = decoder(DECODERS["llama"])
    text = windows_of(model, Tokens.of(token_ids(model.config, 1, 50)[0].numpy()))
    losses = [[s.loss for s in fit(TunedLens(model), LensLoss(model), text, steps=3)] for _ in range(2)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 3
    assert len([*fit(TunedLens(model), LensLoss(model), text, seconds=1e-9)]) == 1
    with pytest.raises(UserError, match="no text to train on"):
        windows_of(model, Tokens.of(token_ids(model.config, 1, 1)[0].numpy()))


@pytest.mark.parametrize(
    ("name", "message"),
    {"blocks.0.mlp.pots": "the nearest are", "blocks.0.attn.weights": r"\(B, 4, T, S\)"}.items(),
)
def test_an_activation_without_features_is_one_sentence(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        autoencoder_of(decoder(DECODERS["llama"]), name)


def test_a_text_beyond_the_context_or_a_position_outside_is_one_sentence(model: onward.Decoder) -> None:
    with pytest.raises(UserError, match="13 tokens and the model's context 12"):
        logit_lens(model, [1] * 13)
    with pytest.raises(UserError, match="no tokens"):
        token_statistics(model, [])
    with pytest.raises(UserError, match="position 8 is not in the text"):
        logit_attribution(model, TOKENS, 8)
