"""Binds the arguments of a call to the parameters of a function, with advice if they do not match."""

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from onward.base.errors import UserError
from onward.base.suggestions import nearest

signature_of: Callable[[Callable[..., Any]], inspect.Signature] = functools.cache(inspect.signature)


def bind(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
    """Bind a call's arguments to a function's parameters, as inspect does. Raises a UserError if they do not match."""
    signature = signature_of(function)
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        known = signature.parameters.keys() - {"self", "cls"}
        others = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values())
        unknown = None if others else next((name for name in kwargs if name not in known), None)
        missing = re.fullmatch(r"missing a required (?:\S+ )?argument: '(\w+)'", str(error))
        what = str(error)
        if missing and not unknown:
            given = signature.bind_partial(*args, **kwargs).arguments
            names = [p.name for p in signature.parameters.values() if is_required(p) and p.name not in given]
            what = f"{' and '.join(names)} {'are missing: give them' if len(names) > 1 else 'is missing: give it'}"
        if unknown:
            what = f"{unknown} is not an argument: {config_with(function, unknown) or nearest(unknown, known)}"
        raise UserError(f"{function.__qualname__.removesuffix('.__init__')}: {what}") from None


def config_with(function: Callable[..., Any], name: str) -> str:
    """The advice to pass the argument `name` to a dataclass that the function takes, together with the fields that the
    dataclass needs, such as "write Decoder(DecoderConfig(vocab_size=..., ...))"; "" if the function takes no dataclass
    with this field."""
    owner = function.__qualname__.removesuffix(".__init__")
    kinds = (parameter.annotation for parameter in signature_of(function).parameters.values())
    for config in (kind for kind in kinds if name in getattr(kind, "__dataclass_fields__", ())):
        required = [p.name for p in signature_of(config).parameters.values() if is_required(p)]
        fields = ", ".join(f"{one}=..." for one in dict.fromkeys([name, *required]))
        return f"write {owner}({config.__name__}({fields}))"
    return ""


def is_required(parameter: inspect.Parameter) -> bool:
    variadic = parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return parameter.default is inspect.Parameter.empty and not variadic
