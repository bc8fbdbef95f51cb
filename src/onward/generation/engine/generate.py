"""Generation for a fixed list of requests, by an engine that exists only for them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TypedDict, Unpack

from torch import Tensor

from onward.generation.cache.manager import CacheManager
from onward.generation.cache.prefix_files import PrefixFiles
from onward.generation.drafts.proposal import Draft
from onward.generation.engine.engine import ROWS, Engine
from onward.generation.request import Request
from onward.model.decoder import Decoder


class EngineOptions(TypedDict, total=False):
    """The options of an Engine as keyword arguments of `generate`: all parameters except its model and rows."""

    cache: CacheManager | None
    stop_token_ids: Collection[int]
    allowed: Tensor | None
    slide: bool
    draft: Draft | None
    files: PrefixFiles | None
    compile_after: int | None


def generate(
    model: Decoder, requests: Sequence[Request], **options: Unpack[EngineOptions]
) -> Iterator[tuple[Request, int]]:
    """Continue requests with a new Engine with these options; yields (request, token) for each token as it is
    generated. The tokens are also appended to the requests.

    Once all requests are done, raises the error of the first request that failed.
    """
    engine = Engine(model, rows=max(1, min(len(requests), ROWS)), **options)
    for request in requests:
        engine.add(request)
    yield from engine.run()
    for request in requests:
        if request.error:
            raise request.error
