"""A decoder with its tokenizer: text in, text out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch

from onward.checkpoint.folder import load_model, save_model
from onward.device import choose_device
from onward.errors import UserError
from onward.evaluation.score import Evaluation, evaluate, log_probabilities
from onward.fields import build
from onward.files import write_json
from onward.generation.generate import Request, generate
from onward.generation.sampling import Sampling
from onward.inspection.curve import write_loss_svg
from onward.inspection.report import write_report
from onward.model.config import DecoderConfig
from onward.model.decoder import Decoder
from onward.text.stream import TextStream
from onward.text.tokenizer import Tokenizer
from onward.training.config import RunConfig
from onward.training.run import Event, Run

MANY = 256  # tokens, where nobody says how many


@dataclass(frozen=True)
class Score:
    """How likely a model finds a text."""

    tokens: list[int]
    pieces: list[str]  # what each token reads as
    log_probabilities: list[float | None]  # of each token given those before it, in nats; None: nothing is before it
    total: float  # the exact sum: the log-probability of the text


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
    def generate(self, prompt: str, max_new_tokens: int | None = ..., **sampling: Any) -> str: ...
    @overload
    def generate(self, prompt: Sequence[str], max_new_tokens: int | None = ..., **sampling: Any) -> list[str]: ...
    def generate(
        self, prompt: str | Sequence[str], max_new_tokens: int | None = None, *, slide: bool = False, **sampling: Any
    ) -> str | list[str]:
        """What follows a prompt, as text; for a list of prompts, computed together, a list.

        By default 256 tokens are generated, or as many as the context has room for, or fewer up to an end token.
        `sampling` are the fields of Sampling: temperature, top_k, top_p, seed. Of a list, prompt i uses seed + i. With
        `slide`, more tokens than the context can be generated.
        """
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        requests = self.requests(prompts, max_new_tokens, slide, sampling)
        for _ in generate(self.model, requests, **self.limits(), slide=slide):
            pass
        texts = []
        for request in requests:
            text = TextStream(self.text(), request.prompt)
            texts.append("".join(text.push(token) for token in request.tokens) + text.finish())
        return texts[0] if isinstance(prompt, str) else texts

    def stream(
        self, prompt: str, max_new_tokens: int | None = None, *, slide: bool = False, **sampling: Any
    ) -> Iterator[str]:
        """The same as `generate`, in pieces, each as soon as it is certain."""
        requests = self.requests([prompt], max_new_tokens, slide, sampling)
        text = TextStream(self.text(), requests[0].prompt)
        for _, token in generate(self.model, requests, **self.limits(), slide=slide):
            if piece := text.push(token):
                yield piece
        if piece := text.finish():
            yield piece

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
            found += log_probabilities(self.model, np.array([context]))[0].tolist()
        pieces = [tokenizer.piece(token) for token in tokens]
        return Score(tokens, pieces, found, math.fsum(p for p in found if p is not None))

    def evaluate(self, text: str | Sequence[str] | np.ndarray, stride: int = 0) -> Evaluation:
        """Loss, perplexity and bits per byte over documents, or over tokens, of any length; see `evaluation.score`."""
        tokenizer = self.text()
        if isinstance(text, np.ndarray):
            return evaluate(self.model, text, tokenizer.byte_count(text[1:].tolist()), stride)
        begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
        documents = [begin + tokenizer.encode(t, special=False) for t in ([text] if isinstance(text, str) else text)]
        tokens = [token for document in documents for token in document]
        return evaluate(self.model, np.array(tokens), tokenizer.byte_count(tokens[1:]), stride)

    def text(self) -> Tokenizer:
        """The tokenizer; a UserError where there is none."""
        if self.tokenizer is None:
            raise UserError("this model came without a tokenizer.json, which text needs: put one into its folder")
        return self.tokenizer

    def requests(
        self, prompts: Sequence[str], max_new_tokens: int | None, slide: bool, sampling: Mapping[str, Any]
    ) -> list[Request]:
        """Prompts as tokens; an empty one starts from the beginning token."""
        tokenizer, values, length = self.text(), Sampling(**sampling), self.config.context_length
        result = []
        for i, prompt in enumerate(prompts):
            tokens = tokenizer.encode(prompt)
            if not tokens and tokenizer.bos_id is not None:
                tokens = [tokenizer.bos_id]
            seed = None if values.seed is None else values.seed + i
            one = Sampling(values.temperature, values.top_k, values.top_p, seed)
            room = MANY if slide else max(1, min(MANY, length - len(tokens)))
            result.append(Request(tokens, one, room if max_new_tokens is None else max_new_tokens))
        return result

    def limits(self) -> dict[str, Any]:
        """The end tokens and the tokens never to be sampled, as `generate` takes them."""
        tokenizer = self.text()
        banned = torch.zeros(self.config.vocab_size, dtype=torch.bool, device=self.model.embed.weight.device)
        banned[tokenizer.textless(self.config.vocab_size)] = True
        return {"end": {tokenizer.eos_id} - {None}, "banned": banned}


def load(
    folder: str | Path, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> LanguageModel:
    """The model in a Hugging Face folder, in its files' precision and on the best device unless told otherwise."""
    folder = Path(folder)
    model, hf = load_model(folder, dtype, choose_device(device))
    has_tokenizer = any((folder / name).exists() for name in ("tokenizer.json", "vocab.json"))
    return LanguageModel(model, Tokenizer.load(folder) if has_tokenizer else None, hf)


def save(lm: LanguageModel, folder: str | Path) -> None:
    """Write a model and its tokenizer as a Hugging Face folder."""
    folder = Path(folder)
    save_model(lm.model, folder, lm.hf)
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
    return LanguageModel(run.model, run.tokenizer, run.hf)


def conclude(run: Run) -> Evaluation | None:
    """Evaluate a finished run on its whole validation text; write result.json, report.html and loss.svg."""
    lm, result = LanguageModel(run.model.eval(), run.tokenizer, run.hf), None
    if run.data.validation is not None:
        result = lm.evaluate(run.data.validation, stride=lm.config.context_length)
    figures = {} if result is None else asdict(result)
    write_json(run.folder / "result.json", figures | {"seconds": run.seconds, "step": run.step})
    held = run.data.train if run.data.validation is None else run.data.validation
    write_report(run.folder, run.model, run.tokenizer, run.tokenizer.decode(held[:64].tolist()))
    write_loss_svg(run.folder, lm.config.vocab_size)
    return result
