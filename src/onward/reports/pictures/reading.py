"""A model and a text, of which the views draw pictures."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from onward.errors import UserError
from onward.inspection.inputs import as_row, logits
from onward.model.decoder import Decoder
from onward.reports.pictures.markup import MARKS, readable
from onward.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Reading:
    """A model that reads a text, or token ids in its place."""

    model: Decoder
    tokenizer: Tokenizer
    text: str
    ids: Sequence[int] = ()

    def encode(self, text: str) -> list[int]:
        """The tokens of a text as the model reads it."""
        return self.tokenizer.begin(self.tokenizer.encode(text))

    @cached_property
    def tokens(self) -> list[int]:
        """The tokens of the text. A UserError if there are none, or more than the context has."""
        tokens = list(self.ids) or self.encode(self.text)
        as_row(self.model, tokens)
        return tokens

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """The texts of tokens, with visible white space."""
        return [readable(self.tokenizer.piece(token), MARKS) for token in tokens]

    def next_token(self, text: str, tokens: Sequence[int]) -> int:
        """The id of a token given as text, or the likeliest token after `tokens`."""
        if not text:
            return int(logits(self.model, tokens)[-1].argmax())
        ids = self.tokenizer.encode(text)
        if len(ids) != 1:
            raise UserError(f"{text!r} is {len(ids)} tokens: give a text of one token")
        return ids[0]
