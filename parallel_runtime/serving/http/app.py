"""The ASGI application: which path does what, who may ask it, and how a refusal looks."""

import hmac
from collections.abc import Awaitable, Callable
from importlib import resources
from typing import Any, Final, TypeAlias, final

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from parallel_runtime.serving.http.answering import Answering
from parallel_runtime.serving.http.chat import read_chat
from parallel_runtime.serving.http.completions import read_completions
from parallel_runtime.serving.http.metrics_text import METRICS_TYPE, metrics_text
from parallel_runtime.serving.http.refusals import RefusedError, error_response
from parallel_runtime.serving.http.service import Service
from parallel_runtime.serving.http.status import status_report

__all__ = ["make_app"]

_Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]

_COMPLETIONS: Final = "/v1/completions"
_CHAT: Final = "/v1/chat/completions"
_OPEN: Final = frozenset(("/", "/health"))
"""Paths that need no key: they tell nothing but whether the server is up."""

_PAGE_HEADERS: Final = (
    ("content-security-policy", "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
)


def make_app(service: Service) -> ASGIApp:
    """Make the application.

    Args:
        service: What it offers.
    """
    paths: dict[str, _Endpoint] = {
        "/": _page(),
        "/health": _health(service),
        "/metrics": _metrics(service),
        "/status": _status(service),
        "/v1/models": _models(service),
        "/v1/models/{model:path}": _model(service),
    }
    answers = {_COMPLETIONS: Answering(read_completions, service), _CHAT: Answering(read_chat, service)}
    routes = [Route(path, endpoint) for path, endpoint in paths.items()]
    routes += [Route(path, app, methods=["POST"]) for path, app in answers.items()]
    known = frozenset((*paths, *answers))
    app = Starlette(routes=routes, exception_handlers={HTTPException: _no_such_path, Exception: _our_fault})
    return _Counted(_Keyed(app, service), service, known)


@final
class _Keyed:
    """Lets those in who bring the key."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        key = service.settings.api_key
        self._app = app
        self._wanted = None if key is None else key.get_secret_value().encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._wanted is not None and scope["path"] not in _OPEN:
            came = Headers(scope=scope).get("authorization", "")
            scheme, _, key = came.partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(key.encode("latin-1"), self._wanted):
                message = "the API key is wrong" if came else "this server wants an API key: Authorization: Bearer KEY"
                refusal = RefusedError(401, message, code="invalid_api_key", hangs_up=True)
                await error_response(refusal)(scope, receive, send)
                return
        await self._app(scope, receive, send)


@final
class _Counted:
    """Counts responses by path and status."""

    def __init__(self, app: ASGIApp, service: Service, known: frozenset[str]) -> None:
        self._app = app
        self._counts = service.live.num_responses
        self._known = known

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"] if scope["path"] in self._known else "other"

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._counts[path, message["status"]] += 1
            await send(message)

        await self._app(scope, receive, counted)


def _page() -> _Endpoint:
    text = resources.files(__package__).joinpath("status_page.html").read_text(encoding="utf-8")

    async def page(_: Request) -> Response:
        return HTMLResponse(text, headers=dict(_PAGE_HEADERS))

    return page


def _health(service: Service) -> _Endpoint:
    async def health(_: Request) -> Response:
        told: dict[str, Any] = {"status": service.state, "replicas": service.replicas}
        return JSONResponse(told, status_code=200 if service.is_up else 503)

    return health


def _metrics(service: Service) -> _Endpoint:
    async def metrics(_: Request) -> Response:
        text = metrics_text(
            service.engine.metrics(),
            states=service.replicas,
            ranks=await service.ranks(),
            counted=await service.counted(),
            responses=service.live.num_responses,
            num_live=len(service.live),
        )
        return PlainTextResponse(text, media_type=METRICS_TYPE)

    return metrics


def _status(service: Service) -> _Endpoint:
    async def status(_: Request) -> Response:
        return JSONResponse(await status_report(service))

    return status


def _models(service: Service) -> _Endpoint:
    async def models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_told(service)]})

    return models


def _model(service: Service) -> _Endpoint:
    async def model(request: Request) -> Response:
        try:
            service.check_model(request.path_params["model"])
        except RefusedError as refusal:
            return error_response(refusal)
        return JSONResponse(_told(service))

    return model


def _told(service: Service) -> dict[str, Any]:
    limits = [ready.max_request_tokens for ready in service.engine.replicas]
    return {
        "id": service.model,
        "object": "model",
        "created": service.created,
        "owned_by": "parallel-runtime",
        "max_model_len": min(limits, default=None),
    }


async def _no_such_path(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return error_response(RefusedError(404, f"there is no {request.url.path[:200]} here", code="not_found"))
    if error.status_code == 405:
        message = f"{request.url.path[:200]} does not take {request.method[:20]}"
        return error_response(RefusedError(405, message, code="method_not_allowed"))
    return error_response(RefusedError(error.status_code, error.detail))


async def _our_fault(_: Request, error: Exception) -> Response:
    message = f"the server failed: {type(error).__name__}; its log says more"
    return error_response(RefusedError(500, message, code="internal_error"))
