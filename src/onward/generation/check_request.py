"""The check of a request against the model that answers it."""

from __future__ import annotations

from onward.config.decoder import DecoderConfig
from onward.errors import UserError
from onward.generation.request import Request
from onward.generation.sampling import check_vocabulary
from onward.model.decoder import check_ids


def check_request(request: Request, config: DecoderConfig, length: int, slide: bool | None) -> None:
    """Raise a UserError if a request cannot be answered by a model with `config` within a context of `length` tokens.

    `slide` says whether the oldest tokens are dropped when the context is full; None: they are not, and the message
    does not suggest it.
    """
    if not request.prompt:
        raise UserError("the prompt is empty and there is no beginning-of-text token: give it at least one token")
    check_ids(min(request.prompt), max(request.prompt), config)
    request.sampling.check_vocabulary(config.vocab_size)
    check_vocabulary("stop_token_ids", request.stop_token_ids, config.vocab_size)
    if request.max_new_tokens < 0:
        raise UserError(f"max_new_tokens is {request.max_new_tokens}: it must be at least 0")
    if request.min_new_tokens > request.max_new_tokens:
        raise UserError(
            f"min_new_tokens is {request.min_new_tokens}, more than max_new_tokens, {request.max_new_tokens}"
        )
    size, hint = len(request.prompt), ", or let the context slide (slide=True, --context-overflow slide)"
    if size + request.max_new_tokens > length and not slide:
        raise UserError(
            (
                f"the prompt has {size} tokens, more than the model's context of {length}: shorten it"
                if size > length
                else f"{size} prompt tokens and {request.max_new_tokens} new ones are more than the model's context of "
                f"{length}: shorten them"
            )
            + ("" if slide is None else hint)
        )
