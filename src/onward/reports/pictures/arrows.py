"""Attention weights as arrows over the tokens of a text.

Shapes: T tokens.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike
from rich.cells import cell_len

from onward.base.errors import UserError
from onward.reports.pictures.markup import readable, visible
from onward.reports.pictures.panels import LABEL, finite
from onward.reports.pictures.picture import LINE_MARKS, Panel, padded
from onward.reports.pictures.scale import ColorScale

WEIGHT = ColorScale(1, root=True, unit="attention weight", faint=True)  # tokens are written over the shades
LEAST = 0.05  # weight of the faintest arrow
MOST = 64  # largest number of tokens in a picture
BETWEEN = 10.0  # pixels between tokens
LISTED = 3  # largest number of weights listed for each token in a terminal


def arrows(title: str, pieces: Sequence[str], weights: ArrayLike) -> Panel:
    """Return a panel that draws attention weights (T, T), one row per query and one column per key, as arrows over the
    tokens of a text; `pieces` are the texts of the tokens.

    An arrow goes from the token of the query to the token of the key; the larger the weight, the stronger the arrow.
    A token is shaded by its weight on itself. Weights below 0.05 have no arrow. In a terminal, each token is followed
    by the tokens to which it attends most. Raises a UserError for more than 64 tokens, or for weights of another shape.
    """
    values = np.asarray(weights, float)
    if len(pieces) > MOST:
        raise UserError(
            f"Cannot draw arrows over {len(pieces)} tokens, because they would be too small to read: use at most "
            f"{MOST} tokens, or draw the weights as cells"
        )
    if values.shape != (len(pieces), len(pieces)):
        raise UserError(f"weights: expected the shape {(len(pieces), len(pieces))}, got {values.shape}")
    sizes = [LABEL * cell_len(readable(piece, LINE_MARKS)) + 8 for piece in pieces]
    starts = np.cumsum([0.0, *(size + BETWEEN for size in sizes)])
    middles = starts[:-1] + np.array(sizes) / 2
    shown = [(q, k) for q, k in np.argwhere(values >= LEAST).tolist() if q != k]
    top = max((rise(middles[q] - middles[k]) for q, k in shown), default=0.0) + 4
    parts = [arrow(middles[q], middles[k], top, values[q, k], f"{pieces[q]} to {pieces[k]}") for q, k in shown]
    for piece, start, size, strength in zip(pieces, starts, sizes, WEIGHT.strength(np.diag(values))):
        box = f'x="{start:.1f}" y="{top:g}" width="{size:.1f}" height="20" rx="3"'
        parts.append(
            f'<rect class="floor" {box}/><rect class="more" {box} opacity="{strength:.2f}"/><text class="label" '
            f'x="{start + size / 2:.1f}" y="{top + 14:g}" text-anchor="middle" style="fill:var(--ink)">'
            f"{visible(piece)}</text>"
        )
    return Panel(
        title,
        max(float(starts[-1]) - BETWEEN, 7.2 * cell_len(title)),
        top + 22,
        "".join(parts),
        lines(pieces, values),
        {"rows": [*pieces], "columns": [*pieces], "values": finite(values)},
        WEIGHT,
    )


def rise(distance: float) -> float:
    """Height in pixels of an arrow between tokens at this distance."""
    return 14 + 0.2 * abs(distance)


def arrow(start: float, end: float, bottom: float, weight: float, tip: str) -> str:
    """An arc from x = `start` to the arrowhead at x = `end`, above y = `bottom`."""
    strength = f'opacity="{float(WEIGHT.strength(np.array(weight))) / WEIGHT.full:.2f}"'
    arc = f"A{abs(end - start) / 2:.1f} {rise(end - start):.1f} 0 0 {int(end > start)} {end:.1f} {bottom - 5:g}"
    return (
        f'<g {strength}><title>{visible(tip)}: {weight:.2f}</title><path class="stroke" style="stroke-width:'
        f'{1 + 2 * weight:.1f}" d="M{start:.1f} {bottom:g}{arc}"/>'
        f'<path class="more" d="M{end - 4:.1f} {bottom - 8:g}h8l-4 7z"/></g>'
    )


def lines(pieces: Sequence[str], values: np.ndarray) -> list[str]:
    """Each token with the tokens to which it attends most, for a terminal."""
    names = [readable(piece, LINE_MARKS) for piece in pieces]
    text = []
    for name, row in zip(padded(pieces, 16), values):
        most = [k for k in np.argsort(-row, kind="stable")[:LISTED] if row[k] >= LEAST]
        if most:
            text.append(f"{name} → " + ", ".join(f"{names[k]} {row[k]:.2f}" for k in most))
    return text
