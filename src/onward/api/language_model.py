"""A decoder with its tokenizer: generates text."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, Unpack, cast, overload

from onward.api.drafting import TrainedDraft, mtp_draft, trained_draft
from onward.api.searching import searched
from onward.api.text_model import TextModel
from onward.base.arguments import Range, checked, named, unchecked
from onward.base.errors import UserError
from onward.compiled.model_state import ModelState
from onward.config.ranges import Size, SizeOrZero
from onward.data.progress import Progress, silent
from onward.evaluation.benchmark import TaskResult, run_task
from onward.evaluation.kept import Kept
from onward.evaluation.tasks import Task, tasks_of
from onward.generation.answer import Answer
from onward.generation.cache.manager import CacheManager
from onward.generation.cache.prefix_files import SIZE, PrefixFiles
from onward.generation.drafts.lookup import LookupDraft
from onward.generation.drafts.model_draft import ModelDraft
from onward.generation.drafts.paced import default_draft
from onward.generation.drafts.proposal import Draft
from onward.generation.engine.engine import ROWS, Engine
from onward.generation.keywords import BeamSearchKeywords, OptionKeywords
from onward.generation.options import GenerationOptions, split
from onward.generation.prompts import Prompt, prompts_of, submit
from onward.generation.request import Request
from onward.generation.results import Completion, SearchResult
from onward.model.attachments import ATTACHMENTS
from onward.text.chat import Message, chat_of

DEFAULT = GenerationOptions()
KEPT = 1 << 27  # an engine whose cache has at most this many bytes is kept for the next call


class EngineKeywords(TypedDict, total=False):
    """The keyword arguments of `LanguageModel.engine`, as types for `typing.Unpack`."""

    slide: bool
    draft: LanguageModel | Literal["mtp"] | None
    lookup: SizeOrZero | None
    rows: Size | None
    cache: CacheManager | None
    prompt_cache: str | Path | None
    prompt_cache_size: int
    prefill_budget: Annotated[int, Range(1, 1 << 20)] | None


class GenerationKeywords(OptionKeywords, EngineKeywords, total=False):
    """The keyword arguments of the methods of LanguageModel that generate, as types for `typing.Unpack`."""

    options: GenerationOptions


@named
@dataclass
class LanguageModel(TextModel):
    """A model and its tokenizer, as `onward.load` returns them: generates text.

    The methods that generate take the fields of GenerationOptions as keyword arguments, or a GenerationOptions as
    `options`; keyword arguments replace its fields. Wrong types, values out of range and unknown names raise a
    UserError.
    """

    draft_head: TrainedDraft | None = None  # trained draft for speculative decoding; None: there is none
    path: Path | None = None  # folder or file from which the model was loaded; None: no files
    idle: dict[object, Engine] = field(default_factory=dict, init=False, repr=False, compare=False)  # see `lent`
    state: ModelState | None = field(default=None, init=False, repr=False, compare=False)  # likewise

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "idle": {}, "state": None}  # copies make engines of their own

    @checked
    def evaluate_tasks(
        self,
        tasks: str | Sequence[Task],
        *,
        examples: SizeOrZero = 0,
        limit: Size = 200,
        chat: bool = False,
        run_code: bool = False,
        kept: Kept | None = None,
        progress: Progress = silent,
    ) -> list[TaskResult]:
        """Return the scores of the model on tasks, such as `"cloze:book.txt, arithmetic(digits=2)"`; see
        `evaluation.tasks`.

        For each task, the model answers up to `limit` questions, each after the same `examples` solved questions; with
        `chat`, the text is a conversation in the chat template. The model answers a question with the likeliest of the
        choices or, without choices, with generated text, as the task defines. `run_code` allows tasks that run programs
        written by the model. Results in `kept`, stored by earlier evaluations (`evaluation.kept.kept_for`), are reused,
        and new results are added to it. `progress` is called with (task, number of finished choices or answers, their
        total number). Raises a UserError for an unknown task, for a task that runs programs without `run_code`, and for
        a file that cannot be read.
        """
        chosen = tasks_of(tasks) if isinstance(tasks, str) else tasks
        for task in chosen:
            if task.runs_code and not run_code:
                raise UserError(
                    f"the task {task.kind} runs programs that the model writes, each in a separate process: allow it "
                    "with --run-code, in Python run_code=True"
                )
        engine = lambda answers: engine_for(self, answers, {})
        ask = partial(run_task, examples=examples, limit=limit, chat=chat, kept=kept, progress=progress)
        return [ask(task, self.model, self.text(), engine) for task in chosen]

    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is a Sequence[str] too
        self,
        prompt: str,
        max_new_tokens: int | None = ...,
        *,
        n: None = None,
        **keywords: Unpack[GenerationKeywords],
    ) -> str: ...
    @overload
    def generate(
        self,
        prompt: Sequence[str],
        max_new_tokens: int | None = ...,
        *,
        n: None = None,
        **keywords: Unpack[GenerationKeywords],
    ) -> list[str]: ...
    @overload
    def generate(
        self,
        prompt: str | Sequence[str],
        max_new_tokens: int | None = ...,
        *,
        n: int,
        **keywords: Unpack[GenerationKeywords],
    ) -> str | list[str] | list[list[str]]: ...
    @checked
    def generate(
        self,
        prompt: str | Sequence[str],
        max_new_tokens: int | None = None,
        *,
        n: int | None = None,
        **keywords: Unpack[GenerationKeywords],
    ) -> str | list[str] | list[list[str]]:
        """Return the text that continues a prompt; for a list of prompts, a list of texts, and with n > 1, a list of n
        texts for each prompt.

        Takes the arguments of `complete`. If an answer failed, its error is raised once the other answers are done.
        """
        completions = completed(self, prompt, {**keywords, "n": n, "max_new_tokens": max_new_tokens})
        if failed := [answer.error for answers in completions for answer in answers if answer.error]:
            raise failed[0]
        texts = [[answer.text for answer in answers] for answers in completions]
        if all(len(answers) == 1 for answers in texts):
            return texts[0][0] if isinstance(prompt, str) else [answers[0] for answers in texts]
        return texts[0] if isinstance(prompt, str) else texts

    @checked
    def complete(
        self,
        prompt: str | Sequence[Prompt],
        max_new_tokens: int | None = None,
        *,
        n: int | None = None,
        **keywords: Unpack[GenerationKeywords],
    ) -> list[list[Completion]]:
        """Return n completions for each prompt, a text or a list of token ids, all computed together.

        By default an answer has at most 256 tokens, or fewer if the context has less room. Keyword arguments are the
        fields of GenerationOptions and the parameters of `engine`. Answer i of a call, counted over all prompts, uses
        seed + i. An answer that failed (its logits are NaN, no token is allowed, a processor raised an error, its text
        breaks the JSON schema) has the finish_reason "error" and an `error`; the other answers do not change.
        """
        return completed(self, prompt, {**keywords, "n": n, "max_new_tokens": max_new_tokens})

    @checked
    def stream(
        self,
        prompt: Prompt,
        max_new_tokens: int | None = None,
        **keywords: Unpack[GenerationKeywords],
    ) -> Generator[str, None, str]:
        """Yield the text that `generate` returns for one prompt in pieces, each as soon as no further token can change
        it.

        Takes the arguments of `complete` except n. The generator returns the finish_reason of the answer. Raises the
        error of an answer that failed.
        """
        return (yield from streamed(self, prompt, {**keywords, "max_new_tokens": max_new_tokens}))

    @checked
    def chat(
        self,
        messages: str | Sequence[Message],
        max_new_tokens: int | None = None,
        *,
        variables: Mapping[str, Any] | None = None,
        **keywords: Unpack[GenerationKeywords],
    ) -> str:
        """Return the assistant's answer to messages, such as `[{"role": "user", "content": "Hello"}]`, or to one user
        message given as text.

        The chat template that came with the tokenizer turns the messages into tokens, see `text.chat`; `variables` are
        values for the template (such as `{"enable_thinking": False}`). The other arguments are those of `stream`. With
        `rows=1` and the same BlockManager as `cache` in each call, tokens that the cache holds are not computed again.
        """
        return "".join(chatted(self, messages, variables, {**keywords, "max_new_tokens": max_new_tokens}))

    @checked
    def stream_chat(
        self,
        messages: str | Sequence[Message],
        max_new_tokens: int | None = None,
        *,
        variables: Mapping[str, Any] | None = None,
        **keywords: Unpack[GenerationKeywords],
    ) -> Generator[str, None, str]:
        """Yield the answer that `chat` returns, in pieces; the generator returns its finish_reason. Takes the arguments
        of `chat`."""
        return (yield from chatted(self, messages, variables, {**keywords, "max_new_tokens": max_new_tokens}))

    @checked
    def beam_search(
        self,
        prompt: str | Sequence[Prompt],
        max_new_tokens: int | None = None,
        **keywords: Unpack[BeamSearchKeywords],
    ) -> list[list[SearchResult]]:
        """Return the n likeliest continuations of each prompt that beam search finds, best first.

        Keyword arguments are those of `generation.search.beam.beam_search` (beams, length_penalty, ...), and the fields
        of Sampling, such as top_k, with a temperature of 1 by default.
        """
        return searched(self, prompt, {**keywords, "max_new_tokens": max_new_tokens})

    @checked
    def engine(
        self,
        *,
        slide: bool = False,
        draft: LanguageModel | Literal["mtp"] | None = None,
        lookup: SizeOrZero | None = None,
        rows: Size | None = None,
        cache: CacheManager | None = None,
        prompt_cache: str | Path | None = None,
        prompt_cache_size: Annotated[int, Range(1, 1 << 60)] = SIZE,
        prefill_budget: Annotated[int, Range(1, 1 << 20)] | None = None,
    ) -> Engine:
        """Return an engine, which computes many requests together, for this model and tokenizer.

        At most `rows` requests are active at a time. `cache` holds their keys and values; the default cache grows. With
        `slide`, a request whose context is full continues from its later half. While other requests decode, a prompt of
        more than `prefill_budget` tokens is prefilled in pieces of this length. For defaults see
        `generation.engine.Engine`.

        For speculative decoding, `draft` is a smaller model with the same vocabulary, or "mtp" for the multi-token
        prediction layer in the model's files. Alternatively, `lookup` is the number of tokens to propose from earlier
        text: 0 for none; with None (the default), the model's draft head proposes tokens or, without a draft head,
        lookup does so while it saves time (`generation.drafts.paced`). `prompt_cache` is a folder that keeps the keys
        and values of prompts, at most `prompt_cache_size` bytes, by default 10 GiB. Raises a UserError for a draft with
        another vocabulary, and if `draft` and `lookup` are both given.
        """
        tokenizer = self.text()
        if isinstance(draft, LanguageModel) and draft.text().inner.get_vocab() != tokenizer.inner.get_vocab():
            raise UserError(
                "Cannot use this draft, because its vocabulary is not the model's: use one with the same tokenizer"
            )
        if draft is not None and lookup:
            raise UserError("Cannot draft tokens by draft and by lookup: choose one")
        proposals: Draft | None = LookupDraft(lookup) if lookup else None
        if draft is not None:
            model, path = self.model, self.path
            proposals = ModelDraft(draft.model) if isinstance(draft, LanguageModel) else mtp_draft(model, path)
        elif lookup is None:
            kv = cache.cache if cache else None
            trained = trained_draft(self.model, self.draft_head, kv) if self.draft_head else None
            proposals = trained or default_draft(self.model, kv)
        return unchecked(Engine)(
            self.model,
            rows=rows,
            cache=cache,
            stop_token_ids=self.stop_token_ids,
            allowed=self.mask(),
            slide=slide,
            draft=proposals,
            files=PrefixFiles(Path(prompt_cache), self.model, prompt_cache_size) if prompt_cache else None,
            prefill_budget=prefill_budget,
        )

    @checked
    def submit(self, engine: Engine, prompts: Sequence[Prompt], options: GenerationOptions) -> dict[Request, Answer]:
        """Add `options.n` requests for each prompt to an engine of this model; return the Answer of each request, whose
        text grows with each step of the engine."""
        return submit(engine, self.text(), prompts, options)


# The methods above check their arguments once; these functions hold the code that several of them share.


def engine_for(lm: LanguageModel, answers: int, options: Mapping[str, object]) -> Engine:
    """Make an engine to compute `answers` answers; `options` are keyword arguments of `LanguageModel.engine`. If
    neither `rows` nor `cache` is given, the engine has at most one row per answer."""
    rows = None if options.get("cache") else max(1, min(answers, ROWS))
    return unchecked(LanguageModel.engine)(lm, **cast(EngineKeywords, {"rows": rows, **options}))


@contextmanager
def lent(lm: LanguageModel, answers: int, options: Mapping[str, object]) -> Iterator[Engine]:
    """Lend an engine, made by `engine_for`, with the model state of the last call's engine if that call kept it.
    Without options, and if nothing but quantization is attached to the model, the last call's engine itself is lent,
    with its cache, if it is idle and was made for the same model, tokenizer and number of answers."""
    key = answers, lm.model, lm.draft_head, id(lm.config), lm.model.dtype, id(lm.mask()), *lm.stop_token_ids
    attached = vars(lm.model).get(ATTACHMENTS)
    is_kept = attached is None or attached.by_kind.keys() <= {"quantization"}
    engine = lm.idle.pop(key, None) if is_kept and not options else None
    state, lm.state = lm.state, None  # calls that overlap have states of their own
    lm.idle.clear()
    if engine is None:
        engine = engine_for(lm, answers, options)
        if state and state.model is lm.model:
            engine.state = engine.runner.state = engine.scheduler.prefixes.state = state
        engine.state.kept = is_kept
    engine.state.confirmed = False
    yield engine
    lm.state = engine.state if is_kept else None  # None, too, if an exception ends the call
    if is_kept and not options and engine.scheduler.manager.cache.nbytes() <= KEPT:
        lm.idle[key] = engine


def completed(
    lm: LanguageModel, prompt: str | Sequence[Prompt], keywords: Mapping[str, object]
) -> list[list[Completion]]:
    options, rest = split(keywords, EngineKeywords, DEFAULT)
    prompts = prompts_of(prompt)
    with lent(lm, len(prompts) * options.n, rest) as engine:
        answers = submit(engine, lm.text(), prompts, options)
        engine.finish()
    done = [
        Completion(
            answer.finish(),
            request.tokens,
            request.finish_reason,
            request.seed,
            request.logprobs,
            request.steps,
            request.num_drafted,
            request.num_accepted,
            request.error,
        )
        for request, answer in answers.items()
    ]
    return [done[i : i + options.n] for i in range(0, len(done), options.n)]


def streamed(lm: LanguageModel, prompt: Prompt, keywords: Mapping[str, object]) -> Generator[str, None, str]:
    options, rest = split(keywords, EngineKeywords, DEFAULT)
    if options.n > 1:
        raise UserError(f"Cannot stream {options.n} answers at the same time: leave out n")
    with lent(lm, 1, rest) as engine:
        [(request, answer)] = submit(engine, lm.text(), [prompt], options).items()
        while engine.busy:
            engine.advance()
            if piece := answer.take():
                yield piece
                engine.state.confirmed = False  # the caller may have changed the model
    answer.finish()
    if piece := answer.take():
        yield piece
    if request.error:
        raise request.error
    return request.finish_reason


def chatted(
    lm: LanguageModel,
    messages: str | Sequence[Message],
    variables: Mapping[str, Any] | None,
    keywords: Mapping[str, object],
) -> Generator[str, None, str]:
    chat = chat_of(lm.text())
    options, rest = split(keywords, EngineKeywords, DEFAULT)
    options = replace(options, stop=(*chat.stop, *options.stop))
    return (yield from streamed(lm, chat.encode(messages, **variables or {}), {"options": options, **rest}))
