"""The server of `reshard serve`: listens, confines itself, and answers until it is stopped."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import uvicorn

from reshard.base.confinement import CONNECTING_EVENTS, REFUSED_EVENTS, confine
from reshard.base.errors import ReshardError
from reshard.final.saved_checkpoints import step_of
from reshard.folders.iterations import is_iteration
from reshard.formats.not_found import nothing_there
from reshard.serve.access import middleware_for
from reshard.serve.hub_app import HubApp
from reshard.serve.options import ServeOptions
from reshard.serve.revisions import OnEvent
from reshard.stores import StorePath

TOKEN_VARIABLE = "RESHARD_TOKEN"
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
MAX_CONNECTIONS = 512
"""Clients at the same time; more get status 503."""
MAX_HEADERS = 32 << 10
"""Bytes of the headers of a request."""
CLOSING_SECONDS = 1
"""Seconds that answers have to end when the server is stopped."""
UNTAKEN_MS = 60_000
"""Milliseconds after which the system closes a connection whose client takes nothing, or is gone."""


def listening(options: ServeOptions) -> socket.socket:
    """A socket at the address of the options. Raises ReshardError if it cannot be had, or needs a token."""
    if options.host not in LOCAL_HOSTS and token_of(options) is None:
        raise ReshardError(
            "token-not-passed",
            "a server for other machines needs a token",
            found=f"--host {options.host}",
            remedy="pass --token, and set HF_TOKEN to the same where clients run; or leave out --host",
        )
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNTAKEN_MS)
    try:
        listener.bind((options.host, options.port))
        listener.listen(MAX_CONNECTIONS)  # whoever asks while modules are imported waits
    except (OSError, OverflowError) as error:
        listener.close()
        raise ReshardError(
            "address-not-usable",
            "the server cannot listen at this address",
            found=f"{options.host}:{options.port}: {getattr(error, 'strerror', None) or error}",
            remedy="choose another --port (0 takes a free one), or an address of this machine",
        ) from None
    return listener


def token_of(options: ServeOptions) -> str | None:
    """What clients must send; None if nothing."""
    return options.token or os.environ.get(TOKEN_VARIABLE) or None


def serve(
    paths: Sequence[Path],
    options: ServeOptions,
    listener: socket.socket,
    on_event: OnEvent,
) -> None:
    """Answer requests for the checkpoints below some paths, until SIGINT or SIGTERM.

    From now on this process can only read, and locally only below these paths and those of the options.
    """
    refused = _confine([*paths, *options.conversion.base_paths])
    app = HubApp(paths, options, on_event, refused).app(middleware_for(token_of(options)))
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)  # why an answer was cut off is in its record
    config = uvicorn.Config(
        app,
        http="h11",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        limit_concurrency=MAX_CONNECTIONS,
        h11_max_incomplete_event_size=MAX_HEADERS,
        timeout_graceful_shutdown=CLOSING_SECONDS,
    )
    uvicorn.Server(config).run(sockets=[listener])


def check_paths(paths: Sequence[Path], options: ServeOptions) -> None:
    """Raise ReshardError for what is to be read and does not exist."""
    named = [*paths, *options.conversion.base_paths]
    if missing := [nothing_there(path) for path in named if not path.exists()]:
        raise ReshardError([problem for error in missing for problem in error.problems])


def _confine(paths: Sequence[Path]) -> list[ReshardError]:
    sys.dont_write_bytecode = True
    local = [path for path in paths if not isinstance(path, StorePath)]
    runs = [path.absolute().parent for path in local if step_of(path) is not None or is_iteration(path)]
    folders = [os.path.realpath(path) for path in (*local, *runs)]  # config and tracker are beside a step
    in_stores = any(isinstance(path, StorePath) for path in paths)
    refused = [each for each in REFUSED_EVENTS if not (in_stores and each in CONNECTING_EVENTS)]
    return confine(folders, sys.path, command="reshard serve PATH …", refused_events=refused)
