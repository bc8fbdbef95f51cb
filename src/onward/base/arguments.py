"""Type annotations, each read once, and the arguments and fields that are checked against them.

`type_of` reads the annotations. Code that depends on a type, such as a check of a Python value (here), the conversion
of text (`fields`) or an option of a command, uses the Type. Does not import torch.
"""

import dataclasses
import functools
import inspect
import re
from collections import abc
from collections.abc import Callable, Mapping
from functools import cached_property
from numbers import Integral, Real
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from onward.base.binding import bind, signature_of
from onward.base.errors import UserError

F = TypeVar("F", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True)
class Range:
    """The least and the greatest number that a field or an argument may have, as part of its type annotation: `eps:
    Annotated[float, Range(0, 1)]`.

    In a tuple of numbers, the range applies to each number. None is allowed where the type allows it.
    """

    least: float
    most: float

    def holds(self, number: Any) -> bool:
        return bool(self.least <= number <= self.most)  # False for NaN

    def __str__(self) -> str:
        least, most = (f"{x:g}" if isinstance(x, float) else x for x in (self.least, self.most))
        return f"from {least} to {most}"


class OutOfRange(UserError):
    """Raised if a number is outside the Range in the type annotation of its field or argument, `Annotated[...,
    Range(...)]`."""

    def __init__(self, name: str, value: Any, kind: "Type") -> None:
        self.value = value
        self.allowed = f"it must be a {'whole ' if kind.only_ints else ''}number {kind.ranges[0]}"
        super().__init__(f"{name} is {shown(value)}: {self.allowed}")


def shown(value: Any) -> str:
    """Format a value for an error message: the first 99 characters of its repr, in one line."""
    return f"{' '.join(repr(value).split()):.99}"


class Type:
    """A type annotation, read by `type_of`: a subclass for each form. This class is for Any and type variables."""

    def __init__(self, annotation: Any, args: tuple["Type", ...] = ()) -> None:
        self.annotation, self.origin, self.args = annotation, get_origin(annotation), args

    def fits(self, value: Any) -> bool:
        """Whether a value has the type and is in its Range, if it has one. An int is also a float, a bool is neither,
        and a str is not a sequence."""
        return True

    @cached_property
    def classes(self) -> frozenset[Any]:
        """The classes that the type allows, without their arguments: {int, NoneType} for `int | None`."""
        return frozenset({self.origin or self.annotation})

    @cached_property
    def whole(self) -> frozenset[type]:
        """Classes whose every instance fits and stays as it is, so that their instances need no further check."""
        return frozenset()

    @cached_property
    def ranges(self) -> list[Range]:
        """The Ranges inside the type, at any depth."""
        return [one for arg in self.args for one in arg.ranges]

    @cached_property
    def only_ints(self) -> bool:
        return all(arg.only_ints for arg in self.args) if self.args else self.annotation is not float

    @cached_property
    def only_in_python(self) -> bool:
        """Whether values are or contain functions, which cannot be written as text on the command line."""
        return any(arg.only_in_python for arg in self.args)

    def __str__(self) -> str:  # as Python code without the names of modules: `Sequence[int] | None`
        return re.sub(r"(?:[A-Za-z_]\w*\.)+", "", inspect.formatannotation(self.annotation))


class Instance(Type):
    """A class without arguments."""

    @cached_property
    def whole(self) -> frozenset[type]:
        return frozenset({self.annotation} - {Path})

    def fits(self, value: Any) -> bool:
        if type(value) is self.annotation:
            return True
        if self.annotation in (int, float):
            return isinstance(value, Integral if self.annotation is int else Real) and not isinstance(value, bool)
        return isinstance(value, self.annotation)


class Choice(Type):
    """Literal."""

    @property
    def values(self) -> tuple[Any, ...]:
        return get_args(self.annotation)

    def fits(self, value: Any) -> bool:
        return any(type(value) is type(one) and value == one for one in self.values)


class Either(Type):
    """A union, possibly with None."""

    def fits(self, value: Any) -> bool:
        return any(arg.fits(value) for arg in self.args)

    @cached_property
    def classes(self) -> frozenset[Any]:
        return frozenset().union(*(arg.classes for arg in self.args))

    @cached_property
    def whole(self) -> frozenset[type]:
        paths = {str} if Path in self.classes else set()
        return frozenset().union(*(arg.whole for arg in self.args)) - paths


class Limited(Type):
    """A type with a Range."""

    def fits(self, value: Any) -> bool:
        return self.args[0].fits(value) and all(limit.holds(value) for limit in self.annotation.__metadata__)

    @cached_property
    def classes(self) -> frozenset[Any]:
        return self.args[0].classes

    @cached_property
    def ranges(self) -> list[Range]:
        return [*self.annotation.__metadata__, *self.args[0].ranges]


class Function(Type):
    """A Callable with any arguments."""

    only_in_python = True

    def fits(self, value: Any) -> bool:
        return callable(value)


class Table(Type):
    """A Mapping or a dict."""

    def fits(self, value: Any) -> bool:
        key, item = self.args
        table = isinstance(value, self.origin)
        return table and all(key.fits(name) and item.fits(one) for name, one in value.items())


class Several(Type):
    """A sequence or another collection of values of one type, or an iterator over them."""

    def fits(self, value: Any) -> bool:
        if not isinstance(value, self.origin) or isinstance(value, str | bytes):
            return False
        if not isinstance(value, abc.Collection):  # an iterator can be read only once
            return True
        return {*map(type, value)} <= {self.args[0].annotation} or all(map(self.args[0].fits, value))


class Row(Type):
    """A tuple with a type for each element."""

    def fits(self, value: Any) -> bool:
        return (
            isinstance(value, tuple)
            and len(value) == len(self.args)
            and all(arg.fits(one) for arg, one in zip(self.args, value))
        )


@functools.cache
def type_of(annotation: Any) -> Type:
    """Read a type annotation."""
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation is Any or isinstance(annotation, TypeVar):
        return Type(annotation)
    if origin is Literal:
        return Choice(annotation)
    if origin is abc.Callable:
        return Function(annotation)
    if origin is Annotated:
        return Limited(annotation, (type_of(args[0]),))
    if origin is None:
        return Instance(annotation)
    types = tuple(type_of(arg) for arg in args if arg is not Ellipsis)
    if origin in (Union, UnionType):
        return Either(annotation, types)
    if issubclass(origin, Mapping):
        return Table(annotation, types)
    return Row(annotation, types) if origin is tuple and Ellipsis not in args else Several(annotation, types)


def types_of(annotations: Mapping[str, Any]) -> dict[str, Type]:
    """Read the annotations of arguments or fields, by name."""
    return {name: type_of(annotation) for name, annotation in annotations.items()}


def as_declared(kind: Type, value: Any) -> Any:
    """Return a value converted to a type if nothing is lost: a float without fraction to int where only an int is
    declared, a list to a tuple, a scalar of numpy or torch to a number. Any other value is returned unchanged."""
    plain = kind.classes
    if type(value) in plain:
        return value
    if isinstance(value, list) and tuple in plain:
        return tuple(value)
    if (int in plain or float in plain) and getattr(value, "ndim", None) == 0:
        value = value.item()
    if int in plain and float not in plain and isinstance(value, Real) and not isinstance(value, bool):
        integral = not value % 1  # type: ignore[operator]  # the remainder of infinity and NaN is NaN, which is true
        return int(value) if integral else value  # type: ignore[call-overload]
    return value


def check(types: Mapping[str, Type], values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return `values`, arguments or fields by name, converted by `as_declared` to their `types`. Raises a UserError for
    the first value that does not have its type; `prefix` precedes its name in the message."""
    read = dict(values)
    for name, given in values.items():
        if (kind := types.get(name)) is None or type(given) in kind.whole:
            continue
        value = read[name] = as_declared(kind, given)
        if isinstance(value, str | Path) and Path in kind.classes and "\0" in str(value):
            raise UserError(f"{prefix}{name} is {shown(value)}: a path cannot contain a zero byte")
        if not kind.fits(value):
            if kind.ranges:
                raise OutOfRange(prefix + name, given, kind)
            raise UserError(f"{prefix}{name} is {shown(given)}: it takes {kind}")
    return read


def read_field_types(cls: type) -> dict[str, Type]:
    """Return the types of the fields that the constructor of a dataclass takes, by field."""
    if not dataclasses.is_dataclass(cls):
        raise UserError(f"{cls.__name__} has no known fields: decorate the class with @dataclass(frozen=True)")
    annotations = get_type_hints(cls, include_extras=True)
    return types_of({field.name: annotations[field.name] for field in dataclasses.fields(cls) if field.init})


def check_fields(value: Any, prefix: str = "") -> None:
    """Check the fields of a dataclass and convert them by `as_declared`, in place, for its `__post_init__`. `prefix`
    precedes the field's name in the message of an error."""
    usual = defaults(type(value))
    given = {name: one for name, one in vars(value).items() if one is not usual.get(name, usual)}
    for name, read in check(field_types(type(value)), given, prefix).items():
        object.__setattr__(value, name, read)


def read_defaults(cls: type) -> dict[str, Any]:
    """Return the defaults of a dataclass's fields, except for defaults that do not have the type of their field."""
    given = {name: (kind, getattr(cls, name)) for name, kind in field_types(cls).items() if hasattr(cls, name)}
    return {name: default for name, (kind, default) in given.items() if kind.fits(default)}


field_types: Callable[[type], dict[str, Type]] = functools.cache(read_field_types)
defaults: Callable[[type], dict[str, Any]] = functools.cache(read_defaults)


@functools.cache
def types(function: Callable[..., Any]) -> dict[str, Type]:
    """The types of a function's parameters by name, except `*args` and `**kwargs`."""
    hints = get_type_hints(function, include_extras=True)
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = signature_of(function).parameters.values()
    return types_of({p.name: hints[p.name] for p in parameters if p.name in hints and p.kind not in variadic})


def checked(function: F) -> F:
    """Decorator for a public function: each call checks the arguments against the annotations and raises a UserError
    that names a wrong argument.

    Costs some microseconds per call, so it is not for functions that are called for each token or each step.
    """

    inner = inspect.unwrap(function)
    names = inner.__code__.co_varnames[: inner.__code__.co_argcount]  # names of parameters that may be positional

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if inner is not function:  # a decorated generator raises errors only when iterated
            bind(function, args, kwargs)
        read = check(types(function), {**dict(zip(names, args)), **kwargs})
        given = [read[name] for name, _ in zip(names, args)]
        try:
            return function(*given, *args[len(names) :], **{name: read[name] for name in kwargs})
        except TypeError:
            bind(function, args, kwargs)  # slower than the check
            raise

    return call  # type: ignore[return-value]


def unchecked(door: F) -> F:
    """Return a `checked` function, or a constructor that is `checked`, without its check, for callers that have already
    checked the arguments."""
    if not isinstance(door, type):
        return door.__wrapped__  # type: ignore[attr-defined,no-any-return]

    def make(*args: Any, **kwargs: Any) -> Any:
        made: Any = object.__new__(door)
        door.__init__.__wrapped__(made, *args, **kwargs)  # type: ignore[misc]
        return made

    return make  # type: ignore[return-value]


def explained(function: F) -> F:
    """Decorator for a public function: if a call fails, check the arguments, and the fields of dataclasses among them,
    against the annotations, and raise a UserError if one of them is wrong; otherwise the original error.

    Costs a tenth of a microsecond per call. Use it only for functions that change nothing before they fail.
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
