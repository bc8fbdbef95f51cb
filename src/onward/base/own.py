"""Objects that a user defines outside the package: parts of a decoder, and objects that options name as "module:NAME".

Does not import torch.
"""

import dataclasses
import sys
from collections.abc import Iterable
from types import FunctionType
from typing import Any

from onward.base import fields
from onward.base.errors import UserError
from onward.base.fields import Part


def own_parts(value: Any) -> list[Part]:
    """The parts in a configuration, or in a part, whose classes are defined outside the package."""
    values = value if isinstance(value, tuple) else vars(value).values() if dataclasses.is_dataclass(value) else ()
    is_own = isinstance(value, Part) and not type(value).__module__.startswith("onward.")
    return [value] * is_own + [part for one in values for part in own_parts(one)]


def code_of(parts: Iterable[Part]) -> frozenset[object]:
    """The classes and functions that parts use from their own modules. If a notebook cell that defines them is run
    again, they are different objects."""
    found, rest = set[object](), list[Any](map(type, parts))
    while rest:
        one = rest.pop()
        if one in found:
            continue
        found.add(one)
        of_class = [*one.__bases__, *vars(one).values()] if isinstance(one, type) else []
        used = [one.__globals__.get(name) for name in one.__code__.co_names] if isinstance(one, FunctionType) else []
        rest += [
            other
            for other in (*of_class, *used)
            if isinstance(other, type | FunctionType) and other.__module__ == one.__module__
        ]
    return frozenset(found)


def named(option: str, text: str, example: str) -> tuple[Any, dict[str, Any]]:
    """Return the object that the value `text` of an option names as "module:NAME", and the arguments of
    "module:NAME(a=1)". Raises a UserError if there is no such object; `example` is the advice in the error message."""
    module, _, rest = text.partition(":")
    name, bracket, _ = rest.partition("(")
    if not all(map(str.isidentifier, (*module.split("."), name))):
        raise UserError(f"{option} is {text!r}: {example}")
    try:
        fields.import_parts(module)
    except ImportError as error:
        raise UserError(f"the {option} {text} cannot be imported: {error}") from None
    except UserError:
        raise UserError(
            f"the {option} {text} cannot be imported, because there is no module {module}, in the current folder or "
            "installed: name it as in Python"
        ) from None
    found = getattr(sys.modules[module], name, None)
    if found is None:
        raise UserError(f"the {option} {text} cannot be found, because the module {module} has no {name}: {example}")
    arguments = fields.parse(rest, option) if bracket else {}
    return found, {key: value for key, value in arguments.items() if key != "kind"}
