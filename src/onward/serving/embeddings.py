"""/v1/embeddings: a vector per text, the mean of the last hidden states of its tokens.

Shapes: T tokens, D d_model.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, Literal

import torch
from fastapi import APIRouter, Request
from pydantic import Field

from onward.base.device import tensor_on
from onward.generation.prompts import prompt_tokens
from onward.model.decoder import Decoder
from onward.serving.errors import TOO_LONG, ApiError
from onward.serving.fields import Body, check_others
from onward.serving.models import Served
from onward.serving.request_log import current
from onward.serving.service import PROMPTS, service_of
from onward.serving.shapes import Prompts, Whole
from onward.transforms.lora import use_adapter

router = APIRouter(tags=["OpenAI"])


class EmbeddingRequest(Body):
    """The body of a request of /v1/embeddings."""

    input: Prompts
    encoding_format: Literal["float", "base64"] | None = Field(None, description="By default float.")
    dimensions: Whole | None = Field(None, description="Must equal the model's d_model.")


@router.post("/v1/embeddings")
async def embeddings(body: EmbeddingRequest, http: Request) -> dict[str, Any]:
    """Return the reply as JSON: for each text the mean of the last hidden states over its tokens, in fp32 and not
    normalized. Raises an ApiError for other dimensions than the model's."""
    service = service_of(http)
    served = service.model(body.model)
    check_others(body.model_extra or {})
    if body.dimensions not in (None, served.lm.config.d_model):
        size = served.lm.config.d_model
        raise ApiError(
            f"Cannot return {body.dimensions} dimensions, because this model has {size}: leave dimensions out",
            param="dimensions",
        )
    texts = await service.compute(tokens_of, body, served)
    vectors = []
    for tokens in texts:  # others decode between two texts
        vectors.append(await service.in_engine(lambda tokens=tokens: embedding(served, tokens)))  # type: ignore[misc]
    data = [
        {"object": "embedding", "index": index, "embedding": encoded(vector, body.encoding_format or "float")}
        for index, vector in enumerate(vectors)
    ]
    current().read = count = sum(map(len, texts))
    usage = {"prompt_tokens": count, "total_tokens": count}
    return {"object": "list", "data": data, "model": served.name, "usage": usage}


def tokens_of(body: EmbeddingRequest, served: Served) -> list[list[int]]:
    """The token ids of each text."""
    given = body.input
    if isinstance(given, list) and given and isinstance(given[0], int):
        given = [given]  # type: ignore[list-item]
    texts = [prompt_tokens(served.lm.text(), one) for one in ([given] if isinstance(given, str) else given)]  # type: ignore[arg-type]
    if not 0 < len(texts) <= PROMPTS:
        raise ApiError(f"input has {len(texts)} texts: give 1 to {PROMPTS:,}", param="input")
    vocab_size, length = served.lm.config.vocab_size, served.engine.length
    for index, tokens in enumerate(texts):
        place = f"input[{index}]"
        if not tokens:
            raise ApiError(f"{place} is empty: give it at least one token", param=place)
        if not 0 <= min(tokens) <= max(tokens) < vocab_size:
            raise ApiError(f"{place} has a token beyond the vocabulary of {vocab_size}", param=place)
        if len(tokens) > length:
            limit = f"this model's maximum context length is {length} tokens"
            raise ApiError(
                f"Cannot read the {len(tokens)} tokens of {place}, because {limit}: shorten it",
                param=place,
                code=TOO_LONG,
            )
    return texts


@torch.inference_mode()
def embedding(served: Served, tokens: Sequence[int]) -> list[float]:
    """The mean of a text's last hidden states (D,), in fp32."""
    model: Decoder = served.lm.model
    with use_adapter(model, served.adapter):
        hidden = model.hidden(tensor_on(model.device, [list(tokens)]))
    vector: list[float] = hidden[0].float().mean(0).tolist()
    return vector


def encoded(vector: list[float], form: str) -> list[float] | str:
    """Numbers ("float"), or base64 of their bytes in fp32, little-endian."""
    if form == "float":
        return vector
    return base64.b64encode(torch.tensor(vector).numpy().astype("<f4").tobytes()).decode()
