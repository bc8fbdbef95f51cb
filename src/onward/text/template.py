"""Chat templates, rendered in Jinja's sandbox within limits. Does not import torch.

The rendered text is a `MaskedString`, which records the source of each character: literals of the template are marked
when the template is compiled, and texts of messages before it is rendered. Jinja's syntax tree is changed through its
public interface; the compiler is unchanged.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from itertools import count
from string import Formatter
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS, make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.visitor import NodeTransformer

from onward.text.masked_string import (
    MAX_LENGTH,
    MAX_WIDTH,
    TEMPLATE,
    MaskedString,
    TooLarge,
    as_text,
    check_length,
    check_size,
    concat,
    generated,
    mask_of,
    sourced,
)

MAX_STEPS = 1_000_000  # largest number of loop iterations and function calls
MAX_SECONDS = 10.0
MAX_BITS = 1 << 16  # largest size of an integer in bits


@dataclass
class RenderBudget:
    """The remaining steps and time of a chat template, since a template from a model's folder may never end."""

    steps: int = field(default_factory=lambda: MAX_STEPS)
    deadline: float = field(default_factory=lambda: time.monotonic() + MAX_SECONDS)

    def spend(self) -> None:
        self.steps -= 1
        if self.steps < 0 or time.monotonic() > self.deadline:
            raise jinja2.TemplateError(f"it runs for more than {MAX_STEPS:,} steps or {MAX_SECONDS:.0f} seconds")


BUDGET: ContextVar[RenderBudget] = ContextVar("BUDGET")


def compiled(source: str) -> jinja2.Template:
    own = environment()
    return own.from_string(Marking().visit(own.parse(source)))


def render(template: jinja2.Template, values: Mapping[str, Any]) -> MaskedString:
    token, pieces, length = BUDGET.set(RenderBudget()), list[str](), 0
    try:
        for piece in template.generate(values):
            length += len(piece)
            check_length(length)
            pieces.append(piece)
    finally:
        BUDGET.reset(token)
    text = concat(pieces)
    return MaskedString(text, mask_of(text))


class Marking(NodeTransformer):
    """Literals become texts whose source is the template, `~` keeps masks, and loops count their iterations."""

    def visit_Const(self, node: nodes.Const) -> nodes.Expr:
        return filtered(node, "literal") if isinstance(node.value, str) else node

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Expr:
        return filtered(nodes.Const(node.data, lineno=node.lineno), "literal")

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        node.node = self.visit(node.node)
        if not isinstance(node.arg, nodes.Const):  # a key is never part of the text
            node.arg = self.visit(node.arg)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        node.nodes = [self.visit(part) for part in node.nodes]
        return filtered(nodes.List(node.nodes, lineno=node.lineno), "concat")

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = filtered(node.iter, "counted")  # type: ignore[arg-type]
        return node


def filtered(node: nodes.Expr, name: str) -> nodes.Filter:
    result = nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
    result.set_environment(node.environment)  # type: ignore[arg-type]
    return result


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with limits of steps and lengths, and strings that record their sources (MaskedString)."""

    intercepted_binops = frozenset(["+", "*", "**"])
    concat = staticmethod(concat)  # type: ignore[assignment]

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        BUDGET.get().spend()
        if isinstance(getattr(__obj, "__self__", None), str):
            check_width(*args)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int) and operator in "**":
            size = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            check_length(0 if size <= MAX_BITS else MAX_LENGTH + 1)
        sized = [len(value) for value in (left, right) if isinstance(value, str | list | tuple)]
        if operator == "+":
            check_length(sum(sized))
        if operator == "*" and sized:
            check_length(sized[0] * max(1, *(value for value in (left, right, 1) if isinstance(value, int))))
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        text, plain = getattr(value, "__self__", None), super().wrap_str_format(value)
        if plain is None or not isinstance(text, MaskedString):
            return plain
        if value.__name__ == "format_map":
            return lambda values: formatted(self, text, (), values, count())
        return lambda *args, **kwargs: formatted(self, text, args, kwargs, count())


def formatted(
    environment: Sandbox, text: MaskedString, args: Any, kwargs: Mapping[str, Any], numbers: Iterator[int]
) -> str:
    """`text.format(*args, **kwargs)`; the sandbox looks up attributes safely, and `numbers` are the indices of fields
    without a name. Values without a format specification or a conversion keep their masks."""
    formatter, pieces = SandboxedFormatter(environment), list[str]()
    source = ord(mask_of(text)[0]) // 2 if len({*mask_of(text)}) == 1 else 0
    for literal, name, spec, conversion in Formatter().parse(text):
        pieces.append(sourced(literal, source))
        if name is None:
            continue
        if name[:1] in ("", ".", "["):
            name = f"{next(numbers)}{name}"
        value = formatter.get_field(name, args, kwargs)[0]
        value = formatter.convert_field(value, conversion) if conversion else value
        spec = formatted(environment, MaskedString(spec), args, kwargs, numbers) if spec else ""
        check_width(*(int(digits) for digits in "".join(c if c.isdecimal() else " " for c in spec).split()))
        pieces.append(formatter.format_field(value, str.__getitem__(spec, slice(None))) if spec else as_text(value))
    return concat(pieces)


def check_width(*widths: Any) -> None:
    if any(isinstance(width, int) and width > MAX_WIDTH for width in widths):
        raise TooLarge


class GenerationTag(Extension):
    """The tag `{% generation %}` around the text that the assistant generates."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        mark = nodes.Filter(None, "generated", [], [], None, None, lineno=line)
        return nodes.FilterBlock(body, mark, lineno=line)


def counted(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        BUDGET.get().spend()
        yield value


@jinja2.pass_context  # so that the filter is not applied at compile time, which would lose the mask
def literal(_: Context, text: str) -> MaskedString:
    return sourced(text, TEMPLATE)


def tojson(value: Any, ensure_ascii: bool = False, **how: Any) -> str:
    check_size(value)
    check_width(how.get("indent"))
    return MaskedString(json.dumps(value, ensure_ascii=ensure_ascii, **how))


def environment() -> Sandbox:
    """The sandbox with the functions that transformers gives to templates, such as raise_exception."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(form: str) -> str:
        return datetime.now().strftime(form)

    def join(value: Iterable[Any], separator: str = "", attribute: str | int | None = None) -> str:
        parts = value if attribute is None else map(make_attrgetter(result, attribute), value)
        return MaskedString(as_text(separator), mask_of(as_text(separator))).join(map(as_text, parts))

    def narrow(name: str) -> Callable[..., Any]:
        def checked(value: Any, *args: Any, **kwargs: Any) -> Any:
            check_width(*args, *kwargs.values())
            if isinstance(value, str):
                check_length(sum(width for width in args if isinstance(width, int)) * value.count("\n"))
            return FILTERS[name](value, *args, **kwargs)

        return checked

    result = Sandbox(trim_blocks=True, lstrip_blocks=True, finalize=as_text, extensions=[GenerationTag, loopcontrols])
    result.filters |= {name: narrow(name) for name in ("center", "indent", "batch", "slice")}
    result.filters |= {"literal": literal, "concat": concat, "counted": counted, "generated": generated}
    result.filters |= {"tojson": tojson, "join": join, "string": as_text}
    result.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    del result.globals["lipsum"]
    return result
