"""Calls of a model with several tokens of each decoding request: the last token and its draft tokens.

Shapes: B rows, T tokens of each, N rows of logits (after each request's last token, and after each draft token), V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onward.base.device import tensor_on
from onward.generation.request import Request
from onward.generation.runner import Pieces, Runner

MAX_COMPILED = 16  # maximum number of tokens of a row in a compiled step


def decode_drafted(runner: Runner, requests: Sequence[Request], drafted: Sequence[Sequence[int]]) -> Tensor:
    """Run the model on each request's last token and its draft tokens (`drafted`), to verify these, and return the
    logits (N, V) after each of these tokens, request by request. Request i is in row i of the cache."""
    runner.decoding = []
    pieces = [[request.last_token, *tokens] for request, tokens in zip(requests, drafted)]
    starts, adapters = [request.num_cached for request in requests], [r.adapter or "" for r in requests]
    with runner.using(adapters):
        if (logits := compiled_logits(runner, padded(pieces, starts, runner.cache.length), starts)) is not None:
            return torch.cat([row[: len(piece)] for row, piece in zip(logits, pieces)])
    hidden = runner.forward_rows(0, pieces, starts, adapters)
    repeated = [adapter for adapter, piece in zip(adapters, pieces) for _ in piece]
    return runner.logits(torch.cat([row[: len(piece)] for row, piece in zip(hidden, pieces)]), repeated)


def padded(pieces: Pieces, starts: Sequence[int], length: int) -> Pieces:
    """Pad each piece to the length of the longest by repeating its last token; the padding counts as refused draft
    tokens. Pieces are returned unchanged if a padded row would exceed `length`. Piece i begins at position
    starts[i]."""
    width = max(map(len, pieces))
    if max(starts) + width > length:
        return pieces
    return [[*piece, *[piece[-1]] * (width - len(piece))] for piece in pieces]


def compiled_logits(runner: Runner, pieces: Pieces, starts: Sequence[int]) -> Tensor | None:
    """Run a compiled decoding step on `pieces`, the next tokens of each row from row 0 on; piece i begins at position
    starts[i]. Returns the logits (B, T, V).

    Returns None if no compiled step fits, for example because the pieces differ in length.
    """
    width = len(pieces[0])
    if width > MAX_COMPILED or any(len(piece) != width for piece in pieces):
        return None
    places = [[*range(start, start + width)] for start in starts]
    tokens, positions = tensor_on(runner.model.device, [pieces, places]).unbind()
    return runner.run_compiled(tokens, positions, max(starts) + width)
