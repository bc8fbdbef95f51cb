"""Checks the format of the server's error messages: one line that uses the names in the request."""

import json
import re
from typing import Any

import httpx

from onward.serving.names import OTHER_NAMES

INNER = re.compile(  # names from Python, pydantic and Onward's own code
    r"pydantic|Input should|a valid|None|True|False|\b(str|int|float|bool|dict|tuple|Mapping|Sequence|Any)\b|\[str"
    r"|\w+Error\b|<class|SamplingFields|AnswerFields|GenerationOptions|__|\.py\b"
)
OPTIONS = re.compile(rf"\b({'|'.join({*OTHER_NAMES.values(), 'json_schema'} - {'n'})})\b")
QUOTED = re.compile(r'"[^"]*"|is [\[{"].*?(?=: )')  # values of the request that are quoted in a message


def refusal(reply: httpx.Response, sent: dict[str, Any]) -> dict[str, Any]:
    """The error of a response with status 400; checks that it is one line of at most 400 characters, without internal
    names."""
    assert reply.status_code == 400, reply.text
    error: dict[str, Any] = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    message = error["message"]
    assert len(message) <= 400
    assert "\n" not in message
    words = QUOTED.sub("", message).replace("json_object or json_schema", "").replace("json_schema.schema", "")
    assert not INNER.search(words), message
    assert all(f'"{name}"' in json.dumps(sent) for name in OPTIONS.findall(words)), (sent, message)
    return error
