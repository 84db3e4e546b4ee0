"""Where checkpoints are stored: on disks, in object stores, on web servers and on the Hub.

`source_path` turns what a user typed into a path, `as_path` a stored string. A local path is a
`pathlib.Path`; a URL is a `StorePath`, which answers the same questions from one listing of the store. `open_file`
opens either for positioned reads. No module above this package needs to know which one it has.
"""

from reshard.stores.file_info import Stamp
from reshard.stores.open_file import OpenFile
from reshard.stores.path import (
    StorePath,
    archive_folder,
    as_path,
    expanded_path,
    homes_of,
    is_remote,
    open_file,
    realpath,
    source_path,
    typed_path,
)
from reshard.stores.read_ahead import fetch_ahead, fetch_heads
from reshard.stores.registry import is_writable, refresh
from reshard.stores.remote_file import CONNECTIONS, MAX_HEADS_BYTES, MAX_REQUEST_BYTES

__all__ = [
    "CONNECTIONS",
    "MAX_HEADS_BYTES",
    "MAX_REQUEST_BYTES",
    "OpenFile",
    "Stamp",
    "StorePath",
    "archive_folder",
    "as_path",
    "expanded_path",
    "fetch_ahead",
    "fetch_heads",
    "homes_of",
    "is_remote",
    "is_writable",
    "open_file",
    "realpath",
    "refresh",
    "source_path",
    "typed_path",
]
