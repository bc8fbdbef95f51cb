"""Lenses and sparse autoencoders: applied to a model, trained on its activations, and used in edits."""

from typing import Any

import pytest
import torch

import onward
from onward import Tokens, UserError
from onward.inspection import (
    LensLoss,
    ReconstructionLoss,
    TunedLens,
    autoencoder_of,
    feature_effect,
    fit,
    logit_lens,
    units,
    windows_of,
)

from support.decoders import DECODERS, assert_close, decoder, token_ids
from support.texts import TOKENS, run


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
    """The first and the last loss of a training on windows of a text."""
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
    optimizer = torch.optim.Adam(autoencoder.parameters(), lr=0.1)  # a custom training loop
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
    with pytest.raises(UserError, match="Cannot train on a text of fewer than two"):
        windows_of(model, Tokens.of(token_ids(model.config, 1, 1)[0].numpy()))


@pytest.mark.parametrize(
    ("name", "message"),
    {"blocks.0.mlp.pots": "the nearest are", "blocks.0.attn.weights": r"\(B, 4, T, S\)"}.items(),
)
def test_an_activation_without_features_is_one_sentence(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        autoencoder_of(decoder(DECODERS["llama"]), name)
