"""/v1/embeddings: a vector per text, the mean of the last hidden states of its tokens."""

from __future__ import annotations

import base64
from typing import Any, Literal

import torch
from fastapi import APIRouter, Request
from pydantic import Field

from onward.generation.prompts import prompt_tokens
from onward.serving.errors import TOO_LONG, ApiError
from onward.serving.fields import Body, check_others
from onward.serving.models import Served
from onward.serving.pieces import embedding
from onward.serving.prompt_size import check_size, prompts_in, size_of
from onward.serving.request_log import current
from onward.serving.service import PROMPTS, service_of
from onward.serving.shapes import Prompts, Whole

router = APIRouter(tags=["OpenAI"])


class EmbeddingRequest(Body):
    """The body of a request of /v1/embeddings."""

    input: Prompts
    encoding_format: Literal["float", "base64"] | None = Field(None, description="By default float.")
    dimensions: Whole | None = Field(None, description="Must equal the model's d_model.")


@router.post("/v1/embeddings")
async def embeddings(body: EmbeddingRequest, http: Request) -> dict[str, Any]:
    """Return the reply as JSON: for each text the mean of the last hidden states over its tokens, in fp32 and not
    normalized. Raises an ApiError for dimensions other than the model's."""
    service = service_of(http)
    served = service.model(body.model)
    check_others(body)
    if body.dimensions not in (None, served.lm.config.d_model):
        size = served.lm.config.d_model
        raise ApiError(
            f"Cannot return {body.dimensions} dimensions, because this model has {size}: leave dimensions out",
            param="dimensions",
        )
    texts = await service.compute(tokens_of, body, served, size=size_of(body.input))
    vectors = [await service.beside(embedding(served, tokens)) for tokens in texts]
    data = [
        {"object": "embedding", "index": index, "embedding": encoded(vector, body.encoding_format or "float")}
        for index, vector in enumerate(vectors)
    ]
    current().read = count = sum(map(len, texts))
    usage = {"prompt_tokens": count, "total_tokens": count}
    return {"object": "list", "data": data, "model": served.name, "usage": usage}


def tokens_of(body: EmbeddingRequest, served: Served) -> list[list[int]]:
    """The token ids of each text."""
    given = prompts_in(body.input)
    if not 0 < len(given) <= PROMPTS:
        raise ApiError(f"input has {len(given)} texts: give 1 to {PROMPTS:,}", param="input")
    for one in given:
        check_size(size_of(one), served, "input")
    texts = [prompt_tokens(served.lm.text(), one) for one in given]
    vocab_size, length = served.lm.config.vocab_size, served.engine.length
    for index, tokens in enumerate(texts):
        place = f"input[{index}]"
        if not tokens:
            raise ApiError(f"{place} is empty: give it at least one token", param=place)
        if not 0 <= min(tokens) <= max(tokens) < vocab_size:
            raise ApiError(f"{place} has an id outside the vocabulary of {vocab_size}: give other ids", param=place)
        if len(tokens) > length:
            limit = f"this model's maximum context length is {length} tokens"
            raise ApiError(
                f"Cannot read the {len(tokens)} tokens of {place}, because {limit}: shorten it",
                param=place,
                code=TOO_LONG,
            )
    return texts


def encoded(vector: list[float], form: str) -> list[float] | str:
    """The numbers of a vector ("float"), or base64 of their bytes in fp32, little-endian."""
    if form == "float":
        return vector
    return base64.b64encode(torch.tensor(vector).numpy().astype("<f4").tobytes()).decode()
