"""JSON schemas as a grammar can express them: equivalent to the original or, where that is impossible, weaker. Does not
import torch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from onward.generation.schema_patterns import ANYTHING, expressible
from onward.generation.schema_rule import rejection

MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})  # maps of subschemas
LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems", "items"})  # keywords that hold a list of subschemas
SINGLE = frozenset(  # keywords that hold a subschema
    {"items", "additionalItems", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames"}
    | {"unevaluatedItems", "unevaluatedProperties"}
)
DEFINITIONS = frozenset({"$defs", "definitions"})
BRANCHES = frozenset({"then", "else"})
SAME = DEFINITIONS | {  # keywords that are passed to the grammar unchanged or with rewritten subschemas
    *("$ref", "$id", "$anchor", "x-guidance", "type", "enum", "const", "allOf", "anyOf", "oneOf"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength"),
    *("items", "prefixItems", "additionalItems", "minItems", "maxItems"),
    *("properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties"),
}
FORMATS = frozenset(("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"))
LATER = frozenset(("dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef"))
IN_PLACE = frozenset(  # keywords whose subschemas may evaluate further properties or items
    {"allOf", "anyOf", "oneOf", "if", "$ref", "$dynamicRef", "$recursiveRef", "dependentSchemas", "contains"}
)
UUID = re.compile(r"uuid[1-8]")
DATE = r"\d{4}-((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8]))"
TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d+)?"
NAMES = {  # patterns of property names, by their format
    "date": f"^{DATE}$",
    "time": f"^{TIME}$",
    "date-time": f"^{DATE}T{TIME}(Z|[+-]([01]\\d|2[0-3]):[0-5]\\d)$",
    "uuid": "^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$",
}
MANY = 200  # maximum number of alternatives that are compared with each other
BOUNDS = "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"
FAR = 1e18
REFERENCES = 8  # the longest chain of references that is followed
TYPES = frozenset(("null", "boolean", "number", "string", "array", "object"))
Node = Mapping[str, Any]


def children(node: Node, path: str, function: Callable[[Any, str], Any]) -> dict[str, Any]:
    """Return a copy of a schema with each of its direct subschemas replaced by `function(subschema, its path)`; `path`
    is the JSON path of the schema."""
    result = dict(node)
    for name, value in node.items():
        at = f"{path}/{escaped(name)}"
        if name in MAPS and isinstance(value, Mapping):
            result[name] = {key: function(child, f"{at}/{escaped(key)}") for key, child in value.items()}
        elif name in LISTS and isinstance(value, list):
            result[name] = [function(child, f"{at}/{index}") for index, child in enumerate(value)]
        elif name in SINGLE:
            result[name] = function(value, at)
    return result


def subschemas(node: Any, path: str = "#") -> Iterator[tuple[str, Node]]:
    """Yield (JSON path, schema) for each subschema of a schema at a JSON path, and finally for the schema itself."""
    if isinstance(node, Mapping):
        inner = list[tuple[str, Node]]()
        children(node, path, lambda child, at: inner.extend(subschemas(child, at)))
        yield from inner
        yield path, node


def escaped(key: str) -> str:
    """Return a key of a JSON object as a part of a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1")


def with_null(node: Node) -> Node:
    """Express OpenAPI's keyword `nullable` in a schema as a type or an alternative."""
    if node.get("nullable") is not True:
        return node
    if "type" in node:
        kinds = [node["type"]] if isinstance(node["type"], str) else node["type"]
        return node if not isinstance(kinds, list) or "null" in kinds else {**node, "type": [*kinds, "null"]}
    kept = {name: value for name, value in node.items() if name in DEFINITIONS}
    rest = {name: value for name, value in node.items() if name not in DEFINITIONS and name != "nullable"}
    return kept | {"anyOf": [rest, {"type": "null"}]}


class Weakened:
    """A JSON schema `root`, rewritten for a grammar in the attribute `schema`. `later` are the JSON paths of keywords
    that the grammar enforces only partly or not at all. Unknown keywords and formats are treated as annotations and
    left out. A property that OpenAPI's `discriminator` names is required."""

    def __init__(self, root: Any) -> None:
        self.root, self.later = root, list[str]()
        self.tags: dict[int, str] = {}  # discriminator property of each alternative, by the id of its subschema
        self.tags = {id(one): tag for _, node in subschemas(root) for one, tag in self.tags_of(node)}
        self.schema = self.subschema(root, "#")

    def subschema(self, node: Any, path: str) -> Any:
        """Return the subschema at this JSON path, rewritten for the grammar."""
        if not isinstance(node, Mapping):
            return {} if node is True else node
        tag, node = self.tags.get(id(node)), with_null(node)
        if is_any(node.get("not", False)):
            return False
        result = children({name: value for name, value in node.items() if name in SAME}, path, self.subschema)
        if tag and isinstance(given := node.get("required", []), list) and tag not in given:
            result["required"] = [*given, tag]
        kept = [name for name in node if name in LATER and node[name] != {}]
        kept += ["not"] * (node.get("not", False) is not False) + ["if"] * ("if" in node and bool(BRANCHES & {*node}))
        if isinstance(node.get("oneOf"), list) and not self.exclusive(node["oneOf"]):
            kept.append("oneOf")
        kept += self.unevaluated(node, path, result)
        kept += far_bounds(result)
        kept += self.texts(node, result) + self.names(node, result) + self.arrays(node, result)
        self.later += [f"{path}/{escaped(name)}" for name in kept]
        return result

    def tags_of(self, node: Node) -> Iterator[tuple[Node, str]]:
        """Yield (alternative, property) for each alternative in a schema's oneOf or anyOf that lists the values of the
        property named by OpenAPI's keyword `discriminator`."""
        named = node.get("discriminator")
        tag = named.get("propertyName") if isinstance(named, Mapping) else None
        for name in ("oneOf", "anyOf") if isinstance(tag, str) else ():
            for one in node[name] if isinstance(node.get(name), list) else ():
                alternative = self.resolved(one)
                if isinstance(alternative, Mapping) and tag in self.facts(alternative).tags:
                    yield alternative, str(tag)

    def texts(self, node: Node, result: dict[str, Any]) -> list[str]:
        """Set the keywords for strings in `result`, the schema `node` rewritten for the grammar; return the names of
        keywords that the grammar does not enforce."""
        kept = []
        if isinstance(node.get("pattern"), str):
            (result["pattern"], *others), exact = expressible(node["pattern"])
            if others:
                result["allOf"] = [*result.get("allOf", ()), *({"pattern": pattern} for pattern in others)]
            kept += ["pattern"] * (not exact)
        elif "pattern" in node:
            kept.append("pattern")  # malformed; the check reports this
        form = node.get("format")
        if not isinstance(form, str | None) or (
            form and (form := UUID.sub("uuid", form)) in FORMATS and agrees(form, result)
        ):
            result["format"] = form
        return kept

    def names(self, node: Node, result: dict[str, Any]) -> list[str]:
        """Set the keywords for property names in `result`, the schema `node` rewritten for the grammar; return the
        names of keywords that the grammar does not enforce."""
        by_pattern = result.get("patternProperties")
        if isinstance(by_pattern, Mapping):
            forms = {pattern: expressible(pattern) for pattern in by_pattern}
            if not all(exact and len(expressions) == 1 for expressions, exact in forms.values()):
                del result["patternProperties"]
                result.pop("additionalProperties", None)
                return ["patternProperties"] + ["propertyNames"] * ("propertyNames" in node)
            result["patternProperties"] = {forms[name][0][0]: child for name, child in by_pattern.items()}
        rule = self.resolved(node.get("propertyNames", True))
        if is_any(rule) or (isinstance(rule, Mapping) and asserted(rule) == {"type"} and rule["type"] == "string"):
            return []
        declared, other = result.get("properties", {}), result.get("additionalProperties", {})
        rule = {"enum": []} if rule is False else rule
        if isinstance(rule, Mapping) and not by_pattern and isinstance(declared, Mapping):
            allowed = listed(rule)
            if allowed is not None and asserted(rule) <= {"type", "enum", "const"}:
                names = [name for name in allowed if isinstance(name, str)]
                result["properties"] = dict.fromkeys(declared, False) | {k: declared.get(k, other) for k in names}
                result["additionalProperties"] = False
                return []
            if not declared and (pattern := name_pattern(rule)):
                result["patternProperties"], result["additionalProperties"] = {pattern: other}, False
                return []
        return ["propertyNames"]

    def arrays(self, node: Node, result: dict[str, Any]) -> list[str]:
        """Set the keywords for arrays in `result`, the schema `node` rewritten for the grammar; return the names of
        keywords that the grammar does not enforce."""
        kept = ["contains"] * ("contains" in node and (node.get("minContains") != 0 or "maxContains" in node))
        if not node.get("uniqueItems"):
            return kept
        items = self.resolved(node.get("items", True))
        allowed = listed(items) if isinstance(items, Mapping) and "prefixItems" not in node else None
        if allowed is not None and isinstance(most := node.get("maxItems", len(allowed)), int):
            result["maxItems"] = min(most, len(allowed))
        return kept + ["uniqueItems"] * (result.get("maxItems") not in (0, 1))

    def unevaluated(self, node: Node, path: str, result: dict[str, Any]) -> list[str]:
        """Set the keywords for unevaluated properties and items in `result`, the schema `node` at a JSON path rewritten
        for the grammar; return the names of keywords that the grammar does not enforce."""
        kept = []
        rest = "additionalItems" if isinstance(node.get("items"), list) else "items"
        for name, simple in ("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", rest):
            if is_any(node.get(name, True)) or (simple in node and not IN_PLACE & {*node}):
                continue
            if IN_PLACE & {*node}:
                kept.append(name)
            else:
                result[simple] = self.subschema(node[name], f"{path}/{name}")
        return kept

    def resolved(self, node: Any) -> Any:
        """Return the subschema that `node` refers to, if `node` is only a reference within the document; else
        `node`."""
        for _ in range(REFERENCES):
            if not isinstance(node, Mapping) or asserted(node) != {"$ref"}:
                break
            node = target(self.root, node["$ref"])
        return node

    def exclusive(self, alternatives: Sequence[Any]) -> bool:
        """Return whether no value can conform to two of these subschemas; False if this is uncertain."""
        facts = [self.facts(one) for one in alternatives[: MANY + 1]]
        return len(facts) <= MANY and all(differ(a, b) or differ(b, a) for i, a in enumerate(facts) for b in facts[:i])

    def facts(self, node: Any) -> Facts:
        """Return facts about the values that conform to a subschema."""
        kinds, values, tags, required = TYPES, None, dict[str, frozenset[str]](), frozenset[str]()
        waiting = [(node, REFERENCES)]
        while waiting:
            node, depth = waiting.pop()
            if not isinstance(node, Mapping) or not depth:
                continue
            waiting += [(target(self.root, node["$ref"]), depth - 1)] if "$ref" in node else []
            waiting += [(one, depth - 1) for one in node.get("allOf", ()) if isinstance(node["allOf"], list)]
            if isinstance(given := with_null(node).get("type"), str | list):
                names = {given} if isinstance(given, str) else set(map(str, given))
                kinds &= {"number" if name == "integer" else name for name in names}
            if (allowed := listed(node)) is not None:
                values = frozenset(map(canonical, allowed))
                kinds &= {kind(value) for value in allowed}
            if isinstance(properties := node.get("properties"), Mapping):
                for name, child in properties.items():
                    child = self.resolved(child)
                    if isinstance(child, Mapping) and (allowed := listed(child)) is not None:
                        tags[name] = frozenset(map(canonical, allowed))
            if isinstance(given := node.get("required"), list):
                required |= frozenset(map(str, given))
            required |= {self.tags[id(node)]} if id(node) in self.tags else set()
        return Facts(kinds, values, tags, required)


def agrees(form: str, result: Node) -> bool:
    """Return whether a grammar can combine a format with the other keywords of a schema."""
    if "enum" in result or "const" in result:
        return False
    patterns = [part for part in result.get("allOf", ()) if isinstance(part, Mapping) and {*part} == {"pattern"}]
    others = {name: result[name] for name in ("pattern", "minLength", "maxLength") if name in result}
    return not (others or patterns) or not rejection(others | {"type": "string", "format": form, "allOf": patterns})


def far_bounds(result: dict[str, Any]) -> list[str]:
    """Remove the bounds of magnitude FAR or more from a schema whose type is not "integer"; return their names."""
    bounds = [name for name in BOUNDS if isinstance(result.get(name), int | float) and abs(result[name]) >= FAR]
    removed = [] if result.get("type") == "integer" else bounds
    for name in removed:
        del result[name]
    return removed


@dataclass(frozen=True)
class Facts:
    """Facts about all values that conform to a schema: their types, the possible values (as JSON; None: any), the
    possible values of their properties, and their required properties."""

    kinds: frozenset[str]
    values: frozenset[str] | None
    tags: Mapping[str, frozenset[str]]
    required: frozenset[str]


def differ(a: Facts, b: Facts) -> bool:
    """Return whether these facts prove that no value conforms to both schemas; only the properties that `a` requires
    are compared."""
    if not a.kinds & b.kinds or (a.values is not None and b.values is not None and not a.values & b.values):
        return True
    shared = a.required & a.tags.keys() & b.tags.keys()
    return a.kinds == {"object"} and any(not a.tags[name] & b.tags[name] for name in shared)


def asserted(node: Node) -> set[str]:
    """Return the keywords of a schema that constrain a value."""
    other = {"pattern", "format", "not", "if", "propertyNames", "uniqueItems", "contains", "patternProperties"}
    return {name for name in node if name in (SAME - DEFINITIONS - {"$id", "$anchor", "x-guidance"}) | LATER | other}


def is_any(node: Any) -> bool:
    """Return whether a schema allows every value, because it is True or has only annotations."""
    return node is True or (isinstance(node, Mapping) and not asserted(node) and "nullable" not in node)


def listed(node: Node) -> list[Any] | None:
    """Return the values that a schema lists by `enum`, `const` or the type boolean; None for any other schema."""
    if "const" in node:
        return [node["const"]]
    if isinstance(values := node.get("enum"), list):
        return values
    return [False, True] if node.get("type") == "boolean" else None


def name_pattern(rule: Node) -> str:
    """Return the pattern of the names that `rule`, a schema of property names, allows; "" if no pattern expresses
    them."""
    names = asserted(rule) - {"type"}
    if names == {"pattern"} and isinstance(rule["pattern"], str):
        expressions, exact = expressible(rule["pattern"])
        return expressions[0] if exact and len(expressions) == 1 else ""
    if names == {"format"}:
        return NAMES.get(UUID.sub("uuid", str(rule["format"])), "")
    if names and names <= {"minLength", "maxLength"}:
        return f"^{ANYTHING}{{{rule.get('minLength', 0)},{rule.get('maxLength', '')}}}$"
    return ""


def with_pointers(root: Any) -> Any:
    """Return a schema in which references by name, such as #anchor, are replaced by JSON pointers."""
    anchors = {f"#{node['$anchor']}": path for path, node in subschemas(root) if "$anchor" in node}

    def rewritten(node: Any, path: str) -> Any:
        if not isinstance(node, Mapping):
            return node
        result = children(node, path, rewritten)
        if isinstance(name := node.get("$ref"), str) and name in anchors:
            result["$ref"] = anchors[name]
        return result

    return rewritten(root, "#") if anchors else root


def target(root: Any, reference: Any) -> Any:
    """Return the subschema of the document `root` that a reference such as #/$defs/X names; None if there is none."""
    if not isinstance(reference, str) or reference[:2] not in ("#", "#/"):
        return None
    node = root
    for part in unquote(reference).split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, list) and part.isdecimal() and int(part) < len(node):
            node = node[int(part)]
        elif isinstance(node, Mapping) and part in node:
            node = node[part]
        else:
            return None
    return node


def circular(root: Any) -> str:
    """Return the JSON path of a circular reference, which leads back to the same schema for the same value; "" if there
    is none."""
    done = set[int]()  # ids of schemas that do not contain themselves

    def within(node: Any, outer: tuple[int, ...]) -> bool:
        if not isinstance(node, Mapping) or id(node) in done:
            return False
        if id(node) in outer:
            return True
        parts = [target(root, node["$ref"])] if "$ref" in node else []
        parts += [
            part for name in ("allOf", "anyOf", "oneOf") if isinstance(node.get(name), list) for part in node[name]
        ]
        parts += [node[name] for name in ("not", "if", "then", "else") if name in node]
        parts += node["dependentSchemas"].values() if isinstance(node.get("dependentSchemas"), Mapping) else []
        if any(within(part, (*outer, id(node))) for part in parts):
            return True
        done.add(id(node))
        return False

    return next((f"{path}/$ref" for path, node in subschemas(root) if "$ref" in node and within(node, ())), "")


def kind(value: Any) -> str:
    """Return the JSON type of a value; "number" for integers."""
    names = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


def canonical(value: Any) -> str:
    """Return a JSON value as text, the same for values that JSON Schema considers equal, such as 1 and 1.0."""
    return json.dumps(with_integers(value), sort_keys=True)


def with_integers(value: Any) -> Any:
    """Return a JSON value with integers in place of integral floats."""
    if isinstance(value, list):
        return [with_integers(item) for item in value]
    if isinstance(value, dict):
        return {key: with_integers(item) for key, item in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value
