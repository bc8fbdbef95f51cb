"""Pictures of the layers of a model that reads a text: attention, roles of heads, feed-forward units, experts.

Shapes: T tokens, X experts.
"""

from collections.abc import Sequence

import numpy as np
import torch

from onward.base.errors import UserError
from onward.inspection.head_maps import attention_maps, most_selective
from onward.inspection.heads import MIN_SCORE, head_roles
from onward.inspection.inputs import check_index, check_layer
from onward.inspection.layers import expert_shares, unit_activations
from onward.reports.pictures.arrows import LEAST, arrows
from onward.reports.pictures.panels import cells
from onward.reports.pictures.picture import Panel, Picture
from onward.reports.pictures.reading import Reading
from onward.reports.pictures.scale import ColorScale
from onward.tracing.sites import attend_modules

WEIGHT = ColorScale(1, root=True, unit="attention weight")
SCORE = ColorScale(1, unit="score", faint=True)
UNITS = 16  # largest number of units shown
SHOWN_ROLES = "previous", "induction", "duplicate", "first"


def attention(reading: Reading, *, layer: int | None = None, head: int | None = None) -> Picture:
    """Draw the attention maps of all heads of a layer, or only of the head with index `head`, for the model and text of
    `reading`. `layer` defaults to the layer with the most selective heads."""
    layer, maps = chosen_maps(reading, layer, head)
    count = len(reading.tokens)
    hidden = np.triu(np.ones((count, count), bool), 1)
    pieces = reading.pieces(reading.tokens)
    room = 170.0 if count <= 12 else 210.0 if count <= 32 else 370.0  # four, three or two heads in a row
    return Picture(
        f"Attention of layer {layer}",
        "Each row is the token of a query, each column the token of a key; the stronger a cell, the larger the "
        f"attention weight (the color shows its square root). {sums(reading, layer)} A token sees no later one, so "
        "that the upper triangle is empty.",
        [
            cells(
                f"head {shown}",
                np.where(hidden, np.nan, weights),
                pieces,
                pieces,
                scale=WEIGHT,
                room=room,
                reading="{row} looks at {column} with {value}",
            )
            for shown, weights in maps.items()
        ],
    )


def attention_arrows(reading: Reading, *, layer: int | None = None, head: int | None = None) -> Picture:
    """Draw the attention weights of all heads of a layer, or only of the head with index `head`, as arrows over the
    text of `reading`, which has at most 64 tokens. `layer` defaults to the layer with the most selective heads."""
    layer, maps = chosen_maps(reading, layer, head)
    pieces = reading.pieces(reading.tokens)
    return Picture(
        f"Attention of layer {layer}",
        "An arrow goes from the token of a query to the token of a key; the stronger it is, the larger the attention "
        f"weight. A token is shaded by its weight on itself. Weights below {LEAST:g} have no arrow. "
        + sums(reading, layer),
        [arrows(f"head {shown}", pieces, weights) for shown, weights in maps.items()],
    )


def chosen_maps(reading: Reading, layer: int | None, head: int | None) -> tuple[int, dict[int, np.ndarray]]:
    """The layer that is drawn, and the attention weights (T, T) of each of its drawn heads."""
    maps = attention_maps(reading.model, reading.tokens)
    layer = most_selective(maps) if layer is None else check_layer(layer, reading.model)
    weights = maps[layer].float().cpu().numpy()
    if not len(weights):
        drawable = [str(i) for i, weights_of in enumerate(maps) if len(weights_of)]
        instead = f"choose layer {' or '.join(drawable)}" if drawable else "no layer of this model has any"
        raise UserError(f"Cannot draw the attention of layer {layer}, which has no attention weights: {instead}")
    heads = range(len(weights)) if head is None else [check_index(head, len(weights), "head")]
    return layer, {shown: weights[shown] for shown in heads}


def sums(reading: Reading, layer: int) -> str:
    """A sentence about the sum of the weights of a query, for a caption."""
    sink = " together with that of the head's sink, which is not drawn"
    return f"The weights of a query sum to 1{sink * (attend_modules(reading.model)[layer].sinks is not None)}."


def heads(reading: Reading) -> Picture:
    """Draw the role of each attention head, such as induction head, and each head's scores for four roles, for the
    model and text of `reading`."""
    scored = head_roles(reading.model, reading.tokens if reading.text else None)
    roles = scored.map()
    best = torch.stack([*scored.scores.values()]).amax(0).clamp(min=0).numpy()
    layers, count = best.shape
    rows, columns = [f"layer {i}" for i in range(layers)], [f"{h}" for h in range(count)]
    short = 9 if count <= 12 else 4
    panels = [
        cells(
            "the role of each head",
            best,
            rows,
            columns,
            texts=[[role[:short] for role in line] for line in roles],
            scale=SCORE,
            reading="{row}, head {column}: {text} {value}",
        )
    ]
    for role in SHOWN_ROLES:
        scores = scored.scores[role].clamp(min=0).numpy()
        panels.append(
            cells(
                role,
                scores,
                rows,
                columns,
                scale=SCORE,
                room=240,
                reading="{row}, head {column}: {value}",
            )
        )
    return Picture(
        "Roles of heads",
        "Measured on random tokens repeated once. A previous-token head attends to the token before, an induction head "
        "to the token after the first occurrence of the same token, a duplicate-token head to that first occurrence, "
        "and a first-token head to the beginning of the text, as idle heads do. Scores are mean attention weights. The "
        "first panel names the role for which a head has its highest score, if this is at least "
        f"{MIN_SCORE}, and is shaded by this score. More roles: self is the token itself, back 2 and back 3 are two "
        "and three tokens before"
        + (", and rare is the weight on rare tokens of the text beyond a uniform share" * bool(reading.text))
        + ".",
        panels,
    )


def neurons(reading: Reading, *, layer: int | None = None) -> Picture:
    """Draw the activations of the most active feed-forward units of a layer at each token of the text of `reading`.
    `layer` defaults to the middle layer."""
    model = reading.model
    layer = check_layer(model.config.n_layers // 2 if layer is None else layer, model)
    units = unit_activations(model, reading.tokens, layer)
    strongest = units[1:].abs().amax(0) if len(units) > 1 else units.abs().amax(0)
    chosen = strongest.argsort(descending=True)[:UNITS].tolist()
    active = (units > 0).float()
    idle = int((active.amax(0) == 0).sum())
    return Picture(
        f"Units of the feed-forward of layer {layer}",
        f"The {len(chosen)} units of {units.size(1):,} that are strongest at some token"
        + " after the first" * (len(units) > 1)
        + f" (inputs of the down projection). On average {active.mean():.0%} of all units are above 0 at a token, and "
        f"{idle:,} {'is' if idle == 1 else 'are'} above 0 at no token.".replace("%", " %"),
        [
            cells(
                "",
                units[:, chosen].T.numpy(),
                [f"unit {i}" for i in chosen],
                reading.pieces(reading.tokens),
                scale=ColorScale(float(units[:, chosen].abs().max()), signed=True, unit="activation"),
                room=760,
                reading="{row} at {column}: {value}",
            )
        ],
    )


def experts(reading: Reading) -> Picture:
    """Draw the routing weight of each expert at each token of the text of `reading`, one panel per mixture-of-experts
    layer."""
    shares = expert_shares(reading.model, reading.tokens)
    return Picture(
        "The experts of each token",
        "A router sends each token to a few of the feed-forwards of a layer, the experts. A row is an expert, a "
        "column a token, and a cell the weight of the expert's output in the output of the feed-forward.",
        [expert_panel(layer, weights.T.numpy(), reading.pieces(reading.tokens)) for layer, weights in shares.items()],
    )


def expert_panel(layer: int, shares: np.ndarray, pieces: Sequence[str]) -> Panel:
    """A panel of the routing weights `shares` (X, T) of the experts at each token."""
    return cells(
        f"layer {layer}",
        shares,
        [f"expert {i}" for i in range(len(shares))],
        pieces,
        scale=ColorScale(1, unit="weight of an expert's output"),
        room=760,
        reading="{column} uses {row} with {value}",
    )
