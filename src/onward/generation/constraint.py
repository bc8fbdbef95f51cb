"""Answers constrained by a regular expression, a JSON schema or a grammar, through llguidance. Imports torch only for
masks, so that a process that prepares constraints starts quickly.

Shapes: V vocabulary.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from copy import copy
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from onward.base.errors import UserError
from onward.generation.options import FORMS, GenerationOptions
from onward.generation.schemas import Claim, Prepared, prepared, rule
from onward.generation.spelling import JSON, Search, Spelling, allowed_tokens
from onward.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher
    from torch import Tensor

ALL_TOKENS = '%llguidance {"no_forcing": true}\n'  # allow every tokenization of a text, not only the tokenizer's
OF_BYTES = '%llguidance {"allow_invalid_utf8": true}\n'  # expressions match bytes or, with the flag u, characters
MOST_STATES = 50_000  # maximum number of states of a constraint's expressions; each takes 1 to 2 kB
TOO_LARGE = "it is too large: use fewer alternatives, optional properties and nested repetitions"
LIMITS = re.compile(
    r"fuel|too (many|large|complex|big)|limit|exceeded|max is", re.IGNORECASE
)  # llguidance's messages about its limits
CHECKED = 1000  # maximum number of allowed tokens for which endings are searched in one step
NAMED = re.compile(  # texts, comments and expressions of a Lark grammar, or the name of a token between them
    r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/(?:\\.|[^/\\\n])+/|<(?P<name>[^\s<>\[\]"]+)>'
)


def constraint(
    tokenizer: Tokenizer, size: int, end: Collection[int], options: GenerationOptions
) -> TextConstraint | None:
    """Return the constraint for the options' `regex`, `json_schema` or `grammar`, over the token ids below `size`; None
    if all are empty.

    Regular expressions use the syntax of Rust's regex crate (Unicode classes; no look-around, back-references or
    `\\b`), and must match the entire answer. Control tokens are allowed only where a grammar names them. Raises a
    UserError for an option that cannot be used, and for a constraint that no tokens of the model can meet. `end` are
    token ids that are allowed only where the answer is complete.
    """
    language = language_of(tokenizer, options)
    return None if language is None else started(language, vocabulary(tokenizer, size), end)


def language_of(tokenizer: Tokenizer, options: GenerationOptions) -> Language | None:
    """Return the language of the options' `regex`, `json_schema` or `grammar`; None if all are empty. Raises a
    UserError if the option cannot be used."""
    what = next((name for name in FORMS if getattr(options, name)), None)
    if what is None:
        return None
    text = getattr(options, what)
    return Language(what, with_ids(lark_of(text), tokenizer) if what == "grammar" else text)


def started(language: Language, vocab: Vocabulary, end: Collection[int]) -> TextConstraint:
    """Return the constraint of an empty answer. Raises a UserError if no tokens can meet the constraint."""
    first = TextConstraint(language.start(vocab), vocab, sorted(end), language.schema, language.what)
    any_allowed = bool(first.mask.any())
    if not (any_allowed and first.state.possible):
        if characters := language.unspelled(vocab):
            raise UserError(
                f"{language.what} cannot be met: the tokens of this model cannot spell "
                f"{', '.join(map(repr, characters))}"
            )
        if not any_allowed:
            raise UserError(
                f"{language.what} cannot be met: the tokens of this model cannot spell any text that it allows"
            )
    return first


class Language:
    """The set of texts that a regular expression, a JSON schema or a grammar allows, as an llguidance grammar.

    `what` is "regex", "json_schema" or "grammar", and `text` is the expression, the schema or the grammar in Lark's
    syntax.
    """

    def __init__(self, what: str, text: str) -> None:
        from llguidance import regex_to_lark

        self.what, self.text, self.source = what, text, text
        self.schema: Prepared | None = None
        self.token_ids = [int(i) for i in re.findall(r"<\[(\d+)\]>", text)] if what == "grammar" else []
        if what == "regex":
            self.expression = regex_to_lark(text, "")
            self.grammar = f"{ALL_TOKENS}start: /{self.expression}/"
        elif what == "grammar":
            self.grammar = ALL_TOKENS + text
        else:
            self.schema = prepared(read_schema(text))
            self.text = json.dumps(self.schema.schema, ensure_ascii=False, separators=(",", ":"))
            self.grammar = f"{ALL_TOKENS}start: {rule(self.schema.schema)}"

    def start(self, vocab: Vocabulary, hint: str = "") -> State:
        """Return the grammar state of an empty answer, over the tokens of `vocab`. Raises a UserError if llguidance
        rejects the grammar.

        If the tokens of `vocab` cannot spell every text, an answer may have a prefix that no tokens can complete.
        Regular expressions are therefore intersected with the texts that tokens can spell. If that does not suffice,
        the state searches for tokens that complete the answer, and tries characters of `hint` first.
        """
        matcher, spelling = self.intersected(vocab), vocab.spelling
        if spelling.complete or self.spelled_by(spelling):
            return State(matcher)
        ids = {piece: vocab.ids[piece] for piece in spelling.generators}
        search = Search(ids, hint, self.text, vocab.size, [i for i in self.token_ids if i < vocab.size])
        return State(matcher, search)

    def spelled_by(self, spelling: Spelling) -> bool:
        """Return whether a vocabulary that cannot spell every text nevertheless has no dead ends: its tokens can
        complete every prefix that they spell to an allowed text. `spelling` describes the texts that these tokens can
        spell."""
        if self.what == "regex":
            return spelling.prefix_free
        return self.what == "json_schema" and spelling.covers(self.text)

    def intersected(self, vocab: Vocabulary) -> LLMatcher:
        """Return an llguidance matcher of this language, before the first token; a regular expression is intersected
        with the texts that the tokens of `vocab` can spell."""
        matcher = self.matcher(self.grammar, vocab)
        if vocab.spelling.complete or self.what != "regex":
            return matcher
        both = f"start: TEXT\nTEXT: /(?u){self.expression}/ & /(?su:.*)/ & /{vocab.spelling.expression}/"
        return self.matcher(ALL_TOKENS + OF_BYTES + both, vocab)

    def matcher(self, grammar: str, vocab: Vocabulary) -> LLMatcher:
        """Return an llguidance matcher of `grammar` over a vocabulary, before the first token. Raises a UserError if
        llguidance rejects the grammar."""
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(max_lexer_states=MOST_STATES)
        matcher = LLMatcher(vocab.inner, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise UserError(f"{self.what} cannot be used: {reason(matcher.get_error())}")
        return matcher

    def unspelled(self, vocab: Vocabulary) -> list[str]:
        """Return a minimal set of characters that the tokens of `vocab` lack to spell an allowed text, for an error
        message.

        Only characters of the expression or schema (and, for a schema, of JSON) are tried; the list is empty if they do
        not suffice.
        """
        spelling = vocab.spelling
        pieces = vocab.pieces if self.token_ids else [*spelling.generators]

        def possible(characters: Collection[str]) -> bool:
            more = Vocabulary([*pieces, *(c.encode() for c in characters)])
            state = State(self.intersected(more)) if self.what == "regex" else self.start(more, "".join(characters))
            return state.possible

        def needed(characters: list[str], others: list[str]) -> list[str]:  # QuickXplain (Junker 2004)
            if possible(others):
                return []
            if len(characters) == 1:
                return characters
            first, second = characters[: len(characters) // 2], characters[len(characters) // 2 :]
            second = needed(second, others + first)
            return needed(first, others + second) + second

        characters = {*self.text, *(JSON if self.what == "json_schema" else "")}
        lacking = sorted(c for c in characters if c.encode() not in spelling.generators)
        return needed(lacking, []) if possible(lacking) else []


class State:
    """The state of a grammar after some tokens of an answer.

    Without a `search`, every token that the grammar allows leaves the answer completable. With a search, `ending`
    are tokens that complete the answer, or None if the search finds none; a token is then allowed only if the search
    finds an ending after it (checked if the grammar allows at most CHECKED tokens).
    """

    def __init__(self, matcher: LLMatcher, search: Search | None = None) -> None:
        self.matcher, self.search = matcher, search
        self.ending: Sequence[int] | None = search.find(matcher) if search else None

    @property
    def complete(self) -> bool:
        """Whether the answer may end in this state."""
        return self.matcher.is_accepting()

    @property
    def possible(self) -> bool:
        """Whether tokens can complete the answer from this state, as far as the grammar or the search can tell."""
        if self.search is None:
            return self.complete or bool(allowed_tokens(self.matcher).any())
        return self.ending is not None

    def allowed(self) -> np.ndarray:
        """Return a mask (V,) of bool: True for tokens that may come next in this state."""
        allowed = allowed_tokens(self.matcher)
        if self.search is not None and self.ending is not None and allowed.sum() <= CHECKED:
            tokens = allowed.nonzero()[0].tolist()
            allowed[[i for i in tokens if self.search.after(self.matcher, i, self.ending) is None]] = False
        return allowed

    def consume(self, token: int) -> None:
        """Advance the state by `token`, which must be allowed."""
        if self.search is not None and self.ending is not None:
            self.ending = self.search.after(self.matcher, token, self.ending)
        self.matcher.consume_token(token)

    def copy(self) -> State:
        """Return a copy of the state that advances independently."""
        result = copy(self)
        result.matcher = self.matcher.deep_copy()
        return result


class TextConstraint:
    """The constraint of one answer after its tokens so far; implements `request.Constraint`.

    `end` are the token ids that end the answer. `full` is True if the answer is complete and only tokens of `end` may
    follow. `schema` is the JSON schema of the answer, None for other constraints.
    """

    def __init__(
        self, state: State, vocab: Vocabulary, end: list[int], schema: Prepared | None = None, what: str = "grammar"
    ) -> None:
        self.state, self.vocab, self.end, self.schema, self.what = state, vocab, end, schema, what
        self.compute_mask()

    def compute_mask(self) -> None:
        """Compute the attributes `mask` (V,), True for the tokens that are allowed next, and `full`, for the present
        state. Raises a UserError if the constraint is too large."""
        self.mask = self.state.allowed()
        if self.state.matcher.is_error() and reason(self.state.matcher.get_error()) == TOO_LARGE:
            raise UserError(f"{self.what} cannot be used: {TOO_LARGE}")
        self.mask[self.end] = False
        self.full = self.state.complete and not bool(self.mask.any())
        self.mask[self.end] = self.state.complete

    def allowed(self) -> Tensor:
        """Return the mask (V,), True for the tokens that are allowed next."""
        from torch import from_numpy

        return from_numpy(self.mask)

    def accept(self, token: int) -> bool:
        """Advance by a token, and return False if the token was not allowed, or if no further token may follow."""
        if token in self.end or not self.mask[token]:
            return False
        self.state.consume(token)
        self.compute_mask()
        return not self.full

    def claims(self, tokens: Sequence[int]) -> list[Claim]:
        """Return the claims to check for `tokens`, a complete answer: keywords of the JSON schema that the mask does
        not enforce."""
        return claims_of(self.schema, (self.vocab.pieces[token] for token in tokens))

    def copy(self) -> TextConstraint:
        """Return a copy of the constraint that advances independently, as for draft tokens."""
        result = copy(self)
        result.state = self.state.copy()
        return result

    def after(self, text: str) -> TextConstraint:
        """Return a copy of the constraint for an answer that is appended to `text`. If `text` is empty, the copy
        excludes tokens that lose their first space when they are decoded at the beginning of a text."""
        result = self.copy()
        if not text:
            result.mask = self.mask.copy()
            result.mask[self.vocab.spaced] = False
        return result


class Vocabulary:
    """The tokens of a model for llguidance, given by their bytes in `pieces`, by token id; tokens without bytes are
    never allowed.

    The token ids in `spaced` lose their first space at the beginning of a text.
    """

    def __init__(self, pieces: Sequence[bytes], spaced: Collection[int] = ()) -> None:
        from llguidance import LLTokenizer

        class Tokens:
            is_tokenizer_wrapper = True
            tokens = (*pieces, b"")  # the last one is an end token that the model does not have
            bos_token_id, eos_token_id, special_token_ids = None, len(pieces), (len(pieces),)

            def __call__(self, text: str) -> list[int]:
                return []  # llguidance calls this only if a grammar forces tokens

        self.inner = LLTokenizer(Tokens())  # type: ignore[arg-type]
        self.size, self.spaced, self.spelling, self.pieces = len(pieces), list(spaced), Spelling(pieces), pieces
        self.ids = {piece: i for i, piece in enumerate(pieces)}


@lru_cache(maxsize=2)
def vocabulary(tokenizer: Tokenizer, size: int) -> Vocabulary:
    """Return the tokens of a tokenizer with ids below `size`, for llguidance."""
    return Vocabulary(*pieces_of(tokenizer, size))


@lru_cache(maxsize=2)
def pieces_of(tokenizer: Tokenizer, size: int) -> tuple[list[bytes], list[int]]:
    """Return the bytes of the token ids below `size`, and the ids that lose their first space at the beginning of a
    text; control tokens and unused ids have no bytes and are never allowed."""
    pieces = [tokenizer.token_bytes(i) for i in range(size)]
    starts = [] if tokenizer.of_bytes else [i for i, piece in enumerate(pieces) if piece[:1] == b" "]
    return pieces, [i for i in starts if tokenizer.decode([i]).encode() != pieces[i]]


def claims_of(schema: Prepared | None, pieces: Iterable[bytes]) -> list[Claim]:
    """Return the claims to check for an answer, given by the bytes of its tokens."""
    return schema.claims(b"".join(pieces).decode(errors="replace")) if schema else []


def check_of(claims: Callable[[Sequence[int]], list[Claim]]) -> Callable[[Sequence[int]], None]:
    """Return a function that checks the tokens of a complete answer and raises a UserError for the first claim that
    does not hold."""

    def check(tokens: Sequence[int]) -> None:
        for claim in claims(tokens):
            if problem := claim.problem():
                raise UserError(problem)

    return check


def read_schema(text: str) -> Any:
    """Parse a JSON schema from its text. Raises a UserError if the text is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"json_schema is not JSON: {error}") from None


def terminal(tokenizer: Tokenizer, text: str) -> str:
    """Return `text` as an expression of a Lark grammar: a token id if it is a control token, else a quoted string."""
    token = tokenizer.inner.token_to_id(text)
    return f"<[{token}]>" if token in tokenizer.special else json.dumps(text)


def with_ids(grammar: str, tokenizer: Tokenizer) -> str:
    """Return a Lark grammar in which the names of tokens, such as <|im_start|>, are replaced by their ids, as in <[5]>.
    Raises a UserError for an unknown name."""

    def with_id(match: re.Match[str]) -> str:
        if not match["name"]:
            return match[0]
        token = tokenizer.inner.token_to_id(match[0])
        if token is None:
            raise UserError(f"grammar cannot be used: the model has no token {match[0]}; write a text in quotes")
        return f"<[{token}]>"

    return NAMED.sub(with_id, grammar)


def lark_of(grammar: str) -> str:
    """Return a grammar in Lark's syntax; a `grammar` in GBNF, the syntax of llama.cpp, is converted. Raises a UserError
    for invalid GBNF."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(grammar)
    except IndexError:
        raise UserError("grammar cannot be used: it ends within a text or a class of characters") from None
    except Exception as error:  # the library has no class of its own for most mistakes, such as a missing rule
        raise UserError(f"grammar cannot be used: {' '.join(str(error).split()) or type(error).__name__}") from None


def reason(message: str) -> str:
    """Shorten `message`, an error message of llguidance, to one sentence, and leave out the excerpt of the grammar."""
    if LIMITS.search(message.partition("\n")[0]):
        return TOO_LARGE
    match = re.search(r"^error: (.*)", message, re.MULTILINE)
    first = message.partition("\n")[0]
    if first.startswith("panic"):  # a bug of the library
        return "llguidance fails on it"
    return match[1] if match else re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", first)
