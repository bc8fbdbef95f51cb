"""The names of a request's fields in error messages: as the client sent them, not as generation calls its options."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from onward.generation.options import FORMS, GenerationOptions

OPTIONS = {field.name for field in fields(GenerationOptions)}
OTHER_NAMES = {  # fields of GenerationOptions by their names in other servers' APIs
    "repeat_penalty": "repetition_penalty",
    "min_tokens": "min_new_tokens",
    "n_predict": "max_new_tokens",
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "max_output_tokens": "max_new_tokens",
    "n_cmpl": "n",
    "include_stop_str_in_output": "include_stop",
}
FORM_FIELDS = {  # fields that become a constraint if they are not empty, with their paths in messages
    "structured_outputs": "structured_outputs",
    "response_format": "response_format",
    "text": "text.format",
    "tools": "tools",
}
CONTENTS = "messages", "input", "prompt"  # fields that become the tokens of the prompt
NAME = r"(?<![\w.'\"`/\[-]){}(?![\w'\"`(=\[])"  # a field's name in a message, outside of quotations and paths


def sent_names(body: Mapping[str, Any]) -> dict[str, str]:
    """Map options of generation to the request's fields from which they come."""
    names = {"max_new_tokens": "max_output_tokens" if "input" in body else "max_tokens"}  # by default
    names |= {own: name for name, own in OTHER_NAMES.items() if body.get(name) is not None}
    forced = body.get("tool_choice") == "required" or isinstance(body.get("tool_choice"), Mapping)
    form = "tools" if forced else next((path for name, path in FORM_FIELDS.items() if body.get(name)), None)
    names |= dict.fromkeys(FORMS, form) if form else {}
    return {own: name for own, name in names.items() if body.get(own) is None}


def as_sent(message: str, body: Mapping[str, Any]) -> tuple[str, str | None]:
    """The message with field names as the request sent them, and the field with which the message begins, if it begins
    with one."""
    names = sent_names(body)
    if names:
        pattern = NAME.format(f"({'|'.join(map(re.escape, names))})")
        message = re.sub(pattern, lambda match: names[match[1]], message)
    first = message.split(maxsplit=1)[0].rstrip(":,") if message else ""
    known = {*OPTIONS, *OTHER_NAMES, *FORM_FIELDS, *CONTENTS}
    return message, first if re.split(r"[.\[]", first)[0] in known else None
