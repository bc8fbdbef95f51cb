"""/api: the page's queries about a model on a text: next tokens, the lens, attention, attribution, heads.

Shapes: V vocabulary.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Request
from pydantic import Field
from torch import Tensor

from onward.base.device import tensor_on
from onward.generation.distribution import next_token_distribution
from onward.generation.sampling import Sampling
from onward.inspection.attribution import logit_attribution
from onward.inspection.head_maps import attention_maps
from onward.inspection.heads import head_roles
from onward.inspection.lens import logit_lens
from onward.serving.edits import Edits
from onward.serving.errors import TOO_LONG, ApiError
from onward.serving.fields import Body, SamplingFields, check_others
from onward.serving.models import Served
from onward.serving.pieces import whole
from onward.serving.service import Service, service_of
from onward.serving.shapes import Whole
from onward.serving.usage import spelled
from onward.text.tokenizer import Tokenizer
from onward.tracing.edit import edit

router = APIRouter(prefix="/api", tags=["page"])
T = TypeVar("T")
MOST = 512  # largest number of tokens of an inspected text
SHOWN = 40  # number of likeliest tokens shown, before and after the sampling options
KEPT = 32  # number of texts whose logits are cached


class Look(Body):
    """The body of a request to look inside a model: a text as token ids, and the index of the token after which the
    next token is predicted, by default the last one."""

    tokens: Annotated[list[Whole], Field(min_length=1, max_length=MOST)]
    position: Whole | None = None
    edits: Edits | None = Field(None, description="Heads and layers to switch off for this request.")


class LookAtLogit(Look):
    """The body of a request for the parts of a logit."""

    target: Whole | None = Field(None, description="A token id whose logit is attributed, by default the likeliest.")


class LookAtSampling(SamplingFields, Look):
    """The body of a request for a distribution, with the sampling options."""

    prompt_length: Annotated[Whole, Field(ge=0)] | None = Field(
        None, description="Number of tokens of the prompt; penalties count the tokens after it."
    )
    target: Annotated[Whole, Field(ge=0)] | None = Field(
        None, description="A token that is listed in any case, such as the one that was drawn."
    )


def text_of(body: Look, http: Request) -> tuple[Service, Served, list[int], int]:
    """(service, model, token ids, position); raises an ApiError for a field of another route, and for a value that is
    out of range."""
    check_others(body)
    service = service_of(http)
    served = service.model(body.model)
    position = len(body.tokens) - 1 if body.position is None else body.position
    if not 0 <= position < len(body.tokens):
        raise ApiError(
            f"Position {position} does not exist: the text has tokens 0 to {len(body.tokens) - 1}", param="position"
        )
    if len(body.tokens) > served.engine.length:
        length = f"this model's maximum context length is {served.engine.length} tokens"
        raise ApiError(
            f"Cannot read a text of {len(body.tokens)} tokens, because {length}: shorten it",
            param="tokens",
            code=TOO_LONG,
        )
    size = served.lm.config.vocab_size
    if not 0 <= min(body.tokens) <= max(body.tokens) < size:
        raise ApiError(f"Cannot read token ids outside the vocabulary of {size} tokens: give other ids", param="tokens")
    return service, served, body.tokens, position


async def looked(service: Service, served: Served, function: Callable[[], T], edits: Edits | None = None) -> T:
    """Call `function` in the engine's thread, alternating with decoding, with the adapter of `served`, without
    gradients and dropout, and with the parts of `edits` switched off."""
    model = served.lm.model
    names = edits.names(model) if edits else []

    def edited() -> T:
        with edit(model, dict.fromkeys(names, 0.0)):
            return function()

    return await service.beside(whole(served, edited if names else function))


class Logits:
    """A cache of logits (V,) after recent texts, so that changing a sampling option does not run the model again."""

    def __init__(self) -> None:
        self.kept: OrderedDict[tuple[str, str, tuple[int, ...]], Tensor] = OrderedDict()

    def of(self, served: Served, tokens: list[int], edits: Edits | None) -> Tensor:
        """Logits (V,) of the next token of a model to which `edits` are applied."""
        key = served.name, repr(edits), tuple(tokens)
        if key not in self.kept:
            model = served.lm.model
            hidden = model.hidden(tensor_on(model.device, [tokens]))
            self.kept[key] = model.logits(hidden[:, -1:])[0, 0].float()
            if len(self.kept) > KEPT:
                self.kept.popitem(last=False)
        self.kept.move_to_end(key)
        return self.kept[key]


def piece(tokenizer: Tokenizer, token: int) -> dict[str, Any]:
    return {"token": token, "text": spelled(tokenizer, token)}


@router.post("/distribution")
async def distribution(body: LookAtSampling, http: Request) -> dict[str, Any]:
    """Return as JSON the likeliest next tokens after the position of the request, each with its probability before and
    after the request's sampling options, and how many tokens can be sampled with these options and without."""
    service, served, tokens, position = text_of(body, http)
    options = Sampling(**{"temperature": 1.0} | body.given())
    if body.target is not None and body.target >= served.lm.config.vocab_size:
        raise ApiError(f"There is no token {body.target}: give the id of a token", param="target")
    before_position = tokens[: position + 1]
    kept: Logits = http.app.state.logits
    prompt = len(before_position) if body.prompt_length is None else min(body.prompt_length, len(before_position))

    def compute() -> dict[str, Any]:
        logits = kept.of(served, before_position, body.edits)
        allowed = served.lm.allowed()
        before = logits.masked_fill(~allowed, -math.inf).softmax(-1)
        after = next_token_distribution(logits[None], options, [before_position], [prompt], allowed)[0]
        best = before.topk(min(SHOWN, len(before))).indices.tolist()
        best += [token for token in after.topk(min(SHOWN, len(after))).indices.tolist() if token not in best]
        best += [body.target] if body.target is not None and body.target not in best else []
        ranked = [token for token in best if float(before[token]) > 0]
        rows = [
            piece(served.lm.text(), token) | {"before": float(before[token]), "after": float(after[token])}
            for token in ranked
        ]
        return {"rows": rows, "kept": int((after > 0).sum()), "vocabulary": int(allowed.sum())}

    return await looked(service, served, compute, body.edits)


@router.post("/lens")
async def lens(body: Look, http: Request) -> dict[str, Any]:
    """Return as JSON the next tokens that each layer would predict after the position (logit lens), with their
    probabilities."""
    service, served, tokens, position = text_of(body, http)
    read = tokens[: position + 1]
    predictions = await looked(service, served, lambda: logit_lens(served.lm.model, read, 5), body.edits)
    tokenizer = served.lm.text()
    ids, probabilities = predictions.ids[:, -1].tolist(), predictions.probabilities[:, -1].tolist()
    layers = [
        {"name": name, "rows": [piece(tokenizer, i) | {"probability": p} for i, p in zip(*row)]}
        for name, *row in zip(predictions.names, ids, probabilities)
    ]
    return {"layers": layers}


@router.post("/attention")
async def attention(body: Look, http: Request) -> dict[str, Any]:
    """Return as JSON {"weights": [layer][head][token]}: the attention weights of the token at the position in `body` to
    each token up to itself."""
    service, served, tokens, position = text_of(body, http)
    read = tokens[: position + 1]
    maps = await looked(service, served, lambda: attention_maps(served.lm.model, read), body.edits)
    return {"weights": [[[round(w, 4) for w in head] for head in layer[:, -1].tolist()] for layer in maps]}


@router.post("/attribution")
async def attribution(body: LookAtLogit, http: Request) -> dict[str, Any]:
    """Return as JSON the contributions of the embedding, the heads [layer][head] and the feed-forward of each layer to
    the logit of the token `target` after the position, by default the likeliest token."""
    service, served, tokens, position = text_of(body, http)
    size = served.lm.config.vocab_size
    if body.target is not None and not 0 <= body.target < size:
        raise ApiError(f"Target {body.target} does not exist: the vocabulary has ids 0 to {size - 1}", param="target")
    read = tokens[: position + 1]
    attributed = await looked(
        service, served, lambda: logit_attribution(served.lm.model, read, target=body.target), body.edits
    )
    return {
        **piece(served.lm.text(), attributed.target),
        "logit": attributed.logit,
        "embedding": attributed.embedding,
        "heads": attributed.heads.tolist(),
        "mlps": attributed.mlps.tolist(),
    }


@router.get("/roles")
async def roles(http: Request, model: str | None = None) -> dict[str, Any]:
    """Return as JSON the role of each attention head, such as induction, [layer][head]; "" for a head without role.
    Roles are computed once per model. `model` is the name of the model, by default that of the first."""
    service = service_of(http)
    served = service.model(model)
    known: dict[str, list[list[str]]] = http.app.state.roles
    if served.name not in known:
        known[served.name] = await looked(service, served, lambda: head_roles(served.lm.model).map())
    return {"roles": known[served.name]}
