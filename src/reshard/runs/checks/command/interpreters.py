"""Which Python a program starts: found on PATH and in the first lines of console scripts."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from shutil import which

PYTHON = re.compile(r"(?:python|pypy)[\d.]*")
_LONG = re.compile(r"'''exec' (.+) \"\$0\" \"\$@\"")
"""The second line of a console script whose interpreter has too long a path for the first."""


def program(word: str, environment: Mapping[str, str], folder: Path) -> Path | None:
    """The file that a word starts."""
    if os.sep in word:
        return folder / word if (folder / word).is_file() else None
    path = which(word, path=environment.get("PATH", os.defpath))
    return folder / path if path else None


def is_of_shell(path: Path) -> bool:
    """Whether a file is a script without a first line that names its program, as bash tells it from a binary."""
    with suppress(OSError), path.open("rb") as file:
        begin = file.read(80)
        return not begin.startswith(b"#!") and b"\0" not in begin.partition(b"\n")[0]
    return False


def shebang(path: Path) -> list[str]:
    """The words of a file's first line after `#!`; those after `env` if that starts it. Empty if it has none."""
    try:
        with path.open("rb") as file:
            begin = file.read(4096).decode("utf-8", "replace")
    except OSError:
        return []
    first, _, rest = begin.partition("\n")
    if not first.startswith("#!"):
        return []
    if long := _LONG.match(rest):
        return shlex.split(long[1])
    words = first[2:].split()
    return [word for word in words[1:] if word != "-S"] if words and Path(words[0]).name == "env" else words


def interpreter_of(word: str, environment: Mapping[str, str], folder: Path) -> tuple[str, ...] | None:
    """The words that start the Python of a program: itself, or the interpreter of a console script."""
    path = program(word, environment, folder)
    if path is None:
        return None
    if PYTHON.fullmatch(Path(word).name):
        return (str(path),)
    first = shebang(path)
    if not first or not PYTHON.fullmatch(Path(first[0]).name):
        return None
    python = program(first[0], environment, folder)
    return (str(python),) if python else None
