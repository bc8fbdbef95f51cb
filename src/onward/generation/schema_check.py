"""The check of a complete answer against its JSON schema, for keywords that a grammar cannot enforce. Does not import
torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from decimal import Decimal, DecimalException
from typing import Any

from onward.errors import UserError
from onward.generation.schema_grammar import children, escaped, with_null
from onward.generation.schema_patterns import searchable
from onward.text.regular import compiled, matches

Errors = Iterator[Any]
TYPES = "string", "number", "integer", "boolean", "null", "array", "object"


class Conformance:
    """The check of JSON texts against `schema`, of any draft or OpenAPI. Raises a UserError that begins with `what` for
    a schema that is malformed; `later` are the JSON paths of the keywords for which it is needed."""

    def __init__(self, schema: Any, what: str) -> None:
        import jsonschema
        import jsonschema_specifications

        self.what = what
        check_schema(schema, what)
        base = jsonschema.Draft202012Validator
        keywords: dict[str, Any] = {"multipleOf": multiple_of, "pattern": pattern}
        keywords |= {"patternProperties": pattern_properties, "additionalProperties": additional_properties}
        registry = jsonschema_specifications.REGISTRY  # which fetches nothing
        self.validator = jsonschema.validators.extend(base, keywords)(standard(schema), registry=registry)

    def problem(self, text: str) -> str:
        """Return the sentence that says why a text does not conform to the schema; "" if it does."""
        import jsonschema

        try:
            error = jsonschema.exceptions.best_match(self.validator.iter_errors(json.loads(text)))
        except (ValueError, RecursionError) as failure:
            return f"{self.what}: the answer is not JSON that can be checked ({failure!s:.99})"
        if error is None:
            return ""
        path = pointer(error.absolute_schema_path)
        return (
            f"{self.what} is not met by the answer: {pointer(error.absolute_path)} breaks {path}, which is checked "
            f"only on the complete answer: try again, or change the schema ({' '.join(error.message.split()):.150})"
        )


def check_schema(schema: Any, what: str) -> None:
    """Raise a UserError, which begins with `what`, if a JSON schema is malformed."""
    import jsonschema

    rules, form = jsonschema.Draft202012Validator, standard(schema)
    if error := jsonschema.exceptions.best_match(rules(rules.META_SCHEMA).iter_errors(form)):
        place, reason = pointer(error.absolute_path), f"{' '.join(error.message.split()):.150}"
        if error.absolute_path and error.absolute_path[-1] == "type":
            reason = f"{error.instance!r:.60} is no type: write one or more of {', '.join(TYPES)}"
        raise UserError(f"{what} is not a JSON schema: {place} is wrong: {reason}")
    for place, expression in patterns(form, "#"):
        try:
            compiled(searchable(expression), place)
        except UserError:
            raise UserError(
                f"{what} cannot be used: {place} is {expression!r:.99}, which is not a regular expression"
            ) from None


def patterns(node: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield (JSON path, pattern) for every regular expression of a schema at a JSON path."""
    inner = list[tuple[str, str]]()
    if isinstance(node, Mapping):
        children(node, path, lambda child, at: inner.extend(patterns(child, at)))
        yield from inner
        yield from [(f"{path}/pattern", node["pattern"])] if "pattern" in node else []
        yield from ((f"{path}/patternProperties", key) for key in node.get("patternProperties", ()))


def pointer(path: Any) -> str:
    """Return a JSON path, given as a sequence of keys and indices, as text."""
    return "#" + "".join(f"/{escaped(str(part))}" for part in path)


def standard(node: Any, path: str = "#") -> Any:
    """Return a schema of an older draft or of OpenAPI in the keywords of draft 2020-12."""
    if not isinstance(node, Mapping):
        return node
    result = children(with_null(node), path, standard)
    for name in "$schema", "id", "nullable":
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
    """Yield the errors of a text by the keyword `pattern`; matching takes a bounded time."""
    from jsonschema import ValidationError

    if isinstance(value, str) and not found(expression, value):
        yield ValidationError(f"{value!r:.80} does not match")


def pattern_properties(validator: Any, rules: Mapping[str, Any], value: Any, schema: Any) -> Errors:
    """Yield the errors of an object by the keyword `patternProperties`."""
    if isinstance(value, dict):
        for expression, rule in rules.items():
            for name in value:
                if found(expression, name):
                    yield from validator.descend(value[name], rule, path=name, schema_path=expression)


def additional_properties(validator: Any, rule: Any, value: Any, schema: Any) -> Errors:
    """Yield the errors of an object by the keyword `additionalProperties`."""
    if isinstance(value, dict):
        for name in value:
            if name in schema.get("properties", {}):
                continue
            if not any(found(expression, name) for expression in schema.get("patternProperties", ())):
                yield from validator.descend(value[name], rule, path=name)


def multiple_of(validator: Any, step: Any, value: Any, schema: Any) -> Errors:
    """Yield the errors of a number by the keyword `multipleOf`, in decimal arithmetic."""
    from jsonschema import ValidationError

    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            rest = Decimal(repr(value)) % Decimal(repr(step))
        except DecimalException:  # a quotient of too many digits
            rest = Decimal(value % step)
        if rest:
            yield ValidationError(f"{value} is not a multiple of {step}")
