"""Messages for an invalid config.json, which name its keys instead of the fields of DecoderConfig."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from onward.base.arguments import OutOfRange
from onward.base.errors import UserError
from onward.families._interface import HF

Read = Callable[[HF], object]  # reads a config.json, or raises a UserError


def refusal(read: Read, hf: HF, error: UserError, where: str) -> str:
    """The message for a config.json for which `read` raised an error; `where` is its path."""
    message = str(error)
    if message.startswith("config.json"):  # the message already names the key
        return where + message.removeprefix("config.json")
    blamed = blame(read, hf, message)
    if isinstance(error, OutOfRange):
        exact = {key: value for key, value in blamed.items() if value is error.value or value == error.value}
        if exact:
            blamed, message = exact, error.allowed
    named = " and ".join(f"{key} {value!r:.60}" for key, value in blamed.items())
    return f"{where} has {named}: {message}" if named else f"{where}: {message}"


def blame(read: Read, hf: HF, message: str) -> dict[str, Any]:
    """Return the values of the keys of a config.json that cause a UserError with this message, by dotted key: at most
    three.

    A key is a cause if reading succeeds without it. Keys whose removal changes the message are added if the message
    contains their value; if no removal succeeds, they alone are the causes."""
    cured, changed = dict[str, Any](), dict[str, Any]()
    for path, value, without in variants(hf):
        try:
            read(without)
            cured[path] = value
        except UserError as error:
            if str(error) != message:
                changed[path] = value
    if cured:
        changed = {key: value for key, value in changed.items() if mentions(message, value)}
    causes = cured | changed
    inner = [key for key in causes if not any(other.startswith(f"{key}.") for other in causes)]
    return {key: causes[key] for key in inner[:3]}


def mentions(message: str, value: Any) -> bool:
    """Whether a message contains the `repr` of a value, not inside another number or word."""
    return re.search(rf"(?<![\w.]){re.escape(repr(value))}(?![\w.])", message) is not None


def variants(hf: HF, prefix: str = "") -> Iterator[tuple[str, Any, HF]]:
    """Yield (dotted key, value, copy without this key) for each key of a config.json and its inner tables except
    model_type."""
    for key, value in hf.items():
        if key != "model_type":
            yield prefix + key, value, {k: v for k, v in hf.items() if k != key}
        if isinstance(value, Mapping):
            for path, inner, without in variants(value, f"{prefix}{key}."):
                yield path, inner, {**hf, key: without}
