"""moto's S3 server on its own port, which records requests and can be told to fail some of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import boto3
import s3fs
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

from reshard.stores import registry
from tests.serving import serving

BUCKET = "bucket"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "not-to-be-shown",
    "AWS_DEFAULT_REGION": "us-east-1",
}


@cache  # boto3 takes longer to make one than to use it
def _client(address: str) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=address,
        aws_access_key_id="testing",
        aws_secret_access_key="x",
        region_name="us-east-1",
    )


@dataclass
class S3:
    """The server, with one bucket. `requests` are (method, path, query)."""

    address: str = ""
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    sent: int = 0
    """Bytes of objects that were sent."""
    fails: Callable[[str, str, str], int | None] = lambda method, path, query: None
    """A status to answer with instead of the content; 0 closes the connection."""
    spoils: Callable[[str, str, str, bytes], bytes | int | None] = lambda method, path, query, body: None
    """The same after a request was executed; or the beginning of the body, after which the connection is closed."""

    @property
    def environment(self) -> dict[str, str]:
        """The variables that point boto and s3fs here."""
        return {**CREDENTIALS, "AWS_ENDPOINT_URL": self.address}

    @property
    def client(self) -> Any:
        """boto3's client: a judge that is independent of fsspec."""
        return _client(self.address)

    def objects(self, prefix: str = "") -> dict[str, bytes]:
        """All objects below a prefix, by the rest of their keys."""
        found = self.client.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", ())
        return {
            each["Key"][len(prefix) :]: self.client.get_object(Bucket=BUCKET, Key=each["Key"])["Body"].read()
            for each in found
        }

    def clear(self) -> None:
        """Remove all objects, and the record of requests."""
        for each in self.client.list_objects_v2(Bucket=BUCKET).get("Contents", ()):
            self.client.delete_object(Bucket=BUCKET, Key=each["Key"])
        self.requests.clear()
        self.sent = 0
        self.clear_faults()

    def clear_faults(self) -> None:
        """Stop failing requests."""
        self.fails = lambda method, path, query: None
        self.spoils = lambda method, path, query, body: None

    def puts(self) -> list[str]:
        """The keys of objects that were written, in order; once for each part of an upload."""
        return [path.removeprefix(f"/{BUCKET}/") for method, path, _ in self.requests if method == "PUT"]


def _application(server: S3) -> Callable[..., Any]:
    moto = DomainDispatcherApplication(create_backend_app)

    def serve(environ: dict[str, Any], start: Callable[..., Any]) -> Any:
        request = environ["REQUEST_METHOD"], environ["PATH_INFO"], environ["QUERY_STRING"]
        server.requests.append(request)
        status = server.fails(*request)
        if status is not None:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            return _fail(status, environ, start)
        begun: list[Any] = []
        body = b"".join(moto(environ, lambda *words: begun.append(words)))
        spoilt = server.spoils(*request, body)
        if isinstance(spoilt, int):
            return _fail(spoilt, environ, start)
        if request[0] == "GET" and "list-type" not in request[2]:
            server.sent += len(body)
        start(*begun[0])
        return [body if spoilt is None else spoilt]

    return serve


def _fail(status: int, environ: dict[str, Any], start: Callable[..., Any]) -> list[bytes]:
    if status:
        start(f"{status} Told to fail", [("Content-Type", "application/xml"), ("Content-Length", "0")])
    else:
        environ["werkzeug.socket"].close()
    return [b""]


@contextmanager
def s3_server() -> Iterator[S3]:
    """A server that runs until the block ends, with one empty bucket."""
    server = S3()
    _forget()
    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    running = make_server("127.0.0.1", 0, _application(server), threaded=True)
    server.address = f"http://127.0.0.1:{running.server_port}"
    try:
        with serving(running):
            server.client.create_bucket(Bucket=BUCKET)
            yield server
    finally:
        _forget()


def _forget() -> None:
    """Drop this process's connections to a server that is gone."""
    s3fs.S3FileSystem.clear_instance_cache()
    registry.forget()
