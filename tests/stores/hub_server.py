"""A server with the API of the Hugging Face Hub, as huggingface_hub calls it: repositories, uploads and commits.

Files of at least `LARGE` bytes are uploaded through Git LFS, in parts of `PART` bytes. Unknown paths answer 404.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

from tests.serving import serving

LARGE = 10_000
PART = 1 << 17


@dataclass
class Repository:
    """The files of the branch `main`, and the messages of its commits; each other branch is like a repository."""

    private: bool = False
    files: dict[str, bytes] = field(default_factory=lambda: {".gitattributes": b"*.safetensors filter=lfs\n"})
    commits: list[str] = field(default_factory=lambda: ["initial commit"])
    branches: dict[str, Repository] = field(default_factory=dict)
    branch: str = "main"

    @property
    def sha(self) -> str:
        return self.shas[-1]

    @property
    def shas(self) -> list[str]:
        """One for each commit, the first one first."""
        return [
            hashlib.sha1(f"{number} {message} {self.branch if number > 1 else ''}".encode()).hexdigest()
            for number, message in enumerate(self.commits, 1)
        ]


@dataclass
class Hub:
    """The server's state. `tokens` has the role of each token of the user `user`, who may write to `orgs`."""

    address: str = ""
    tokens: dict[str, str] = field(default_factory=lambda: {"hf_writes": "write", "hf_reads": "read"})
    orgs: tuple[str, ...] = ("user", "Org")
    repositories: dict[str, Repository] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    parts: dict[str, dict[int, bytes]] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    sent: int = 0
    """Bytes of files that were sent."""
    fails: Callable[[str, str], int | None] = lambda method, path: None
    """A status to answer with instead of the content."""
    shifted: int = 0
    """Ranges of files are answered by ranges that begin so many bytes later."""

    def environment(self, token: str = "hf_writes") -> dict[str, str]:
        """The variables that point huggingface_hub here."""
        return {
            "HF_ENDPOINT": self.address,
            "HF_TOKEN": token,
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }

    def constants(self) -> dict[str, object]:
        """The same for a huggingface_hub that is already imported."""
        template = self.address + "/{repo_id}/resolve/{revision}/{filename}"
        changed: dict[str, object] = {"ENDPOINT": self.address, "HUGGINGFACE_CO_URL_TEMPLATE": template}
        return {**changed, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}

    def count(self, method: str, pattern: str) -> int:
        """The number of requests of a kind."""
        return sum(each == method and bool(re.search(pattern, path)) for each, path in self.requests)


class RefusedError(Exception):
    def __init__(self, status: int, code: str = "", message: str = "") -> None:
        self.status, self.code, self.message = status, code, message


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # it waits 40 ms between the headers and the content of an answer
    hub: Hub
    lock: Lock

    def log_message(self, *words: object) -> None:
        pass

    def _serve(self) -> None:
        parts = urlsplit(self.path)
        path, query = unquote(parts.path), {key: each[0] for key, each in parse_qs(parts.query).items()}
        body = self._body()
        with self.lock:
            self.hub.requests.append((self.command, path))
        try:
            if status := self.hub.fails(self.command, path):
                raise RefusedError(status, message="the server is told to fail")
            for method, pattern, action in ROUTES:
                if method == self.command and (match := re.fullmatch(pattern, path)):
                    with self.lock:
                        answer = action(self, *match.groups(), body=body, query=query)
                    is_part = len(answer) > 1 and "Content-Range" in answer[1]
                    return self._answer(206 if is_part else 200, *answer)
            raise RefusedError(404, "EntryNotFound", "Entry not found")
        except RefusedError as refused:
            headers = {"X-Error-Code": refused.code, "X-Error-Message": refused.message}
            self._answer(refused.status, {"error": refused.message}, headers)

    do_GET = do_HEAD = do_POST = do_PUT = _serve  # noqa: N815

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _answer(self, status: int, content: Any = b"", headers: dict[str, str] | None = None) -> None:
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for key, value in {"Content-Length": str(len(raw)), **(headers or {})}.items():
            if value:
                self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(raw)

    # What a token may do.

    def _role(self) -> str | None:
        return self.hub.tokens.get(self.headers.get("Authorization", "").removeprefix("Bearer "))

    def _repository(self, name: str) -> Repository:
        found = self.hub.repositories.get(name)
        if found is None or (found.private and not self._role()):
            raise RefusedError(404, "RepoNotFound", "Repository not found")
        return found

    def _branch(self, name: str, revision: str | None) -> Repository:
        found = self._repository(name)
        for branch in (found, *found.branches.values()):
            if revision in (branch.sha, *(each for each, own in found.branches.items() if own is branch)):
                return branch
        if revision not in (None, "main"):
            raise RefusedError(404, "RevisionNotFound", "Invalid rev id")
        return found

    def _commits(self, name: str, revision: str, **_: Any) -> Any:
        found = self._branch(name, revision)
        each = {"authors": [{"user": "user"}], "date": "2026-11-26T10:00:00.000Z", "message": ""}
        titles = zip(found.shas, found.commits, strict=True)
        return ([{**each, "id": sha, "title": title} for sha, title in reversed([*titles])],)

    def _new_branch(self, name: str, branch: str, body: bytes, **_: Any) -> Any:
        self._may_write(name)
        found, begin = self._repository(name), json.loads(body).get("startingPoint")
        if branch in found.branches:
            raise RefusedError(409, message="Reference already exists")
        if begin != found.shas[0]:
            raise RefusedError(501, message="this server keeps the files of the first commit only")
        found.branches[branch] = Repository(found.private, branch=branch)
        return ({},)

    def _may_write(self, name: str) -> None:
        if self._role() is None:
            raise RefusedError(401, message="Invalid username or password.")
        if self._role() != "write" or name.split("/")[0] not in self.hub.orgs:
            raise RefusedError(403, message=f"You don't have the rights to write to {name}")

    # The API.

    def _whoami(self, **_: Any) -> Any:
        if self._role() is None:
            raise RefusedError(401, message="Invalid credentials in Authorization header")
        return ({"type": "user", "name": "user", "auth": {"accessToken": {"role": self._role()}}},)

    def _create(self, body: bytes, **_: Any) -> Any:
        wanted = json.loads(body)
        name = f"{wanted.get('organization') or 'user'}/{wanted['name']}"
        self._may_write(name)
        if name in self.hub.repositories:
            raise RefusedError(409, message="You already created this model repo")
        private = wanted.get("private") or wanted.get("visibility") == "private"
        self.hub.repositories[name] = Repository(bool(private))
        return ({"url": f"{self.hub.address}/{name}", "name": name},)

    def _info(self, name: str, revision: str | None = None, **_: Any) -> Any:
        found = self._branch(name, revision)
        files = [{"rfilename": path} for path in sorted(found.files)]
        return ({"id": name, "modelId": name, "sha": found.sha, "private": found.private, "siblings": files},)

    def _auth(self, name: str, write: str | None, **_: Any) -> Any:
        self._repository(name)
        if write:
            self._may_write(name)
        return ({},)

    def _tree(self, name: str, revision: str, query: dict[str, str], **_: Any) -> Any:
        found = self._branch(name, revision)
        return (
            [
                {"type": "file", "path": path, "size": len(content), "oid": _oid(content)}
                for path, content in sorted(found.files.items())
            ],
        )

    def _resolve(self, name: str, revision: str, path: str, **_: Any) -> Any:
        found = self._branch(name, revision)
        if path not in found.files:
            raise RefusedError(404, "EntryNotFound", "Entry not found")
        content = found.files[path]
        headers = {"ETag": f'"{_oid(content)}"', "X-Repo-Commit": found.sha}
        if asked := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or ""):
            begin, end = (int(each) + self.hub.shifted for each in asked.groups())
            end = min(end + 1, len(content))
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(content)}"
            content = content[begin:end]
        if self.command == "GET":
            self.hub.sent += len(content)
        return content, headers

    def _preupload(self, name: str, revision: str, body: bytes, **_: Any) -> Any:
        self._may_write(name)
        there = self._branch(name, revision).files
        found = []
        for each in json.loads(body)["files"]:
            mode = "lfs" if each["size"] >= LARGE else "regular"
            content = there.get(each["path"])
            oid = content and (hashlib.sha256(content).hexdigest() if mode == "lfs" else _oid(content))
            found.append({"path": each["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return ({"files": found},)

    def _batch(self, name: str, body: bytes, **_: Any) -> Any:
        self._may_write(name)
        return (
            {
                "transfer": "multipart",
                "objects": [self._object(each) for each in json.loads(body)["objects"]],
            },
        )

    def _object(self, wanted: dict[str, Any]) -> dict[str, Any]:
        oid, size = wanted["oid"], wanted["size"]
        if oid in self.hub.blobs:
            return wanted
        count = -(-size // PART)
        urls = {
            f"{number:05d}": f"{self.hub.address}/blobs/{oid}/{number}?signature=secret"
            for number in range(1, count + 1)
        }
        upload = {"href": f"{self.hub.address}/blobs/{oid}", "header": {"chunk_size": str(PART), **urls}}
        return {**wanted, "actions": {"upload": upload}}

    def _part(self, oid: str, number: str, body: bytes, **_: Any) -> Any:
        self.hub.parts.setdefault(oid, {})[int(number)] = body
        return b"", {"ETag": f'"{_oid(body)}"'}

    def _complete(self, oid: str, body: bytes, **_: Any) -> Any:
        parts = self.hub.parts.pop(oid)
        content = b"".join(parts[each["partNumber"]] for each in json.loads(body)["parts"])
        if hashlib.sha256(content).hexdigest() != oid:
            raise RefusedError(400, message="the parts are not the file")
        self.hub.blobs[oid] = content
        return ({},)

    def _commit(self, name: str, revision: str, body: bytes, **_: Any) -> Any:
        self._may_write(name)
        found = self._branch(name, revision)
        lines = [json.loads(line) for line in body.splitlines()]
        files = dict(found.files)
        for line in lines:
            key, value = line["key"], line["value"]
            if key == "header":
                if value.get("parentCommit") not in (None, found.sha):
                    raise RefusedError(
                        412, message="A commit has happened since. Please refresh and try again."
                    )
                summary = value["summary"]
            elif key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                files[value["path"]] = self.hub.blobs[value["oid"]]
            elif key == "deletedFile":
                del files[value["path"]]
        found.files = files
        found.commits.append(summary)
        url = f"{self.hub.address}/{name}/commit/{found.sha}"
        return ({"commitUrl": url, "commitOid": found.sha, "success": True},)

    def _yaml(self, body: bytes, **_: Any) -> Any:
        about = re.match(r"---\n(.*?)\n---\n", json.loads(body)["content"], re.DOTALL)
        if not about or not isinstance(yaml.safe_load(about[1]), dict):
            raise RefusedError(400, message="no metadata")
        return ({"errors": [], "warnings": []},)


NAME, REVISION = r"([^/]+/[^/]+)", r"([^/]+)"
ROUTES: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("GET", "/api/whoami-v2", _Handler._whoami),
    ("POST", "/api/repos/create", _Handler._create),
    ("POST", "/api/validate-yaml", _Handler._yaml),
    ("GET", f"/api/(?:models|datasets)/{NAME}", _Handler._info),
    ("GET", f"/api/(?:models|datasets)/{NAME}/revision/{REVISION}", _Handler._info),
    ("GET", f"/api/models/{NAME}/commits/{REVISION}", _Handler._commits),
    ("POST", f"/api/models/{NAME}/branch/{REVISION}", _Handler._new_branch),
    ("GET", f"/api/models/{NAME}/auth-check(/write)?", _Handler._auth),
    ("GET", f"/api/(?:models|datasets)/{NAME}/tree/{REVISION}/?", _Handler._tree),
    ("POST", f"/api/models/{NAME}/preupload/{REVISION}", _Handler._preupload),
    ("POST", f"/api/models/{NAME}/commit/{REVISION}", _Handler._commit),
    ("GET", f"/(?:datasets/)?{NAME}/resolve/{REVISION}/(.+)", _Handler._resolve),
    ("HEAD", f"/(?:datasets/)?{NAME}/resolve/{REVISION}/(.+)", _Handler._resolve),
    ("POST", f"/{NAME}.git/info/lfs/objects/batch", _Handler._batch),
    ("PUT", r"/blobs/(\w+)/(\d+)", _Handler._part),
    ("POST", r"/blobs/(\w+)", _Handler._complete),
)


def _oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextmanager
def hub_server() -> Iterator[Hub]:
    """A server that runs until the block ends."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub, "lock": Lock()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    with serving(server):
        yield hub
