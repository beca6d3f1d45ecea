"""What is said to a client that gets no answer: OpenAI's shape, with the HTTP status that the error deserves."""

import re
from collections.abc import Mapping
from typing import Any, final

from starlette.responses import JSONResponse

from parallel_runtime.errors import (
    CheckpointError,
    ContextStateError,
    ParallelRuntimeError,
    QueueFullError,
    RequestError,
)

__all__ = ["RefusedError", "error_body", "error_response", "refusal_of"]

_RETRY_S = 1


@final
class RefusedError(ParallelRuntimeError):
    """A request gets no answer.

    Args:
        status: HTTP status.
        message: For people.
        param: The field at fault.
        code: For programs.
        retry_s: Seconds after which the same request may be answered.
        hangs_up: Whether the connection is of no use any more.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_s: int | None = None,
        hangs_up: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_s = retry_s
        self.hangs_up = hangs_up

    @property
    def kind(self) -> str:
        """Whose fault it is, in OpenAI's words."""
        if self.status >= 500:
            return "server_error"
        return "authentication_error" if self.status == 401 else "invalid_request_error"


def refusal_of(error: ParallelRuntimeError, fields: Mapping[str, object] | None = None) -> RefusedError:
    """Say over HTTP what an engine raised.

    Args:
        error: Whatever it is.
        fields: Of the request; the one that the message begins with is at fault.

    Returns:
        The refusal.
    """
    if isinstance(error, RefusedError):
        return error
    text = str(error)
    if isinstance(error, QueueFullError):
        return RefusedError(503, text, code="queue_full", retry_s=_RETRY_S)
    if isinstance(error, RequestError):
        word = re.match(r"\w*", text)
        param = word[0] if word is not None and word[0] in (fields or ()) else None
        return RefusedError(400, text, param=param, code="invalid_value")
    if isinstance(error, ContextStateError):
        return RefusedError(503, text, code="unavailable", retry_s=_RETRY_S)
    code = "model_unusable" if isinstance(error, CheckpointError) else "engine_failed"
    return RefusedError(500, text, code=code)


def error_body(refusal: RefusedError) -> dict[str, Any]:
    """The JSON of a refusal.

    Args:
        refusal: What to say.
    """
    return {"error": {"message": str(refusal), "type": refusal.kind, "param": refusal.param, "code": refusal.code}}


def error_response(refusal: RefusedError) -> JSONResponse:
    """The HTTP response of a refusal.

    Args:
        refusal: What to say.
    """
    headers = {}
    if refusal.retry_s is not None:
        headers["retry-after"] = str(refusal.retry_s)
    if refusal.hangs_up:
        headers["connection"] = "close"
    if refusal.status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(error_body(refusal), status_code=refusal.status, headers=headers)
