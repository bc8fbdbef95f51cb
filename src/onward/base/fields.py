"""Dataclasses from plain values: fields are read from JSON, TOML and the command line by one set of rules.

Does not import torch, so that `--help` answers at once.
"""

import ast
import dataclasses
import functools
import importlib
import inspect
import os
import re
import sys
from collections import abc
from collections.abc import Mapping
from shlex import quote
from typing import Any, ClassVar, Self, TypeVar

from onward.base import handed
from onward.base.arguments import (
    Choice,
    Either,
    Instance,
    Limited,
    Row,
    Several,
    Table,
    Type,
    bind,
    check,
    check_fields,
    field_types,
    shown,
    type_of,
)
from onward.base.errors import UserError
from onward.base.suggestions import nearest

T = TypeVar("T")
P = TypeVar("P", bound="Part")
# fields whose option has another name
FLAGS = {"base_model": "--base", "imports": "--import", "base": "--from", "adapter_folder": "--adapter"}
HUGE = 1e15  # numbers of this size or more are written with a power of ten
SUM = "sum"  # the kind of a weighted sum of parts


class Part:
    """A choice among alternatives, with fields of its own, in a configuration: a frozen dataclass, registered under its
    `kind`.

    A direct subclass without a kind is a type of part (`class Norm(Part)`), which a field of a configuration may have
    as its type; a subclass of it with a kind is one of its choices (`class RMSNorm(Norm, kind="rms")`), and with kind
    "" only a base class of choices. As text a choice is `rms` or `rms(eps=1e-6)`, as JSON or TOML `{"kind": "rms",
    "eps": 1e-6}`. An `internal` choice exists to read published files and is not offered to users. If a type has a
    choice of kind `sum`, the text `dpo + 0.2 * sft` means this choice, with the pairs (1.0, dpo) and (0.2, sft) as its
    `terms`.
    """

    kind: ClassVar[str]
    kinds: ClassVar[dict[str, type[Any]]]
    internal: ClassVar[bool]
    named: frozenset[str]  # fields passed to the constructor, even if equal to their defaults

    def __new__(cls, *values: Any, **named: Any) -> Self:
        part = super().__new__(cls)
        given = bind(cls.__init__, (part, *values), named).arguments if values or named else {}  # {} for copies
        object.__setattr__(part, "named", frozenset(given) - {"self"})
        return part

    def __init_subclass__(cls, kind: str | None = None, internal: bool = False) -> None:
        if kind is None:
            cls.kinds = {}
        elif kind:
            cls.kind, cls.internal = kind, internal
            cls.kinds[kind] = cls

    def __post_init__(self) -> None:
        slot = next(base for base in type(self).__mro__ if "kinds" in vars(base))
        check_fields(self, f"{slot.__name__.lower()}.{self.kind}.")

    @classmethod
    def shorthand(cls, value: Any) -> Any:
        """Expand a shorthand for a part of this type, such as 16 for lora(rank=16), to the part's table, a dict with
        `kind`; None for other values. A direct subclass may override this method; by default, there are no
        shorthands."""
        return None

    @classmethod
    def choices(cls) -> dict[str, type[Any]]:
        """The choices of this type of part that are offered to users, by kind."""
        return {kind: choice for kind, choice in cls.kinds.items() if not choice.internal}


def hints(cls: type) -> dict[str, Any]:
    """The annotations of the fields that the constructor of a dataclass takes, by field."""
    return {name: kind.annotation for name, kind in field_types(cls).items()}


def read_docs(cls: type) -> dict[str, str]:
    """The documentation of each field of a dataclass, by field: the comment at the end of its line in the source."""
    found = dict[str, str]()
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            try:
                source = inspect.getsource(base)
            except (OSError, TypeError):  # no source file
                continue
            found |= dict(re.findall(r"^    (\w+): [^#\n]*# (.*)$", source, re.MULTILINE))
    return found


docs: abc.Callable[[type], dict[str, str]] = functools.cache(read_docs)


def build(cls: type[T], values: Mapping[str, Any], where: str = "") -> T:
    """Make a dataclass from plain values by field, such as those of a JSON file or a command line. `where` precedes the
    field's name in error messages."""
    known, prefix = field_types(cls), f"{where}." if where else ""
    for name in values:
        if name not in known:
            hint = nearest(str(name), known) if known else "it has no options"
            raise UserError(f"{prefix}{name} is not a known option: {hint}")
    made = {name: converted(known[name], value, prefix + name) for name, value in values.items()}
    needed = (dataclasses.MISSING, dataclasses.MISSING)
    for f in dataclasses.fields(cls):  # type: ignore[arg-type]
        if f.init and f.name not in made and (f.default, f.default_factory) == needed:
            raise UserError(f"{prefix}{f.name} is missing: give it a value ({docs(cls).get(f.name, f.name)})")
    check(known, made, prefix)  # unlike the constructor's, these messages include `where`
    return cls(**made)


def plain(value: Any) -> Any:
    """Convert a dataclass to plain values, as JSON has them: the reverse of `build`."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind = kind_of(value) if isinstance(value, Part) else {}
        return kind | {name: plain(getattr(value, name)) for name in hints(type(value))}
    if isinstance(value, tuple | list):
        return [plain(v) for v in value]
    return {k: plain(v) for k, v in value.items()} if isinstance(value, dict) else value


def kind_of(part: Part) -> dict[str, str]:
    """The entries of a part's table that identify its class: {"kind": ...} and, for a class of the user's, "import"
    with the module to import before the table can be read."""
    module = type(part).__module__
    known = module == "__main__" or module.startswith("onward.")
    return {"kind": part.kind} if known else {"kind": part.kind, "import": module}


def convert(annotation: Any, value: Any, where: str) -> Any:
    """Convert a plain value, such as from JSON, or a text, such as from the command line, to an annotated type.
    Error messages begin with `where`, the name of the field."""
    return converted(type_of(annotation), value, where)


def converted(kind: Type, value: Any, where: str) -> Any:
    match kind:
        case Limited():
            return converted(kind.args[0], value, where)
        case Either():
            if type(None) in kind.classes and (value is None or value == "none"):
                return None
            if tuple in kind.classes and isinstance(value, str):
                value = parse(value, where)
            return converted(alternative(kind, value), value, where)
        case Choice():
            if value in kind.values:
                return value
            raise UserError(f"{where} is {shown(value)}: {nearest(str(value), map(str, kind.values))}")
        case Row() | Several() if kind.origin is tuple:
            value = parse(value, where) if isinstance(value, str) else value
            if isinstance(kind, Several) and kind.args[0].annotation is str and not isinstance(value, list | tuple):
                value = [value]
            if isinstance(value, list | tuple):
                each = kind.args if isinstance(kind, Row) else kind.args * len(value)
                if len(each) == len(value):
                    return tuple(converted(one, x, f"{where}[{i}]") for i, (one, x) in enumerate(zip(each, value)))
        case Table():
            value = parse(value, where) if isinstance(value, str) else value
            if isinstance(value, Mapping):
                return dict(value)
        case Instance():
            return of_class(kind, value, where)
        case _:  # a function, or anything
            return value
    raise UserError(f"{where} is {shown(value)}: it takes {describe(kind)}")


def alternative(kind: Either, value: Any) -> Type:
    """The type in a union to which a plain value or a text is converted."""
    types = [one for one in kind.args if one.annotation is not type(None)]
    if tuple in kind.classes:  # one part, or several that repeat over the layers
        several = isinstance(value, list | tuple)
        types = [one for one in types if (tuple in one.classes) == several] or types
    elif len(types) == 2 and part_choices(types[1]):  # a number or a part
        number = isinstance(value, int | float) or bool(isinstance(value, str) and re.match(r"[-+.]?\d", value))
        return types[not number]
    return types[0]


def of_class(kind: Instance, value: Any, where: str) -> Any:
    cls = kind.annotation
    if cls is str and isinstance(value, Mapping) and value.keys() == {"kind"}:
        return value["kind"]  # a name without quotes
    if isinstance(value, cls) and not (cls in (int, float) and isinstance(value, bool)):
        return value
    if issubclass(cls, Part):
        return part(cls, value, where)
    if dataclasses.is_dataclass(cls) and isinstance(value, Mapping):
        return build(cls, value, where)  # type: ignore[arg-type]
    if cls is bool and value in ("true", "false"):
        return value == "true"
    if cls in (int, float) and isinstance(value, str | int | float) and not isinstance(value, bool):
        try:
            number = float(value)
            if cls is float:
                return number
            if number == int(number):
                return int(value) if isinstance(value, str) and value.lstrip("+-").isdigit() else int(number)
        except (ValueError, OverflowError):
            pass
    raise UserError(f"{where} is {shown(value)}: it takes {describe(kind)}")


def part(slot: type[P], value: Any, where: str) -> P:
    """Make a part of the type `slot`, such as Norm, from its text, such as `rms(eps=1e-6)`, its table, such as
    `{"kind": "rms", "eps": 1e-6}`, or a shorthand."""
    value = slot.shorthand(value) or (parse(value, where) if isinstance(value, str) else value)
    if not isinstance(value, Mapping) or not isinstance(value.get("kind"), str):
        raise UserError(f"{where} is {shown(value)}: {nearest('', slot.choices())}")
    kind, module = value["kind"], value.get("import")
    if kind not in slot.kinds:
        handed.define_kinds()
    if kind not in slot.kinds and isinstance(module, str):
        raise UserError(f"{where} is {kind!r}, which the module {module} defines: {trusted([module])}")
    if kind not in slot.kinds:
        raise UserError(
            f"{where} is {kind!r}, which is not a known kind of {slot.__name__}: {nearest(kind, slot.choices())} "
            "(for a class of your own, import its module: --import MODULE)"
        )
    return build(slot.kinds[kind], {k: v for k, v in value.items() if k not in ("kind", "import")}, f"{where}.{kind}")


def part_choices(kind: Type) -> list[type[Part]]:
    """The choices for a field whose type is a type of part, such as Norm, or a union or sequence of such types."""
    slots = [one.annotation for one in (kind, *kind.args) if isinstance(one, Instance)]
    return [choice for slot in slots if issubclass(slot, Part) for choice in slot.choices().values()]


def import_parts(module: str) -> None:
    """Import a user's module, from the current folder or installed, which registers the parts that it defines."""
    if os.getcwd() not in sys.path:  # under the command `onward`, the current folder is not on the path
        sys.path.append(os.getcwd())
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise UserError(
            f"there is no module {module}: --import takes the name of a Python file of the current folder, without "
            ".py, or of an installed module"
        ) from None
    except ValueError as error:  # an empty or relative name
        raise UserError(
            f"{module!r} is not the name of a module ({error}): write it as in Python, package.module"
        ) from None


def flag(name: str) -> str:
    return FLAGS.get(name) or "--" + name.replace("_", "-")


def import_options(modules: abc.Iterable[str]) -> str:
    return "".join(f" --import {quote(module)}" for module in modules)


def trusted(modules: abc.Iterable[str]) -> str:
    """The advice to import the user's `modules`: a folder must not run code unless the user asks for it."""
    return f"if you trust its code, give{import_options(modules)} (in Python, import it first)"


def parse(text: str, where: str) -> Any:
    """Parse a text in Python's notation to plain values: names and calls such as `rms(eps=1e-6)` become dicts such as
    {"kind": "rms", "eps": 1e-6}, and weighted sums of them become dicts of the kind "sum"."""

    def read(node: ast.expr) -> Any:
        match node:
            case ast.BinOp(_, ast.Add() | ast.Sub() | ast.Mult(), _) if any(
                isinstance(one, ast.Name) for one in ast.walk(node)
            ):
                return {"kind": SUM, "terms": terms(node)}
            case ast.Name(name):
                return {"kind": name}
            case ast.Attribute():  # a dotted name, such as attn.q
                return ast.unparse(node)
            case ast.Call(ast.Name(name), [], keywords) if all(k.arg for k in keywords):
                return {"kind": name} | {k.arg: word(k.value) for k in keywords}
            case ast.Tuple(items) | ast.List(items):
                return [read(item) for item in items]
            case _:
                return ast.literal_eval(node)

    def terms(node: ast.expr) -> list[list[Any]]:
        match node:
            case ast.BinOp(left, ast.Add(), right):
                return terms(left) + terms(right)
            case ast.BinOp(left, ast.Sub(), right):
                return terms(left) + [[-weight, part] for weight, part in terms(right)]
            case ast.BinOp(weight, ast.Mult(), ast.Name() | ast.Call() as part):
                return [[float(ast.literal_eval(weight)), read(part)]]
            case ast.Name() | ast.Call():
                return [[1.0, read(node)]]
        raise ValueError

    def word(node: ast.expr) -> Any:  # relu, true, none: read by the type of the field
        return node.id if isinstance(node, ast.Name) else read(node)

    try:
        return read(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise UserError(f"{where} is {shown(text)}: write it as name, name(field=value) or (first, second)") from None


def notation(value: Any) -> str:
    """Format a value as text that `parse` reads; a part as its kind with the fields that differ from their defaults."""
    if isinstance(value, Part) and value.kind == SUM:
        [(first, part), *others] = getattr(value, "terms")  # noqa: B009
        rest = "".join(f" {'-' if w < 0 else '+'} {weighted(abs(w), p)}" for w, p in others)
        return weighted(first, part) + rest
    if isinstance(value, Part):
        changed = ", ".join(f"{name}={inside(field)}" for name, field in changed_fields(value).items())
        return f"{value.kind}({changed})" if changed else value.kind
    if isinstance(value, tuple):
        return f"({', '.join(map(inside, value))}{',' * (len(value) == 1)})"
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def inside(value: Any) -> str:
    return repr(value) if isinstance(value, str) and not value.isidentifier() else notation(value)


def weighted(weight: float, part: Any) -> str:
    return notation(part) if weight == 1 else f"{repr(weight).removesuffix('.0')} * {notation(part)}"


def decimal(number: float, digits: int) -> str:
    """Format a number with thousands separators and `digits` decimals; from 1e15 on with four significant digits and a
    power of ten: 1.014e+304."""
    return f"{number:,.{digits}f}" if abs(number) < HUGE else f"{number:.4g}"


def text(value: Any) -> str:
    """Format a value for people: whole numbers below 1e15 with thousands separators, other numbers with six significant
    digits, booleans as yes and no, None as ""."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return f"{int(value):,}" if abs(value) < HUGE and value == int(value) else f"{value:.6g}"
    return "" if value is None else value if isinstance(value, str) else notation(value)


def counted(number: int, noun: str) -> str:
    """Format a count with its noun: 1 step, 2,000 steps."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def changed_fields(value: Any) -> dict[str, Any]:
    changed = {}
    for f in dataclasses.fields(value):
        default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        if f.init and getattr(value, f.name) != default:
            changed[f.name] = getattr(value, f.name)
    return changed


def describe(kind: Type) -> str:
    """Describe a type in words for messages and `--help`, such as "a whole number or none"."""
    match kind:
        case Limited():
            return describe(kind.args[0])
        case Either():
            return " or ".join("none" if one.annotation is type(None) else describe(one) for one in kind.args)
        case Choice():
            return "|".join(map(str, kind.values))
        case Row():
            return f"({', '.join(map(describe, kind.args))})"
        case Several():
            return f"({describe(kind.args[0])}, ...)"
        case Table() if kind.origin is Mapping:
            return "a table, such as {5: 1.5}"
    words = "|".join(choice.kind for choice in part_choices(kind))
    return words or {int: "a whole number", float: "a number", str: "text", bool: "true|false"}.get(
        kind.annotation, "a table of fields"
    )


def time_in_words(seconds: float) -> str:
    """Format a time in seconds as 0:05 or 1:02:03."""
    minutes, hours = int(seconds) // 60 % 60, int(seconds) // 3600
    return f"{hours}:{minutes:02}:{int(seconds) % 60:02}" if hours else f"{minutes}:{int(seconds) % 60:02}"
