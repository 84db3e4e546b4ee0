"""The routes of the Hugging Face Hub that its clients use to load a model, read-only.

Each was seen in requests of huggingface_hub 2.3, transformers 5.24, vLLM and mlx-lm.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timezone
from functools import partial
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import parse_qs

import anyio.to_thread
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from reshard.base.errors import ReshardError
from reshard.serve.byte_ranges import ranges_of
from reshard.serve.file_answer import FileAnswer, MemoryTurns
from reshard.serve.options import ServeOptions
from reshard.serve.repositories import (
    MAIN,
    NotServedError,
    Repository,
    repositories_below,
    repository_named,
)
from reshard.serve.revisions import OnEvent, Revision, Revisions

MAX_BODY = 1 << 20
"""Bytes of a request's body."""
MODEL = "/{owner}/{name}"
REFUSED = "RevisionNotFound"
"""The code for a step that cannot be converted: clients show the message of it, and of few others."""
STATUSES = {NotServedError: 404, ReshardError: 404, OSError: 500}
"""The status of an answer for each kind of error."""


class HubApp:
    """Answers requests for the checkpoints below some paths. `on_event` receives a record of each.

    `refused` is what `confine` returns.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        options: ServeOptions,
        on_event: OnEvent,
        refused: list[ReshardError],
    ) -> None:
        self._paths = tuple(paths)
        self.revisions = Revisions(options, refused, on_event)
        self._on_event = on_event
        self._turns = MemoryTurns(options.limit // 2)

    def app(self, middleware: Sequence[Any] = ()) -> Starlette:
        """The application."""
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
        return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)

    async def _repository(self, request: Request) -> Repository:
        names = request.path_params["owner"], request.path_params["name"]
        return await anyio.to_thread.run_sync(repository_named, self._paths, *names)

    async def _revision(self, request: Request) -> Revision:
        repository = await self._repository(request)
        wanted = request.path_params.get("revision", MAIN)
        return await anyio.to_thread.run_sync(self.revisions.of, repository, wanted)

    async def _list(self, request: Request) -> Response:
        repositories = await anyio.to_thread.run_sync(repositories_below, self._paths)
        ids = [each.id for each in repositories.values() if request.query_params.get("search", "") in each.id]
        return JSONResponse([{"id": each, "modelId": each, "private": False, "tags": []} for each in ids])

    async def _info(self, request: Request) -> Response:
        revision = await self._revision(request)
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

    async def _refs(self, request: Request) -> Response:
        repository = await self._repository(request)

        def branches() -> list[dict[str, str]]:
            found = []
            for name in (MAIN, *(state.step.name for state in repository.states() if state.is_complete)):
                with suppress(ReshardError, NotServedError):  # it is said when this step is asked for
                    commit = self.revisions.of(repository, name).commit
                    found.append({"name": name, "ref": f"refs/heads/{name}", "targetCommit": commit})
            if not found:
                self.revisions.of(repository, MAIN)  # raises
            return found

        found = await anyio.to_thread.run_sync(branches)
        return JSONResponse({"branches": found, "tags": [], "converts": []})

    async def _tree(self, request: Request) -> Response:
        revision = await self._revision(request)
        top = PurePosixPath(request.path_params.get("path", ""))
        below = [path for path in map(PurePosixPath, revision.files) if path.is_relative_to(top)]
        if not below:
            revision.file(str(top))  # raises
        is_recursive = request.query_params.get("recursive", "").lower() in ("1", "true")
        folders = {folder for path in below for folder in path.parents if top in folder.parents}
        shown = [path for path in (*sorted(folders), *below) if is_recursive or path.parent == top]
        return JSONResponse([_entry(revision, str(path)) for path in shown])

    async def _paths_info(self, request: Request) -> Response:
        revision = await self._revision(request)
        if int(request.headers.get("content-length", 0)) > MAX_BODY:
            return _problem(413, None, "the request is too large")
        try:
            is_json = request.headers.get("content-type", "").startswith("application/json")
            asked = (await request.json() if is_json else parse_qs((await request.body()).decode()))["paths"]
            known = {*revision.files, *_folders(revision)}
            return JSONResponse([_entry(revision, path) for path in asked if path in known])
        except (ValueError, TypeError, KeyError):
            return _problem(400, None, 'the body must be {"paths": […]}, as JSON or as a form')

    async def _resolve(self, request: Request) -> Response:
        revision = await self._revision(request)
        path = request.path_params["path"]
        size = revision.file(path).size
        etag = f'"{revision.etag(path)}"'
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
        content = _content(ranges, size, headers)
        done = partial(self._ended, time.monotonic())
        return FileAnswer(revision, path, content, headers, self._turns, done)

    def _ended(self, begun: float, answer: FileAnswer) -> None:
        """Report an answer, and plan again what was wrong."""
        revision = answer.revision
        if answer.is_wrong:
            self.revisions.drop(revision)
        self._on_event(
            {
                "event": "sent",
                "model": revision.repository.id,
                "step": revision.step.name,
                "path": answer.path,
                "bytes": answer.sent,
                "read": answer.read,
                "seconds": round(time.monotonic() - begun, 3),
                "error": answer.error or None,
            }
        )

    async def _failed(self, request: Request, error: Exception) -> Response:
        status = next(status for kind, status in STATUSES.items() if isinstance(error, kind))
        if not isinstance(error, NotServedError):
            self._on_event({"event": "refused", "path": request.url.path, "error": str(error)})
        return _problem(status, getattr(error, "code", REFUSED), str(error))

    async def _page(self, request: Request) -> Response:
        from reshard.serve.page import page_of

        address = str(request.base_url).rstrip("/")
        return HTMLResponse(await anyio.to_thread.run_sync(page_of, self._paths, address))


def _content(ranges: list[range] | None, size: int, headers: dict[str, str]) -> list[range | bytes]:
    """The content of an answer; adds to `headers` what describes it."""
    content: list[range | bytes] = [*(ranges or [range(size)])]
    about = [f"bytes {each.start}-{each.stop - 1}/{size}" for each in ranges or ()]
    if len(content) > 1:
        boundary = secrets.token_hex(16)
        kind = "Content-Type: application/octet-stream"
        heads = [f"\r\n--{boundary}\r\n{kind}\r\nContent-Range: {each}\r\n\r\n".encode() for each in about]
        content = [*chain.from_iterable(zip(heads, content, strict=True)), f"\r\n--{boundary}--\r\n".encode()]
        headers["Content-Type"] = f"multipart/byteranges; boundary={boundary}"
    elif about:
        headers["Content-Range"] = about[0]
    headers["Content-Length"] = str(sum(map(len, content)))
    return content


def _folders(revision: Revision) -> set[str]:
    """The folders of all files."""
    return {str(each) for path in revision.files for each in PurePosixPath(path).parents[:-1]}


def _entry(revision: Revision, path: str) -> dict[str, Any]:
    """A file or a folder as the Hub lists it."""
    if path not in revision.files:
        return {"type": "directory", "path": path, "size": 0, "oid": revision.etag(path)}
    return {"type": "file", "path": path, "size": revision.files[path].size, "oid": revision.etag(path)}


async def _who(request: Request) -> Response:
    return JSONResponse(
        {"type": "user", "name": "local", "orgs": [], "auth": {"accessToken": {"role": "read"}}}
    )


def _problem(status: int, code: str | None, message: str) -> Response:
    """An error in the Hub's words: its clients show `X-Error-Message`."""
    line = " ".join(message.split()).encode("ascii", "replace").decode()[:2000]
    headers = {"X-Error-Message": line} | ({"X-Error-Code": code} if code else {})
    return JSONResponse({"error": message}, status, headers)
