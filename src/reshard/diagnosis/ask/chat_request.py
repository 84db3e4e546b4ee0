"""One request to an endpoint that speaks the chat protocol of OpenAI, by the standard library only.

The key goes to the host of the URL and to nobody else: no redirect is followed, and OPENAI_API_KEY is for OpenAI's.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import time
from contextlib import suppress
from http.client import HTTPException, HTTPResponse, IncompleteRead
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit, urlunsplit
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

from reshard.base.errors import Problem, ReshardError
from reshard.base.foreign_text import clipped, shown
from reshard.diagnosis.ask.expressions import texts
from reshard.diagnosis.ask.redaction import redacted
from reshard.version import __version__

KEY, KEY_OF_OPENAI = "RESHARD_ASK_KEY", "OPENAI_API_KEY"
TIMEOUT_SECONDS = 180.0
"""Seconds until an answer must be complete."""
MAX_BYTES = 1 << 20
"""Bytes of an answer."""
CHAT_PATH = "/chat/completions"


def endpoint(typed: str) -> str:
    """The URL to ask. Raises ReshardError for one that is none, or with which a key or a log would not be safe."""
    parts, host = urlsplit(""), None
    with suppress(ValueError):  # no host, or no port
        parts = urlsplit(typed)
        host, _ = parts.hostname, parts.port
    wrong = {
        "shape": parts.scheme not in ("http", "https") or not host or not re.fullmatch(r"[!-~]+", typed),
        "password": "@" in parts.netloc,
        "readable": parts.scheme == "http" and not _is_near(str(host)),
    }
    for name in (name for name, is_wrong in wrong.items() if is_wrong):
        rule, remedy = texts()["urls"][name]
        raise ReshardError("ask-url", "the URL of --ask cannot be used", rule=rule, remedy=remedy)
    path = parts.path.rstrip("/")
    return urlunsplit(
        parts._replace(path=path if path.endswith(CHAT_PATH) else path + CHAT_PATH, fragment="")
    )


def host_of(url: str) -> str:
    """The host of a URL, with its port if it has one."""
    return urlsplit(url).netloc


def _is_near(host: str) -> bool:
    """Whether a host is this machine, or one of the same network."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_private
    return not re.fullmatch(r"\d.*|.*\..*(?<!\.local)(?<!\.internal)(?<!\.lan)", host)


def key_for(url: str) -> str:
    """The key for an endpoint, empty if there is none."""
    of_openai = f"https://api.openai.com/ {os.environ.get('OPENAI_BASE_URL', '')}/".split()
    names = [KEY, *[KEY_OF_OPENAI for each in of_openai if url.startswith(each)]]
    key, name = next(((key, name) for name in names if (key := os.environ.get(name, "").strip())), ("", ""))
    if not re.fullmatch(r"[!-~]*", key):
        raise ReshardError(
            "ask-key", f"{name} is no key", rule="it has spaces, or letters that are not ASCII"
        )
    return key


def body_of(model: str, messages: list[dict[str, str]]) -> bytes:
    """What is sent, as JSON."""
    return json.dumps({"model": model, "messages": messages, "stream": False}, ensure_ascii=False).encode(
        errors="replace"
    )


class _NoRedirect(HTTPRedirectHandler):
    """Turns a redirect into an error: neither the key nor the log goes to another host."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def ask(url: str, body: bytes) -> str:
    """The text that a model answers. Raises ReshardError if there is none."""
    key = key_for(url)
    request = Request(url, body, {"Content-Type": "application/json", "User-Agent": f"reshard/{__version__}"})
    if key:
        request.add_unredirected_header("Authorization", f"Bearer {key}")
    host = host_of(url)
    proxies = [ProxyHandler({})] if url.startswith("http:") else []  # it is on this network
    try:
        with build_opener(_NoRedirect, *proxies).open(request, timeout=TIMEOUT_SECONDS) as response:
            return _text(_read(response))
    except HTTPError as error:
        raise _refusal(error, host, key) from None
    except (OSError, HTTPException) as error:
        found = _reason(error.reason if isinstance(error, URLError) else error)
        remedy = "check the URL, and that the server runs; then try again"
        problem = Problem("ask-no-answer", f"no answer came from {host}", found=found, remedy=remedy)
        raise ReshardError(problem) from None


def _reason(error: object) -> str:
    """Why a connection failed."""
    if isinstance(error, TimeoutError):
        return f"no complete answer after {TIMEOUT_SECONDS:g} seconds"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused: no program listens on this port"
    if isinstance(error, (ConnectionError, HTTPException)):
        return "the connection ended before the answer was complete"
    return clipped(shown(str(getattr(error, "strerror", None) or error)), 200)


def _read(response: HTTPResponse) -> bytes:
    """The body of an answer, unless it is too long or takes too long."""
    end, raw = time.monotonic() + TIMEOUT_SECONDS, b""
    while block := response.read1(1 << 16):
        raw += block
        if time.monotonic() > end:
            raise TimeoutError
        if len(raw) > MAX_BYTES:
            raise ReshardError(
                "ask-answer-too-long", "the answer is too long", found=f"over {MAX_BYTES:,} bytes"
            )
    if response.length:
        raise IncompleteRead(raw)
    return raw


def _text(raw: bytes) -> str:
    """The text in an answer, which is a string or in parts; what a model thought before it is left out."""
    content, text = None, None
    with suppress(ValueError, RecursionError):
        content = json.loads(raw)
    with suppress(LookupError, TypeError, AttributeError):
        text = content["choices"][0]["message"]["content"]  # type: ignore[index]
        if isinstance(text, list):
            text = "\n".join(each["text"] for each in text if each.get("type", "text") == "text")
    text = re.sub(r"(?s)<think>.*?(?:</think>|$)", "", text).strip() if isinstance(text, str) else None
    if text:
        return text
    what = "is empty" if text == "" else "has no text"
    what = "is not JSON" if content is None else what
    found = _message(content) or clipped(shown(redacted(raw[:1000].decode(errors="replace"))), 200)
    remedy = "check --model, and that the URL is that of a chat API: it ends in /v1 or in /chat/completions"
    raise ReshardError("ask-answer", f"the answer {what}", found=found or None, remedy=remedy)


def _refusal(error: HTTPError, host: str, key: str) -> ReshardError:
    """What a status other than 200 means, with what the server says about it, but never with the key."""
    statuses = texts()["statuses"]
    meaning, remedy = statuses.get(error.code) or statuses[min(error.code // 100, 5)]
    said = str(error.headers.get("Location", "")) if error.code // 100 == 3 else ""
    with suppress(OSError, HTTPException, ValueError, RecursionError):
        said = said or _message(json.loads(error.read(MAX_BYTES)))
    if error.code in (401, 403) and not key:
        remedy += ": none was sent"
    found = clipped(shown(redacted(said.replace(key, "<key>") if key else said)), 300) or None
    return ReshardError("ask-refused", f"{host} answered {error.code}: {meaning}", found=found, remedy=remedy)


def _message(content: Any) -> str:
    """The error message in an answer, in the shapes of OpenAI, FastAPI and others; empty without one."""
    if not isinstance(content, dict):
        return ""
    inner = content.get("error") or content.get("message") or content.get("detail") or ""
    return _message(inner) if isinstance(inner, dict) else str(inner)
