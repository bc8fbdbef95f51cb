"""A decoder with its tokenizer: text in, text out."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from onward.checkpoint.folder import load_model, save_model
from onward.data.tokens import Tokens
from onward.device import choose_device
from onward.errors import UserError
from onward.evaluation.score import Evaluation, evaluate_tokens, logprobs
from onward.fields import build, hints, nearest
from onward.generation.answer import Answer
from onward.generation.beam import beam_search
from onward.generation.constraint import constraint
from onward.generation.contrastive import contrastive_search
from onward.generation.engine import Engine
from onward.generation.options import GenerationOptions
from onward.generation.prompt_cache import PromptCache
from onward.generation.request import Request, TokenLogprob, random_seed
from onward.generation.speculation import Draft, LookupDraft, ModelDraft
from onward.model.config import DecoderConfig
from onward.model.decoder import Decoder
from onward.reports.write import conclude
from onward.text.chat import Message, chat_of
from onward.text.stream import LOOK_BACK
from onward.text.tokenizer import Tokenizer
from onward.training.config import RunConfig
from onward.training.run import Event, Run

MANY = 256  # tokens, where nobody says how many
ENGINE = ("slide", "draft", "lookup", "rows", "cache", "prompt_cache")  # options that are not of the sampling


@dataclass(frozen=True)
class Completion:
    """What followed a prompt."""

    text: str
    tokens: list[int]  # an end token is not among them; those of a stop text are
    finish_reason: str  # why it ended: stop, length or cancelled
    logprobs: list[TokenLogprob]  # how likely each token was, where logprobs is given
    steps: int  # how many times the model was asked
    num_drafted: int  # drafted tokens that were looked at, in speculative decoding
    num_accepted: int  # and those that were taken


@dataclass(frozen=True)
class Score:
    """How likely a model finds a text."""

    tokens: list[int]
    pieces: list[str]  # what each token reads as
    logprobs: list[float | None]  # of each token given those before it, in nats; None: nothing is before it
    total: float  # the exact sum: the log-probability of the text


def options_of(values: Mapping[str, Any]) -> GenerationOptions:
    """GenerationOptions from keyword arguments; a UserError names an unknown one."""
    known = hints(GenerationOptions)
    for name in values:
        if name not in known:
            raise UserError(f"{name} is not a known option: {nearest(name, known)}")
    return GenerationOptions(**values)


@dataclass(frozen=True)
class Found:
    """What a search found to follow a prompt."""

    text: str
    tokens: list[int]  # an end token is not among them
    score: float | None = None  # by which beam search ranks: the log-probability normalized by length
    logprob: float | None = None  # of the tokens


@dataclass
class LanguageModel:
    """What `onward.load` gives: the model, its tokenizer, and what one does with both."""

    model: Decoder
    tokenizer: Tokenizer | None = None
    hf: Mapping[str, Any] = field(default_factory=dict)  # the config.json it was loaded from

    @property
    def config(self) -> DecoderConfig:
        """The sizes and parts of the model."""
        return self.model.config

    @overload
    def generate(self, prompt: str, max_new_tokens: int | None = ..., **options: Any) -> str: ...
    @overload
    def generate(self, prompt: Sequence[str], max_new_tokens: int | None = ..., **options: Any) -> list[str]: ...
    def generate(self, prompt: str | Sequence[str], max_new_tokens: int | None = None, **options: Any) -> Any:
        """What follows a prompt, as text; for a list of prompts a list; with n > 1 a list of n for each prompt.

        The options are those of `complete`.
        """
        texts = [[one.text for one in of] for of in self.complete(prompt, max_new_tokens, **options)]
        each = [of if options.get("n", 1) > 1 else of[0] for of in texts]
        return each[0] if isinstance(prompt, str) else each

    def complete(
        self, prompt: str | Sequence[str], max_new_tokens: int | None = None, **options: Any
    ) -> list[list[Completion]]:
        """All that follows prompts, computed together: for each of them n completions.

        By default 256 tokens are generated, or as many as the context has room for, or fewer up to an end token.
        The options are the fields of Sampling (temperature, top_k, top_p, stop, seed, n, ...), of which `stop` may
        also be a text or a function of the text that says whether to end there, and of `engine`. Of several
        answers, number i uses seed + i.
        """
        answers = self.answers(prompt, max_new_tokens, options)
        for _ in self.run(answers, options):
            pass
        done = [
            Completion(answer.finish(), r.tokens, r.finish_reason, r.logprobs, r.steps, r.num_drafted, r.num_accepted)
            for r, answer in answers.items()
        ]
        n = options.get("n", 1)
        return [done[i : i + n] for i in range(0, len(done), n)]

    def stream(self, prompt: str | Sequence[int], max_new_tokens: int | None = None, **options: Any) -> Iterator[str]:
        """The same as `generate` for one prompt, a text or its tokens, in pieces, each as soon as it is certain."""
        answers = self.answers([prompt], max_new_tokens, options)
        if len(answers) > 1:
            raise UserError(f"n is {len(answers)}: a stream is of one answer, so leave it out")
        (answer,) = answers.values()
        for _ in self.run(answers, options):
            if piece := answer.take():
                yield piece
        answer.finish()
        if piece := answer.take():
            yield piece

    def chat(self, messages: str | Sequence[Message], max_new_tokens: int | None = None, **options: Any) -> str:
        """What the assistant answers to messages, as `[{"role": "user", "content": "Hello"}]`, or to one of the user.

        They are written by the chat template that came with the tokenizer, see `text.chat`. `variables` is a table of
        values for the template (as `{"enable_thinking": False}`); the other options are those of `complete`. With
        `rows=1` and `cache=` the same PagedCache each time, what has been read before is not read again.
        """
        return "".join(self.stream_chat(messages, max_new_tokens, **options))

    def stream_chat(
        self,
        messages: str | Sequence[Message],
        max_new_tokens: int | None = None,
        *,
        variables: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Iterator[str]:
        """The same as `chat`, in pieces, each as soon as it is certain."""
        chat = chat_of(self.text())
        stop = options.get("stop", ())
        options["stop"] = (*chat.stop, *([stop] if isinstance(stop, str) else stop))
        yield from self.stream(chat.encode(messages, **variables or {}), max_new_tokens, **options)

    def beam_search(
        self, prompt: str | Sequence[str], max_new_tokens: int | None = None, **options: Any
    ) -> list[list[Found]]:
        """The likeliest continuations of each prompt that a beam search finds, best first.

        The options are those of `generation.beam.beam_search` (beams, n, length_penalty, ...) and the fields of
        Sampling, which by default change nothing.
        """
        prompts, arguments = self.search(beam_search, prompt, max_new_tokens, options)
        found = beam_search(self.model, prompts, **arguments)
        return [
            [Found(self.continued(tokens, h.tokens), h.tokens, h.score, h.logprob) for h in of]
            for tokens, of in zip(prompts, found)
        ]

    def contrastive_search(
        self, prompt: str | Sequence[str], max_new_tokens: int | None = None, **options: Any
    ) -> list[Found]:
        """What contrastive search finds to follow each prompt.

        The options are those of `generation.contrastive.contrastive_search` (alpha, k) and the fields of Sampling,
        which by default change nothing.
        """
        prompts, arguments = self.search(contrastive_search, prompt, max_new_tokens, options)
        found = contrastive_search(self.model, prompts, **arguments)
        return [Found(self.continued(tokens, new), new) for tokens, new in zip(prompts, found)]

    def search(
        self,
        way: Callable[..., object],
        prompt: str | Sequence[str],
        max_new_tokens: int | None,
        options: Mapping[str, Any],
    ) -> tuple[list[list[int]], dict[str, Any]]:
        """Prompts as tokens, and the arguments of a way to search; new tokens as the longest prompt leaves room for."""
        names, known = {*hints(GenerationOptions)}, inspect.signature(way).parameters
        own = options_of({"temperature": 1.0} | {k: v for k, v in options.items() if k in names})
        for name in "stop", "logprobs", "regex", "json_schema":
            if getattr(own, name) != getattr(GenerationOptions, name):
                raise UserError(f"{name} is given, which a search cannot use: leave it out")
        if own.n > 1:
            if "n" not in known:
                raise UserError(f"n is {own.n}: this search finds one answer, so leave it out")
            options = {**options, "n": own.n}
        rest = {k: v for k, v in options.items() if k not in names or k == "n"}
        if unknown := [name for name in rest if name not in known]:
            raise UserError(f"{unknown[0]} is no option of this search: {nearest(unknown[0], {*known, *names})}")
        requests = self.answers(prompt, max_new_tokens, {"n": 1})
        new = min((r.max_new_tokens for r in requests), default=0)
        allowed = self.allowed()
        return [r.prompt for r in requests], rest | {
            "max_new_tokens": new,
            "sampling": own,
            "min_new_tokens": own.min_new_tokens,
            "stop_token_ids": [*self.end_ids, *own.stop_token_ids],
            "allowed": allowed,
        }

    def continued(self, before: Sequence[int], tokens: Sequence[int]) -> str:
        """Tokens as the text that follows those before."""
        answer = Answer(self.text(), before)
        for token in tokens:
            answer.push(token)
        return answer.finish()

    def score(self, text: str) -> Score:
        """The log-probability of each token of a text and of the whole; its start is known where there is a
        beginning token."""
        tokenizer = self.text()
        tokens = tokenizer.encode(text)
        begins = tokenizer.bos_id is not None and tokens[:1] != [tokenizer.bos_id]
        context = [tokenizer.bos_id, *tokens] if begins else tokens
        if len(context) > self.config.context_length:
            raise UserError(
                f"the text is {len(context)} tokens and the model's context {self.config.context_length}: shorten it, "
                "or use evaluate, which slides"
            )
        found: list[float | None] = [] if begins or not tokens else [None]
        if len(context) > 1:
            found += logprobs(self.model, np.array([context]))[0].tolist()
        pieces = [tokenizer.piece(token) for token in tokens]
        return Score(tokens, pieces, found, math.fsum(p for p in found if p is not None))

    def evaluate(self, text: str | Sequence[str] | np.ndarray | Tokens, stride: int = 0) -> Evaluation:
        """Loss, perplexity and bits per byte over documents, or over tokens, of any length; see `evaluation.score`."""
        tokenizer = self.text()
        if isinstance(text, np.ndarray | Tokens):
            return evaluate_tokens(self.model, tokenizer, text, stride)
        begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
        documents = [begin + tokenizer.encode(t, special=False) for t in ([text] if isinstance(text, str) else text)]
        tokens = [token for document in documents for token in document]
        return evaluate_tokens(self.model, tokenizer, np.array(tokens), stride)

    @property
    def end_ids(self) -> list[int]:
        """The tokens that end an answer."""
        return [i for i in self.text().end_ids if i < self.config.vocab_size]

    def text(self) -> Tokenizer:
        """The tokenizer; a UserError where there is none."""
        if self.tokenizer is None:
            raise UserError("this model came without a tokenizer.json, which text needs: put one into its folder")
        return self.tokenizer

    def answers(
        self, prompt: str | Sequence[str | Sequence[int]], max_new_tokens: int | None, options: Mapping[str, Any]
    ) -> dict[Request, Answer]:
        """A request and its growing text for each prompt, a text or its tokens, and sample; an empty prompt is the
        beginning token."""
        own = options_of({k: v for k, v in options.items() if k not in ENGINE})
        tokenizer, length = self.text(), self.config.context_length
        if (cache := options.get("cache")) is not None:
            length = min(length, cache.length)
        room = MANY if options.get("slide") else length
        form = constraint(tokenizer, self.config.vocab_size, {*self.end_ids, *own.stop_token_ids}, own)
        result: dict[Request, Answer] = {}
        for text in [prompt] if isinstance(prompt, str) else prompt:
            tokens = tokenizer.encode(text) if isinstance(text, str) else list(text)
            if not tokens and tokenizer.bos_id is not None:
                tokens = [tokenizer.bos_id]
            new = max(1, min(MANY, room - len(tokens))) if max_new_tokens is None else max_new_tokens
            twin, last = None, tokenizer.decode(tokens[-LOOK_BACK:])
            for _ in range(own.n):
                answer = Answer(tokenizer, tokens, own.stop, own.stop_when)
                request = Request(
                    tokens,
                    own,
                    new,
                    answer.push,
                    form and form.after(last),
                    min_new_tokens=own.min_new_tokens,
                    stop_token_ids=frozenset(own.stop_token_ids),
                    seed=random_seed() if own.seed is None else own.seed + len(result),
                    num_logprobs=own.logprobs,
                    shares_prompt_with=twin,
                )
                twin = twin or request
                result[request] = answer
        return result

    def run(self, answers: Mapping[Request, Answer], options: Mapping[str, Any]) -> Iterator[tuple[Request, int]]:
        """Go on with all answers together, token by token."""
        engine = self.engine(**{name: options[name] for name in ENGINE if name in options})
        for request in answers:
            engine.add(request)
        return engine.run()

    def engine(
        self,
        *,
        draft: LanguageModel | None = None,
        lookup: int = 0,
        prompt_cache: str | Path | None = None,
        **options: Any,
    ) -> Engine:
        """An engine for this model and tokenizer.

        `draft` is a smaller model with the same vocabulary, or `lookup` the number of tokens to look up in the text,
        for speculative decoding; `prompt_cache` is a folder in which prompts that have been read are kept; the other
        options are those of Engine.
        """
        tokenizer = self.text()
        if draft is not None and draft.text().inner.get_vocab() != tokenizer.inner.get_vocab():
            raise UserError("the draft has another vocabulary than the model: take one with the same tokenizer")
        if draft is not None and lookup:
            raise UserError("draft and lookup are both given: choose one")
        proposals: Draft | None = (
            ModelDraft(draft.model) if draft is not None else LookupDraft(lookup) if lookup else None
        )
        prompts = PromptCache(Path(prompt_cache), self.model) if prompt_cache else None
        return Engine(
            self.model, stop_token_ids=self.end_ids, allowed=self.allowed(), draft=proposals, prompts=prompts, **options
        )

    def allowed(self) -> Tensor:
        """Which tokens stand for a text, (V,)."""
        allowed = torch.ones(self.config.vocab_size, dtype=torch.bool, device=self.model.embed.weight.device)
        allowed[self.text().textless(self.config.vocab_size)] = False
        return allowed


def load(
    folder: str | Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    *,
    allow_nonfinite: bool = False,
) -> LanguageModel:
    """The model in a Hugging Face folder, in its files' precision and on the best device unless told otherwise.

    Weights that are NaN or infinite are a UserError unless `allow_nonfinite`.
    """
    folder = Path(folder)
    model, hf = load_model(folder, dtype, choose_device(device), allow_nonfinite=allow_nonfinite)
    has_tokenizer = any((folder / name).exists() for name in ("tokenizer.json", "vocab.json"))
    return LanguageModel(model, Tokenizer.load(folder) if has_tokenizer else None, hf)


def save(lm: LanguageModel, folder: str | Path, *, shard_bytes: float = 5e9) -> None:
    """Write a model and its tokenizer as a Hugging Face folder, its weights in files of at most `shard_bytes`."""
    folder, hf = Path(folder), lm.hf
    if lm.tokenizer is not None and len(lm.tokenizer.end_ids) > 1:
        hf = {**hf, "eos_token_id": lm.tokenizer.end_ids}  # the tokenizer's files name but one
    save_model(lm.model, folder, hf, shard_bytes)
    if lm.tokenizer is not None:
        lm.tokenizer.save(folder)


def train(
    sources: str | Sequence[str],
    out: str | Path,
    on_event: Callable[[Event], object] = lambda event: None,
    **config: Any,
) -> LanguageModel:
    """Train a fresh model on texts into the run folder `out`, and return it.

    `config` are the fields of RunConfig, such as tokenizer="char", steps=100 or model={"n_layers": 2}; `on_event` is
    called with a Step after each step and with a Validation after each validation. A run that was stopped goes on with
    `onward train --resume`.
    """
    values = {"sources": [sources] if isinstance(sources, str) else list(sources), "out": str(out)} | config
    run = Run.start(build(RunConfig, values))
    for event in run.train():
        on_event(event)
    conclude(run)
    return load(run.folder, device=run.device)
