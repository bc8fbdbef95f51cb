"""Conversion of JSON schemas to rules of llguidance grammars. Does not import torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

SPACE = r"[ ]?|\n[ ]{0,40}"  # white space between JSON tokens: at most one space, or a new line with at most 40 spaces
OPTIONS = {"whitespace_pattern": SPACE, "coerce_one_of": True}  # llguidance's options; `Weakened` checks alternatives


def rule(schema: Any) -> str:
    """Return the rule of a Lark grammar for a schema that llguidance accepts."""
    options = {"x-guidance": OPTIONS | schema.get("x-guidance", {})} if isinstance(schema, Mapping) else {}
    return f"%json {json.dumps(options | schema if options else schema)}"


def rejection(schema: Any) -> str:
    """Return the message with which llguidance rejects a schema, without its excerpt of the grammar; "" if it accepts
    the schema."""
    from llguidance import LLMatcher

    failed, messages = LLMatcher.validate_grammar_with_warnings(f"start: {rule(schema)}")
    return messages[0].partition("\n   1 | ")[0] if failed else ""
