"""Templates can write control tokens, variables cannot; templates that never end or grow without limit are refused."""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import jinja2
import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from onward import Tokenizer, UserError, train_tokenizer
from onward.text import Chat
from onward.text.masked_string import TEMPLATE, MaskedString, concat, mask_of, sourced
from onward.text.template import environment

CONTROL = ["<s>", "</s>", "<|im_end|>", "[INST]", "<x><y>"]
HALVES = [
    "<s",
    ">",
    "</",
    "s>",
    "S>",
    "<|im_",
    "end|>",
    "<|",
    "im_end",
    "|>",
    "[IN",
    "ST]",
    "<x>",
    "<y>",
    "a",
    "\u00a0",
]
FULL_WIDTH = ["＜s", "＞", "＜|im_", "end|＞"]
ALPHABET = [*HALVES, *FULL_WIDTH, *CONTROL, "\ufdd0", "\ufdd3"]


def of_bytes(normalizer: Any = None) -> tokenizers.Tokenizer:
    inner = train_tokenizer("bpe:300", ["<s> a cat im_end" * 3]).inner
    if normalizer:
        inner.normalizer = normalizer
    inner.add_special_tokens([AddedToken(name, normalized=normalizer is not None) for name in CONTROL])
    return inner


def of_words() -> tokenizers.Tokenizer:
    """A tokenizer whose model also contains the control tokens as words."""
    words = ["<unk>", *CONTROL, *sorted(set("".join(ALPHABET)))]
    inner = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens(CONTROL)
    return inner


INNER: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "bytes": of_bytes,
    "NFKC": lambda: of_bytes(normalizers.NFKC()),
    "lower case": lambda: of_bytes(normalizers.Lowercase()),
    "words": of_words,
}
TOKENIZERS = {name: make() for name, make in INNER.items()}
FILTERS = [
    "x",
    "x | upper",
    "x | lower",
    "x | capitalize",
    "x | tojson",
    "x | tojson(ensure_ascii=true)",
    "x | urlencode",
    "x | list",
    "[x, {x: x}]",
    "x | length",
    "x[:2]",
    "x | replace('a', 'b')",
    "x | string | trim",
    "'%s' | format(x)",
    "'{}'.format(x)",
    "[x, x] | join",
    "x.split('m') | join('m')",
    "x ~ x",
    "messages[0].role | lower",
    "tools | tojson",
]
SHOWN = "{{ messages[0].shown }}"  # every template must write the message, since messages left out are refused
CONTENT = "{{ messages[0].content }}"
LITERALS = st.lists(st.sampled_from([*HALVES, *CONTROL]), min_size=1, max_size=3).map("".join)
PARTS = st.lists(st.tuples(st.sampled_from(["text", "constant"]), LITERALS) | st.sampled_from(FILTERS), max_size=6)
CONTENTS = st.lists(st.sampled_from(ALPHABET), min_size=1, max_size=5).map("".join)


def source(parts: list[Any], *, joined: bool) -> str:
    if joined:
        terms = [repr(part[1]) if isinstance(part, tuple) else f"({part})" for part in parts]
        return f"{{{{ {' ~ '.join(terms) or repr('')} }}}}"
    written = [
        (part[1] if part[0] == "text" else f"{{{{ {part[1]!r} }}}}") if isinstance(part, tuple) else f"{{{{ {part} }}}}"
        for part in parts
    ]
    return "".join(written)


def chat(inner: str, template: str) -> Chat:
    return Chat(Tokenizer(TOKENIZERS[inner], "<s>", "</s>", templates={"default": template}))


def values(content: str) -> dict[str, Any]:
    return {"x": content, "tools": [{content: {"name": [content]}}]}


@pytest.mark.parametrize("inner", TOKENIZERS)
@given(parts=PARTS, content=CONTENTS, joined=st.booleans())
@example(parts=["x", ("text", "end|>")], content="<|im_", joined=False)
@example(parts=["messages[0].role | lower"], content="</S>", joined=False)
def test_control_tokens_are_those_of_the_template(inner: str, parts: list[Any], content: str, joined: bool) -> None:
    made = chat(inner, source(parts, joined=joined) + SHOWN)
    ids = made.encode([{"role": content, "content": content, "shown": "-"}], **values(content))
    runs = "".join(part[1] if isinstance(part, tuple) else "\0" for part in parts).split("\0")
    control = {made.inner.token_to_id(name) for name in CONTROL}
    expected = [i for run in runs for i in made.inner.encode(run, add_special_tokens=False).ids if i in control]
    assert Counter(i for i in ids if i in control) == Counter(expected)


@pytest.mark.parametrize("inner", TOKENIZERS)
@given(parts=PARTS, content=st.text("abé 猫", min_size=1, max_size=4), joined=st.booleans())
def test_tokens_of_harmless_content_equal_those_of_the_rendered_text(
    inner: str, parts: list[Any], content: str, joined: bool
) -> None:
    template = source(parts, joined=joined) + SHOWN
    made, messages = chat(inner, template), [{"role": content, "content": content, "shown": "-"}]
    plain = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    plain.filters["tojson"] = environment().filters["tojson"]
    text = plain.from_string(template).render(messages=messages, **values(content))
    assert made.encode(messages, **values(content)) == made.inner.encode(text, add_special_tokens=False).ids


def test_role_that_is_usual_may_complete_a_control_token() -> None:
    inner = of_bytes()
    inner.add_special_tokens(["<|user|>"])
    made = Chat(Tokenizer(inner, templates={"default": "{{ '<|' + messages[0].role + '|>' }}" + SHOWN}))
    ids = made.encode([{"role": "user", "shown": "-"}])
    assert ids == [inner.token_to_id("<|user|>"), *inner.encode("-").ids]


def written(text: str) -> MaskedString:
    return sourced(text, TEMPLATE)


def marked(text: str) -> MaskedString:
    """A string whose upper-case letters are marked as written by the template."""
    return MaskedString(text, "".join(chr(2 * c.isupper()) for c in text))


OPERATIONS: dict[str, Callable[[str], Any]] = {
    "slices": lambda s: [s[1:], s[-1:], s[::-1], s[:0], *s],
    "split": lambda s: [*s.split("aB"), *s.split(), *s.split("B", 1), *s.rsplit("a", 1), *s.rsplit(None, 1)],
    "lines": lambda s: [*s.splitlines(), *s.splitlines(True), *s.partition("a"), *s.rpartition("B")],
    "strip": lambda s: [s.strip(), s.lstrip("aB"), s.rstrip("a "), s.removeprefix("aB"), s.removesuffix("B ")],
    "replace": lambda s: [s.replace("aB", "X"), s.replace("", "-"), s.replace("a", "", 1), s.replace("", "Y", 2)],
    "repeat": lambda s: [s * 3, 0 * s, s + "x", "x" + s, s % (), s.join(["X", "y", s])],
}


@pytest.mark.parametrize("name", OPERATIONS)
@given(text=st.text("aB \n", max_size=8))
def test_characters_keep_their_writer_through(name: str, text: str) -> None:
    kept, expected = OPERATIONS[name](marked(text)), OPERATIONS[name](text)
    assert kept == expected
    for piece in kept:
        by_template = {c for c, code in zip(piece, mask_of(piece)) if code != "\0"}
        assert by_template <= {"B"}
        if "X" not in piece and "Y" not in piece:
            assert mask_of(piece) == mask_of(marked(piece))


def test_fields_of_formats_keep_their_writer() -> None:
    text = written("A%s%%") % marked("bC")
    assert (text, mask_of(text)) == ("AbC%", "\2\0\2\2")
    assert written("%3d|%-4s|") % (5, "x") == "  5|x   |"
    assert mask_of(written("%(a)s-%(a)4s") % {"a": written("X")}) == "\2\2\0\0\0\0"
    assert mask_of(concat([written("A"), "b"])) == "\2\0"


ENDLESS = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a recursive macro": "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "a recursive loop": "{% for i in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "a text times a number": "{{ 'x' * 10**9 }}",
    "a number times a list": "{{ 10**9 * [1] }}",
    "a power": "{{ 10 ** (10 ** 10) }}",
    "a wide field": "{{ '%1000000000d' | format(1) }}",
    "a wide field of a message": "{{ messages[0].content | format(1) }}",
    "a width that is an argument": "{{ '%*d' % (1000000000, 1) }}",
    "a wide format": "{{ '{:1000000000d}'.format(1) }}",
    "a format of a format": "{{ '{:{}}'.format(1, 1000000000) }}",
    "center": "{{ 'x' | center(10**9) }}",
    "a method that pads": "{{ 'x'.ljust(10**9) }}",
    "an indent": "{{ messages | tojson(indent=10**9) }}",
    "an indent of many lines": "{% set s = ('x\n' * 99999) %}{{ s | indent(9999) }}",
    "a fill": "{{ [1] | batch(10**9, 0) | list }}",
    "texts that double": (
        "{% set n = namespace(s='ab') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}"
    ),
    "lists that double": (
        "{% set n = namespace(s=[1]) %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}"
    ),
    "lists in lists": (
        "{% set n = namespace(s=[1]) %}{% for i in range(99) %}{% set n.s = [n.s, n.s] %}{% endfor %}{{ n.s }}"
    ),
    "JSON of lists in lists": (
        "{% set n = namespace(s=[1]) %}{% for i in range(99) %}{% set n.s = [n.s, n.s] %}{% endfor %}{{ n.s | tojson }}"
    ),
    "a replacement": "{% set s = 'x' * 99999 %}{{ s | replace('x', s) }}",
    "a replacement in a message": "{% set s = 'x' * 9999999 %}{{ messages[0].content.replace('', s) }}",
    "long texts again and again": "{% set s = 'x' * 99999 %}{% for i in range(9999) %}{{ s }}{% endfor %}",
}


@pytest.mark.parametrize("case", ENDLESS)
def test_template_without_end_is_refused(case: str) -> None:
    with pytest.raises(UserError, match=r"too large|runs for more than|recursion") as caught:
        chat("bytes", ENDLESS[case]).encode("%1000000000d")
    assert "\n" not in str(caught.value)


def test_surrogate_in_a_template_becomes_unknown() -> None:
    made = [chat("bytes", template + CONTENT).encode("a") for template in ("\ud800b", "{{ '\\ud800b' }}", "\ufffdb")]
    assert made[0] == made[1] == made[2]


def test_message_that_contains_itself_is_refused() -> None:
    message: dict[str, Any] = {"role": "user", "content": "a"}
    message["again"] = message
    with pytest.raises(UserError, match="contain themselves"):
        chat("bytes", "{{ 1 }}").encode([message])


def test_unknown_token_that_the_vocabulary_lacks_is_named() -> None:
    inner = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="<unk>"))
    with pytest.raises(UserError, match=re.escape("the vocabulary lacks the unknown token '<unk>'")):
        Tokenizer(inner, None, None).encode("b")
