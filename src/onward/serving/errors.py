"""Errors of the server, in the format of the OpenAI API: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onward.base.errors import UserError
from onward.generation.check_request import ContextOverflow, PromptError
from onward.serving.names import CONTENTS, as_sent

TYPES = {  # type of an error, by its HTTP status
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "unavailable_error",
}
TOO_LONG = "context_length_exceeded"  # error code; clients that see it shorten the conversation
LONGEST = 400  # largest number of characters of a message
RETRY_AFTER = {429: "1", 503: "5"}  # seconds until a client tries again, by status


class ApiError(UserError):
    """The error of a request that is refused, with the HTTP status of the response and the field at fault."""

    def __init__(self, message: str, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


def error_body(message: str, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """An error response in the format of OpenAI's API, without the middle of a long message."""
    if len(message) > LONGEST:
        message = f"{message[: LONGEST // 2]} ... {message[5 - LONGEST // 2 :]}"
    kind = TYPES.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def body_of(error: Exception, sent: Mapping[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
    """HTTP status and response for an exception; `sent` is the request's body, whose field names the message uses.
    For an exception other than a UserError, only the class is named, since its message may contain data that the client
    must not see."""
    if isinstance(error, ApiError):
        return error.status, error_body(str(error), error.status, error.param, error.code)
    if isinstance(error, UserError):
        message, param = as_sent(str(error), sent or {})
        if isinstance(error, PromptError) and error.index is not None:
            message, param = f"prompt[{error.index}]: {message}", f"prompt[{error.index}]"
        elif isinstance(error, PromptError):
            param = next((name for name in CONTENTS if name in (sent or {})), None)
        return 400, error_body(message, 400, param, TOO_LONG if isinstance(error, ContextOverflow) else None)
    return 500, error_body(f"the server failed on this request ({type(error).__name__}): see its log", 500)
