"""A model with a text that it reads: the input of the pictures in `views` and `layer_views`."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from onward.base.errors import UserError
from onward.inspection.inputs import as_row, logits
from onward.model.decoder import Decoder
from onward.reports.pictures.markup import MARKS, readable
from onward.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Reading:
    """A model and the text that it reads, the input of the pictures of `onward inspect`. `ids`, if not empty, are token
    ids that replace the text."""

    model: Decoder
    tokenizer: Tokenizer
    text: str
    ids: Sequence[int] = ()

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.begin(self.tokenizer.encode(text))

    @cached_property
    def tokens(self) -> list[int]:
        """The token ids of the text; raises a UserError if there are none, or more than the context."""
        tokens = list(self.ids) or self.encode(self.text)
        as_row(self.model, tokens)
        return tokens

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """The text of each token, with visible white space."""
        return [readable(self.tokenizer.piece(token), MARKS) for token in tokens]

    def next_token(self, text: str, tokens: Sequence[int]) -> int:
        """The token of `text`, or the likeliest after `tokens` for ""; raises a UserError if `text` is not one
        token."""
        if not text:
            return int(logits(self.model, tokens)[-1].argmax())
        ids = self.tokenizer.encode(text)
        if len(ids) != 1:
            raise UserError(f"{text!r} is {len(ids)} tokens: give a text of one token")
        return ids[0]
