"""The formats of tool calls and of reasoning, and their choice by the chat template."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from onward.generation.schema_rule import rule
from onward.generation.schemas import Prepared
from onward.serving.calls import json_calls
from onward.serving.calls.harmony import harmony_grammar, harmony_rules, read_harmony
from onward.serving.calls.markers import Markers
from onward.serving.calls.reasoning import BLOCKS, Block
from onward.serving.calls.schemas import Function, moved
from onward.serving.calls.source import Parser, Source
from onward.serving.calls.xml_calls import read_xml, xml_grammar

Reader = Callable[[Source, Sequence[Function], Markers], Parser[None]]
Grammar = Callable[[Sequence[Function], bool, Markers], str | None]
Schema = Callable[[Sequence[Function], bool], dict[str, Any]]
HARMONY = "harmony"
LOOK_BACK = 32  # number of last prompt tokens in which the beginning of a block of reasoning is searched


@dataclass(frozen=True)
class Form:
    """A format in which models write tool calls. `read` parses an answer, and a chat template of this format contains
    one of the texts `signs`. Calls are constrained by a `schema` if they are bare JSON, otherwise by a `grammar` (rules
    in Lark's syntax, the first one named `calls`; None if a grammar cannot express the arguments)."""

    read: Reader
    signs: tuple[str, ...]
    grammar: Grammar | None = None
    schema: Schema | None = None


FORMS = {  # the first format with a sign in the chat template is used, or else json
    HARMONY: Form(read_harmony, ("<|channel|>",), harmony_grammar),
    "qwen3_coder": Form(read_xml, ("<function=",), xml_grammar),
    "hermes": Form(json_calls.read_hermes, ("<tool_call>",), json_calls.hermes_grammar),
    "mistral_args": Form(json_calls.read_mistral, ("[ARGS]",), json_calls.named_grammar),
    "mistral": Form(json_calls.read_mistral, ("[TOOL_CALLS]",), json_calls.mistral_grammar),
    "llama3_json": Form(
        json_calls.read_llama, ("<|python_tag|>", '"parameters": dictionary of'), schema=json_calls.llama_schema
    ),
    "json": Form(json_calls.read_json, (), schema=json_calls.json_schema),
}


def call_form_of(template: str) -> str:
    """The format of tool calls in the source of a chat template."""
    return next((name for name, form in FORMS.items() if any(sign in template for sign in form.signs)), "json")


def reasoning_form_of(template: str) -> str:
    """The format of reasoning in the source of a chat template: harmony, one of BLOCKS, or none."""
    if any(sign in template for sign in FORMS[HARMONY].signs):
        return HARMONY
    return next((name for name, block in BLOCKS.items() if block.begin in template or block.end in template), "none")


@dataclass(frozen=True)
class Forms:
    """How answers to a request are read. `opened` and `closed` say whether the prompt ends with the beginning of a
    block of reasoning, or with a whole block."""

    calls: str
    reasoning: str
    markers: Markers
    functions: Sequence[Function] = ()
    parallel: bool = True
    opened: bool = False
    closed: bool = False

    @property
    def block(self) -> Block | None:
        return BLOCKS.get(self.reasoning)

    def after(self, prompt: Sequence[int], continued: str = "") -> Forms:
        """Return the Forms of an answer after this prompt; the answer may continue the assistant's text
        `continued`."""
        if not self.block:
            return self
        end = self.markers.marked(prompt[-LOOK_BACK:]).rstrip()
        inside = continued.lstrip().startswith(self.block.begin) and self.block.end not in continued
        opened = inside or end.endswith(self.markers.text(self.block.begin))
        return replace(self, opened=opened, closed=end.endswith(self.markers.text(self.block.end)))

    def reader(self, source: Source) -> Parser[None]:
        if self.calls == HARMONY:
            return read_harmony(source, self.functions, self.markers)
        read = FORMS[self.calls].read if self.functions else read_content
        rest = read(source, self.functions, self.markers)
        return self.block.read(source, self.markers, self.opened, rest) if self.block else rest

    def constrained(self, required: bool, schema: Prepared | None = None) -> tuple[Forms, dict[str, Any]]:
        """Return the Forms that read a constrained answer, and the constraint as fields of GenerationOptions: calls if
        they are `required`, else calls or JSON of the schema. A model that reasons may do so first, as it was trained
        to; the constraint applies to the rest."""
        if not required and schema is None:
            return self, {}
        form = FORMS[self.calls]
        if not self.functions and not self.block and self.calls != HARMONY:
            return self, {"json_schema": schema.original if schema else {}}
        final = "final" if self.calls == HARMONY else ""
        content = "" if required or not schema else f"content: {final} form\nform: {rule(schema.schema)}\n"
        if not self.functions:
            return self, self.grammar("content", content)
        if form.grammar and (calls := form.grammar(self.functions, self.parallel, self.markers)):
            return self, self.grammar("calls" if required else "(calls | content)", calls + content)
        forms = self if form.schema else replace(self, calls="json")
        return forms, forms.grammar("answer", forms.bare_rule(None if required else schema))

    def grammar(self, answer: str, rules: str) -> dict[str, Any]:
        """The grammar of `answer`, a symbol of the rules, and of the reasoning before it."""
        if self.calls == HARMONY:
            answer, rules = f"reasoning? {answer}", rules + harmony_rules(self.markers)
        elif self.block and not self.closed:
            answer = f"reasoning{'' if self.opened else '?'} {answer}"
            rules += self.block.grammar(self.markers, self.opened)
        return {"grammar": f"start: {answer}\n{rules}"}

    def bare_rule(self, schema: Prepared | None) -> str:
        """A grammar rule for calls or JSON of the schema. One schema holds both, since a grammar could not tell them
        apart by their first characters."""
        describe = FORMS[self.calls].schema
        assert describe is not None
        calls = describe(self.functions, self.parallel)
        if schema is None:
            return f"answer: {rule(calls)}\n"
        definitions = {**calls.pop("$defs"), "answer": moved(schema.schema, "answer")}
        both = {"anyOf": [calls, {"$ref": "#/$defs/answer"}], "$defs": definitions}
        return f"answer: {rule(both)}\n"


def read_content(source: Source, functions: Sequence[Function], markers: Markers) -> Parser[None]:
    yield from source.until([], "content")
