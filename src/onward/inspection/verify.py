"""Measures the exactness of a model: whether its logits with caches, batches, drafts or in another program equal those
of the plain forward pass.

Shapes: T tokens, S tokens in one call, V vocabulary.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onward.base.arguments import checked
from onward.base.errors import UserError
from onward.checkpoint.huggingface.save import save_model
from onward.checkpoint.load import load_model
from onward.generation.answer import Answer
from onward.generation.cache.blocks import BlockManager
from onward.generation.cache.manager import CacheManager
from onward.generation.drafts.model_draft import ModelDraft
from onward.generation.engine.engine import Engine
from onward.generation.request import Request
from onward.generation.sampling import Sampling
from onward.inspection.lens import residuals
from onward.inspection.references import Reference
from onward.model.adapters import adapter_names
from onward.model.cache import KVCache
from onward.model.decoder import Decoder, without_dropout
from onward.model.paged import PagedKVCache
from onward.text.tokenizer import Tokenizer

TOKENS, NEW, CHUNK = 48, 24, 7  # number of tokens in a row, of generated tokens, and of tokens in a call
# relative to the largest logit, or to 1 if that is smaller
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class PromiseFinding:
    """A promise of exactness, such as "cached = plain", with the measured and the allowed difference."""

    promise: str
    measured: float  # largest difference, in the unit `of`
    allowed: float
    of: str
    note: str = ""

    @property
    def holds(self) -> bool:
        return self.measured <= self.allowed  # False for NaN


class VerifiedModel:
    """The model to verify, two rows of random tokens (2, T), and their logits (2, T, V) without a cache; `hf` is its
    config.json."""

    def __init__(self, model: Decoder, tokenizer: Tokenizer | None, hf: Mapping[str, Any]) -> None:
        self.model, self.tokenizer, self.hf = model, tokenizer, hf
        length = min(TOKENS, model.config.context_length)
        vocabulary = min(model.config.vocab_size, tokenizer.vocab_size if tokenizer else model.config.vocab_size)
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(vocabulary, (2, length), generator=generator).to(model.device)
        self.half = max(1, length // 2)  # number of tokens in a prompt
        self.plain = model(self.tokens)
        self.allowed = TOLERANCE[model.dtype] * max(1.0, float(self.plain.abs().max()))

    def compare(self, promise: str, logits: Tensor, note: str = "") -> PromiseFinding:
        difference = float((logits.float() - self.plain.float()).abs().max())
        return PromiseFinding(promise, difference, self.allowed, "a logit", note)

    def manager(self, kind: str, chunk: int) -> CacheManager:
        """The manager of a cache, "contiguous" or "paged", for the two rows, with at most `chunk` tokens in a call."""
        length = self.tokens.size(1)
        options: dict[str, Any] = {"device": self.model.device, "dtype": self.model.dtype, "keep": chunk}
        if kind == "paged":
            blocks = 2 * (-(-length // 4) + 2)
            return BlockManager(
                PagedKVCache(self.model.config, 2, length, chunk, blocks=blocks, block_size=4, **options)
            )
        return CacheManager(KVCache(self.model.config, 2, length, chunk, **options))

    def feed(self, manager: CacheManager, tokens: Tensor, start: int) -> Tensor:
        """Logits (2, S, V) of tokens (2, S) at positions from `start` on."""
        end = start + tokens.size(1)
        for row in range(2):
            manager.reserve(row, start, end)
        positions = torch.arange(start, end, device=tokens.device).expand_as(tokens)
        return self.model(tokens, positions, manager.cache.view())

    def in_chunks(self, chunk: int, kind: str = "contiguous", wrong: bool = False) -> Tensor:
        """Logits (2, T, V), computed by calls of at most `chunk` tokens. With `wrong`, wrong tokens are fed before each
        call at the same positions, and the call overwrites them."""
        manager, pieces = self.manager(kind, chunk), []
        for start in range(0, self.tokens.size(1), chunk):
            piece = self.tokens[:, start : start + chunk]
            if wrong:
                self.feed(manager, piece.flip(0, 1), start)
            pieces.append(self.feed(manager, piece, start))
        return torch.cat(pieces, 1)

    def generate(self, *, rows: int = 1, draft: bool = False) -> list[int]:
        """Greedy tokens after the first half of the first row, batched with `rows` - 1 requests of other lengths."""
        engine = Engine(self.model, rows=rows, draft=ModelDraft(self.model, 3) if draft else None)
        prompts = [self.tokens[row % 2, : max(1, self.half - row)].tolist() for row in range(rows)]
        new = min(NEW, self.model.config.context_length - self.half)
        requests = [engine.add(Request(prompt, Sampling(temperature=0), new)) for prompt in prompts]
        engine.finish()
        if error := requests[0].error:
            raise error
        return requests[0].tokens

    def generated(self, promise: str, **options: Any) -> PromiseFinding:
        """Measure the largest gap, in a plain forward pass, between the greatest logit and the logit of a generated
        token."""
        tokens, half = self.generate(**options), self.half
        row = torch.tensor([[*self.tokens[0, :half].tolist(), *tokens]], device=self.tokens.device)
        logits = self.model(row)[0, half - 1 : -1].float()
        below = logits.amax(-1) - logits.gather(-1, row[0, half:, None])[:, 0]
        equal = int((below == 0).sum())
        return PromiseFinding(
            promise, float(below.max()), self.allowed, "a logit", f"{equal} of {len(tokens)} tokens equal"
        )


def saved(subject: VerifiedModel) -> PromiseFinding:
    with tempfile.TemporaryDirectory() as folder:
        save_model(subject.model, Path(folder), subject.hf)
        loaded, _ = load_model(Path(folder), device=subject.model.device)
        return replace(subject.compare("saved = loaded", loaded(subject.tokens)), allowed=0.0)


def streamed(subject: VerifiedModel) -> PromiseFinding:
    assert subject.tokenizer
    tokens, answer = subject.generate(), Answer(subject.tokenizer)
    for token in tokens:
        answer.push(token)
    streamed_text, text = answer.finish(), subject.tokenizer.decode(tokens)
    wrong = abs(len(streamed_text) - len(text)) + sum(a != b for a, b in zip(streamed_text, text))
    return PromiseFinding("streamed = whole text", float(wrong), 0.0, "characters", f"{len(text)} characters")


def batched(subject: VerifiedModel) -> PromiseFinding:
    alone = [subject.model(row[None]) for row in subject.tokens]
    return subject.compare("batched = alone", torch.cat(alone))


def with_rows(subject: VerifiedModel) -> PromiseFinding:
    assert subject.tokenizer
    ids, rows = subject.tokenizer.vocab_size, subject.model.config.vocab_size
    return PromiseFinding(
        "token ids have rows", float(max(0, ids - rows)), 0.0, "token ids", f"{ids:,} ids, {rows:,} rows"
    )


PROMISES: dict[str, Callable[[VerifiedModel], PromiseFinding]] = {
    "saved": saved,
    "batched": batched,
    "cached": lambda s: s.compare("cached = plain", s.in_chunks(1), "token by token"),
    "chunked": lambda s: s.compare("chunked = whole", s.in_chunks(CHUNK), f"{CHUNK} tokens at a time"),
    "rolled back": lambda s: s.compare("rolled back = plain", s.in_chunks(CHUNK, wrong=True)),
    "paged": lambda s: s.compare("paged = contiguous", s.in_chunks(CHUNK, "paged"), "blocks of 4 tokens"),
    "generated": lambda s: s.generated("generated = plain"),
    "in company": lambda s: s.generated("generated in a batch = plain", rows=3),
    "speculated": lambda s: s.generated("speculated = target", draft=True),
    "streamed": streamed,
    "has rows": with_rows,
}
OF_TOKENIZERS = {"streamed", "has rows"}  # promises that need a tokenizer
OF_ANSWERS = {"generated", "in company", "speculated", "streamed"}  # promises that need a token after a prompt


def left_out(model: Decoder, tokenizer: Tokenizer | None) -> dict[str, str]:
    """The promises that cannot be measured on a model, with the reason."""
    reasons: dict[str, str] = {}
    if adapter_names(model):
        reasons["saved"] = "the model has an adapter, which is saved in a folder of its own"
    if model.config.context_length < 2:
        reasons |= dict.fromkeys(OF_ANSWERS, "the context of one token has no room for an answer")
    if tokenizer is None:
        reasons |= dict.fromkeys(OF_TOKENIZERS, "the model has no tokenizer")
    return reasons


@checked
@torch.inference_mode()
def verify(
    model: Decoder,
    tokenizer: Tokenizer | None = None,
    hf: Mapping[str, Any] | None = None,
    reference: Reference | None = None,
) -> Iterator[PromiseFinding]:
    """Measure each of Onward's promises of exactness on a model, such as equal logits with and without a cache, and
    yield the findings one by one. Promises that do not apply are left out: those of a tokenizer without `tokenizer`, of
    saving with an adapter, and of generation with a context of one token.

    `hf` is the config.json that the model was loaded from. `reference` is the same model in another program, such as
    transformers, whose logits and residual streams are compared (None: not compared). Raises a UserError if the model's
    logits are not finite.
    """
    with without_dropout(model):
        subject = VerifiedModel(model, tokenizer, hf or {})
        if not subject.plain.isfinite().all():
            raise UserError(f"Cannot compare logits, because the model's logits are NaN or infinite in {model.dtype}")
        unmeasured = left_out(model, tokenizer)
        for name, measure in PROMISES.items():
            if name not in unmeasured:
                yield measure(subject)
        if reference is not None:
            yield against(subject, reference)


def against(subject: VerifiedModel, reference: Reference) -> PromiseFinding:
    """Compare the logits with those of another program; the note names where the residual streams first differ."""
    theirs = reference.compute(subject.tokens)
    finding = subject.compare(f"Onward = {reference.name}", theirs.logits)
    ours = TOLERANCE[subject.model.dtype]
    tolerance = max(ours, reference.tolerance)
    finding = replace(finding, allowed=finding.allowed * tolerance / ours)
    *streams, last = residuals(subject.model, subject.tokens)
    streams = [*streams, subject.model.norm(last)]  # a reference's last stream is after the final norm
    share = {
        i: float((streams[i].float() - x.float()).abs().max() / x.float().abs().max().clamp(min=1e-6))
        for i, x in theirs.streams.items()
    }
    beyond = next((i for i, difference in share.items() if not difference <= 5 * tolerance), None)
    if beyond is None:
        worst = max(share.values(), default=0.0)
        return replace(finding, note=f"the residual stream differs by at most {worst:.0e} of its largest value")
    where = f"after block {beyond - 1}" if beyond else "in the embedding"
    return replace(finding, note=f"the residual stream first differs beyond rounding {where}, by {share[beyond]:.0e}")
