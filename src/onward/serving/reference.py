"""/docs: the paths and fields of /openapi.json as a page to read, without a script and without a network."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import HTMLResponse

from onward.reports.pictures.markup import filled, resource, visible
from onward.reports.pictures.plot import COLORS

router = APIRouter()
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
TYPES = {"string": "text", "array": "list"}  # names of JSON Schema that a reader of Python would not use
STYLE = "section { margin-top: 2rem } h2 code { font-size: 1.1rem } td, th { vertical-align: top } a { color: inherit }"
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title><!--title--></title>
<style>
<!--style-->
</style>
</head>
<body>
<main>
<h1>The API of this server</h1>
<p class="lead"><!--about--></p>
<p>The same as a schema for programs: <a href="/openapi.json">/openapi.json</a>.</p>
<!--body-->
</main>
</body>
</html>
"""


@router.get("/docs", include_in_schema=False)
async def docs(http: Request) -> HTMLResponse:
    """Return the HTML page that lists every path with its fields."""
    return HTMLResponse(page(http.app), headers={"Content-Security-Policy": POLICY})


def page(app: FastAPI) -> str:
    """The OpenAPI schema of an app as an HTML page."""
    schema = app.openapi()
    parts = [
        section(method, path, operation, schema)
        for path, methods in schema["paths"].items()
        for method, operation in methods.items()
    ]
    title, about = visible(f"{app.title}: the API"), visible(app.description)
    style = COLORS + resource("report.css") + STYLE
    return filled(PAGE, {"title": title, "about": about, "style": style, "body": "\n".join(parts)})


def section(method: str, path: str, operation: dict[str, Any], schema: dict[str, Any]) -> str:
    """One path, with a table of the fields of its body or query; `operation` is its entry in the schema."""
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    body = resolved(content.get("schema", {}), schema)
    fields = {
        one["name"]: one["schema"] | {"description": one.get("description")} for one in operation.get("parameters", [])
    }
    fields |= body.get("properties", {})
    needed = {
        *body.get("required", ()),
        *(one["name"] for one in operation.get("parameters", []) if one.get("required")),
    }
    rows = "".join(
        f"<tr><th>{visible(name).replace('_', '_<wbr>')}</th>"
        f"<td>{type_of(field, schema)}{', required' if name in needed else ''}</td>"
        f"<td>{visible(field.get('description') or '')}</td></tr>"
        for name, field in fields.items()
    )
    head = f"<h2><code>{method.upper()} {visible(path)}</code></h2><p>{visible(operation.get('description', ''))}</p>"
    return f"<section>{head}{f'<figure><table>{rows}</table></figure>' if rows else ''}</section>"


def resolved(part: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """The definition to which a part of an OpenAPI schema refers by $ref, or the part itself."""
    name = part.get("$ref", "").rpartition("/")[2]
    return schema["components"]["schemas"][name] if name else part


def type_of(field: dict[str, Any], schema: dict[str, Any]) -> str:
    """The type of a field in words: "integer", "text or list of text"."""
    if "anyOf" in field:
        kinds = [type_of(one, schema) for one in field["anyOf"] if one.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    kind = resolved(field, schema).get("type", "any")
    items = field.get("items", {})
    inner = f" of {type_of(items, schema)}" if kind == "array" and items else ""
    return TYPES.get(kind, kind) + inner
