"""JSON schemas of answers: the part that a grammar enforces while a model writes, and the part that is checked on the
complete answer. Does not import torch.

A schema is first rewritten (`schema_grammar`). If llguidance still rejects the schema, the responsible keyword is found
by bisection. An unsupported keyword is then removed from the grammar and, except `format`, checked on the complete
answer; a malformed or unsatisfiable keyword raises a UserError that names it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from onward.base.errors import UserError
from onward.generation.schema_check import Conformance, check_schema
from onward.generation.schema_grammar import (
    DEFINITIONS,
    LISTS,
    MAPS,
    Weakened,
    children,
    circular,
    escaped,
    subschemas,
    with_pointers,
)
from onward.generation.schema_rule import rejection, rule

MOST = 10  # maximum number of keywords that are left to the check because llguidance rejects them
WITH = {  # by keyword: the keywords whose meaning depends on it
    "properties": ("additionalProperties",),
    "patternProperties": ("additionalProperties",),
    "prefixItems": ("items",),
}
WHOLE = MAPS | LISTS | {"type", "additionalProperties", "additionalItems", "$ref"}  # removed last
KEPT = DEFINITIONS | {"$id", "$anchor", "x-guidance"}  # never removed
DEFINED = tuple(f"#/{name}/" for name in DEFINITIONS)
SHOWN = 5  # maximum number of keywords in a note
MISSING, CIRCULAR = "does not exist", "circular references"  # parts of llguidance's messages
UNSATISFIABLE = "Unsatisfiable schema: "
Keyword = tuple[str, str]  # JSON path of a subschema, and a key in it


class SchemaWarning(UserWarning):
    """The warning that a part of a JSON schema is checked only on the complete answer."""


class Prepared:
    """A JSON schema, ready to constrain answers. Error messages name the schema by `what`, such as "json_schema".

    `schema` is the part that the grammar enforces: it allows every value that conforms to the schema `original`.
    `later` are the JSON paths of the keywords that the grammar does not fully enforce; `conformance` checks them.
    Raises a UserError for a schema that cannot be used, such as a malformed one.
    """

    def __init__(self, original: Any, what: str) -> None:
        original = with_pointers(original)
        self.original, self.what = original, what
        if path := circular(original):
            raise UserError(f"{what} cannot be used: {path} refers to itself without end: remove it")
        weakened = Weakened(original)
        self.schema, later = weakened.schema, list(weakened.later)
        while message := rejection(self.schema):
            path, name = culprit(self.schema, message)
            self.check(message, path, name)
            self.schema = without(self.schema, {(path, name)})
            later += [f"{path}/{escaped(name)}"] * (name != "format")  # `format` is only an annotation
            if len(later) > MOST + len(weakened.later):
                raise UserError(
                    f"{what} cannot be used: more than {MOST} keywords, such as {later[-1]}, are not supported: "
                    "remove them"
                )
        self.later = tuple(dict.fromkeys(later))
        if later:
            _ = self.conformance  # a malformed schema raises its error now

    @cached_property
    def conformance(self) -> Conformance:
        """The check of complete answers against the original schema."""
        return Conformance(self.original, self.what)

    @property
    def note(self) -> str:
        """A sentence about the keywords that are checked only on the complete answer; "" without any."""
        if not self.later:
            return ""
        more = f" and {len(self.later) - SHOWN} more" if len(self.later) > SHOWN else ""
        return (
            f"{self.what}: {', '.join(self.later[:SHOWN])}{more} cannot be enforced while an answer is "
            "written: an answer that violates the schema ends with an error"
        )

    def claims(self, text: str) -> list[Claim]:
        """Return the claims to check for a complete answer; empty if the grammar enforces the entire schema."""
        return [Claim(self, text)] if self.later else []

    def check(self, message: str, path: str, name: str) -> None:
        """Raise a UserError if the keyword `name` at a JSON path, which llguidance rejects with `message`, is not
        merely unsupported but malformed, names a missing schema or allows no value, or if `name` is empty."""
        check_schema(self.original, self.what)
        at, reason = f"{path}/{escaped(name)}" if name else path, message.partition("\n")[0]
        if UNSATISFIABLE in reason and name != "format":
            reason = reason.partition(UNSATISFIABLE)[2]
            reason = "no text matches all keywords of the same schema" if reason.startswith("Regex") else reason
            raise UserError(f"{self.what} cannot be used: no value conforms to {at}: {reason}")
        if name == "$ref" and CIRCULAR not in reason:
            raise UserError(
                f"{self.what} cannot be used: {at} names a schema that is not in this document: put it into $defs"
            )
        if not name:
            raise UserError(f"{self.what} cannot be used: it is too large or too deeply nested: simplify it")


def prepared(schema: Any, what: str = "json_schema") -> Prepared:
    """Return a JSON schema (a dict or a Boolean) ready to constrain answers; results are cached. Raises a UserError
    that begins with `what` for a schema that cannot be used."""
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        return prepared_text(text, what)
    except (TypeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{what} is not JSON: {error}") from None
    except RecursionError:
        raise UserError(f"{what} cannot be used: it is nested too deeply") from None


@lru_cache(maxsize=64)
def prepared_text(text: str, what: str) -> Prepared:
    """Return the JSON schema in `text` ready to constrain answers, as `prepared` does."""
    return Prepared(json.loads(text), what)


def json_rule(schema: Any, what: str = "json_schema") -> str:
    """Return the rule of a Lark grammar for JSON that conforms to a schema; references in the schema are relative to
    its own root. Raises a UserError as `prepared` does; the keywords in `prepared(schema, what).later` are not
    enforced."""
    return rule(prepared(schema, what).schema)


class Claim(NamedTuple):
    """A complete text that must conform to a schema."""

    schema: Prepared
    text: str

    def problem(self) -> str:
        """Return a sentence that explains why the text does not conform to the schema; "" if it conforms."""
        return self.schema.conformance.problem(self.text)


def culprit(schema: Any, message: str) -> Keyword:
    """Return the keyword that makes llguidance reject a schema with `message`; its name is "" if there is none. Of
    several keywords that contradict each other, a format is blamed first, and keywords that contain subschemas last.
    Within each group, keywords inside definitions are blamed first, because an alternative that allows anything would
    hide the error of another alternative."""
    found = [(path, name) for path, node in subschemas(schema) for name in node if name not in KEPT]
    found.sort(key=lambda keyword: (keyword[1] != "format", keyword[1] in WHOLE, not keyword[0].startswith(DEFINED)))
    low, high = 0, len(found)  # without the first `low` keywords, the message is the same
    while high - low > 1:
        middle = (low + high) // 2
        other = rejection(without(schema, set(found[:middle])))
        low, high = (middle, high) if other == message or (MISSING in other) > (MISSING in message) else (low, middle)
    return found[high - 1] if found else ("#", "")


def without(node: Any, removed: Collection[Keyword], path: str = "#") -> Any:
    """Return a copy of a schema, at a JSON path, without the keywords in `removed` and those that depend on them."""
    if not isinstance(node, Mapping):
        return node
    names = {name for name in node if (path, name) in removed}
    names |= {other for name in names for other in WITH.get(name, ())}
    rest = {name: value for name, value in node.items() if name not in names}
    return children(rest, path, lambda child, at: without(child, removed, at))
