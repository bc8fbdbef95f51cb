"""The forms of calls and of reasoning, and the choice among them by a chat template."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from onward.serving.calls import json_calls
from onward.serving.calls.harmony import harmony_grammar, harmony_rules, read_harmony
from onward.serving.calls.markers import Markers
from onward.serving.calls.reasoning import BLOCKS, Block
from onward.serving.calls.schemas import Function, json_rule
from onward.serving.calls.source import Parser, Source
from onward.serving.calls.xml_calls import read_xml, xml_grammar

Reader = Callable[[Source, Sequence[Function], Markers], Parser[None]]
Grammar = Callable[[Sequence[Function], bool, Markers], str | None]
HARMONY = "harmony"
LOOK_BACK = 32  # tokens at the end of a prompt that may open a block of reasoning


@dataclass(frozen=True)
class Form:
    """A form in which models write calls: how an answer is read, the grammar of calls (rules in Lark's syntax, the
    first one named `calls`; None if it cannot express the schemas), and texts of which a chat template in this form
    has one."""

    read: Reader
    grammar: Grammar
    signs: tuple[str, ...] = ()


FORMS = {  # by name; the first one with a sign in the chat template is used, or else json
    HARMONY: Form(read_harmony, harmony_grammar, ("<|channel|>",)),
    "qwen3_coder": Form(read_xml, xml_grammar, ("<function=",)),
    "hermes": Form(json_calls.read_hermes, json_calls.hermes_grammar, ("<tool_call>",)),
    "mistral_args": Form(json_calls.read_mistral, json_calls.named_grammar, ("[ARGS]",)),
    "mistral": Form(json_calls.read_mistral, json_calls.mistral_grammar, ("[TOOL_CALLS]",)),
    "llama3_json": Form(
        json_calls.read_llama, json_calls.llama_grammar, ("<|python_tag|>", '"parameters": dictionary of')
    ),
    "json": Form(json_calls.read_json, json_calls.json_grammar),
}


def call_form_of(template: str) -> str:
    """Return the name of the form of calls in a chat template, given by its source."""
    return next((name for name, form in FORMS.items() if any(sign in template for sign in form.signs)), "json")


def reasoning_form_of(template: str) -> str:
    """Return the name of the form of reasoning in a chat template, given by its source: harmony, one of BLOCKS, or
    none."""
    if any(sign in template for sign in FORMS[HARMONY].signs):
        return HARMONY
    return next((name for name, block in BLOCKS.items() if block.begin in template or block.end in template), "none")


@dataclass(frozen=True)
class Forms:
    """How the answers to a request are read: the names of the forms of calls and of reasoning, the functions that may
    be called, and whether an answer may have several calls. `opened` and `closed` say whether the prompt ends with the
    beginning of a block of reasoning, or with a whole block."""

    calls: str
    reasoning: str
    markers: Markers
    functions: Sequence[Function] = ()
    parallel: bool = True
    opened: bool = False
    closed: bool = False

    @property
    def block(self) -> Block | None:
        """The block of reasoning with which an answer may begin."""
        return BLOCKS.get(self.reasoning)

    def after(self, prompt: Sequence[int], continued: str = "") -> Forms:
        """Return how an answer after the prompt with these tokens is read. `continued` is the text of the assistant
        that the answer continues."""
        if not self.block:
            return self
        end = self.markers.marked(prompt[-LOOK_BACK:]).rstrip()
        inside = continued.lstrip().startswith(self.block.begin) and self.block.end not in continued
        opened = inside or end.endswith(self.markers.text(self.block.begin))
        return replace(self, opened=opened, closed=end.endswith(self.markers.text(self.block.end)))

    def reader(self, source: Source) -> Parser[None]:
        """Return a parser of an answer."""
        if HARMONY in (self.calls if self.functions else "", self.reasoning):
            return read_harmony(source, self.functions, self.markers)
        read = FORMS[self.calls].read if self.functions else read_content
        rest = read(source, self.functions, self.markers)
        return self.block.read(source, self.markers, self.opened, rest) if self.block else rest

    def constrained(self, required: bool, schema: Any = None, field: str = "") -> tuple[Forms, dict[str, Any]]:
        """Return how a constrained answer is read, and the constraint as fields of GenerationOptions: the answer is
        calls if they are `required`, else calls or JSON of the schema; `field` names the schema in errors. Without
        either, the answer is free.

        A model that reasons does so first, if it wants to: it was trained to, and an answer without its reasoning is
        worse. The constraint holds for the rest.
        """
        if not required and schema is None:
            return self, {}
        if not self.functions and self.reasoning == "none":
            return self, {"json_schema": schema}
        forms, rules, answers = self, list[str](), list[str]()
        if self.functions:
            calls = FORMS[self.calls].grammar(self.functions, self.parallel, self.markers)
            if calls is None:
                forms = replace(self, calls="json")
                calls = json_calls.json_grammar(self.functions, self.parallel, self.markers)
            answers.append("calls")
            rules.append(calls or "")
        final, reasoning = "", ""
        if HARMONY in (self.calls if self.functions else "", self.reasoning):
            final, reasoning = "final", "reasoning?"
            rules.append(harmony_rules(self.markers))
        elif self.block and not self.closed:
            reasoning = "reasoning" if self.opened else "reasoning?"
            rules.append(self.block.grammar(self.markers, self.opened))
        if not required:
            answers.append(f"{final} form")
            rules.append(json_rule("form", schema, field))
        return forms, {"grammar": f"start: {reasoning} ({' | '.join(answers)})\n" + "".join(rules)}


def read_content(source: Source, functions: Sequence[Function], markers: Markers) -> Parser[None]:
    """Read an answer that is content alone."""
    yield from source.until([], "content")
