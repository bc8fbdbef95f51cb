"""API keys with names and limits, and the used part of each limit. Imports neither torch nor the libraries of the
server."""

from __future__ import annotations

import hmac
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from time import monotonic
from typing import Annotated, Any

from onward.base.arguments import Range
from onward.base.errors import UserError
from onward.base.fields import build

Limit = Annotated[int, Range(0, 1 << 40)]


@dataclass(frozen=True, kw_only=True)
class Key:
    """An API key of a client, and the limits of its requests; 0: no limit. Tokens are those of prompts and answers, and
    count when a request ends."""

    key: str = field(repr=False)  # the text that the client sends
    name: str = ""  # name in logs; in a file, the name of the table
    requests_per_minute: Limit = 0  # requests that begin in a minute
    tokens_per_minute: Limit = 0  # tokens of prompts and answers in a minute
    concurrent: Limit = 0  # requests at the same time
    admin: bool = False  # may add and remove models and adapters


def read_keys(path: Path) -> list[Key]:
    """Read the keys in a file: one per line or, if its name ends in .toml, a table for each, whose name is that of the
    key. Raises a UserError for a file that cannot be read or has no keys."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise UserError(f"Cannot read api_key_file {path} ({reason}): name a file") from None
    keys = tables(path, text) if path.suffix == ".toml" else [Key(key=line) for line in text.split()]
    if not keys:
        raise UserError(f"api_key_file {path} is empty: write a key into it, or leave it out")
    return keys


def tables(path: Path, text: str) -> list[Key]:
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"api_key_file {path} is not TOML: {error}") from None
    keys = []
    for name, values in tables.items():
        if not isinstance(values, Mapping):
            raise UserError(f"api_key_file {path} has {name} outside of a table: begin it with the key's name, [alice]")
        if "name" in values:
            raise UserError(f"api_key_file {path} has {name}.name, but the name is that of the table: leave it out")
        given: dict[str, Any] = {"name": name, **values}
        try:
            keys.append(build(Key, given, name))
        except UserError as error:
            raise UserError(f"api_key_file {path}: {error}") from None
    return keys


def check_keys(keys: Sequence[Key]) -> None:
    """Raise a UserError for a key that is blank, has white space around it or control characters, or has two names."""
    seen: dict[str, str] = {}
    for key in keys:
        if not key.key.strip():
            raise UserError("api_key is empty: give a key, or leave it out")
        if key.key != key.key.strip() or not key.key.isprintable():
            raise UserError(f"api_key {key.name!r} has white space around it or control characters: remove them")
        if seen.setdefault(key.key, key.name) != key.name:
            raise UserError(f"api_key {key.name!r} is the same as that of {seen[key.key]!r}: give each its own")


@dataclass
class Allowance:
    """An amount that grows by `limit` in a minute, up to `limit`; below 0 where more was taken than was left."""

    limit: int
    level: float
    time: float

    def left(self, now: float) -> float:
        self.level = min(float(self.limit), self.level + self.limit * (now - self.time) / 60)
        self.time = now
        return self.level

    def wait(self, least: float) -> int:
        """Whole seconds until `least` is left."""
        return max(1, ceil(60 * (least - self.level) / self.limit))


@dataclass
class Usage:
    running: int = 0
    allowances: dict[str, Allowance] = field(default_factory=dict)  # allowances for requests and for tokens

    def allowance(self, what: str, limit: int, now: float) -> Allowance:
        one = self.allowances.setdefault(what, Allowance(limit, limit, now))
        one.left(now)
        one.limit = limit
        return one


class Keys:
    """The keys of a server, used in the event loop."""

    def __init__(self, keys: Sequence[str | Key]) -> None:
        self.usage: dict[str, Usage] = {}
        self.known: dict[str, Key] = {}
        self.replace(keys)

    def replace(self, keys: Sequence[str | Key]) -> None:
        """Accept these keys from now on; the usage of each name so far still counts. Raises a UserError, and changes
        nothing, for keys that `check_keys` refuses."""
        made = [key if isinstance(key, Key) else Key(key=key) for key in keys]
        named = [key if key.name else Key(key=key.key, name=f"key {i}") for i, key in enumerate(made, 1)]
        check_keys(named)
        self.known = {key.name: key for key in named}

    def __bool__(self) -> bool:
        return bool(self.known)

    def find(self, given: bytes) -> Key | None:
        """The key that a client has sent; compares it with all keys, in the same time for all wrong keys of the same
        length."""
        matches = [key for key in self.known.values() if hmac.compare_digest(given, key.key.encode())]
        return matches[0] if matches else None

    def begin(self, key: Key) -> tuple[str, int] | None:
        """Count a request that begins; `end` must follow. Returns None or, if the request is beyond a limit of its key
        and must be refused, an error message and the number of seconds to wait."""
        usage, now = self.usage.setdefault(key.name, Usage()), monotonic()
        if key.concurrent and usage.running >= key.concurrent:
            return f"the key {key.name!r} may have {key.concurrent} requests at a time: wait until one ends", 1
        if key.tokens_per_minute:
            tokens = usage.allowance("tokens", key.tokens_per_minute, now)
            if tokens.level <= 0:
                seconds = tokens.wait(1)
                what = f"{key.tokens_per_minute:,} tokens per minute"
                return f"the key {key.name!r} has used its {what}: try again in {seconds} s", seconds
        if key.requests_per_minute:
            requests = usage.allowance("requests", key.requests_per_minute, now)
            if requests.level < 1:
                seconds = requests.wait(1)
                what = f"{key.requests_per_minute:,} requests per minute"
                return f"the key {key.name!r} has used its {what}: try again in {seconds} s", seconds
            requests.level -= 1
        usage.running += 1
        return None

    def end(self, key: Key) -> None:
        self.usage[key.name].running -= 1

    def charge(self, name: str, tokens: int) -> None:
        """Count the tokens of a request that has ended."""
        key = self.known.get(name)
        if key and key.tokens_per_minute:
            usage = self.usage.setdefault(name, Usage())
            usage.allowance("tokens", key.tokens_per_minute, monotonic()).level -= tokens
