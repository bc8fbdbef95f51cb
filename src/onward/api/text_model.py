"""A decoder with its tokenizer: scores, evaluates and classifies texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from onward.base.arguments import check_fields, checked, named
from onward.base.errors import UserError
from onward.base.files import check_text
from onward.config.decoder import DecoderConfig
from onward.data.examples import Encoder
from onward.data.tokens import Tokens
from onward.evaluation.outputs import outputs
from onward.evaluation.score import Evaluation
from onward.evaluation.text import Score, documents_of, evaluate_texts, evaluate_tokens, score_text
from onward.model.decoder import Decoder
from onward.text.chat import Message
from onward.text.tokenizer import Tokenizer
from onward.transforms.heads import head_labels

MASKS: WeakKeyDictionary[Tokenizer, dict[tuple[object, ...], Tensor]] = WeakKeyDictionary()
READ = "give Path({!r}).read_text()"


@named
@dataclass
class TextModel:
    """A model and its tokenizer (None if it has none): scores, evaluates and classifies texts. The base class of
    LanguageModel."""

    model: Decoder
    tokenizer: Tokenizer | None = None
    hf: Mapping[str, Any] = field(default_factory=dict)  # config.json of the loaded model

    def __post_init__(self) -> None:
        check_fields(self)

    def _repr_html_(self) -> str | None:
        from onward.reports.runs.notebook import of_model  # draws pictures, which only a notebook needs

        return of_model(self.model, self.tokenizer)

    @property
    def config(self) -> DecoderConfig:
        """The DecoderConfig of the model: its sizes and parts."""
        return self.model.config

    @checked
    def score(self, text: str) -> Score:
        """Return the log-probability of each token of a text under the model, and of the whole text; see
        `evaluation.text`. Raises a UserError if the text is the path of a file."""
        check_text(text, "text", READ)
        return score_text(self.model, self.text(), text)

    @checked
    def evaluate(
        self,
        text: str | PathLike[str] | Sequence[str | PathLike[str]] | np.ndarray | Tokens,
        stride: int = 0,
        *,
        n_bytes: int | None = None,
    ) -> Evaluation:
        """Compute loss, perplexity and bits per byte of the model over documents, or over token ids (T,), of any
        length.

        A Path names a file or folder of documents, as in `onward.train`; a str is a document itself. Raises a UserError
        for a str that is the path of a file. Documents longer than the context are read in windows, which advance by
        `stride` tokens; 0 means the context length. See `evaluation.score`. `n_bytes` is the length in bytes of the
        text of token ids, by default computed by decoding them.
        """
        if isinstance(text, np.ndarray | Tokens):
            return evaluate_tokens(self.model, self.text(), text, stride, n_bytes)
        return evaluate_texts(self.model, self.text(), documents_of(text), stride)

    @checked
    def classify(self, texts: Sequence[str | tuple[str, str]]) -> list[dict[str, float]]:
        """Return the probabilities of the classes for each text or pair of texts, as {label: probability}. The model
        must have been trained with `onward finetune --method classify`."""
        encoder = Encoder(self.text())
        pairs = [(one,) if isinstance(one, str) else one for one in texts]
        for one in (text for pair in pairs for text in pair):
            check_text(one, "a text", READ)
        probabilities = outputs(self.model, [encoder.texts(*pair).tokens for pair in pairs]).softmax(-1)
        return [dict(zip(head_labels(self.model), row)) for row in probabilities.tolist()]

    @checked
    def rewards(self, prompt: str | Sequence[Message], answers: Sequence[str]) -> list[float]:
        """Return the reward that the model, as a reward model, gives to each answer to a prompt, which is a text or a
        list of messages. The model must have been trained with `onward finetune --method reward`."""
        encoder = Encoder(self.text())
        replies = answers if isinstance(prompt, str) else [[{"role": "assistant", "content": one}] for one in answers]
        sequences = [encoder.answer(prompt, one).until_trained() for one in replies]
        return outputs(self.model, sequences)[:, 0].tolist()

    @property
    def stop_token_ids(self) -> list[int]:
        """The token ids that end an answer: the tokenizer's end tokens that are in the model's vocabulary."""
        return [i for i in self.text().end_ids if i < self.config.vocab_size]

    def allowed(self) -> Tensor:
        """Return a mask (V,) of the token ids that may be generated: False for padding and unused ids of the
        vocabulary."""
        return self.mask().clone()

    def mask(self) -> Tensor:
        """Return the mask of `allowed`, made once for each tokenizer and vocabulary: engines share the mask and do not
        change it."""
        tokenizer, size, device = self.text(), self.config.vocab_size, self.model.device
        masks, key = MASKS.setdefault(tokenizer, {}), (tokenizer.inner.get_vocab_size(), size, device)
        if key not in masks:
            with torch.inference_mode(False):
                masks[key] = torch.ones(size, dtype=torch.bool, device=device)
                masks[key][tokenizer.textless(size)] = False
        return masks[key]

    def text(self) -> Tokenizer:
        """Return the tokenizer of the model. Raises a UserError if the model has none."""
        if self.tokenizer is None:
            raise UserError("this model has no tokenizer.json, which is required for text: put one into its folder")
        return self.tokenizer
