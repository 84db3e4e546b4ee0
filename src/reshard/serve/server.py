"""The server of `reshard serve`: the routes of the Hugging Face Hub that its clients use to load a model, and a page.

Each route was seen in requests of huggingface_hub 2.3, transformers 5.24, vLLM and mlx-lm.
"""

from __future__ import annotations

import base64
import hmac
import logging
import os
import socket
import sys
import time
from collections.abc import MutableSequence, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from functools import lru_cache, partial
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import parse_qs

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from reshard.api.inspection import inspect
from reshard.base.confinement import CONNECTING_EVENTS, REFUSED_EVENTS, confine
from reshard.base.errors import ReshardError, raise_all
from reshard.base.plain_json import json_of
from reshard.final.saved_checkpoints import step_of
from reshard.folders.iterations import is_iteration
from reshard.formats.not_found import nothing_there
from reshard.pages import served_page
from reshard.serve.file_answer import FileAnswer, MemoryTurns, content_of, ranges_of
from reshard.serve.options import ServeOptions
from reshard.serve.repositories import (
    MAIN,
    NotServedError,
    Repository,
    Step,
    repositories_below,
    repository_named,
)
from reshard.serve.revisions import OnEvent, Revision, Revisions
from reshard.stores import StorePath

TOKEN_VARIABLE = "RESHARD_TOKEN"
OWN_NAMES = ("127.0.0.1", "localhost", "::1", "[::1]")
# Clients at the same time; more get status 503.
MAX_CONNECTIONS = 512
# Bytes of the headers of a request.
MAX_HEADERS = 32 << 10
# Seconds that answers have to end when the server is stopped.
CLOSING_SECONDS = 1
# Milliseconds after which the system closes a connection whose client takes nothing, or is gone.
UNTAKEN_MS = 60_000
# Bytes of a request's body.
MAX_BODY = 1 << 20
MODEL = "/{owner}/{name}"
# The code for a step that cannot be converted: clients show the message of it, and of few others.
REFUSED = "RevisionNotFound"
# The status of an answer for each kind of error.
STATUSES = {NotServedError: 404, ReshardError: 404, OSError: 500}


def listening(options: ServeOptions) -> socket.socket:
    """A socket at the address of the options. Raises ReshardError if it cannot be had, or needs a token."""
    if options.host not in OWN_NAMES and token_of(options) is None:
        raise ReshardError(
            "token-not-passed",
            "a server for other machines needs a token",
            found=f"--host {options.host}",
            remedy="pass --token, and set HF_TOKEN to the same where clients run; or leave out --host",
        )
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    try:
        listener = socket.create_server((options.host, options.port), family=family, backlog=MAX_CONNECTIONS)
    except (OSError, OverflowError) as error:
        raise ReshardError(
            "address-not-usable",
            "the server cannot listen on this address",
            found=f"{options.host}:{options.port}: {getattr(error, 'strerror', None) or error}",
            remedy="choose another --port (0 takes a free one), or an address of this machine",
        ) from None
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNTAKEN_MS)
    return listener


def token_of(options: ServeOptions) -> str | None:
    """What clients must send; None if nothing."""
    return options.token or os.environ.get(TOKEN_VARIABLE) or None


def address_of(listener: socket.socket) -> str:
    """The address for clients."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(paths: Sequence[Path], options: ServeOptions, listener: socket.socket, on_event: OnEvent) -> None:
    """Answer requests for the checkpoints below some paths, until SIGINT or SIGTERM.

    From now on this process can only read, and locally only below these paths and those of the options.
    """
    sys.dont_write_bytecode = True
    named = [*paths, *options.conversion.base_paths]
    local = [path for path in named if not isinstance(path, StorePath)]
    runs = [path.absolute().parent for path in local if step_of(path) is not None or is_iteration(path)]
    folders = [os.path.realpath(path) for path in (*local, *runs)]  # config and tracker are beside a step
    allowed = CONNECTING_EVENTS if len(local) < len(named) else ()
    refused = confine(
        folders, sys.path, command="reshard serve PATH …", refused_events={*REFUSED_EVENTS} - {*allowed}
    )
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)  # why an answer was cut off is in its record
    config = uvicorn.Config(
        guarded(HubApp(paths, options, on_event, refused).app(), token_of(options)),
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        limit_concurrency=MAX_CONNECTIONS,
        h11_max_incomplete_event_size=MAX_HEADERS,
        timeout_graceful_shutdown=CLOSING_SECONDS,
    )
    uvicorn.Server(config).run(sockets=[listener])


def guarded(app: ASGIApp, token: str | None) -> ASGIApp:
    """The application for programs of this machine only, or for whoever sends the token.

    Clients of the Hub send it as a bearer, browsers as a password of nobody. A page of the web that has another name
    led to this machine is refused.
    """
    if token is None:
        return TrustedHostMiddleware(app, OWN_NAMES, www_redirect=False)
    password = base64.b64encode(f":{token}".encode()).decode()
    allowed = [each.encode() for each in (f"Bearer {token}", f"Basic {password}")]

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        given = Headers(scope=scope).get("authorization", "").encode()
        if any(hmac.compare_digest(given, each) for each in allowed):
            await app(scope, receive, send)
            return
        message = "this server requires a token: set HF_TOKEN to the one it was started with"
        headers = {"WWW-Authenticate": 'Basic realm="reshard"', "X-Error-Message": message}
        await JSONResponse({"error": message}, 401, headers)(scope, receive, send)

    return checked


def check_paths(paths: Sequence[Path], options: ServeOptions) -> None:
    """Raise ReshardError for what is to be read and does not exist."""
    missing = [nothing_there(path) for path in (*paths, *options.conversion.base_paths) if not path.exists()]
    raise_all(problem for error in missing for problem in error.problems)


class HubApp:
    """Answers requests for the checkpoints below some paths. `on_event` receives a record of each.

    `refused` is what `confine` returns.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        options: ServeOptions,
        on_event: OnEvent,
        refused: MutableSequence[ReshardError],
    ) -> None:
        self._paths, self._on_event = tuple(paths), on_event
        self._revisions = Revisions(options, refused, on_event)
        self._reading, self._sending = MemoryTurns(options.limit // 4), MemoryTurns(options.limit // 4)

    def app(self) -> Starlette:
        """The application. What is no coroutine runs in a thread."""
        api = f"/api/models{MODEL}"
        routes = [
            Route("/", self._page),
            Route("/api/whoami-v2", _who),
            Route("/api/models", self._list),
            Route(api, self._info),
            Route(f"{api}/refs", self._refs),
            Route(f"{api}/revision/{{revision}}", self._info),
            Route(f"{api}/tree/{{revision}}", self._tree),
            Route(f"{api}/tree/{{revision}}/{{path:path}}", self._tree),
            Route(f"{api}/paths-info/{{revision}}", self._paths_info, methods=["POST"]),
            Route(f"{MODEL}/resolve/{{revision}}/{{path:path}}", self._resolve),
        ]
        handlers: Any = dict.fromkeys(STATUSES, self._failed)
        return Starlette(routes=routes, exception_handlers=handlers)

    def _repository(self, request: Request) -> Repository:
        return repository_named(self._paths, request.path_params["owner"], request.path_params["name"])

    def _revision(self, request: Request) -> Revision:
        return self._revisions.of(self._repository(request), request.path_params.get("revision", MAIN))

    def _list(self, request: Request) -> Response:
        wanted = request.query_params.get("search", "")
        ids = [each.id for each in repositories_below(self._paths).values() if wanted in each.id]
        return JSONResponse([{"id": each, "modelId": each, "private": False, "tags": []} for each in ids])

    def _info(self, request: Request) -> Response:
        revision = self._revision(request)
        changed = datetime.fromtimestamp(revision.step.when, timezone.utc).isoformat(timespec="milliseconds")
        name = revision.repository.id
        return JSONResponse(
            {
                "_id": revision.commit[:24],
                "id": name,
                "modelId": name,
                "author": request.path_params["owner"],
                "sha": revision.commit,
                "lastModified": changed.replace("+00:00", "Z"),
                "private": False,
                "gated": False,
                "disabled": False,
                "downloads": 0,
                "likes": 0,
                "tags": ["reshard"],
                "siblings": [{"rfilename": path, "size": file.size} for path, file in revision.files.items()],
            }
        )

    def _refs(self, request: Request) -> Response:
        repository = self._repository(request)
        branches = []
        for name in (MAIN, *(step.name for step in repository.complete())):
            with suppress(ReshardError, NotServedError):  # it is said when this step is asked for
                commit = self._revisions.of(repository, name).commit
                branches.append({"name": name, "ref": f"refs/heads/{name}", "targetCommit": commit})
        if not branches:
            self._revisions.of(repository, MAIN)  # raises
        return JSONResponse({"branches": branches, "tags": [], "converts": []})

    def _tree(self, request: Request) -> Response:
        revision = self._revision(request)
        top = PurePosixPath(request.path_params.get("path", ""))
        below = [path for path in map(PurePosixPath, revision.files) if path.is_relative_to(top)]
        if not below:
            revision.file(str(top))  # raises
        is_recursive = request.query_params.get("recursive", "").lower() in ("1", "true")
        folders = {folder for path in below for folder in path.parents if top in folder.parents}
        shown = [path for path in (*sorted(folders), *below) if is_recursive or path.parent == top]
        return JSONResponse([_entry(revision, str(path)) for path in shown])

    async def _paths_info(self, request: Request) -> Response:
        revision = await run_in_threadpool(self._revision, request)
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY:
                return _problem(413, None, "the request is too large")
        is_json = request.headers.get("content-type", "").startswith("application/json")
        try:
            asked = (json_of(body) if is_json else parse_qs(body.decode()))["paths"]
            known = {*revision.files, *_folders(revision)}
            return JSONResponse([_entry(revision, path) for path in asked if path in known])
        except (ValueError, TypeError, KeyError):
            return _problem(400, None, 'the body must be {"paths": […]}, as JSON or as a form')

    def _resolve(self, request: Request) -> Response:
        revision, path = self._revision(request), request.path_params["path"]
        size, etag = revision.file(path).size, f'"{revision.etag(path)}"'
        headers = {
            "ETag": etag,
            "X-Repo-Commit": revision.commit,
            "Accept-Ranges": "bytes",
            "Content-Type": "application/octet-stream",
            "Content-Disposition": "attachment",
            "Cache-Control": "no-cache",
        }
        if etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        is_same = request.headers.get("if-range", etag) == etag
        ranges = ranges_of(request.headers.get("range", ""), size) if is_same else None
        if ranges == []:
            return Response(status_code=416, headers={**headers, "Content-Range": f"bytes */{size}"})
        content = content_of(ranges, size, headers)
        how: Any = {"status_code": 206 if ranges else 200, "headers": headers}
        if request.method == "HEAD":
            return Response(**how)
        ended = partial(self._ended, time.monotonic())
        return FileAnswer(revision, path, content, self._reading, self._sending, ended, **how)

    def _ended(self, begun: float, answer: FileAnswer) -> None:
        revision = answer.revision
        self._on_event(
            {
                "event": "sent",
                "model": revision.repository.id,
                "step": revision.step.name,
                "path": answer.path,
                "bytes": answer.sent,
                "read": answer.read,
                "seconds": round(time.monotonic() - begun, 3),
                "error": answer.error,
            }
        )

    def _failed(self, request: Request, error: Exception) -> Response:
        status = next(status for kind, status in STATUSES.items() if isinstance(error, kind))
        if not isinstance(error, NotServedError):
            self._on_event({"event": "refused", "path": request.url.path, "error": str(error)})
        return _problem(status, getattr(error, "code", REFUSED), str(error))

    def _page(self, request: Request) -> Response:
        shown = sorted(repositories_below(self._paths).values(), key=lambda each: each.name)
        return HTMLResponse(served_page(str(request.base_url).rstrip("/"), shown, _described))


@lru_cache(maxsize=256)
def _described(step: Step) -> dict[str, str]:
    """When a step was saved, and what `inspect` says of it."""
    saved = {"saved": datetime.fromtimestamp(step.when).strftime("%Y-%m-%d %H:%M")} if step.when else {}
    try:
        return {**inspect(step.path).rows(), **saved}
    except (ReshardError, OSError) as error:
        return {"format": str(error).splitlines()[0], **saved}


def _folders(revision: Revision) -> set[str]:
    """The folders of all files."""
    return {str(each) for path in revision.files for each in PurePosixPath(path).parents[:-1]}


def _entry(revision: Revision, path: str) -> dict[str, Any]:
    """A file or a folder as the Hub lists it."""
    if path not in revision.files:
        return {"type": "directory", "path": path, "size": 0, "oid": revision.etag(path)}
    return {"type": "file", "path": path, "size": revision.files[path].size, "oid": revision.etag(path)}


def _who(request: Request) -> Response:
    return JSONResponse(
        {"type": "user", "name": "local", "orgs": [], "auth": {"accessToken": {"role": "read"}}}
    )


def _problem(status: int, code: str | None, message: str) -> Response:
    """An error in the Hub's words: its clients show `X-Error-Message`."""
    line = " ".join(message.split()).encode("ascii", "replace").decode()[:2000]
    headers = {"X-Error-Message": line} | ({"X-Error-Code": code} if code else {})
    return JSONResponse({"error": message}, status, headers)
