"""Answers constrained by a regular expression or a JSON schema, through llguidance.

Shapes: V vocabulary.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from onward.errors import UserError
from onward.generation.options import GenerationOptions
from onward.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

ALL_TOKENS = '%llguidance {"no_forcing": true}\n'  # allow every tokenization of a text, not only the tokenizer's
SPACE = r"[ ]?|\n[ ]{0,40}"  # white space between JSON tokens: at most one space, or a new line with at most 40 spaces


def constraint(
    tokenizer: Tokenizer, size: int, end: Collection[int], options: GenerationOptions
) -> TextConstraint | None:
    """The constraint of the options' `regex` or `json_schema`, over the first `size` token ids; None without either.

    Regular expressions are those of Rust's regex crate, which must match the whole answer: Unicode classes, no
    look-around, no back-references, no `\\b`. Schemas with a keyword that is not supported raise a UserError, as do
    constraints that no tokens of the model can meet. `end` are token ids that are allowed only where the answer is
    complete.
    """
    if options.regex:
        what, text = "regex", options.regex
    elif options.json_schema:
        what, text = "json_schema", read_schema(options.json_schema)
    else:
        return None
    try:
        from llguidance import LLMatcher, regex_to_lark
    except ImportError:
        raise UserError(f"{what} needs the package llguidance: pip install 'onward[constrain]'") from None
    rule = f"%json {text}" if what == "json_schema" else f"/{regex_to_lark(text, '')}/"
    known = vocabulary(tokenizer, size)
    matcher = LLMatcher(known.inner, f"{ALL_TOKENS}start: {rule}", log_level=0)
    if matcher.is_error():
        raise UserError(f"{what} cannot be used: {reason(matcher.get_error())}")
    first = TextConstraint(matcher, known, sorted(end))
    if not first.mask.any():
        raise UserError(f"{what} cannot be met with the tokens of this model")
    return first


class TextConstraint:
    """The state of a constrained answer, see `request.Constraint`."""

    def __init__(self, matcher: LLMatcher, known: Vocabulary, end: list[int]) -> None:
        self.matcher, self.known, self.end = matcher, known, end
        self.compute_mask()

    def compute_mask(self) -> None:
        """Compute which tokens are allowed next."""
        bits = np.frombuffer(self.matcher.compute_bitmask(), np.uint8)
        text = np.unpackbits(bits, count=len(self.known.spaced), bitorder="little")
        self.mask = torch.from_numpy(text).bool()
        self.mask[self.end] = False
        complete = self.matcher.is_accepting()
        self.full = complete and not self.mask.any()
        self.mask[self.end] = complete

    def allowed(self) -> Tensor:
        return self.mask

    def accept(self, token: int) -> bool:
        if token in self.end or not self.mask[token]:
            return False
        self.matcher.consume_token(token)
        self.compute_mask()
        return not self.full

    def copy(self) -> TextConstraint:
        result = copy(self)
        result.matcher = self.matcher.deep_copy()
        return result

    def after(self, text: str) -> TextConstraint:
        """A copy for an answer that follows `text`; after an empty text, tokens that lose their first space are
        excluded."""
        result = self.copy()
        if not text:
            result.mask = self.mask & ~self.known.spaced
        return result


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a tokenizer for llguidance."""

    inner: LLTokenizer
    spaced: Tensor  # (V,), True for tokens that lose their first space at the beginning of a text


@lru_cache(maxsize=2)
def vocabulary(tokenizer: Tokenizer, size: int) -> Vocabulary:
    """The token ids below `size`; control tokens and unused ids have no text and are never allowed."""
    from llguidance import LLTokenizer

    pieces = [tokenizer.token_bytes(i) for i in range(size)]

    class Tokens:
        is_tokenizer_wrapper = True
        tokens = (*pieces, b"")
        bos_token_id, eos_token_id, special_token_ids = None, size, (size,)  # an end token that the model does not have

        def __call__(self, text: str) -> list[int]:
            return tokenizer.encode(text, special=False)

    lost = [piece[:1] == b" " and tokenizer.decode([i]).encode() != piece for i, piece in enumerate(pieces)]
    spaced = torch.tensor(lost) & (not tokenizer.of_bytes)
    return Vocabulary(LLTokenizer(Tokens()), spaced)  # type: ignore[arg-type]


def read_schema(text: str) -> str:
    """A schema with the white space SPACE, unless it sets `x-guidance` itself."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"json_schema is not JSON: {error}") from None
    if isinstance(schema, dict):
        schema = {"x-guidance": {"whitespace_pattern": SPACE}} | schema
    return json.dumps(schema)


def reason(message: str) -> str:
    """One sentence of an llguidance message, without the excerpt of its grammar."""
    found = re.search(r"^error: (.*)", message, re.MULTILINE)
    first = message.partition("\n")[0]
    return found[1] if found else re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", first)
