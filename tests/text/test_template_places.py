"""A chat template gives the text of Jinja's sandbox, for each call in CALLS in each of PLACES."""

import json
import random
import re
from typing import Any

import jinja2
import pytest
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from onward import Tokenizer, train_tokenizer
from onward.text import Chat
from onward.text.masked_string import MaskedString, sourced
from onward.text.template import compiled, render

VALUES = {"x": "a-b a\n c", "y": "a", "n": 2, "names": ["u", "v w"], "table": {"k": "z", "n": 3}, "none": None}
TEXTS = ["x", "y", "'a b'", "table.k", "names[1]", "('a' ~ x)", "(x | upper)", "(x | tojson)", "x[1:]", "n | string"]
CALLS = [  # T and U are replaced by texts
    *("T.replace(U, 'r')", "T.replace('a', U, 1)", "T.join(names)", "T.join([U, 'q'])", "T.split(U)", "T.split()"),
    *("T.rsplit(U, 1)", "T.splitlines()", "T.partition(U)", "T.rpartition(' ')", "T.strip()", "T.lstrip('a')"),
    *("T.rstrip(U)", "T.startswith(U)", "T.removeprefix('a')", "T.removesuffix(U)", "T.upper()", "T.title()"),
    *("T.capitalize()", "T.lower()", "T.find(U)", "T.count(U)", "T.center(9)", "T.ljust(n, '.')", "T.zfill(5)"),
    *("'{}-{}'.format(T, n)", "'{0:>{1}}|{0!r}'.format(T, 5)", "'{k}'.format_map(table)", "'{a.b}'.format(a=T)"),
    *("'%s: %d' % (T, n)", "'%(k)s' % table", "T ~ U", "T + U", "T * n", "n * T", "T in U", "T == U", "T | trim"),
    *("T | replace(U, 'r')", "T | replace('a', U, 1)", "[T, U] | join", "T | length", "T | list"),
    *(
        "'%s|%s' | format(T, U)",
        "T | indent(2)",
        "T | capitalize",
        "T | title",
        "T | first",
        "T | reverse",
        "T | wordcount",
    ),
    *(
        "names | join(U)",
        "names | map('upper') | join(T)",
        "T | default(U)",
        "[T] | batch(2, U) | list",
        "T | urlencode",
    ),
    *(
        "table.items() | list",
        "table.get(T, U)",
        "dict(a=T).a",
        "T if n else U",
        "(T, U) | max",
        "T.encode()",
        "T.nothing",
    ),
    *("T.join(n)", "T.replace(n, U)", "T + n", "T.format()", "none.x", "T.split(U, maxsplit=1)", "T.expandtabs(2)"),
]
PLACES = {  # E is replaced by the expression
    "output": "{{ E }}",
    "loop": "{% for i in names %}{{ E }}{{ loop.last }}{% endfor %}",
    "loop over it": "{% for i in [E] recursive %}{{ i }}{% else %}none{% endfor %}",
    "block": "{% block body %}{{ E }}{% endblock %}",
    "block in a loop": "{% for i in names %}{% block body scoped %}{{ i }}{{ E }}{% endblock %}{% endfor %}",
    "macro": "{% macro f(a) %}{{ E }}{{ a }}{% endmacro %}{{ f(y) }}{{ f(a=E) }}",
    "macro in a loop": "{% macro f(a) %}{{ a }}{% endmacro %}{% for i in names %}{{ f(E) }}{% endfor %}",
    "caller": "{% macro f() %}[{{ caller() }}]{% endmacro %}{% call f() %}{{ E }}{% endcall %}",
    "set": "{% set v = E %}{{ v }}",
    "set block": "{% set v %}{{ E }}!{% endset %}{{ v }}",
    "namespace": "{% set ns = namespace(v='') %}{% for i in names %}{% set ns.v = E %}{% endfor %}{{ ns.v }}",
    "filter block": "{% filter upper %}{{ E }}{% endfilter %}",
    "condition": "{% if E %}yes{% else %}no{% endif %}",
    "with": "{% with v = E %}{{ v }}{% endwith %}",
    "list": "{{ [E, y] }}{{ {'k': E} }}",
    "loop with break": "{% for i in names %}{{ E }}{% break %}{% endfor %}",
}


def outcome(make: Any) -> str:
    try:
        return re.sub("(?i)0x[0-9a-f]+", "", make())
    except Exception as error:
        return type(error).__name__


def marked(value: Any) -> Any:
    if isinstance(value, str):
        return sourced(value, 2)
    if isinstance(value, dict):
        return {name: marked(inner) for name, inner in value.items()}
    return [marked(inner) for inner in value] if isinstance(value, list) else value


def compared(source: str) -> None:
    sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    sandbox.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    expected = outcome(lambda: sandbox.from_string(source).render(VALUES))
    assert outcome(lambda: render(compiled(source), marked(VALUES))) == expected, source


@pytest.mark.parametrize("place", PLACES)
def test_each_call_in_each_place_gives_the_text_of_jinja(place: str) -> None:
    draw = random.Random(place)
    for call in CALLS:
        expression = "".join(f"({draw.choice(TEXTS)})" if c in "TU" else c for c in call)
        compared(PLACES[place].replace("E", expression))


@pytest.mark.fuzzer
@pytest.mark.parametrize("count", [400, pytest.param(20_000, marks=pytest.mark.long)])
def test_random_templates_give_the_text_of_jinja(count: int) -> None:
    draw = random.Random(46)
    for _ in range(count):
        pieces = []
        for _ in range(draw.randint(1, 3)):
            text = draw.choice(TEXTS)
            for _ in range(draw.randint(1, 3)):
                text = "".join(
                    f"({text if c == 'T' else draw.choice(TEXTS)})" if c in "TU" else c for c in draw.choice(CALLS)
                )
            pieces.append(draw.choice([*PLACES.values()]).replace("E", text).replace("body", f"b{len(pieces)}"))
        compared("\n".join(pieces))


@pytest.mark.parametrize("place", PLACES)
def test_a_control_token_of_the_template_is_one_in_each_place(place: str) -> None:
    if place == "condition":
        return
    inner = train_tokenizer("bpe:300", ["a b c " * 9]).inner
    inner.add_special_tokens(["<|end|>", "<|END|>"])
    for expression in "'<|end|>'", "'<|' ~ 'end' ~ '|>'", "'<|x|>'.replace('x', 'end')", "['<|', '|>'] | join('end')":
        source = PLACES[place].replace("E", expression) + "{{ messages[0].content }}"
        chat = Chat(Tokenizer(inner, templates={"default": source}))
        ids = chat.encode([{"role": "user", "content": "<|end|>"}], names=["u"], y="")
        written = jinja2.Environment(extensions=[loopcontrols]).from_string(source)
        plain = written.render(messages=[{"content": ""}], names=["u"], y="")
        if place == "list":  # the template prints a list as one text
            continue
        count = plain.count("<|end|>") + plain.count("<|END|>")
        assert count == sum(i in {inner.token_to_id("<|end|>"), inner.token_to_id("<|END|>")} for i in ids), source


def test_an_ordinary_string_keeps_the_methods_of_its_type() -> None:
    assert MaskedString("ab").join(["x", "y"]) == "xaby"
    with pytest.raises(TypeError, match="sequence item 1: expected str instance, int found"):
        "".join(["a", 1])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="sequence item 1: expected str instance, int found"):
        MaskedString("").join(["a", 1])  # type: ignore[list-item]
