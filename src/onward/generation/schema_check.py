"""The check of a complete answer against its JSON schema, for keywords that a grammar cannot enforce. Does not import
torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from fractions import Fraction
from math import inf
from time import perf_counter
from typing import Any

from onward.base.errors import UserError
from onward.generation.schema_grammar import canonical, children, escaped, subschemas, target, with_null
from onward.generation.schema_patterns import searchable
from onward.text.regular import compiled, matches

Errors = Iterator[Any]
SECONDS = 2.0  # time limit of the check of an answer
DEADLINE = ContextVar("DEADLINE", default=float("inf"))  # deadline of the current check, a time of perf_counter
TYPES = "string", "number", "integer", "boolean", "null", "array", "object"


UNCHECKED = {  # unsupported keywords; unevaluatedProperties: unsupported together with patternProperties
    "$dynamicRef": "is not supported: use $ref",
    "$recursiveRef": "is not supported: use $ref",
    "unevaluatedProperties": "cannot be combined with patternProperties: use additionalProperties",
}


class Conformance:
    """Checks JSON texts against `schema`, a JSON Schema of any draft or of OpenAPI. Raises a UserError that begins with
    `what` for a schema that is malformed or cannot be checked."""

    def __init__(self, schema: Any, what: str) -> None:
        import jsonschema

        self.what = what
        check_schema(schema, what)
        form, base = standard(schema), jsonschema.Draft202012Validator
        used = {name: f"{path}/{name}" for path, node in subschemas(form) for name in node}
        for name, reason in UNCHECKED.items():
            if name in used and (name != "unevaluatedProperties" or "patternProperties" in used):
                raise UserError(f"{what} cannot be used: {used[name]} {reason}")

        def reference(validator: Any, name: str, value: Any, schema: Any) -> Errors:
            return validator.descend(value, target(form, name))

        own = {"multipleOf": multiple_of, "pattern": pattern, "patternProperties": pattern_properties}
        own |= {"additionalProperties": additional_properties, "uniqueItems": unique_items, "$ref": reference}
        keywords = {name: timed(function) for name, function in (base.VALIDATORS | own).items()}
        self.validator = jsonschema.validators.extend(base, keywords)(form)

    def problem(self, text: str) -> str:
        """Return a sentence that explains why a text does not conform to the schema; "" if it conforms."""
        import jsonschema

        token = DEADLINE.set(perf_counter() + SECONDS)
        try:
            value = json.loads(text, parse_float=number)
            error = jsonschema.exceptions.best_match(self.validator.iter_errors(value))
        except TimeoutError:
            return f"{self.what} is not met: the check of the answer takes more than {SECONDS} s: simplify the schema"
        except (ValueError, RecursionError):
            return f"{self.what} is not met: the answer is nested too deeply, or a number is too long: try again"
        finally:
            DEADLINE.reset(token)
        if error is None:
            return ""
        path = pointer(error.absolute_schema_path)
        return (
            f"{self.what} is not met by the answer: {pointer(error.absolute_path)} breaks {path}, which is checked "
            f"only on the complete answer: try again, or change the schema ({' '.join(error.message.split()):.150})"
        )


def number(text: str) -> int | float:
    """Return the value of a JSON number; an int if it is integral."""
    value = float(text)
    return int(value) if value.is_integer() else value


def timed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function of a keyword to raise a TimeoutError after the deadline, because nested alternatives can take
    exponential time."""

    def run(*arguments: Any) -> Any:
        if perf_counter() > DEADLINE.get():
            raise TimeoutError
        return function(*arguments)

    return run


def check_schema(schema: Any, what: str) -> None:
    """Raise a UserError, which begins with `what`, if a JSON schema is malformed or holds an invalid reference or
    pattern."""
    import jsonschema

    rules, form = jsonschema.Draft202012Validator, standard(schema)
    if error := jsonschema.exceptions.best_match(rules(rules.META_SCHEMA).iter_errors(form)):
        place, reason = pointer(error.absolute_path), f"{' '.join(error.message.split()):.150}"
        if error.absolute_path and error.absolute_path[-1] == "type":
            reason = f"{error.instance!r:.60} is not a type: write one or more of {', '.join(TYPES)}"
        raise UserError(f"{what} is not a JSON schema: {place} is wrong: {reason}")
    for path, node in subschemas(form):
        if "$ref" in node and target(form, node["$ref"]) is None:
            raise UserError(
                f"{what} cannot be used: {path}/$ref names {node['$ref']:.99}, which is not in this document: put it "
                "into $defs, and write #/$defs and its name"
            )
        for expression in [*([node["pattern"]] if "pattern" in node else []), *node.get("patternProperties", ())]:
            try:
                compiled(searchable(expression), path)
            except UserError:
                name = "pattern" if expression == node.get("pattern") else "patternProperties"
                raise UserError(
                    f"{what} cannot be used: {path}/{name} has {expression!r:.99}, which is not a regular expression"
                ) from None


def pointer(path: Any) -> str:
    """Return the JSON Pointer, such as #/properties/a, of a path given as a sequence of keys and indices."""
    return "#" + "".join(f"/{escaped(str(part))}" for part in path)


def standard(node: Any, path: str = "#") -> Any:
    """Convert a schema of an older draft or of OpenAPI to the keywords of draft 2020-12."""
    if not isinstance(node, Mapping):
        return node
    result = children(with_null(node), path, standard)
    for name in "$schema", "$id", "id", "nullable":
        result.pop(name, None)
    for name, bound in ("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum"):
        if isinstance(flag := result.get(name), bool):
            del result[name]
            if flag and bound in result:
                result[name] = result.pop(bound)
    if isinstance(result.get("items"), list):
        result["prefixItems"] = result.pop("items")
        if "additionalItems" in result:
            result["items"] = result.pop("additionalItems")
    if isinstance(rules := result.pop("dependencies", None), Mapping):
        names = {key: rule for key, rule in rules.items() if isinstance(rule, list)}
        others = {key: standard(rule) for key, rule in rules.items() if key not in names}
        result["dependentRequired"] = names | result.get("dependentRequired", {})
        result["dependentSchemas"] = others | result.get("dependentSchemas", {})
    return result


def found(expression: str, text: str) -> bool:
    """Return whether a pattern matches a part of a text; False if matching takes longer than a second."""
    return matches(searchable(expression), text, full=False)


def pattern(validator: Any, expression: str, value: Any, schema: Any) -> Errors:
    """Yield errors for a string that violates `pattern`; matching takes a bounded time."""
    from jsonschema import ValidationError

    if isinstance(value, str) and not found(expression, value):
        yield ValidationError(f"{value!r:.80} does not match")


def pattern_properties(validator: Any, rules: Mapping[str, Any], value: Any, schema: Any) -> Errors:
    """Yield errors for an object that violates `patternProperties`."""
    if isinstance(value, dict):
        for expression, rule in rules.items():
            for name in value:
                if found(expression, name):
                    yield from validator.descend(value[name], rule, path=name, schema_path=expression)


def additional_properties(validator: Any, rule: Any, value: Any, schema: Any) -> Errors:
    """Yield errors for an object that violates `additionalProperties`."""
    if isinstance(value, dict):
        for name in value:
            if name in schema.get("properties", {}):
                continue
            if not any(found(expression, name) for expression in schema.get("patternProperties", ())):
                yield from validator.descend(value[name], rule, path=name)


def unique_items(validator: Any, unique: bool, value: Any, schema: Any) -> Errors:
    """Yield errors for an array that violates `uniqueItems`."""
    from jsonschema import ValidationError

    if unique and isinstance(value, list) and len(set(map(canonical, value))) < len(value):
        yield ValidationError(f"{value!r:.80} has equal items")


def multiple_of(validator: Any, step: Any, value: Any, schema: Any) -> Errors:
    """Yield errors for a number that violates `multipleOf`, in exact arithmetic."""
    from jsonschema import ValidationError

    if isinstance(value, bool) or not isinstance(value, int | float) or value in (inf, -inf):
        return
    if Fraction(repr(value)) % Fraction(repr(step)):
        yield ValidationError(f"{value} is not a multiple of {step}")
