"""/v1/completions: texts that continue prompts."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field

from onward.generation.logprobs import TokenLogprob
from onward.generation.prompts import prompt_tokens
from onward.serving.errors import ApiError
from onward.serving.fields import AnswerFields
from onward.serving.jobs import Job, Update, merged
from onward.serving.models import Served
from onward.serving.pieces import scores
from onward.serving.prompt_size import check_size, prompts_in, size_of
from onward.serving.service import account_of, service_of
from onward.serving.shapes import Prompts, Whole
from onward.serving.streams import Streamed, event
from onward.serving.usage import TextOffsets, of_completion, usage_of
from onward.text.media import refuse_media

router = APIRouter(tags=["OpenAI"])
DEFAULT_TOKENS = 16  # tokens of an answer by default, as in OpenAI's API, or fewer if the context is full
MOST_LOGPROBS = 100


class CompletionRequest(AnswerFields):
    """The body of a request of /v1/completions."""

    prompt: Prompts = ""
    logprobs: Annotated[Whole, Field(ge=0, le=MOST_LOGPROBS)] | None = Field(
        None, description="Alternatives per token."
    )
    echo: bool | None = Field(None, description="Begin each answer with its prompt.")
    add_special_tokens: bool | None = Field(None, description="Prepend the tokenizer's begin-of-text tokens.")
    best_of: Whole | None = Field(None, description="The same as n: the server ranks no answers.")
    return_token_ids: bool | None = None


@router.post("/v1/completions", response_model=None)
async def completions(body: CompletionRequest, http: Request) -> Any:
    """Continue one prompt or several, given as texts or as token ids: return the reply as JSON or, if the request asks
    for a stream, as server-sent events."""
    service = service_of(http)
    served = service.model(body.model)
    prompts = await service.compute(tokens_of, body, served, size=size_of(body.prompt))
    room = max(1, served.engine.length - max(map(len, prompts), default=0))
    options = body.options(min(DEFAULT_TOKENS, room), room, logprobs=body.logprobs)
    if body.best_of not in (None, options.n):
        raise ApiError(
            f"Cannot rank answers by best_of {body.best_of}: leave it out, or give n ({options.n})", param="best_of"
        )
    job = await service.submit(account_of(http), served, prompts, options, "completions", body.edits)
    choices = [CompletionChoice(body, served, prompt) for prompt in prompts for _ in range(options.n)]
    if body.echo and body.logprobs is not None:
        for number, prompt in enumerate(prompts):
            scored = await service.beside(scores(served, prompt, body.logprobs))
            for choice in choices[number * options.n :][: options.n]:
                choice.prompt_logprobs = [prompt[0], *scored]
    reply = CompletionReply(body, served, job, choices)
    if body.stream:
        return service.stream(http, job, reply)
    return await service.respond(job, reply.as_json)


def tokens_of(body: CompletionRequest, served: Served) -> list[list[int]]:
    tokenizer = served.lm.text()
    special = body.add_special_tokens is not False
    result = []
    for prompt in prompts_in(body.prompt):
        check_size(size_of(prompt), served, "prompt", body.truncate_prompt_tokens)
        refuse_media(tokenizer.media, prompt)
        tokens = tokenizer.encode(prompt, special=special) if isinstance(prompt, str) else prompt
        result.append(truncated(prompt_tokens(tokenizer, tokens), body, served))
    return result


def truncated(tokens: list[int], body: AnswerFields, served: Served) -> list[int]:
    """The last truncate_prompt_tokens tokens; -1: as many as fit before one answer token."""
    keep = body.truncate_prompt_tokens
    if keep is None:
        return tokens
    if keep < -1 or keep == 0:
        raise ApiError(f"truncate_prompt_tokens is {keep}: give at least 1, or -1", param="truncate_prompt_tokens")
    return tokens[-(keep if keep > 0 else served.engine.length - 1) :]


class CompletionChoice:
    """One answer of a reply, as it grows."""

    def __init__(self, body: CompletionRequest, served: Served, prompt: list[int]) -> None:
        self.body, self.tokenizer, self.prompt = body, served.lm.text(), prompt
        self.before = self.tokenizer.decode(prompt) if body.echo else ""  # text that the next piece begins with
        self.prompt_logprobs: list[TokenLogprob | int] = []
        self.offsets = TextOffsets(self.tokenizer, prompt, len(self.before))  # of the answer's tokens

    def piece(self, index: int, update: Update) -> dict[str, Any]:
        """The `index`-th item of `choices`."""
        text = self.before + update.text
        logprobs = None
        if self.body.logprobs is not None:
            tokens = [*self.prompt_logprobs, *update.logprobs]
            before = self.prompt if self.prompt_logprobs else []
            offsets = [*map(TextOffsets(self.tokenizer).push, before)]
            offsets += [self.offsets.push(one.token) for one in update.logprobs]
            logprobs = of_completion(self.tokenizer, tokens, offsets, self.body.logprobs)
        self.before, self.prompt_logprobs = "", []
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": update.finish_reason or None}
        return choice | ({"token_ids": update.tokens} if self.body.return_token_ids else {})


class CompletionReply(Streamed):
    """The reply to a request, one JSON object or server-sent events, from the updates of its answers."""

    def __init__(self, body: CompletionRequest, served: Served, job: Job, choices: Sequence[CompletionChoice]) -> None:
        self.body, self.served, self.job, self.choices = body, served, job, choices
        self.head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": served.name,
        }

    def as_json(self, updates: list[Update]) -> dict[str, Any]:
        joined = [merged([update for update in updates if update.index == i]) for i in range(len(self.choices))]
        choices = [choice.piece(i, update) for i, (choice, update) in enumerate(zip(self.choices, joined))]
        return {**self.head, "choices": choices, "usage": usage_of(self.job)}

    def growth(self, update: Update) -> Iterator[bytes]:
        choice = self.choices[update.index].piece(update.index, update)
        usage = {"usage": usage_of(self.job)} if self.body.continuous_usage else {}
        yield event({**self.head, "choices": [choice], **usage})

    def ending(self) -> Iterator[bytes]:
        if self.body.include_usage:
            yield event({**self.head, "choices": [], "usage": usage_of(self.job)})
        yield from super().ending()
