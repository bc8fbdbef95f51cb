"""Answers obey their constraint, whatever the model prefers."""

import json
import re
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import onward
from onward import Decoder, DecoderConfig, GenerationOptions, LanguageModel, Tokenizer, UserError, train_tokenizer
from onward.generation.constraint import TextConstraint, constraint

from support import SHARED
from support.devices import on_device

TEXT = 'abc é 猫 🐈 0123456789 {"name": [true, false, null], "b": -1.5e+2}\n \\u "ab": "ba"}' * 3
SPECS = ["char", "byte", "bpe:330", "gpt2"]


@lru_cache
def lm(spec: str) -> LanguageModel:
    """An untrained model with one of the tokenizers."""
    folder = SHARED / "gpt2-tokenizer"
    if spec == "gpt2" and not folder.is_dir():
        pytest.skip(f"needs the data in {SHARED}")
    tokenizer = Tokenizer.load(folder) if spec == "gpt2" else train_tokenizer(spec, [TEXT])
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"d_model": 8, "n_layers": 1, "n_heads": 1, "n_kv_heads": 1, "context_length": 512}
    model = on_device(Decoder(DecoderConfig(vocab_size=tokenizer.vocab_size + 3, **sizes)).eval())
    return LanguageModel(model, tokenizer)


def form(spec: str, **how: Any) -> TextConstraint:
    model = lm(spec)
    found = constraint(model.text(), model.config.vocab_size, model.stop_token_ids, GenerationOptions(**how))
    assert found is not None
    return found


def repeated(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.tuples(inner, st.sampled_from(["?", "*", "+", "{2}", "{0,2}", "{1,3}"])).map(lambda t: f"({t[0]}){t[1]}")


def joined(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.lists(inner, min_size=1, max_size=3).map("".join) | st.lists(inner, min_size=2, max_size=3).map("|".join)


LETTERS = ["a", "b", "é", "猫", "🐈", " ", '"', r"\\", "0"]
REGEX = st.recursive(
    st.sampled_from([*LETTERS, "[abé猫]", "[^a]", "[0-9]", ".", r"\n"]), lambda s: repeated(s) | joined(s), max_leaves=6
)


@pytest.mark.parametrize("spec", SPECS)
@given(pattern=REGEX, temperature=st.sampled_from([0.0, 1.0, 20.0]), seed=st.integers(0, 99))
@settings(max_examples=40)
def test_answers_match_the_regular_expression(spec: str, pattern: str, temperature: float, seed: int) -> None:
    (answers,) = lm(spec).complete("ab", 60, regex=pattern, temperature=temperature, seed=seed, n=3)
    for answer in answers:
        if answer.finish_reason == "stop":
            assert re.fullmatch(pattern, answer.text), (pattern, answer.text)
        else:
            assert len(answer.tokens) == 60
            assert re.search("[*+]", pattern)  # only such patterns allow a text of this length


@lru_cache
def ids_of(spec: str) -> dict[bytes, set[int]]:
    found: dict[bytes, set[int]] = {}
    for i in range(lm(spec).config.vocab_size):
        found.setdefault(lm(spec).text().token_bytes(i), set()).add(i)
    return found


@pytest.mark.parametrize("spec", SPECS)
@given(language=st.sets(st.text("abé猫🐈", min_size=1, max_size=4), min_size=1, max_size=4), data=st.data())
@settings(max_examples=40)
def test_allowed_tokens_are_those_that_lead_to_an_answer(spec: str, language: set[str], data: st.DataObject) -> None:
    optional = data.draw(st.booleans())
    state = form(spec, regex=f"({'|'.join(language)})" + "?" * optional)
    whole, said, goes_on = [text.encode() for text in language] + [b""] * optional, b"", True
    while goes_on:
        starts = {w[len(said) : end] for w in whole if w.startswith(said) for end in range(len(said) + 1, len(w) + 1)}
        may = {i for start in starts for i in ids_of(spec).get(start, ())}
        ends = set(lm(spec).stop_token_ids) if said in whole else set()
        assert set(state.allowed().nonzero().flatten().tolist()) == may | ends
        token = data.draw(st.sampled_from(sorted(may)))
        said += lm(spec).text().token_bytes(token)
        goes_on = state.accept(token)
        assert goes_on == any(w.startswith(said) and w != said for w in whole)


def of_type(name: str, **keywords: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"type": st.just(name)}, optional=keywords)


def required_is_defined(schema: dict[str, Any]) -> bool:
    return set(schema["required"]) <= schema["properties"].keys()


VALUE = st.recursive(
    of_type("integer", minimum=st.integers(-20, 5), maximum=st.integers(5, 3000))
    | of_type("boolean")
    | of_type("null")
    | st.fixed_dictionaries({"type": st.just("string"), "maxLength": st.integers(0, 4)})
    | st.fixed_dictionaries({"type": st.just("string"), "pattern": st.sampled_from(["^[ab]{1,3}$", "^é+猫?$"])})
    | st.fixed_dictionaries({"enum": st.lists(st.sampled_from([1, "a", None, "é", "🐈"]), min_size=1, unique=True)}),
    lambda inner: (
        st.fixed_dictionaries({"type": st.just("array"), "items": inner, "maxItems": st.integers(0, 3)})
        | st.fixed_dictionaries(
            {
                "type": st.just("object"),
                "properties": st.dictionaries(st.sampled_from("abn"), inner, min_size=1),
                "required": st.sampled_from([[], ["a"]]),
                "additionalProperties": st.just(False),
            }
        ).filter(required_is_defined)
    ),
    max_leaves=4,
)


@pytest.mark.parametrize("spec", SPECS)
@given(schema=VALUE, temperature=st.sampled_from([0.0, 1.0, 20.0]), as_text=st.booleans())
@settings(max_examples=20)
def test_answers_are_json_of_the_schema(spec: str, schema: dict[str, Any], temperature: float, as_text: bool) -> None:
    given = json.dumps(schema) if as_text else schema
    (answers,) = lm(spec).complete("ab", 100, json_schema=given, temperature=temperature, seed=1, n=2)
    for answer in answers:
        if answer.finish_reason == "stop":
            jsonschema.validate(json.loads(answer.text), schema)
        else:
            assert len(answer.tokens) == 100
            assert {"integer", "^é+猫?$", "object", "array"} & set(
                re.findall('[^"]+', json.dumps(schema, ensure_ascii=False))
            )


PATTERNS = [r"[ab]{3}( [ab]{3}){4}", r"(abc)+\.?|猫{2,9}", ""]


@pytest.mark.parametrize("how", [{"lookup": 4}, {"draft": "byte"}, {}], ids=["look-up", "a model", "no draft"])
@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_constraints_hold_in_batches_and_speculation(how: dict[str, Any], temperature: float) -> None:
    draft: Any = {name: lm(value) if name == "draft" else value for name, value in how.items()}
    model = lm("byte")
    sampling = GenerationOptions(temperature, max_new_tokens=40, seed=3)
    requests: dict = {}
    engine = model.engine(**draft)
    for pattern in PATTERNS:
        requests |= model.submit(engine, ["abab abab", "é"], replace(sampling, regex=pattern))
    list(engine.run())
    for i, (request, answer) in enumerate(requests.items()):
        pattern = PATTERNS[i // 2]
        if pattern and request.finish_reason == "stop":
            assert re.fullmatch(pattern, answer.finish())
        prompt, seed = ["abab abab", "é"][i % 2], 3 + i % 2
        engine = model.engine(**draft)
        [one] = model.submit(engine, [prompt], replace(sampling, regex=pattern, seed=seed))
        list(engine.run())
        assert (request.tokens, request.finish_reason) == (one.tokens, one.finish_reason)
    assert {request.finish_reason for request in list(requests)[:2]} == {"stop"}


@pytest.mark.parametrize("prompt", ["", "Once upon a time"])
@pytest.mark.parametrize("pattern", ["[a-z]{1,9}( [a-z]{1,9}){2}", r"[^a-z]{4}\.", " ?was.{5}"])
def test_space_removed_by_the_tokenizer_does_not_count(prompt: str, pattern: str, shared: Path) -> None:
    stories = onward.load(shared / "stories260K")
    (answers,) = stories.complete(prompt, 60, regex=pattern, temperature=3.0, seed=0, n=8)
    assert all(re.fullmatch(pattern, answer.text) for answer in answers)


def test_complete_answer_ends_without_a_stop_token() -> None:
    model = lm("byte")
    endless = LanguageModel(model.model, Tokenizer(model.text().inner, None, None))
    ((answer,),) = endless.complete("a", 9, regex="ab", seed=0)
    assert (answer.text, answer.finish_reason) == ("ab", "stop")


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a bracket that is not closed": ({"regex": "(a"}, "regex cannot be used: unclosed group"),
    "look-ahead": ({"regex": "a(?=b)"}, "look-around"),
    "a word boundary": ({"regex": r"a\b"}, "lookarounds not supported"),
    "a reference": ({"regex": r"(a)\1"}, "backreferences are not supported"),
    "nothing that could match": (
        {"regex": "[a&&b]"},
        "of this model cannot spell any text that it allows",
    ),
    "text that is no JSON": ({"json_schema": "{"}, "json_schema is not JSON: "),
    "far too deep a schema": ({"json_schema": "[" * 9999}, "json_schema is not JSON"),
    "an unknown type": ({"json_schema": {"type": "strin"}}, "#/type is wrong: 'strin' is not a type"),
    "bounds that exclude each other": (
        {"json_schema": {"type": "integer", "minimum": 5, "maximum": 3}},
        "no value conforms to #/minimum: minimum (5) is greater than maximum (3)",
    ),
    "a schema that allows nothing": ({"json_schema": "false"}, "schema is false"),
    "a reference to nowhere": ({"json_schema": {"$ref": "#/a"}}, "#/$ref names #/a, which is not in this document"),
    "an unknown token": ({"grammar": "start: <|call|>"}, "the model has no token <|call|>"),
    "a rule that is missing": ({"grammar": "root ::= item"}, "grammar cannot be used: Rule 'item' not found"),
    "a grammar without rules": ({"grammar": " \n# none"}, "grammar cannot be used: No 'root' rule found"),
    "half an escape": ({"grammar": 'root ::= "\\'}, "grammar cannot be used: it ends within a text"),
    "both": ({"regex": "a", "json_schema": "{}"}, "choose one"),
}


@pytest.mark.parametrize("case", BAD)
def test_impossible_constraint_is_a_user_error(case: str) -> None:
    how, message = BAD[case]
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        lm("char").generate("a", 9, **how)
    assert "\n" not in str(caught.value)


GRAMMARS = (
    'root ::= "x" ("yz" | "y")* "!"',
    'root ::= item{2,3}\nitem ::= [a-z0-9] | "q"',
    'root ::= [^"\\\\]+ # c\n',
    'start: ("a" | "bc")+ "."',
    'start: WORD "."\nWORD: /[a-z]{2,8}/',
    'start: %json {"type": "integer"}',
)
MISPRINTS = *"\"'(){}[]*+?|:\\-^/%<>@~9\n\0", "::=", "root", "start", "\\u12", ""


@pytest.mark.parametrize("count", [300, pytest.param(20_000, marks=pytest.mark.long)])
def test_a_misprinted_grammar_is_a_grammar_or_a_user_error(count: int) -> None:
    choose = Random(5)
    for _ in range(count):
        grammar = choose.choice(GRAMMARS)
        for _ in range(choose.randint(1, 3)):
            start = choose.randrange(len(grammar) + 1)
            grammar = grammar[:start] + choose.choice(MISPRINTS) + grammar[start + choose.choice([0, 1, 2, 5]) :]
        with suppress(UserError):
            form("byte", grammar=grammar)


def test_a_prompt_of_wrong_ids_is_named_with_a_constraint_too() -> None:
    for regex in "", "a":
        with pytest.raises(UserError, match="token id -1 is out of range"):
            lm("byte").complete([[1, -1]], 3, regex=regex)


@pytest.mark.parametrize("forced", [b"b", b""], ids=["a letter", "the end"])
def test_forced_token_that_breaks_the_constraint_is_an_error(forced: bytes) -> None:
    token = min(ids_of("byte")[forced]) if forced else lm("byte").text().eos_id
    ((answer,),) = lm("byte").complete("x", 9, regex="a+", forced_tokens=(token,))
    assert (answer.tokens, answer.finish_reason) == ([], "error")
    assert f"Cannot force token {token}, which breaks the request's constraint" in str(answer.error)


@pytest.mark.parametrize("count", [600, 1200])
def test_a_schema_beyond_the_limits_is_said_to_be_too_large(count: int) -> None:
    schema = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(count)}}
    with pytest.raises(UserError, match="json_schema cannot be used: it is too large"):
        lm("byte").generate("x", 8, json_schema=schema)
