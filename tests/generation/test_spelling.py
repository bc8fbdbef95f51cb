"""A constrained answer can be spelled with the model's tokens, or the request is refused before its first token."""

import json
import re
from collections.abc import Sequence
from functools import cache
from itertools import islice, product
from typing import Any

import jsonschema
import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from onward import Decoder, DecoderConfig, GenerationOptions, LanguageModel, Tokenizer, UserError
from onward.generation.constraint import TextConstraint, constraint
from onward.text.tokenizer import BYTE_OF, END

from support.devices import on_device

ASCII = [bytes([b]) for b in range(32, 127)]
VOCABULARIES: dict[str, Sequence[bytes]] = {
    "some letters": [b"a", b"b", "é".encode()],
    "one letter": [b"a"],
    "letters only in pairs": [b"a", b"ab", b"bc", "éé".encode()],
    "bytes without that of é": [b"a", b"b", b"\xc3", b"\xa8", b"ab"],
    "bytes with é only before b": [b"a", b"\xc3", b"\xa9b"],
    "ASCII": ASCII,
    "ASCII without quotes": [c for c in ASCII if c != b'"'],
    "ASCII with the digit 3 only": [c for c in ASCII if not c.isdigit()] + [b"3"],
    "ASCII in pairs": [*ASCII, "é,".encode(), b'":', b'"a', b"ar"],
    "bytes of ASCII and of è": [*ASCII, b"\xc3", b"\xa8"],
}
SMALL, LARGE = list(VOCABULARIES)[:5], list(VOCABULARIES)[5:]


@cache
def tokenizer(name: str) -> Tokenizer:
    """A tokenizer with an end token and the tokens of a vocabulary in VOCABULARIES; it can spell only texts made of
    them."""
    pieces = VOCABULARIES[name]
    if "bytes" in name:
        symbol = {byte: c for c, byte in BYTE_OF.items()}
        tokens = ["".join(symbol[b] for b in piece) for piece in pieces]
        inner = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
        inner.decoder = decoders.ByteLevel()
    else:
        tokens = [piece.decode() for piece in pieces]
        inner = tokenizers.Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, tokens[0]))
        inner.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
        inner.decoder = decoders.Fuse()
    inner.add_special_tokens([END])
    return Tokenizer(inner)


def form(name: str, **how: Any) -> TextConstraint:
    known = tokenizer(name)
    return constraint(known, known.vocab_size, known.end_ids, GenerationOptions(**how))


@cache
def lm(name: str) -> LanguageModel:
    """An untrained model."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"d_model": 8, "n_layers": 1, "n_heads": 1, "n_kv_heads": 1, "context_length": 128}
    known = tokenizer(name)
    return LanguageModel(on_device(Decoder(DecoderConfig(vocab_size=known.vocab_size, **sizes)).eval()), known)


AFTER_TEXT = {"type": "array", "prefixItems": [{"type": "string"}, {"enum": ["é", "ê"]}], "minItems": 2}
ANSWERS: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "an alternative with a character that no token has": ("some letters", {"regex": "(abc|aé)"}, {"aé"}),
    "a character that is missing at any later place": ("some letters", {"regex": "a(b*c|b)"}, {"ab"}),
    "a token after which none fits": ("letters only in pairs", {"regex": "(a|ab)b|a"}, {"ab", "a"}),
    "part of a character": ("bytes without that of é", {"regex": "(aé|a[è-ê])?b"}, {"aèb", "b"}),
    "part of a character, with the next one": ("bytes with é only before b", {"regex": "a(é[ab]|è|a)"}, {"aéb", "aa"}),
    "a value of an enum": ("ASCII", {"json_schema": {"enum": ["café", "bar", 7]}}, {'"bar"', "7"}),
    "digits": (
        "ASCII with the digit 3 only",
        {"json_schema": {"type": "integer", "minimum": 29, "maximum": 340}},
        {"33", "333"},
    ),
    "a value that follows a free text": ("ASCII", {"json_schema": {"anyOf": [AFTER_TEXT, {"const": []}]}}, {"[]"}),
    "properties": (
        "ASCII in pairs",
        {
            "json_schema": {
                "properties": {"é": {"type": "null"}, "a": {"enum": ["é", "ar"]}, "b": {"const": "é"}},
                "type": "object",
                "required": ["a"],
                "additionalProperties": False,
            }
        },
        {'{"a":"ar"}'},
    ),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_answers_are_all_that_tokens_can_spell(case: str) -> None:
    name, options, expected = ANSWERS[case]
    (answers,) = lm(name).complete("a", 100, n=5, seed=1, temperature=3.0, lookup=2, **options)
    assert {answer.finish_reason for answer in answers} == {"stop"}
    compact = lambda text: json.dumps(json.loads(text), separators=(",", ":")) if "json_schema" in options else text
    assert {compact(answer.text) for answer in answers} == expected


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a character": ("some letters", {"regex": "abc"}, "regex cannot be met: the tokens of this model cannot spell 'c'"),
    "one of several missing characters": ("some letters", {"regex": "a(cd|b(c|e)c)"}, "cannot spell 'c'"),
    "characters of a class": (
        "some letters",
        {"regex": r"a\p{Greek}"},
        "of this model cannot spell any text that it allows",
    ),
    "a character of which there is a part": ("bytes without that of é", {"regex": "a*é"}, "cannot spell 'é'"),
    "a letter that only a pair has": ("letters only in pairs", {"regex": "a*c"}, "cannot spell 'c'"),
    "a value": (
        "ASCII",
        {"json_schema": {"const": "café"}},
        "json_schema cannot be met: the tokens of this",
    ),
    "quotes": ("ASCII without quotes", {"json_schema": {"type": "string"}}, "cannot spell '\"'"),
    "a value after a free text": ("bytes of ASCII and of è", {"json_schema": AFTER_TEXT}, "cannot spell 'é'"),
    "the end of any text": ("ASCII", {"json_schema": {"type": "string", "pattern": "^.{3,}é$"}}, "cannot spell 'é'"),
    "a property": (
        "ASCII",
        {"json_schema": {"type": "object", "properties": {"a": {"type": "string"}, "é": {}}, "required": ["a", "é"]}},
        "cannot spell 'é'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusal_names_the_characters_that_tokens_cannot_spell(case: str) -> None:
    name, options, said = REFUSED[case]
    with pytest.raises(UserError, match=re.escape(said)) as caught:
        lm(name).generate("a", 9, **options)
    assert "\n" not in str(caught.value)


@cache
def spells(name: str, text: bytes) -> bool:
    return not text or any(text.startswith(piece) and spells(name, text[len(piece) :]) for piece in VOCABULARIES[name])


@cache
def spelled(name: str) -> list[str]:
    """The texts of at most five characters that the vocabulary can spell."""
    texts = ("".join(letters) for size in range(6) for letters in product("abcéè", repeat=size))
    return [text for text in texts if spells(name, text.encode())]


def next_tokens(name: str, language: Sequence[str], said: bytes) -> set[int]:
    """The tokens that can be continued to a text of the language."""
    rests = [text.encode()[len(said) :] for text in language if text.encode().startswith(said)]
    ends = {tokenizer(name).eos_id} if b"" in rests else set()
    pieces = enumerate(VOCABULARIES[name])
    return ends | {i for i, p in pieces if any(r.startswith(p) and spells(name, r[len(p) :]) for r in rests)}


def can_end(name: str, state: TextConstraint) -> bool:
    """Whether some sequence of allowed tokens ends the answer."""
    states = [state]
    for state in islice(states, 1000):
        for token in state.allowed().nonzero().flatten().tolist():
            states.append(state.copy())
            if not states[-1].accept(token):
                return True
    return False


PATTERN = st.recursive(
    st.sampled_from([*"abcé", "[abcé]", "[^a]", "[b-é]", "."]),
    lambda inner: (
        st.tuples(inner, st.sampled_from("?*+")).map("({0[0]}){0[1]}".format)
        | st.lists(inner, min_size=1, max_size=3).map("".join)
        | st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"({'|'.join(parts)})")
    ),
    max_leaves=5,  # the shortest matching text then has at most 5 characters
)


EXPRESSIONS = given(pattern=PATTERN, name=st.sampled_from(SMALL), choices=st.lists(st.integers(0, 9), max_size=5))
UNMET = "regex cannot be met: the tokens of this model cannot spell '"
FAILS = "regex cannot be used: llguidance fails on it"  # the library panics for one pattern in a thousand
COUNTS = pytest.mark.parametrize("count", [100, pytest.param(3_000, marks=pytest.mark.long)])


def formed(name: str, pattern: str) -> TextConstraint | str:
    """The state before the first token, or the message that refuses the pattern."""
    try:
        return form(name, regex=pattern)
    except UserError as error:
        return str(error)


@COUNTS
def test_expressions_are_met_or_refused_at_once(count: int) -> None:
    @settings(max_examples=count)
    @EXPRESSIONS
    def check(pattern: str, name: str, choices: list[int]) -> None:
        language = [text for text in spelled(name) if re.fullmatch(pattern, text)]
        state, said = formed(name, pattern), b""
        if isinstance(state, str):
            # `language` has the texts of at most 5 characters
            assert FAILS in state or (UNMET in state and not language)
            return
        for choice in choices:
            allowed = state.allowed().nonzero().flatten().tolist()
            assert next_tokens(name, language, said) <= set(allowed)
            token = allowed[choice % len(allowed)]
            said += tokenizer(name).token_bytes(token)
            if not state.accept(token):
                assert re.fullmatch(pattern, said.decode())
                return
        assert can_end(name, state)

    check()


Value = tuple[dict[str, Any], list[str]]  # a schema, and texts that conform to it


def array(item: Value, least: int) -> Value:
    schema = {"type": "array", "items": item[0], "minItems": least, "maxItems": 2}
    return schema, [f"[{text}]" for text in item[1]] + ["[]"] * (not least)


def table(names: list[str], values: list[Value], required: list[bool]) -> Value:
    fields = [(name, *value, needed) for name, value, needed in zip(names, values, required)]
    schema = {
        "type": "object",
        "properties": {name: value for name, value, *_ in fields},
        "required": [name for name, *_, needed in fields if needed],
        "additionalProperties": False,
    }
    some = product(*([f'"{name}":{text}' for text in texts] + [""] * (not needed) for name, _, texts, needed in fields))
    return schema, ["{" + ",".join(filter(None, parts)) + "}" for parts in some]


NEEDED = st.lists(st.booleans(), min_size=3, max_size=3)
VALUE = st.recursive(
    st.sampled_from(
        [
            ({"type": "integer", "minimum": 1, "maximum": 340}, ["1", "33"]),
            ({"type": "boolean"}, ["true"]),
            ({"type": "string"}, ['""']),
            ({"type": "string", "pattern": "^(aé|è{1,2}|3)$"}, ['"aé"', '"è"', '"3"']),
            ({"enum": ["é", 1, None]}, ['"é"', "1", "null"]),
            ({"enum": ["bé", "bar", ["é"]]}, ['"bé"', '"bar"', '["é"]']),
        ]
    ),
    lambda inner: (
        st.builds(array, inner, st.integers(0, 1))
        | st.builds(
            table, st.permutations(["a", "é", "ar"]), st.lists(inner, max_size=3), st.lists(st.booleans(), min_size=3)
        )
        | st.lists(inner, min_size=2, max_size=2).map(lambda v: ({"anyOf": [v[0][0], v[1][0]]}, v[0][1] + v[1][1]))
    ),
    max_leaves=4,
)
SCHEMAS = given(value=VALUE, name=st.sampled_from(LARGE), choices=st.lists(st.integers(0, 999), max_size=20))


@COUNTS
def test_schemas_are_met_or_refused_at_once(count: int) -> None:
    @settings(max_examples=count // 2)
    @SCHEMAS
    def check(value: Value, name: str, choices: list[int]) -> None:
        schema, texts = value
        if not any(spells(name, text.encode()) for text in texts):
            with pytest.raises(UserError, match="json_schema cannot be met: the tokens of this model cannot spell '"):
                form(name, json_schema=schema)
            return
        state, said = form(name, json_schema=schema), b""
        closing = [VOCABULARIES[name].index(c) for c in (b'"', b"}", b"]") if c in VOCABULARIES[name]]
        for choice in [*choices, *[None] * 60]:
            allowed = state.allowed().nonzero().flatten().tolist()
            soonest = next(i for i in [tokenizer(name).eos_id, *closing, *allowed] if i in allowed)
            token = soonest if choice is None else allowed[choice % len(allowed)]
            said += tokenizer(name).token_bytes(token)
            if not state.accept(token):
                jsonschema.validate(json.loads(said), schema)
                return
        pytest.fail(f"{said!r} has no end")

    check()
