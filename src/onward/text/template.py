"""Chat templates, rendered in Jinja's sandbox within limits. Does not import torch.

Text that the template wrote is distinguished from the text of its variables, as Jinja's autoescape does: literals of
the template are marked in a `MaskedString`, and text from a variable is not, whatever filters it passes.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from string import Formatter
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS, make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter

from onward.text.masked_string import (
    FROM_TEMPLATE,
    MAX_LENGTH,
    MAX_WIDTH,
    MaskedString,
    TooLarge,
    as_text,
    check_length,
    check_size,
    concat,
    from_template,
    is_trained,
    mask_of,
    percent,
    replace,
    trained,
)

MAX_STEPS = 1_000_000  # iterations of loops and calls of functions
MAX_SECONDS = 10.0
MAX_BITS = 1 << 16  # of an integer


@dataclass
class Budget:
    """The remaining steps (loop iterations and calls) and time of a chat template while it is rendered, since a
    template from a model's folder may never end."""

    steps: int = field(default_factory=lambda: MAX_STEPS)
    deadline: float = field(default_factory=lambda: time.monotonic() + MAX_SECONDS)

    def spend(self) -> None:
        """Count one step, such as an iteration of a loop. Raises jinja2's TemplateError if no step or no time is
        left."""
        self.steps -= 1
        if self.steps < 0 or time.monotonic() > self.deadline:
            raise jinja2.TemplateError(f"it runs for more than {MAX_STEPS:,} steps or {MAX_SECONDS:.0f} seconds")


BUDGET: ContextVar[Budget] = ContextVar("BUDGET")


def render(template: jinja2.Template, values: Mapping[str, Any]) -> MaskedString:
    """Render a chat template with `values`, its variables by name, within the limits of steps, time and length; return
    the text with a mask, which says for each character whether the template wrote it and whether it is trained on."""
    token, pieces, length = BUDGET.set(Budget()), list[str](), 0
    try:
        for piece in template.generate(values):
            length += len(piece)
            check_length(length)
            pieces.append(piece)
    finally:
        BUDGET.reset(token)
    text = concat(pieces)
    return MaskedString(text, mask_of(text))


def counted(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the values that a loop of a chat template iterates over, and count each as a step of the current Budget;
    the code of compiled templates calls it."""
    for value in values:
        BUDGET.get().spend()
        yield value


class Generator(CodeGenerator):
    """Jinja's code generator for chat templates: literals of the template become MaskedStrings marked as written by the
    template, and conversions to text keep masks."""

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:
        if isinstance(node.value, str):
            self.write(f"environment.from_template({node.value!r})")
        else:
            super().visit_Const(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return f"environment.from_template({''.join(map(str, group))!r})"

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        self.write("environment.as_text(")


class Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox for chat templates, with limits of steps and lengths, and with strings that know which characters
    the template wrote (MaskedString)."""

    code_generator_class = Generator
    intercepted_binops = frozenset(["+", "*", "**", "%"])
    concat = staticmethod(concat)  # type: ignore[assignment]
    from_template = staticmethod(from_template)
    as_text = staticmethod(as_text)

    def _generate(self, source: nodes.Template, *arguments: Any, **more: Any) -> str:
        for loop in list(source.find_all(nodes.For)):
            loop.iter = nodes.Filter(loop.iter, "counted", [], [], None, None, lineno=loop.lineno).set_environment(self)
        return super()._generate(source, *arguments, **more)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        BUDGET.get().spend()
        text, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(text, str) and not isinstance(text, MaskedString) and name in METHODS:
            return METHODS[name](text, *args, **kwargs)
        if isinstance(text, str) and any(isinstance(value, int) and value > MAX_WIDTH for value in args):
            raise TooLarge
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            return percent(left, right)
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
        text = getattr(value, "__self__", None)
        if not isinstance(text, str) or getattr(value, "__name__", "") not in ("format", "format_map"):
            return None
        if value.__name__ == "format_map":
            return lambda values: formatted(self, text, (), values)
        return lambda *args, **kwargs: formatted(self, text, args, kwargs)


METHODS: dict[str, Callable[..., str]] = {
    "replace": replace,
    "join": lambda text, parts: MaskedString(text).join(parts),
}  # of strings, as plain functions


def formatted(environment: Environment, text: str, args: Any, kwargs: Mapping[str, Any]) -> str:
    """Return `text.format(*args, **kwargs)` for a chat template; `environment` is the sandbox, which looks up
    attributes safely. Values that are neither padded nor converted keep their masks (see MaskedString). Raises TooLarge
    if a field is too wide."""
    formatter, pieces, count = SandboxedFormatter(environment), list[str](), 0
    form = from_template if all(byte & FROM_TEMPLATE for byte in mask_of(text)) else MaskedString
    for literal, name, spec, conversion in Formatter().parse(text):
        pieces.append(form(literal))
        if name is None:
            continue
        if any(len(number) > len(str(MAX_WIDTH)) for number in re.findall(r"\d+", spec or "")) or "{" in (spec or ""):
            raise TooLarge
        if name[:1] in ("", ".", "["):
            name, count = f"{count}{name}", count + 1
        value = formatter.get_field(name, args, kwargs)[0]
        value = formatter.convert_field(value, conversion) if conversion else value
        pieces.append(formatter.format_field(value, spec) if spec else as_text(value))
    return concat(pieces)


class Generation(Extension):
    """Jinja's extension for the tag `{% generation %}`, which encloses the assistant's text in a chat template: if any
    text in the block is marked as text to train on, the whole block gets this mark."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        mark = nodes.Filter(None, "generated", [], [], None, None, lineno=line)
        return nodes.FilterBlock(body, mark, lineno=line)


def environment() -> Environment:
    """Return the sandbox in which chat templates are rendered, with the functions that transformers provides to
    templates, such as raise_exception and strftime_now."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **how: Any) -> str:
        check_size(value)
        check_width(how.get("indent"))
        text = json.dumps(value, ensure_ascii=ensure_ascii, **how)
        return trained(text) if is_trained(value) else text

    def strftime_now(form: str) -> str:
        return datetime.now().strftime(form)

    def join(value: Iterable[Any], separator: str = "", attribute: str | int | None = None) -> str:
        parts = value if attribute is None else map(make_attrgetter(result, attribute), value)
        return MaskedString(as_text(separator), mask_of(as_text(separator))).join(map(as_text, parts))

    def form(value: Any, *args: Any, **kwargs: Any) -> str:
        return percent(as_text(value), kwargs or args)

    def replaced(text: Any, old: Any, new: Any, count: int | None = None) -> str:
        return replace(as_text(text), as_text(old), as_text(new), -1 if count is None else count)

    def checked(name: str) -> Callable[..., Any]:
        def narrow(value: Any, *args: Any, **kwargs: Any) -> Any:
            for width in (*args, *kwargs.values()):
                check_width(width)
            if isinstance(value, str):
                check_length(sum(width for width in args if isinstance(width, int)) * value.count("\n"))
            return FILTERS[name](value, *args, **kwargs)

        return narrow

    def check_width(width: Any) -> None:
        if isinstance(width, int) and width > MAX_WIDTH:
            raise TooLarge

    result = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    result.filters |= {name: checked(name) for name in ("center", "indent", "batch", "slice")}
    result.filters |= {"counted": counted, "tojson": tojson, "join": join, "format": form, "replace": replaced}
    result.filters |= {"string": as_text, "generated": lambda text: trained(text) if is_trained(text) else text}
    result.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    del result.globals["lipsum"]
    return result
