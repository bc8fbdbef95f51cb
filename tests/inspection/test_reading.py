"""Statistics of tokens, heads, units and weights follow their definitions."""

import math

import pytest
import torch
from torch.nn import functional as F

import onward
from onward import Sampling, UserError, next_token_distribution
from onward.inspection import (
    head_roles,
    logit_attribution,
    logit_lens,
    loss_by_position,
    repeated_tokens,
    router_load,
    sampling_steps,
    score_alternatives,
    token_statistics,
    units,
)
from onward.inspection.heads import rarity_of
from onward.inspection.layers import kind_of, residual_stream, singular_values
from onward.tracing import zero

from support.adapters import stirred
from support.decoders import DECODERS, assert_close, config, decoder, token_ids
from support.texts import OTHERS, TOKENS, run


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
    windows = token_ids(model.config, 5, 21)  # the context length is 12
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
    rare[0, 0] = rare[1:, 1] = 1  # attends to the only occurrence of token 2
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


def test_roles_do_not_depend_on_the_default_dtype(model: onward.Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    text = [1, 2, 1, 3]
    wanted = head_roles(model, text, pairs={"one": [(3, 1)]}, length=4).scores
    torch.set_default_dtype(torch.float64)
    try:
        found = head_roles(model, text, pairs={"one": [(3, 1)]}, length=4).scores
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.keys() == wanted.keys()
    assert all(torch.allclose(found[name].double(), wanted[name].double(), atol=1e-6) for name in wanted)


def test_layers_without_attention_weights_have_no_heads_to_score() -> None:
    found = head_roles(decoder(DECODERS["gated delta"]), [1, 2, 3], length=4)
    assert all((scores[[0, 2, 3]] == -1).all() and (scores[1] > -1).all() for scores in found.scores.values())
    with pytest.raises(UserError, match="Cannot score heads, because no layer"):
        head_roles(decoder(DECODERS["mamba2"]), length=4)


def test_repeated_tokens_are_two_equal_halves(model: onward.Decoder) -> None:
    ids = repeated_tokens(model)
    assert ids.shape == (4, 12)
    assert torch.equal(ids[:, :6], ids[:, 6:])
    assert all(len(set(row[:6].tolist())) == 6 for row in ids)
    with pytest.raises(UserError, match="Cannot repeat 7 tokens"):
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


def test_a_text_beyond_the_context_or_a_position_outside_is_one_sentence(model: onward.Decoder) -> None:
    with pytest.raises(UserError, match="13 tokens with a context of 12"):
        logit_lens(model, [1] * 13)
    with pytest.raises(UserError, match="no tokens"):
        token_statistics(model, [])
    with pytest.raises(UserError, match="position 8 is not in the text"):
        logit_attribution(model, TOKENS, 8)
