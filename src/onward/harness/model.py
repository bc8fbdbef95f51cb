"""The model "onward" of lm-evaluation-harness."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal

import tokenizers
import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from onward.api.folders import load
from onward.api.language_model import LanguageModel, engine_for
from onward.base.errors import UserError
from onward.data.progress import Progress
from onward.evaluation.answers import write_answers
from onward.evaluation.continuations import Pair, score_continuations
from onward.evaluation.kept import Kept
from onward.generation.options import GenerationOptions
from onward.text.chat import Message, chat_of
from onward.text.tokenizer import utf8

READ = frozenset({"top_p", "top_k", "min_p", "repetition_penalty", "temperature"})  # supported options
SEED = 1234  # seed of sampled answers; the library's default


class Truncated(UserWarning):
    """Warning that prompts are longer than the model's context, and that their first tokens are left out."""


@register_model("onward")
class HarnessModel(TemplateLM):
    """An Onward model with the model interface of lm-evaluation-harness.

    `path` is a folder, a GGUF file, the folder of an adapter, a name on the hub, or a loaded model; `dtype`, `device`,
    `quantize`, `adapter_folder`, `rope` and `revision` are those of `onward.load`. `kept` stores results: requests that
    it contains are not computed again, and new results are added.
    """

    def __init__(
        self,
        path: str | LanguageModel,
        *,
        dtype: str = "",
        quantize: Literal["", "int8", "int4"] = "",
        adapter_folder: str = "",
        rope: str | None = None,
        revision: str = "",
        device: str | None = None,
        batch_size: int | str | None = None,  # ignored: batches are formed by their number of tokens
        max_batch_size: int | None = None,
        kept: Kept | None = None,
        progress: Progress | None = None,
    ) -> None:
        super().__init__()
        if device == "cuda:0" and not torch.cuda.is_available():
            device = None  # `lm_eval` passes "cuda:0" by default, even without CUDA
        if isinstance(path, str):
            path = load(
                path,
                getattr(torch, dtype) if dtype else None,
                device,
                quantize=quantize or None,
                adapter_folder=adapter_folder or (),
                rope=rope,
                revision=revision,
            )
        self.lm, self.kept, self.progress = path, kept or Kept(), progress or Bars()
        self.text = self.lm.text()
        # like those of the library's other models, but unlike Onward's, this tokenizer converts control tokens in a
        # text
        self.inner = tokenizers.Tokenizer.from_str(self.text.inner.to_str())
        self.inner.encode_special_tokens = False
        self.encoded = lru_cache(maxsize=256)(self.encode)  # the library encodes a question's context once per choice

    @property
    def max_length(self) -> int:
        return self.lm.config.context_length

    @property
    def eot_token_id(self) -> int:
        if self.text.eos_id is None:
            raise UserError("the tokenizer has no end-of-text token, which lm-evaluation-harness needs: add one")
        return self.text.eos_id

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context: the beginning-of-text token or, if the tokenizer has none, the
        end-of-text token."""
        return self.eot_token_id if self.text.prefix_id is None else self.text.prefix_id

    @property
    def tokenizer_name(self) -> str:
        # lm-evaluation-harness caches its requests under this name
        return f"onward-{self.text.vocab_size}"

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The chat template, which lm-evaluation-harness writes into its results; None without `chat_template`."""
        return self.text.templates.get("default", "") if chat_template else None

    def apply_chat_template(self, chat_history: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """Convert messages to text. Without `add_generation_prompt`, the text ends right after the last message's
        content. System messages are left out if the template refuses them."""
        chat, last = chat_of(self.text), str(chat_history[-1]["content"]).strip()
        try:
            text = chat.text(chat_history, add_generation_prompt)
        except UserError:
            others = [message for message in chat_history if message["role"] != "system"]
            if len(others) == len(chat_history):
                raise
            text = chat.text(others, add_generation_prompt)
        end = len(text) if add_generation_prompt else text.rindex(last) + len(last)
        return str.__getitem__(text, slice(end))

    def encode(self, text: str, special: bool) -> list[int]:
        """Encode a text. Unlike Onward's tokenizers, this converts control tokens that are written in the text."""
        return self.text.encoded(self.inner.encode, utf8(text), add_special_tokens=special).ids

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Encode a text for lm-evaluation-harness, by default with control tokens unless the text already begins with
        the prefix token."""
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self.text.piece(self.prefix_token_id))
        return self.encoded(string, add_special_tokens)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        pairs = [
            Pair(tuple(context), tuple(rest)) if rest else Pair(tuple(context[:-1]), tuple(context[-1:]))
            for _, context, rest in requests
        ]
        self.warn_of_length([len(pair.context) + len(pair.continuation) - 1 for pair in pairs], self.max_length)
        report = lambda done: self.progress("log-likelihoods", done, len(pairs))
        return [
            (scored.logprob, scored.greedy) for scored in score_continuations(self.lm.model, pairs, report, self.kept)
        ]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of each whole text, in disjoint windows of the context length."""
        windows = [[*self.windows(*request.args)] for request in requests]
        scored = iter(self._loglikelihood_tokens([(None, *one) for some in windows for one in some]))
        return [sum(next(scored)[0] for _ in some) for some in windows]

    def windows(self, text: str) -> Iterator[tuple[list[int], list[int]]]:
        """Windows of a long text as (context, tokens to score)."""
        tokens = self.tok_encode(text)
        for window in get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1):
            yield make_disjoint_window(window)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The text that the model generates for each request, up to a stop string."""
        results: dict[int, str] = {}
        groups: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(i)
        for group in groups.values():
            options = self.options(requests[group[0]].args[1])
            room, before = self.max_length - (options.max_new_tokens or 0), len(results)
            prompts = [self.tok_encode(requests[i].args[0]) for i in group]
            self.warn_of_length(list(map(len, prompts)), room)
            report = lambda done, before=before: self.progress("answers", before + done, len(requests))
            engine = engine_for(self.lm, len(group), {})
            answers = write_answers(engine, self.text, [one[-room:] for one in prompts], options, report, self.kept)
            results |= {i: self.cut(answer.tokens, options) for i, [answer] in zip(group, answers)}
        return [results[i] for i in range(len(requests))]

    def options(self, given: dict[str, Any]) -> GenerationOptions:
        """Convert a task's generation options to GenerationOptions. Raises a UserError for an unsupported option."""
        values = dict(normalize_gen_kwargs(given, 256))
        values.pop("do_sample", None)
        most = min(values.pop("max_gen_toks"), self.max_length - 1)
        ends = StopTexts(tuple(text for text in values.pop("until", []) if text), self.strips)
        if unread := values.keys() - READ:
            raise UserError(f"Cannot generate with the option {min(unread)} of a task: remove it from the task")
        values = {"temperature": 0.0, **values}
        return GenerationOptions(max_new_tokens=most, stop_when=ends, seed=SEED, **values)

    def cut(self, tokens: list[int], options: GenerationOptions) -> str:
        """The answer before the first stop string, decoded without its prompt, as lm-evaluation-harness does."""
        text = self.text.decode(tokens)
        for stop in options.stop_when.texts if isinstance(options.stop_when, StopTexts) else ():
            text = text.split(stop)[0]
        return text

    @cached_property
    def strips(self) -> bool:
        """Whether an answer that is decoded without its prompt loses the space at its beginning."""
        spaced = (i for i in range(self.text.vocab_size) if self.text.piece(i).startswith(" "))
        return not self.text.decode([first]).startswith(" ") if (first := next(spaced, None)) is not None else False

    def warn_of_length(self, lengths: Sequence[int], room: int) -> None:
        if count := sum(length > room for length in lengths):
            warnings.warn(
                Truncated(
                    f"{count} of {len(lengths)} requests lose their first tokens, because the context has room for "
                    f"{room} tokens: give fewer examples"
                ),
                stacklevel=2,
            )


@dataclass(frozen=True)
class StopTexts:
    """A stopping condition: the text of an answer contains one of `texts`."""

    texts: tuple[str, ...]
    strips: bool  # whether to ignore the space before the first token

    def __call__(self, text: str) -> bool:
        alone = text.removeprefix(" ") if self.strips else text
        return any(stop in alone for stop in self.texts)


class Bars:
    """Shows a tqdm progress bar for each kind of request, as lm-evaluation-harness does."""

    def __init__(self) -> None:
        self.bar: Any = None

    def __call__(self, task: str, done: int, total: int) -> None:
        if self.bar is None or self.bar.desc != task:
            self.bar = tqdm(desc=task, total=total)
        self.bar.update(done - self.bar.n)
        if done == total:
            self.bar.close()
            self.bar = None
