"""Conversion of prompts to requests, and of tokens back to text."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Protocol

from onward.base.arguments import unchecked
from onward.base.errors import UserError
from onward.generation.answer import Answer
from onward.generation.constraint import check_of, constraint, read_schema
from onward.generation.engine.engine import Engine
from onward.generation.options import FORMS, GenerationOptions
from onward.generation.request import Constraint, Request, random_seed
from onward.generation.schemas import Claim, SchemaWarning, prepared
from onward.text.media import refuse_media
from onward.text.stream import LOOK_BACK
from onward.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]  # a text, or its token ids
DEFAULT_NEW_TOKENS = 256


class StartedConstraint(Protocol):
    """Interface of the constraint of an empty answer, such as `constraint.TextConstraint`."""

    def after(self, text: str) -> Constraint: ...

    def claims(self, tokens: Sequence[int]) -> list[Claim]: ...


def default_new_tokens(room: int) -> int:
    """Return the default maximum number of new tokens: DEFAULT_NEW_TOKENS, or `room`, the number of tokens that still
    fit into the context, if that is less; at least 1."""
    return max(1, min(DEFAULT_NEW_TOKENS, room))


def prompts_of(prompt: str | Sequence[Prompt]) -> list[Prompt]:
    return [prompt] if isinstance(prompt, str) else list(prompt)


def prompt_tokens(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    """Return the token ids of a prompt; for an empty prompt, the beginning-of-text token. Raises a UserError for tokens
    of images or sound."""
    if tokenizer.media:
        refuse_media(tokenizer.media, prompt)
    tokens = tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
    return tokens or tokenizer.begin([])


def requests_for(
    engine: Engine,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    options: GenerationOptions,
    form: StartedConstraint | None = None,
) -> dict[Request, Answer]:
    """Make options.n requests for each prompt, to be added to an engine, and return each request with its Answer, whose
    text grows as the engine steps. The engine is not changed, so any thread may call this while the engine steps.

    `form` is the constraint of the options, if it has already been created. Request i, counted over all prompts, has
    the seed options.seed + i, or a random one. Requests with the same prompt may share its prefill. By default an
    answer has at most DEFAULT_NEW_TOKENS tokens, or fewer if the context has less room.
    """
    if form is None and any(getattr(options, name) for name in FORMS):
        ends = {*engine.stop_token_ids, *options.stop_token_ids}
        form = constraint(tokenizer, engine.model.config.vocab_size, ends, options)
    answers: dict[Request, Answer] = {}
    for prompt in prompts:
        tokens = prompt_tokens(tokenizer, prompt)
        room = DEFAULT_NEW_TOKENS if engine.slide else engine.length - len(tokens)
        known = [i for i in tokens[-LOOK_BACK:] if 0 <= i < engine.model.config.vocab_size]  # others: see `Engine.add`
        before = tokenizer.decode(known) if form else ""
        for _ in range(options.n):
            limit = default_new_tokens(room) if options.max_new_tokens is None else options.max_new_tokens
            answer = unchecked(Answer)(tokenizer, tokens, options.stop, options.stop_when, limit, options.include_stop)
            request = Request(
                tokens,
                options,
                limit,
                answer.push,
                form.after(before) if form else None,
                options.min_new_tokens,
                frozenset(options.stop_token_ids),
                random_seed() if options.seed is None else options.seed + len(answers),
                options.logprobs,
                options.adapter,
                check_of(form.claims) if form else None,
                calls_user=bool(options.stop_when or options.processors),
            )
            answers[request] = answer
    return answers


def schema_note(options: GenerationOptions) -> str:
    """Return a sentence about the keywords of the options' JSON schema that are checked only on the complete answer; ""
    if there are none."""
    return prepared(read_schema(options.json_schema)).note if options.json_schema else ""


def submit(
    engine: Engine, tokenizer: Tokenizer, prompts: Sequence[Prompt], options: GenerationOptions
) -> dict[Request, Answer]:
    """Make requests for the prompts as `requests_for` does, add them to an engine, and return each request with its
    Answer. If one of several requests can never be answered, only it fails, with `Request.error` set; with a single
    request, its error is raised. A SchemaWarning names keywords of a JSON schema that are checked only at the end."""
    answers = requests_for(engine, tokenizer, prompts, options)
    if note := schema_note(options):
        warnings.warn(note, SchemaWarning, stacklevel=2)
    for number, request in enumerate(answers):
        try:
            engine.add(request)
        except UserError as error:
            if len(answers) == 1:
                raise
            request.finish_reason, request.error = "error", UserError(f"prompt {number // options.n + 1}: {error}")
    return answers
