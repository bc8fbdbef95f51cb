"""Draws the picture of `onward inspect features`: the features of a sparse autoencoder, with texts that activate them
and their effects on the prediction.

Shapes: N texts, T tokens.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from onward.inspection.features import SparseAutoencoder, feature_effect
from onward.inspection.inputs import as_row, exact
from onward.inspection.layers import units
from onward.model.decoder import Decoder, without_dropout
from onward.reports.pictures.markup import MARKS, readable
from onward.reports.pictures.panels import words
from onward.reports.pictures.picture import Panel, Picture
from onward.reports.pictures.scale import ColorScale
from onward.text.tokenizer import Tokenizer
from onward.tracing.trace import trace

SHOWN, TEXTS = 10, 3  # number of features, and of texts for each
BEFORE, AFTER = 12, 4  # tokens shown before the token where the feature is strongest, and from this token on
BETWEEN = " ¦ "  # separates texts


def features(
    model: Decoder, tokenizer: Tokenizer, autoencoder: SparseAutoencoder, name: str, texts: Sequence[Sequence[int]]
) -> Picture:
    """Draw the strongest features that a sparse autoencoder finds in the activation `name` of a model over texts of
    token ids: the tokens at which each feature is active, and its effect on the next-token prediction."""
    active = units(model, texts, name, top=TEXTS, encode=autoencoder.encode)
    chosen = [feature for feature in active.most_active(SHOWN) if active.share[feature] > 0]
    pieces = lambda ids: [readable(tokenizer.piece(i), MARKS) for i in ids]
    panels = []
    for feature in chosen:
        parts = []
        for text, position in zip(active.texts[feature].tolist(), active.positions[feature].tolist()):
            part = slice(max(0, position - BEFORE), position + AFTER)
            values = activity(model, autoencoder, name, texts[text])[part, feature].tolist()
            parts.append([*zip(pieces(texts[text][part]), values)])
        effect = feature_effect(
            model, name, autoencoder, feature, texts[int(active.texts[feature, 0])], int(active.positions[feature, 0])
        )
        raised, lowered = (", ".join(f"“{piece}”" for piece in pieces(ids)) for ids in (effect.raised, effect.lowered))
        peak = float(active.peaks[feature, 0])
        title = (
            f"feature {feature}, active at {active.share[feature]:.1%} of the tokens, at most {peak:.3g}; it raises "
            f"{raised}, lowers {lowered} ({effect.divergence:.2f} nats)"
        )
        panels.append(panel(title.replace("%", " %"), parts, peak))
    return Picture(
        f"Features of {name}",
        f"A sparse autoencoder writes this activation as a sum of at most {autoencoder.active} of "
        f"{active.share.numel():,} directions, its features; {len(active.dead):,} of them are never active in these "
        f"texts. Each panel shows one of the {len(chosen)} strongest features: the texts where it is most active, "
        f"with {BETWEEN.strip()} between them, shaded from 0 to its largest value, and the tokens whose probability "
        "it raises and lowers most after its strongest token, with the change of the prediction when the feature is "
        "set to 0.",
        panels,
    )


def panel(title: str, texts: Sequence[Sequence[tuple[str, float]]], peak: float) -> Panel:
    """Draw texts, sequences of (token, value), shaded from 0 to `peak`; in a terminal, tokens with values above half of
    `peak` are in brackets."""
    shown = [pair for text in texts for pair in ((BETWEEN, 0.0), *text)][1:]
    values = np.array([value for _, value in shown])
    made = words(title, [piece for piece, _ in shown], values, [f"{v:.2f}" for v in values], ColorScale(peak))
    lines = ["".join(f"[{piece}]" if value > peak / 2 else piece for piece, value in text) for text in texts]
    return replace(made, text=[f"  {line}" for line in lines])


@torch.no_grad()
def activity(model: Decoder, autoencoder: SparseAutoencoder, name: str, tokens: Sequence[int]) -> torch.Tensor:
    """Values (T, F) of an autoencoder's features at each token."""
    with without_dropout(model), trace(model, name) as t:
        model.hidden(as_row(model, tokens))
    return autoencoder.encode(exact(t[name][0])).cpu()
