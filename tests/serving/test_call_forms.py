"""Formats of calls and of reasoning, parsed from answers in arbitrary pieces, with control tokens or text as
markers."""

from __future__ import annotations

import json
import random
import re
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

import onward
from onward import Tokenizer
from onward.serving.calls.forms import BLOCKS, FORMS, call_form_of, reasoning_form_of
from onward.serving.calls.markers import MARKERS, Markers
from onward.serving.calls.splitter import Splitter
from onward.serving.server_options import ReasoningParser, ToolParser

from support.calls import CONTROL, PLAIN, encoded, forms_for, random_text, read, written

PARAMETERS = {
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "more": {"anyOf": [{"$ref": "#/$defs/More"}, {"type": "null"}]},
    },
    "$defs": {"More": {"type": "object"}},
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("weather", "time")]
ARGUMENTS = '{"city": "Oslo"}'
CALL = f'{{"name": "weather", "arguments": {ARGUMENTS}}}'
OTHER = f'{{"name": "time", "parameters": {ARGUMENTS}}}'
ONE = [("call", "weather"), ("arguments", ARGUMENTS), ("end", "")]
TWO = [*ONE, ("call", "time"), ("arguments", ARGUMENTS), ("end", "")]
TAGS = "<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>"
TALK = "<|start|>assistant<|channel|>"
HARMONY = f"commentary to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>"
QUOTED = '{"name": "weather", "arguments": {"city": "a</tool_call>\\"}b"}}'

READ: dict[str, tuple[str, str, list[tuple[str, str]]]] = {  # format, text of an answer, expected events
    "one": ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", ONE),
    "two": ("hermes", f"<tool_call>{CALL}</tool_call>\n<tool_call>{OTHER}</tool_call>\n", TWO),
    "two in one block": ("hermes", f"<tool_call>\n{CALL}\n{OTHER}\n</tool_call>", TWO),
    "after text": ("hermes", f"I ask. <tool_call>{CALL}</tool_call>", [("content", "I ask. "), *ONE]),
    "before text": ("hermes", f"<tool_call>{CALL}</tool_call>\nThere.", [*ONE, ("content", "There.")]),
    "without its end": ("hermes", f"<tool_call>{CALL}", ONE),
    "no call": ("hermes", "It rains <in Oslo>.", [("content", "It rains <in Oslo>.")]),
    "white space": ("hermes", " \n", [("content", " \n")]),
    "further keys": (
        "hermes",
        f'<tool_call>{{"id": 1, {CALL[1:-1]}, "why": "a}}"}}</tool_call>!',
        [*ONE, ("content", "!")],
    ),
    "no last brace": ("hermes", f"<tool_call>{CALL[:-1]}</tool_call> So.", [*ONE, ("content", "So.")]),
    "its end in a text": (
        "hermes",
        f"<tool_call>{QUOTED}</tool_call>",
        [("call", "weather"), ("arguments", '{"city": "a</tool_call>\\"}b"}'), ("end", "")],
    ),
    "arguments as text": (
        "hermes",
        '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}</tool_call>',
        ONE,
    ),
    "arguments first": ("hermes", f'<tool_call>{{"arguments": {ARGUMENTS}, "name": "weather"}}</tool_call>', ONE),
    "a list": ("mistral", f"[TOOL_CALLS] [{CALL}, {OTHER}]", TWO),
    "a list without its marker": ("mistral", f" [{CALL}, {OTHER}]", TWO),
    "text and a list": ("mistral", f"So:[TOOL_CALLS][{CALL}]", [("content", "So:"), *ONE]),
    "names and arguments": (
        "mistral",
        f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]time[CALL_ID]1[ARGS]{ARGUMENTS}",
        TWO,
    ),
    "bare": ("json", CALL, ONE),
    "a bare list": ("json", f"[{CALL},{OTHER}]", TWO),
    "bare text": ("json", "It is {fine}.", [("content", "It is {fine}.")]),
    "bare JSON": ("json", '{"name": "Ann", "a": 1}', [("content", '{"name": "Ann", "a": 1}')]),
    "bare JSON with the name of a tool": ("json", '{"name": "time"}', [("content", '{"name": "time"}')]),
    "bare numbers": ("json", "[1, 2]", [("content", "[1, 2]")]),
    "Llama's": ("llama3_json", OTHER.replace("time", "weather"), ONE),
    "Llama's with its tag": ("llama3_json", f"<|python_tag|>{CALL}; {OTHER}", TWO),
    "harmony": ("harmony", f"<|channel|>{HARMONY}", ONE),
    "harmony, thoughts and a preamble": (
        "harmony",
        f"<|channel|>analysis<|message|>Hm.<|end|>{TALK}commentary<|message|>I look.<|end|>{TALK}{HARMONY}",
        [("reasoning", "Hm."), ("content", "I look."), *ONE],
    ),
    "harmony, the recipient first": (
        "harmony",
        f" to=functions.weather<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>",
        ONE,
    ),
    "harmony, an answer": ("harmony", "<|channel|>final<|message|>Hi<|return|>", [("content", "Hi")]),
    "harmony, no channel": ("harmony", "Hi", [("content", "Hi")]),
    "tags": ("qwen3_coder", f"<tool_call>\n{TAGS}\n</tool_call>", ONE),
    "tags, twice": (
        "qwen3_coder",
        f"So: <tool_call>{TAGS}</tool_call>\n{TAGS.replace('weather', 'time')}",
        [("content", "So: "), *TWO],
    ),
    "tags of each type": (
        "qwen3_coder",
        '<tool_call>\n<function=weather>\n<parameter=city>\n5 </tool_call>\n</parameter> "\n\n</parameter>\n'
        '<parameter=days>\n5\n</parameter>\n<parameter=more>\n{"a":\n[1]}\n</parameter>\n</function>\n</tool_call>',
        [
            ("call", "weather"),
            ("arguments", '{"city": "5 </tool_call>\\n</parameter> \\"\\n", "days": 5, "more": {"a":\n[1]}}'),
            ("end", ""),
        ],
    ),
    "tags that are none": ("qwen3_coder", "a <function=x> b", [("content", "a <function=x> b")]),
}
EMPTY = {  # calls without arguments
    "hermes": (
        '<tool_call>{"name": "weather", "arguments": null}</tool_call>',
        '<tool_call>{"name": "weather"}</tool_call>',
    ),
    "mistral": ('[TOOL_CALLS][{"name": "weather", "arguments": ""}]', "[TOOL_CALLS]weather[ARGS]{}"),
    "llama3_json": ('{"name": "weather", "parameters": null}',),
    "harmony": ("<|channel|>commentary to=functions.weather<|message|><|call|>",),
    "qwen3_coder": ("<tool_call>\n<function=weather>\n</function>\n</tool_call>",),
}
NONE = {  # texts that are not calls
    "hermes": ('<tool_call>{"name": "x", "arguments": {"a": 1}}</tool_call>', "<tool_call>weather</tool_call>!",
        '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>', '<tool_call>{"name": "wea'),
    "mistral": ('[TOOL_CALLS] [{"name": "x"}]', "[TOOL_CALLS]x[ARGS]{}", "[TOOL_CALLS] weather"),
    "json": ('{"name": "x", "arguments": {}}', '{"name": 3}', "[", '{"name": "weather", "arguments": 3}'),
    "qwen3_coder": ("<tool_call>\n<function=x>\n</function>\n</tool_call>", "<tool_call> <func",
        "<function=weather><parameter=ci"),
}  # fmt: skip


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    cuts = sorted(cuts)
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]


@pytest.mark.parametrize("name", READ)
@given(data=st.data())
def test_calls_are_read_however_the_answer_is_cut(name: str, data: st.DataObject) -> None:
    form, text, expected = READ[name]
    reasoning = "harmony" if form == "harmony" else "none"
    for markers in PLAIN, CONTROL:
        whole = written(text, markers)
        cuts = data.draw(st.lists(st.integers(0, len(whole)), max_size=6))
        assert read(forms_for(TOOLS, form, reasoning, markers), pieces_of(whole, cuts)) == expected


@pytest.mark.parametrize("form", EMPTY)
def test_calls_without_arguments_have_an_empty_object(form: str) -> None:
    for text in EMPTY[form]:
        for markers in PLAIN, CONTROL:
            events = read(forms_for(TOOLS, form, markers=markers), [written(text, markers)])
            assert events == [("call", "weather"), ("arguments", "{}"), ("end", "")], text


@pytest.mark.parametrize("form", NONE)
def test_text_that_is_no_call_remains_content(form: str) -> None:
    for text in NONE[form]:
        assert read(forms_for(TOOLS, form), [*text]) == [("content", text)]


def test_markers_that_are_control_tokens_are_no_text() -> None:
    forms = forms_for(TOOLS, "mistral", markers=CONTROL)
    assert read(forms, [f"[TOOL_CALLS] [{CALL}]"]) == [("content", f"[TOOL_CALLS] [{CALL}]")]
    think = forms_for(TOOLS, "json", "mistral", markers=CONTROL)
    text = written("[THINK]a", CONTROL) + "[/THINK]" + written("[/THINK]b", CONTROL)
    assert read(think, [text]) == [("reasoning", "a[/THINK]"), ("content", "b")]


def test_content_and_arguments_are_passed_on_as_they_arrive() -> None:
    splitter = Splitter(forms_for(TOOLS, "hermes"))
    pieces = [
        "It",
        " is <",
        "b> and <tool",
        " x",
        '<tool_call>{"name": "weather", "argu',
        'ments": {"ci',
        'ty": "O',
        'slo"}',
        "}",
    ]
    told = [[(event.kind, event.text) for event in splitter.push(piece)] for piece in pieces]
    assert told == [
        [("content", "It")],
        [("content", " is ")],
        [("content", "<b> and ")],
        [("content", "<tool x")],
        [],
        [("call", "weather"), ("arguments", '{"ci')],
        [("arguments", 'ty": "O')],
        [("arguments", 'slo"}'), ("end", "")],
        [],
    ]


CUT: dict[str, tuple[str, str, list[tuple[str, str]]]] = {  # format, text of an answer that is cut off, expected events
    "in the first name": ("hermes", '<tool_call>\n{"name": "wea', []),
    "in a marker": ("hermes", "<tool_call>", []),
    "in a list": ("mistral", f'[TOOL_CALLS] [{CALL}, {{"name": "ti', ONE),
    "in a list, between": ("mistral", f"[TOOL_CALLS] [{CALL}, ", ONE),
    "in a bare list": ("json", f'[{CALL}, {{"na', ONE),
    "in a name": ("mistral", f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]ti", ONE),
    "in arguments": ("hermes", f"<tool_call>{CALL[:-4]}", [("call", "weather"), ("arguments", '{"city": "Osl')]),
    "before arguments": ("mistral_args", f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]time[ARGS]", ONE),
    "after a tag": ("qwen3_coder", f"{TAGS}<tool_call><function=time>\n", ONE),
    "in a parameter's tag": ("qwen3_coder", f"{TAGS}<function=time><parameter=ci", ONE),
    "in a header": ("harmony", "<|channel|>commentary to=functions.wea", []),
    "in tags": ("qwen3_coder", f"<tool_call>\n{TAGS[:-25]}", [("call", "weather"), ("arguments", '{"city": "Oslo')]),
    "between tags": (
        "qwen3_coder",
        f"<tool_call>\n{TAGS[:-3]}",
        [("call", "weather"), ("arguments", '{"city": "Oslo"')],
    ),
    "in JSON that is no call": ("json", '{"city": "Os', [("content", '{"city": "Os')]),
    "in another name": ("json", '{"name": "An', [("content", '{"name": "An')]),
}


@pytest.mark.parametrize("name", CUT)
def test_an_answer_cut_at_its_limit_gives_calls_and_never_their_json(name: str) -> None:
    form, text, expected = CUT[name]
    for markers in PLAIN, CONTROL:
        assert read(forms_for(TOOLS, form, markers=markers), [*written(text, markers)], cut=True) == expected


@pytest.mark.parametrize("form", FORMS)
def test_a_request_of_one_call_gets_one(form: str) -> None:
    texts = [text for other, text, events in READ.values() if other == form and events[-3:] == TWO[-3:]]
    for text in texts:
        events = read(forms_for(TOOLS, form, parallel=False), [text])
        assert [kind for kind, _ in events].count("call") == 1


BLOCK: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "a block": ("<think>\nHm.\n\nSo.\n</think>\n\nHi", [("reasoning", "Hm.\n\nSo."), ("content", "Hi")]),
    "an empty block": ("<think>\n\n</think>\n\nHi", [("reasoning", ""), ("content", "Hi")][1:]),
    "a call in it": (
        f"<think><tool_call>{CALL}</tool_call></think>{CALL}",
        [("reasoning", f"<tool_call>{CALL}</tool_call>"), ("content", CALL)],
    ),
    "a call after it": (f"<think>Hm.</think>\n<tool_call>{CALL}</tool_call>", [("reasoning", "Hm."), *ONE]),
    "no end": ("<think>Hm. ", [("reasoning", "Hm.")]),
    "no block": ("The tag <think> opens.", [("content", "The tag <think> opens.")]),
}


@pytest.mark.parametrize("name", BLOCK)
@given(data=st.data())
def test_reasoning_is_read_however_the_answer_is_cut(name: str, data: st.DataObject) -> None:
    text, expected = BLOCK[name]
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6))
    assert read(forms_for(TOOLS, "hermes", "think"), pieces_of(text, cuts)) == expected
    if text.startswith("<think>"):
        opened = forms_for(TOOLS, "hermes", "think", opened=True)
        assert read(opened, [text.removeprefix("<think>")]) == expected


def test_reasoning_is_open_only_after_a_prompt_that_opens_it() -> None:
    for markers, (name, block) in ((m, b) for m in (PLAIN, CONTROL) for b in BLOCKS.items()):
        encode = partial(encoded, markers=markers)
        forms = forms_for(TOOLS, "json", name, markers)
        assert forms.after(encode(f"a{block.begin}\n")).opened
        assert not forms.after(encode(f"{block.begin}a")).opened
        assert forms.after(encode(f"{block.begin}\n\n{block.end}\n\n")).closed
        assert forms.after(encode("a"), f"{block.begin}Hm").opened
        assert not forms.after(encode("a"), f"{block.begin}Hm{block.end}Hi").opened


def test_forms_are_those_of_the_chat_template() -> None:
    assert call_form_of("... <tool_call> ...") == "hermes"
    assert call_form_of("<tool_call> <function=") == "qwen3_coder"
    assert call_form_of("[TOOL_CALLS] [ARGS]") == "mistral_args"
    assert call_form_of("nothing") == "json"
    assert [reasoning_form_of(text) for text in ("x</think>", "[THINK]", "<|channel|>", "x")] == [
        "think",
        "mistral",
        "harmony",
        "none",
    ]
    assert {*FORMS, "auto"} == {*get_args(ToolParser)}
    assert {*BLOCKS, "auto", "none", "harmony"} == {*get_args(ReasoningParser)}


def test_markers_stay_where_they_are_in_a_text_of_byte_tokens(shared: Path) -> None:
    inner = onward.load(shared / "stories260K").text().inner
    inner.add_special_tokens([*MARKERS])
    markers, generator = Markers(Tokenizer(inner)), random.Random(46)
    for _ in range(200):
        text = "".join(generator.choices(["😀", "日本", "é", "so", *MARKERS], k=6))
        assert markers.marked(encoded(text, markers)).replace(" ", "") == written(text, markers)


def random_value(random: random.Random, depth: int = 0) -> Any:
    texts = [
        "",
        "Oslo",
        'a "b" \\',
        "</tool_call>",
        "}]",
        "[TOOL_CALLS]",
        "ü\n\t",
        "<think>",
        "</parameter>x",
        "<|end|>",
    ]
    if depth < 3 and random.random() < 0.4:
        if random.random() < 0.5:
            return [random_value(random, depth + 1) for _ in range(random.randrange(3))]
        return {random.choice(texts[1:5]): random_value(random, depth + 1) for _ in range(random.randrange(3))}
    return random.choice([*texts, 0, -1.5, 1e30, True, None])


def random_answer(random: random.Random, form: str, spaces: str) -> tuple[str, list[tuple[str, Any]]]:
    """An answer with up to three calls in a format, and (name, arguments) of its calls."""
    calls = []
    for _ in range(1 if form in ("harmony", "llama3_json") else random.randrange(1, 4)):
        given = {"city": random.choice(["", "Oslo", "a\nb", "</tool_call>"]), "more": {"a": random_value(random)}}
        calls.append((random.choice(["weather", "time"]), given if random.random() < 0.8 else {}))
    dumped = [json.dumps(given, ensure_ascii=random.random() < 0.5) for _, given in calls]
    key = "parameters" if form == "llama3_json" else "arguments"
    records = [f'{{"name":{spaces}"{name}",{spaces}"{key}":{spaces}{text}}}' for (name, _), text in zip(calls, dumped)]
    match form:
        case "hermes":
            text = spaces.join(f"<tool_call>{spaces}{one}{spaces}</tool_call>" for one in records)
        case "mistral":
            text = f"[TOOL_CALLS]{spaces}[{(',' + spaces).join(records)}]"
        case "mistral_args":
            text = "".join(f"[TOOL_CALLS]{name}[ARGS]{one}" for (name, _), one in zip(calls, dumped))
        case "harmony":
            text = f"<|channel|>commentary to=functions.{calls[0][0]} <|constrain|>json<|message|>{dumped[0]}<|call|>"
        case "qwen3_coder":
            text = ""
            for name, given in calls:
                values = [one if isinstance(one, str) else json.dumps(one) for one in given.values()]
                inner = "".join(f"<parameter={key}>\n{one}\n</parameter>\n" for key, one in zip(given, values))
                text += f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>\n"
        case _:
            text = records[0] if len(records) == 1 else f"[{(',' + spaces).join(records)}]"
    return text, calls


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("count", [60, pytest.param(2000, marks=pytest.mark.long)])
def test_random_calls_are_read_and_no_cut_changes_them(form: str, count: int) -> None:
    generator = random.Random(46)
    for _ in range(count):
        spaces = generator.choice(["", " ", "\n"])
        text, calls = random_answer(generator, form, spaces)
        thought = generator.choice(["", "Hm. "])
        block = thought and form != "harmony"
        for markers in PLAIN, CONTROL:
            forms = forms_for(TOOLS, form, "think" if form != "harmony" else "none", markers)
            answer = written(f"<think>{thought}</think>\n{text}" if block else text, markers)
            events = read(forms, [answer])
            called = [(name, json.loads(given)) for (kind, name), (_, given) in pairwise(events) if kind == "call"]
            assert called == calls, text
            assert {kind for kind, _ in events} - {"call", "arguments", "end"} == ({"reasoning"} if block else set())
            limit = generator.randrange(len(answer) + 1)
            for part, cut in (answer, False), (answer[:limit], True):
                pieces = pieces_of(part, [generator.randrange(len(part) + 1) for _ in range(4)])
                assert read(forms, pieces, cut) == read(forms, [part], cut), part
            assert not any(kind == "content" and "{" in text for kind, text in read(forms, [answer[:limit]], cut=True))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("count", [100, pytest.param(5000, marks=pytest.mark.long)])
def test_no_cut_changes_what_is_read_from_any_text_and_no_word_is_lost(form: str, count: int) -> None:
    choose = random.Random(47)
    for _ in range(count):
        markers, cut = choose.choice([PLAIN, CONTROL]), choose.random() < 0.3
        reasoning = "harmony" if form == "harmony" else choose.choice(["none", "think", "mistral"])
        forms = forms_for(TOOLS, form, reasoning, markers, opened=choose.random() < 0.2)
        text = random_text(choose)
        answer = written(text, markers)
        events = read(forms, [answer], cut)
        assert read(forms, [*answer], cut) == events, text
        assert read(forms, pieces_of(answer, choose.choices(range(len(answer)), k=3)), cut) == events, text
        joined = "".join(piece for _, piece in events)
        for word in re.findall(r"w\d+w", text):
            least = int(not cut and form != "harmony")  # headers of harmony are not returned
            assert least <= joined.count(word) <= 1, text
