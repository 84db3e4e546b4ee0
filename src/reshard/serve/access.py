"""Who may ask a server: programs of this machine, or whoever has the token."""

from __future__ import annotations

import base64
import binascii
import hmac

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

OWN_NAMES = ("127.0.0.1", "localhost", "::1", "[::1]")
"""Names under which a program of this machine asks. A page of the web that has another name led here is refused."""


def middleware_for(token: str | None) -> list[Middleware]:
    """What a request passes first."""
    if token is not None:
        return [Middleware(TokenRequired, token=token)]
    return [Middleware(TrustedHostMiddleware, allowed_hosts=OWN_NAMES, www_redirect=False)]


class TokenRequired:
    """Refuses requests without the token: as a bearer, as clients of the Hub send it, or as a browser's password."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._token = app, token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = (
            _given(Headers(scope=scope).get("authorization", "")) if scope["type"] == "http" else self._token
        )
        if hmac.compare_digest(given, self._token):
            await self._app(scope, receive, send)
            return
        message = "this server wants a token: set HF_TOKEN to the one that it was started with"
        headers = {"WWW-Authenticate": 'Basic realm="reshard"', "X-Error-Message": message}
        await JSONResponse({"error": message}, 401, headers)(scope, receive, send)


def _given(header: str) -> bytes:
    kind, _, value = header.partition(" ")
    if kind.lower() == "bearer":
        return value.strip().encode()
    try:
        return base64.b64decode(value, validate=True).partition(b":")[2] if kind.lower() == "basic" else b""
    except binascii.Error:
        return b""
