"""What a request says: its bytes within limits, its fields by name, and how its answers are to be made."""

import asyncio
import difflib
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.requests import Request

from parallel_runtime.errors import RequestError
from parallel_runtime.serving.checks import check_integer, shown
from parallel_runtime.serving.http.refusals import RefusedError
from parallel_runtime.serving.messages import MAX_PRIORITY
from parallel_runtime.serving.sampling_params import SamplingParams

__all__ = ["SAMPLING_FIELDS", "check_fields", "read_flag", "read_json", "read_priority", "sampling_settings"]

SAMPLING_FIELDS = (
    *("temperature", "top_p", "n", "seed", "stop", "presence_penalty", "frequency_penalty"),
    *("top_k", "min_p", "repetition_penalty", "stop_token_ids", "min_tokens", "ignore_eos", "skip_special_tokens"),
)
"""Fields of both kinds of completions that say how tokens are chosen; the second line is beyond OpenAI's."""

_IN_THE_LOOP = 32 * 2**10
"""Bytes of JSON that are read at once; more of them are read in a thread, so that nothing else waits."""


async def read_json(request: Request, *, max_bytes: int, timeout_s: float) -> dict[str, Any]:
    """Read the body of a request.

    Args:
        request: Its body was not read.
        max_bytes: Longest body.
        timeout_s: Longest time for it to arrive.

    Returns:
        The object it holds.

    Raises:
        RefusedError: It is too long, too slow, of another type, or holds no JSON object.
        ClientDisconnect: The client has gone.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise RefusedError(415, "the body must be JSON, with the header Content-Type: application/json", hangs_up=True)
    if (encoding := request.headers.get("content-encoding", "identity").strip().lower()) not in ("", "identity"):
        raise RefusedError(415, f"a body with Content-Encoding: {encoding[:40]} is not read; send it as it is", hangs_up=True)
    try:
        async with asyncio.timeout(timeout_s):
            body = await _read_bytes(request, max_bytes)
    except TimeoutError as error:
        message = f"the body did not arrive within {timeout_s:g} s"
        raise RefusedError(408, message, code="too_slow", hangs_up=True) from error
    try:
        read = msgspec.json.decode
        value = read(body) if len(body) <= _IN_THE_LOOP else await asyncio.to_thread(read, body)
    except (ValueError, RecursionError) as error:
        raise RefusedError(400, f"the body is no JSON: {error}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise RefusedError(400, f"the body must be a JSON object such as {{...}}, got {shown(value)[:60]}", code="invalid_json")
    return value


def check_fields(
    body: Mapping[str, Any], *, known: frozenset[str], without_effect: frozenset[str], neutral: Mapping[str, tuple[object, ...]]
) -> None:
    """Refuse fields that would change the answer and are not served.

    Args:
        body: The request.
        known: Fields that are served.
        without_effect: Fields that say nothing about the answer.
        neutral: Fields that are not served, and the values by which they ask for nothing; ``null`` always does.

    Raises:
        RefusedError: There are other fields. All of them are named.
    """
    unknown = [name for name in body if name not in known and name not in without_effect and name not in neutral]
    wanted = [name for name in body if name in neutral and body[name] is not None and body[name] not in neutral[name]]
    if unknown:
        close = difflib.get_close_matches(unknown[0], sorted(known | set(neutral)), n=1)
        hint = f"; did you mean {close[0]}?" if close else f"; there are {', '.join(sorted(known))}"
        message = f"unknown field{'s' if len(unknown) > 1 else ''} {', '.join(unknown)}{hint}"
        raise RefusedError(400, message, param=unknown[0], code="unknown_parameter")
    if wanted:
        told = ", ".join(f"{name}={shown(body[name])[:60]}" for name in wanted)
        message = f"not supported by this server: {told}; leave {'them' if len(wanted) > 1 else 'it'} out"
        raise RefusedError(400, message, param=wanted[0], code="unsupported_parameter")


def read_flag(body: Mapping[str, Any], name: str) -> bool:
    """Read a field that is true or false, and false where it is left out.

    Args:
        body: The request.
        name: The field.

    Returns:
        Its value.

    Raises:
        RequestError: It is something else.
    """
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise RequestError(f"{name} must be true or false, got {shown(value)[:60]}")
    return bool(value)


def read_priority(body: Mapping[str, Any]) -> int:
    """Read how urgent a request is.

    Args:
        body: The request.

    Returns:
        Its priority; 0 where it is left out.

    Raises:
        RequestError: It is no integer, or out of range.
    """
    value = body.get("priority")
    if value is None:
        return 0
    if type(value) is not int or abs(value) > MAX_PRIORITY:
        raise RequestError(f"priority must be an integer from {-MAX_PRIORITY} to {MAX_PRIORITY}, got {shown(value)[:60]}")
    return value


def sampling_settings(body: Mapping[str, Any]) -> dict[str, Any]:
    """Read how tokens are to be chosen.

    Args:
        body: The request.

    Returns:
        Settings of ``SamplingParams`` by name, those that the request has. They are checked, together, when one is made.

    Raises:
        RequestError: A field is of another type.
    """
    settings = {name: body[name] for name in SAMPLING_FIELDS if body.get(name) is not None}
    if "min_tokens" in settings:
        check_integer("min_tokens", settings["min_tokens"], low=0)
        settings["min_new_tokens"] = settings.pop("min_tokens")
    stop = settings.get("stop")
    if stop is not None:
        settings["stop"] = (stop,) if isinstance(stop, str) else _as_tuple("stop", stop, "a text or a list of texts")
    if "stop_token_ids" in settings:
        settings["stop_token_ids"] = _as_tuple("stop_token_ids", settings["stop_token_ids"], "a list of token ids")
    SamplingParams(**{name: value for name, value in settings.items() if name != "min_new_tokens"})
    return settings


def _as_tuple(name: str, value: object, wanted: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise RequestError(f"{name} must be {wanted}, got {shown(value)[:60]}")
    return tuple(value)


async def _read_bytes(request: Request, limit: int) -> bytes:
    said = request.headers.get("content-length", "")
    if said.isdecimal() and int(said) > limit:
        raise _too_long(said, limit)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise _too_long(f"more than {limit}", limit)
    return bytes(body)


def _too_long(count: str, limit: int) -> RefusedError:
    return RefusedError(413, f"the body has {count} bytes; the limit is {limit}", code="body_too_long", hangs_up=True)
