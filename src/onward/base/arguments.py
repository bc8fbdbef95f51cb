"""Arguments of public functions and fields of dataclasses, checked against their type annotations.

Does not import torch.
"""

import dataclasses
import functools
import inspect
import re
from collections import abc
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from onward.base.errors import UserError
from onward.base.suggestions import nearest

F = TypeVar("F", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True)
class Range:
    """The least and the greatest number that a field or an argument may have, as part of its type annotation: `eps:
    Annotated[float, Range(0, 1)]`.

    In a tuple of numbers it applies to each. None is allowed where the type allows it.
    """

    least: float
    most: float

    def holds(self, number: Any) -> bool:
        """Return whether a number is in the range, bounds included; False for NaN."""
        return bool(self.least <= number <= self.most)

    def __str__(self) -> str:
        least, most = (f"{x:g}" if isinstance(x, float) else x for x in (self.least, self.most))
        return f"from {least} to {most}"


class OutOfRange(UserError):
    """Raised if a number is outside the Range that the type annotation of its field or argument gives, `Annotated[...,
    Range(...)]`."""

    def __init__(self, name: str, value: Any, kind: Any) -> None:
        self.value = value
        self.allowed = f"it must be a {'whole ' if holds_only_ints(kind) else ''}number {ranges(kind)[0]}"
        super().__init__(f"{name} is {shown(value)}: {self.allowed}")


def shown(value: Any) -> str:
    """Format a value for an error message: the first 99 characters of its repr, in one line."""
    return f"{' '.join(repr(value).split()):.99}"


def spelled(kind: Any) -> str:
    """Format a type annotation as Python code without the names of modules: `Sequence[int] | None`."""
    return re.sub(r"(?:[A-Za-z_]\w*\.)+", "", inspect.formatannotation(kind))


def ranges(kind: Any) -> list[Range]:
    """Return the Range annotations inside the type annotation `kind`, at any depth; [] if there are none."""
    limits = [limit for limit in kind.__metadata__ if isinstance(limit, Range)] if hasattr(kind, "__metadata__") else []
    return limits + [limit for inner in get_args(kind) for limit in ranges(inner)]


def holds_only_ints(kind: Any) -> bool:
    """Return whether all numbers that the type annotation `kind` allows are integers."""
    args = get_args(kind)
    return all(map(holds_only_ints, args)) if args else kind is not float


def fits(kind: Any, value: Any) -> bool:
    """Return whether a value has the annotated type `kind` and is in its Range, if it has one. An int is also a float,
    a bool is neither, and a str is not a sequence."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return fits(args[0], value) and all(limit.holds(value) for limit in kind.__metadata__)
    if origin in (Union, UnionType):
        return any(fits(inner, value) for inner in args)
    if origin is Literal:
        return any(type(value) is type(one) and value == one for one in args)
    if kind in (int, float):
        return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    if kind is Any or isinstance(kind, TypeVar):
        return True
    if origin is abc.Callable:
        return callable(value)
    if origin is None or not isinstance(value, origin):
        return origin is None and isinstance(value, kind)
    if issubclass(origin, Mapping):
        return all(fits(args[0], key) and fits(args[1], one) for key, one in value.items())
    if isinstance(value, str | bytes):
        return False
    if origin is tuple and args[-1] is not Ellipsis:
        return len(args) == len(value) and all(map(fits, args, value))
    if not isinstance(value, abc.Collection):  # an iterator, which is read once
        return True
    return {*map(type, value)} <= {args[0]} or all(fits(args[0], one) for one in value)


@functools.cache
def alternatives(kind: Any) -> set[Any]:
    """Return the classes that the type annotation `kind` allows, without their arguments: `{int, NoneType}` for `int |
    None`."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return {one for arg in args for one in alternatives(arg)}
    return alternatives(args[0]) if origin is Annotated else {origin or kind}


def as_declared(kind: Any, value: Any) -> Any:
    """Return a value converted to the annotated type `kind` if nothing is lost: a float without fraction to int where
    only an int is declared, a list to a tuple, a scalar of numpy or torch to a number. Any other value is returned
    unchanged."""
    plain = alternatives(kind)
    if type(value) in plain:
        return value
    if isinstance(value, list) and tuple in plain:
        return tuple(value)
    if (int in plain or float in plain) and getattr(value, "ndim", None) == 0:
        value = value.item()
    if int in plain and float not in plain and isinstance(value, Real) and not isinstance(value, bool):
        integral = not value % 1  # type: ignore[operator]  # of infinity and NaN it is NaN, which is true
        return int(value) if integral else value  # type: ignore[call-overload]
    return value


def check(types: Mapping[str, Any], values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return `values`, arguments or fields by name, converted by `as_declared` to their annotated types in `types`.
    Raises a UserError for the first value that does not have its type; `prefix` precedes the name of the argument or
    field in the message."""
    read = dict(values)
    for name in types.keys() & values.keys():
        read[name] = as_declared(types[name], values[name])
    for name, kind in types.items():
        if isinstance(read.get(name), str | Path) and Path in alternatives(kind) and "\0" in str(read[name]):
            raise UserError(f"{prefix}{name} is {shown(values[name])}: a path cannot contain a zero byte")
        if name in read and not fits(kind, read[name]):
            if ranges(kind):
                raise OutOfRange(prefix + name, values[name], kind)
            raise UserError(f"{prefix}{name} is {shown(values[name])}: it takes {spelled(kind)}")
    return read


def read_field_types(cls: type) -> dict[str, Any]:
    """Return the annotated types, with their ranges, of the fields of a dataclass that its constructor takes, by
    field."""
    types = get_type_hints(cls, include_extras=True)
    return {field.name: types[field.name] for field in dataclasses.fields(cls) if field.init}


field_types: Callable[[type], dict[str, Any]] = functools.cache(read_field_types)


def check_fields(value: Any, prefix: str = "") -> None:
    """Check the fields of a dataclass instance and convert them by `as_declared`, in place; meant to be called in
    `__post_init__`. Raises a UserError for a field of a wrong type; `prefix` precedes the field's name in the
    message."""
    for name, read in check(field_types(type(value)), vars(value), prefix).items():
        object.__setattr__(value, name, read)


signature_of: Callable[[Callable[..., Any]], inspect.Signature] = functools.cache(inspect.signature)


def bind(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
    """Match the arguments of a call, positional `args` and keyword `kwargs`, with the parameters of a function. Raises
    a UserError for an unknown argument, a missing one, or too many."""
    signature = signature_of(function)
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        known = signature.parameters.keys() - {"self", "cls"}
        others = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values())
        unknown = None if others else next((name for name in kwargs if name not in known), None)
        missing = re.fullmatch(r"missing a required (?:\S+ )?argument: '(\w+)'", str(error))
        what = f"{missing[1]} is missing: give it" if missing else str(error)
        what = f"{unknown} is not an argument: {nearest(unknown, known)}" if unknown else what
        raise UserError(f"{function.__qualname__.removesuffix('.__init__')}: {what}") from None


@functools.cache
def types(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotated types, with their ranges, of a function's parameters by name, except `*args` and
    `**kwargs`."""
    hints = get_type_hints(function, include_extras=True)
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = signature_of(function).parameters.values()
    return {p.name: hints[p.name] for p in parameters if p.name in hints and p.kind not in variadic}


def checked(function: F) -> F:
    """Decorator for a public function: each call checks the arguments against the annotations and raises a UserError
    that names a wrong argument.

    Costs some microseconds per call, so it is not for functions that are called for each token or each step.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = bind(function, args, kwargs)
        bound.arguments |= check(types(function), bound.arguments)
        return function(*bound.args, **bound.kwargs)

    return call  # type: ignore[return-value]


def explained(function: F) -> F:
    """Decorator for a public function: if a call fails, check the arguments, and the fields of dataclasses among them,
    against the annotations, and raise a UserError if one of them is wrong; otherwise the original error.

    Costs a tenth of a microsecond per call. It is for functions that change nothing before they fail.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except UserError:
            raise
        except Exception:
            try:
                given = bind(function, args, kwargs).arguments
                check(types(function), given)
                for name, value in given.items():
                    if name in types(function) and dataclasses.is_dataclass(value):
                        check(field_types(type(value)), vars(value), f"{name}.")
            except UserError as error:
                raise error from None
            raise

    return call  # type: ignore[return-value]


def named(cls: F) -> F:
    """Decorator for a dataclass: its constructor raises a UserError, not a TypeError, for unknown and missing
    arguments."""
    construct = cls.__init__  # type: ignore[misc]

    @functools.wraps(construct)
    def init(*args: Any, **kwargs: Any) -> None:
        try:
            construct(*args, **kwargs)
        except TypeError:
            try:
                bind(construct, args, kwargs)
            except UserError as error:
                raise error from None
            raise

    cls.__init__ = init  # type: ignore[method-assign, misc]
    return cls
