"""A JSON schema is enforced during generation, checked on the complete answer, or refused with the path of the
cause."""

import json
import re
from functools import cache
from typing import Any

import pytest
import torch

from onward import Decoder, DecoderConfig, GenerationOptions, LanguageModel, Tokenizer, UserError, train_tokenizer
from onward.generation import SchemaWarning
from onward.generation.constraint import TextConstraint, constraint, terminal
from onward.generation.schema_patterns import expressible
from onward.generation.schemas import json_rule, prepared

from support.devices import on_device
from support.schemas import is_allowed, problems

REFERENCED = {"$defs": {"A": {"type": "integer"}, "B": {"enum": ["a", "b"]}}}
OBJECT = {"type": "object", "additionalProperties": False, "properties": {"a": {}, "b": {}}}
CLOSED = {"type": "object", "additionalProperties": False}
ENFORCED: dict[str, tuple[Any, list[Any], list[Any]]] = {  # schema, some values that conform and some that do not
    "annotations": (
        {"title": "x", "default": 1, "examples": [1], "readOnly": True, "x-a": 1, "type": "null"},
        [None],
        [1],
    ),
    "an unknown format": ({"type": "string", "format": "password"}, ["a"], [1]),
    "a known format": ({"format": "date"}, ["2024-02-28", 5], ["2024-02-31", "a"]),
    "a version of UUID": ({"format": "uuid4"}, ["01234567-89ab-4def-8123-456789abcdef"], ["a"]),
    "a format that its pattern excludes": ({"format": "date", "pattern": "^a$"}, ["a"], ["2024-02-28", "b"]),
    "an optional format that its pattern excludes": (
        {"anyOf": [{"type": "string", "format": "date", "allOf": [{"pattern": "^a"}]}, {"type": "null"}]},
        ["ab", None],
        ["2024-02-28"],
    ),
    "a format beside an enum": ({"type": "string", "format": "date", "enum": ["a"]}, ["a"], ["2024-02-28"]),
    "look-ahead at the start": ({"pattern": r"^(?=.*\d)(?=.{2,3}$)[a-z\d]+$"}, ["a1", "1ab"], ["ab", "1", "abc1"]),
    "an ECMAScript set": ({"pattern": r"^[[\]&&]$"}, ["[", "]", "&"], ["a", "\\"]),
    "an enum with a type": ({"type": "integer", "enum": ["a", 2]}, [2], ["a"]),
    "a reference with siblings": (REFERENCED | {"$ref": "#/$defs/A", "minimum": 3}, [3], [2]),
    "a reference in allOf": (REFERENCED | {"allOf": [{"$ref": "#/$defs/A"}], "minimum": 3}, [3], [2, "a"]),
    "an anchor": ({"$ref": "#A", "$defs": {"A": {"$anchor": "A", "type": "null"}}}, [None], [1]),
    "an own address": ({"$id": "http://a.b/c", "$ref": "#/$defs/A"} | REFERENCED, [1], ["a"]),
    "any property names": ({"propertyNames": {"type": "string"}}, [{"é": 1}, 1], []),
    "a pattern of names": (
        CLOSED | {"propertyNames": {"pattern": "^a"}, "additionalProperties": {}},
        [{"ab": 1}],
        [{"b": 1}],
    ),
    "an enum of names": (
        REFERENCED | {"type": "object", "propertyNames": {"$ref": "#/$defs/B"}},
        [{"b": 1}],
        [{"c": 1}],
    ),
    "an enum of declared names": (OBJECT | {"propertyNames": {"enum": ["a"]}}, [{"a": 1}], [{"b": 1}]),
    "a length of names": ({"type": "object", "propertyNames": {"maxLength": 1}}, [{"é": 1}], [{"ab": 1}]),
    "names that are dates": ({"type": "object", "propertyNames": {"format": "date"}}, [{"2024-02-28": 1}], [{"a": 1}]),
    "no names": ({"type": "object", "propertyNames": False, "maxProperties": 0}, [{}], [{"a": 1}]),
    "unevaluated properties": ({"properties": {"a": {}}, "unevaluatedProperties": False}, [{"a": 1}, 1], [{"b": 1}]),
    "unevaluated items": ({"prefixItems": [{"const": 1}], "unevaluatedItems": False}, [[1]], [[1, 2]]),
    "equal items of one": ({"type": "array", "uniqueItems": True, "maxItems": 1}, [[1]], [[1, 1]]),
    "a property that is never allowed": (OBJECT | {"properties": {"a": {"not": {}}, "b": {}}}, [{"b": 1}], [{"a": 1}]),
    "a condition without branches": ({"if": {"const": 1}}, [1, 2], []),
    "alternatives of other types": ({"oneOf": [{"type": "integer"}, {"enum": ["a", None]}]}, [1, None], [True, "b"]),
    "alternatives with a tag": (
        {
            "oneOf": [
                {"type": "object", "properties": {"k": {"const": "a"}, "n": {"const": 1}}, "required": ["k"]},
                {"properties": {"k": {"enum": ["b", "c"]}}, "type": "object"},
            ]
        },
        [{"k": "a", "n": 1}, {"k": "c"}, {}],
        [{"k": "a", "n": 2}, {"k": "d"}],
    ),
    "a discriminator": (
        {
            "oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
            "discriminator": {"propertyName": "k"},
            "$defs": {
                "A": {"type": "object", "properties": {"k": {"const": "a"}}},
                "B": {"type": "object", "properties": {"k": {"const": "b"}, "n": {"$ref": "#"}}},
            },
        },
        [{"k": "a"}, {"k": "b", "n": {"k": "a"}}],
        [{}, {"n": 1}, {"k": "b", "n": {}}],
    ),
}
CHECKED: dict[
    str, tuple[Any, str, list[Any], list[Any]]
] = {  # schema, path, values that conform, and those that do not
    "equal items": (
        {"items": {"uniqueItems": True}},
        "#/items/uniqueItems",
        [[[1, True]]],
        [[[1, 1.0]], [[[1], [1.0]]], [[[], []]]],
    ),
    "overlapping alternatives": ({"oneOf": [{"type": "number"}, {"const": 1}]}, "#/oneOf", [2], [1]),
    "look-ahead": ({"pattern": r"^(?!\.)(?!.*\.\.)[a.]+$"}, "#/pattern", ["a.a"], [".a", "a..a"]),
    "look-behind": ({"pattern": r"^a+(?<!aaa)$"}, "#/pattern", ["aa"], ["aaa"]),
    "a word's end": (
        {"properties": {"~/": {"pattern": r"a\b"}}},
        "#/properties/~0~1/pattern",
        [{"~/": "a b"}],
        [{"~/": "ab"}],
    ),
    "a back-reference": ({"pattern": r"^(?<c>[ab])\k<c>$"}, "#/pattern", ["aa"], ["ab"]),
    "an anchor within": ({"pattern": r"^(a|b^c)$"}, "#/pattern", ["a"], ["b"]),
    "names by look-ahead": (
        {"patternProperties": {"^(?!a)": {"const": 1}}},
        "#/patternProperties",
        [{"b": 1}],
        [{"b": 2}],
    ),
    "overlapping names": (
        {"patternProperties": {"^a": {"minimum": 1}, "b$": {"maximum": 2}}, "additionalProperties": False},
        "#/patternProperties",
        [{"ab": 1, "a": 3}],
        [{"ab": 3}, {"c": 1}],
    ),
    "names by exclusion": ({"propertyNames": {"not": {"const": "a"}}}, "#/propertyNames", [{"b": 1}], [{"a": 1}]),
    "a number of properties": (OBJECT | {"minProperties": 2}, "#/minProperties", [{"a": 1, "b": 1}], [{"a": 1}]),
    "a condition": ({"if": {"const": 1}, "else": {"type": "string"}}, "#/if", [1, "a"], [2]),
    "a negation": ({"not": {"type": "integer"}}, "#/not", ["a", 1.5], [1]),
    "contained items": ({"contains": {"const": 1}, "maxContains": 1}, "#/contains", [[1, 2]], [[], [1, 1]]),
    "dependent properties": ({"dependentRequired": {"a": ["b"]}}, "#/dependentRequired", [{"b": 1}], [{"a": 1}]),
    "dependent schemas": ({"dependentSchemas": {"a": {"required": ["b"]}}}, "#/dependentSchemas", [{}], [{"a": 1}]),
    "dependencies": (
        {"dependencies": {"a": ["b"], "c": {"required": ["d"]}}},
        "#/dependencies",
        [{}],
        [{"a": 1}, {"c": 1}],
    ),
    "properties of parts": (
        {"allOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False},
        "#/unevaluatedProperties",
        [{"a": 1}],
        [{"b": 1}],
    ),
    "a far bound": ({"type": "number", "maximum": 1e38}, "#/maximum", [1e37], [1e39]),
    "a multiple beside a negation": ({"multipleOf": 0.01, "not": {"const": 1}}, "#/not", [9.01, 0.07, "a"], [1, 0.001]),
    "a bound of draft 4": ({"not": {"minimum": 1, "exclusiveMinimum": True}}, "#/not", [1], [2]),
    "a cycle with siblings": (
        {"$defs": {"A": {"properties": {"x": {"$ref": "#/$defs/A", "required": ["y"]}}}}, "$ref": "#/$defs/A"},
        "#/$defs/A/properties/x/required",
        [{"x": {"y": 1}}],
        [{"x": {}}],
    ),
}
REFUSED: dict[str, tuple[Any, str]] = {
    "bounds": (
        {"items": {"type": "integer", "minimum": 5, "maximum": 3}, "minItems": 1, "type": "array"},
        "no value conforms to #/items/minimum: required item is unsatisfiable",
    ),
    "lengths": (
        {"type": "string", "minLength": 5, "maxLength": 3},
        "#/minLength: minLength (5) is greater than maxLength",
    ),
    "nothing": ({"not": {}}, "no value conforms to #: schema is false"),
    "an impossible pattern": ({"type": "string", "pattern": "^a$", "minLength": 2}, "no value conforms to #/minLength"),
    "an unknown type": (
        {"properties": {"a": {"type": "any"}}},
        "#/properties/a/type is wrong: 'any' is not a type: write one",
    ),
    "a wrong value": ({"anyOf": [{"maxLength": "3"}]}, "#/anyOf/0/maxLength is wrong: '3' is not of type 'integer'"),
    "a wrong value of a checked keyword": ({"dependentRequired": ["a"]}, "#/dependentRequired is wrong"),
    "a wrong pattern": ({"pattern": "(a"}, "#/pattern has '(a', which is not a regular expression"),
    "a missing schema": (
        {"items": {"$ref": "#/$defs/A"}},
        "#/items/$ref names #/$defs/A, which is not in this document",
    ),
    "another document": ({"$ref": "https://a.b/c"}, "#/$ref names https://a.b/c, which is not in this document"),
    "itself": ({"$defs": {"A": {"anyOf": [{"$ref": "#/$defs/A"}]}}, "$ref": "#/$defs/A"}, "refers to itself"),
    "a dynamic reference": ({"$dynamicRef": "#a"}, "#/$dynamicRef is not supported: use $ref"),
    "unevaluated properties": (
        {"allOf": [{"patternProperties": {"a": {}}}], "unevaluatedProperties": False},
        "#/unevaluatedProperties cannot be combined with patternProperties: use additionalProperties",
    ),
    "infinity": ({"const": float("inf")}, "is not JSON"),
    "depth": (json.loads('{"items":' * 400 + "{}" + "}" * 400), "nested too deeply"),
    "too many": (
        {"allOf": [{"pattern": f"a^{i}"} for i in range(20)]},
        "more than 10 keywords, such as #/allOf/10/pattern",
    ),
}


@pytest.mark.parametrize("case", ENFORCED)
def test_keyword_is_enforced_while_an_answer_is_written(case: str) -> None:
    schema, valid, invalid = ENFORCED[case]
    assert prepared(schema).later == ()
    assert [is_allowed(schema, value) for value in valid + invalid] == [True] * len(valid) + [False] * len(invalid)


@pytest.mark.parametrize("case", CHECKED)
def test_keyword_that_no_grammar_expresses_is_checked_in_the_complete_answer(case: str) -> None:
    schema, path, valid, invalid = CHECKED[case]
    ready = prepared(schema, "response_format")
    assert ready.later == (path,)
    assert path in ready.note
    for value in valid:
        assert is_allowed(schema, value)
        assert problems(ready, json.dumps(value)) == []
    for value in invalid:
        [problem] = problems(ready, json.dumps(value))
        assert problem.startswith("response_format is not met by the answer: #")


@pytest.mark.parametrize("case", REFUSED)
def test_schema_that_cannot_be_used_is_refused_by_path(case: str) -> None:
    schema, message = REFUSED[case]
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        prepared(schema, "tools[2].parameters")
    assert str(caught.value).startswith("tools[2].parameters ")
    assert "\n" not in str(caught.value)


def test_check_of_a_pattern_takes_a_bounded_time() -> None:
    assert problems(prepared({"pattern": "^(?!b)(a+)+$"}), '"' + "a" * 60 + '!"')


def test_check_of_nested_alternatives_takes_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onward.generation.schema_check.SECONDS", 0.1)
    lists = {"type": "array", "items": {"$ref": "#"}}
    ready = prepared({"anyOf": [lists | {"uniqueItems": True}, lists, {"const": 1}]})
    assert "more than 0.1 s" in problems(ready, "[" * 40 + "2" + "]" * 40)[0]
    assert "nested too deeply" in problems(ready, "[" * 2000 + "1" + "]" * 2000)[0]


@pytest.mark.parametrize(
    ("pattern", "expected", "exact"),
    [
        (r"^(?=a)(?=.*b)c|d$", [r"^c|d$"], False),
        (r"^(?=(a|b)c)d\/e$", ["^d/e$", "^(?:(a|b)c)"], True),
        (r"^[^]{2}[]?\Z", [r"^[\s\S]{2}[^\s\S]?\z"], True),
        (r"a(?!b)+(?<=c)d\B*", ["ad"], False),
        (r"(a)\1{2}", [r"(a)[\s\S]*"], False),
        (r"^{a}[\]\\(?=]$", [r"^\{a}[\]\\(?=]$"], True),
        (r"[[:alpha:]][a~&]", [r"[[:alpha:]][a\~\&]"], True),
    ],
)
def test_pattern_becomes_expressions_without_assertions(pattern: str, expected: list[str], exact: bool) -> None:
    assert expressible(pattern) == (expected, exact)


def test_set_of_an_enum_has_at_most_as_many_items() -> None:
    schema = {
        "type": "array",
        "items": {"$ref": "#/$defs/A"},
        "uniqueItems": True,
        "$defs": {"A": {"enum": ["a", "b"]}},
    }
    assert [is_allowed(schema, ["a"] * count) for count in range(4)] == [True, True, True, False]


@cache
def lm(spec: str = "byte") -> LanguageModel:
    torch.manual_seed(0)
    tokenizer = train_tokenizer(spec, ['{"x":12} true'])
    tokenizer.inner.add_special_tokens(["<|call|>", "[CALL]"])
    sizes: dict[str, Any] = {"d_model": 8, "n_layers": 1, "n_heads": 1, "n_kv_heads": 1, "context_length": 64}
    model = Decoder(DecoderConfig(vocab_size=tokenizer.vocab_size + 2, **sizes)).eval()
    return LanguageModel(on_device(model), Tokenizer(tokenizer.inner))


BROKEN = {"enum": [True], "not": {"const": True}}  # the grammar allows only one answer, which violates `not`
MESSAGE = "json_schema is not met by the answer: # breaks #/not, which is checked only on the complete answer"


@pytest.mark.parametrize("how", [{}, {"lookup": 4}], ids=["tokens", "drafts"])
def test_answer_that_breaks_its_schema_fails_alone(how: dict[str, Any]) -> None:
    with pytest.warns(SchemaWarning, match=r"json_schema: #/not cannot be enforced while an answer is written"):
        [[answer]] = lm().complete("truetrue", 9, json_schema=BROKEN, **how)
    assert (answer.text, answer.finish_reason) == ("true", "error")
    assert str(answer.error).startswith(MESSAGE)


@pytest.mark.filterwarnings("ignore::onward.generation.schemas.SchemaWarning")
def test_broken_schema_is_raised_after_the_stream_and_not_for_an_answer_that_is_cut() -> None:
    with pytest.raises(UserError, match=re.escape(MESSAGE)):
        lm().generate("a", 9, json_schema=BROKEN)
    with pytest.raises(UserError, match=re.escape(MESSAGE)):
        list(lm().stream("a", 9, json_schema=BROKEN))
    assert lm().generate("a", 3, json_schema=BROKEN) == "tru"
    assert lm().generate("a", 9, json_schema=BROKEN, stop="e") == "tru"


def form(grammar: str, spec: str = "byte") -> TextConstraint:
    model = lm(spec)
    found = constraint(model.text(), model.config.vocab_size, [], GenerationOptions(grammar=grammar))
    assert found is not None
    return found


def accepts(state: TextConstraint, *pieces: str) -> bool:
    """Whether an answer may consist of these pieces (control tokens or texts)."""
    state, inner = state.copy(), lm().text()
    names = [inner.inner.id_to_token(i) for i in inner.special]
    for piece in pieces:
        for token in [inner.inner.token_to_id(piece)] if piece in names else inner.encode(piece):
            if not state.allowed()[token]:
                return False
            state.accept(token)
    return state.state.complete


def test_schemas_in_one_grammar_have_their_own_roots() -> None:
    x = {"$ref": "#/$defs/X"}
    rules = [
        json_rule(x | {"$defs": {"X": {"const": 12}}}),
        json_rule(x | {"$defs": {"X": {"const": "::=\nstart: a"}}}),
    ]
    state = form(f'start: "a" a | "b" b\na: {rules[0]}\nb: {rules[1]}')
    texts = ["a12", "b12", 'a"::=\\nstart: a"', 'b"::=\\nstart: a"']
    assert [accepts(state, text) for text in texts] == [True, False, False, True]


@pytest.mark.parametrize("spec", ["byte", "char"])
def test_grammar_may_force_control_tokens(spec: str) -> None:
    text = lm(spec).text()
    state = form(f"start: <|call|> {terminal(text, '[CALL]')} {terminal(text, '[x]' if spec == 'byte' else 'x')}", spec)
    for name in "<|call|>", "[CALL]":
        assert state.allowed().nonzero().flatten().tolist() == [text.inner.token_to_id(name)]
        state.accept(text.inner.token_to_id(name))
    assert state.allowed().any()


def test_control_tokens_are_allowed_only_where_the_grammar_names_them() -> None:
    special = sorted(lm().text().special)
    for grammar in "start: /(?s:.*)/", f"start: {json_rule({})}", 'start: "" /[^a]*/ | "<|call|>" // <|call|>':
        state = form(grammar)
        assert not state.allowed()[special].any()
    state = form("start: /(?s:.*)/ [CALL] /(?s:.*)/".replace("[CALL]", terminal(lm().text(), "[CALL]")))
    assert accepts(state, "ab", "[CALL]", "cd")
    assert not accepts(state, "ab", "<|call|>", "[CALL]")
    assert not accepts(state, "ab[CALL", "]")
