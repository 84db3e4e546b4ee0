"""The environment that this process was started with, for the programs of users that it starts.

Since the start, two variables may have changed. Python sets LC_CTYPE in the C locale (PEP 538), and the command line
limits the threads of its own numpy; in a training command, either would change what its data loaders do.
"""

import os
from pathlib import Path

_COERCED_LOCALES = ("C.UTF-8", "C.utf8", "UTF-8")
"""The values to which Python sets LC_CTYPE (PEP 538)."""
_own: set[str] = set()


def set_for_this_process(name: str, value: str) -> None:
    """Set a variable for reshard alone, unless the user has set it."""
    if name not in os.environ:
        os.environ[name] = value
        _own.add(name)


def start_environment() -> dict[str, str]:
    """The variables of this process, without what reshard and Python itself have set since the start."""
    environment = {name: value for name, value in os.environ.items() if name not in _own}
    if environment.get("LC_CTYPE") in _COERCED_LOCALES:
        locale = _value_at_start("LC_CTYPE")
        if locale is None:
            del environment["LC_CTYPE"]
        else:
            environment["LC_CTYPE"] = locale
    return environment


def _value_at_start(name: str) -> str | None:
    """The kernel's copy of a variable; where it keeps none, the present value."""
    try:
        entries = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return os.environ.get(name)
    prefix = os.fsencode(f"{name}=")
    return next((os.fsdecode(each.removeprefix(prefix)) for each in entries if each.startswith(prefix)), None)
