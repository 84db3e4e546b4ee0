"""Programs that run another command, such as `uv run` and `nohup`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Wrapper:
    """A program that runs the command after its own options and operands, and after its `verb` if it has several.

    `valued` are its options with a value, `moving` those that change the folder. `quietly` is what makes it start an
    interpreter without installing anything; None if the command has the same Python without the wrapper.
    """

    program: str
    verb: str = ""
    valued: frozenset[str] = frozenset()
    operands: int = 0
    quietly: tuple[str, ...] | None = None
    moving: frozenset[str] = frozenset()
    starts_files: bool = False
    """Whether it starts Python for a file: without being told so for one whose name ends in .py."""


_OF_UV = """
--extra --no-extra --group --no-group --only-group --no-editable-package --env-file -w --with
--with-editable --with-requirements --package --python-platform --index --default-index -i --index-url
--extra-index-url -f --find-links --index-strategy --keyring-provider -P --upgrade-package --upgrade-group
--resolution --prerelease --prerelease-package --fork-strategy --exclude-newer --exclude-newer-package
--no-sources-package --reinstall-package --link-mode -C --config-setting --config-settings-package
--no-build-isolation-package --no-build-package --no-binary-package --cache-dir --refresh-package -p
--python --color --allow-insecure-host --directory --project --config-file
"""
_OF_CONDA = frozenset(("-n", "--name", "-p", "--prefix", "--cwd"))
_OF_POETRY = frozenset(("-C", "--directory", "-P", "--project"))
_OF_PDM = frozenset(
    ("-p", "--project", "-k", "--skip", "--venv", "--env", "--env-file", "--working-dir", "-c", "--config")
)
_OF_GUARD = frozenset(
    ("--startup", "--stall", "--on-stall", "--nan-steps", "--output", "--log", "--final", "--base")
) | {"--requeue"}
_EACH = (
    Wrapper(
        "uv",
        "run",
        frozenset(_OF_UV.split()),
        0,
        ("--no-sync",),
        frozenset(("--directory",)),
        starts_files=True,
    ),
    Wrapper("poetry", "run", _OF_POETRY, quietly=(), moving=frozenset(("-C", "--directory"))),
    Wrapper("pipenv", "run", frozenset(("--python", "--pypi-mirror")), quietly=()),
    Wrapper("pdm", "run", _OF_PDM, quietly=(), moving=frozenset(("--working-dir",)), starts_files=True),
    *(
        Wrapper(name, "run", _OF_CONDA, quietly=(), moving=frozenset(("--cwd",)))
        for name in ("conda", "mamba", "micromamba")
    ),
    Wrapper(
        "pixi",
        "run",
        frozenset(("-e", "--environment", "--manifest-path", "--color")),
        quietly=("--as-is",),
    ),
    Wrapper("reshard", "guard", _OF_GUARD),
    Wrapper("nohup"),
    Wrapper("setsid"),
    Wrapper("exec"),
    Wrapper("time", "", frozenset(("-f", "--format", "-o", "--output"))),
    Wrapper("nice", "", frozenset(("-n", "--adjustment"))),
    Wrapper("ionice", "", frozenset(("-c", "-n", "--class", "--classdata"))),
    Wrapper("stdbuf", "", frozenset(("-i", "-o", "-e", "--input", "--output", "--error"))),
    Wrapper("taskset", operands=1),
    Wrapper("timeout", "", frozenset(("-k", "--kill-after", "-s", "--signal")), operands=1),
    Wrapper(
        "numactl",
        "",
        frozenset(
            (
                "-m",
                "--membind",
                "-N",
                "--cpunodebind",
                "-C",
                "--physcpubind",
                "-p",
                "--preferred",
                "-i",
                "--interleave",
            )
        ),
    ),
)
WRAPPER_PROGRAMS = {each.program: each for each in _EACH}


def unwrapped(words: Sequence[str]) -> tuple[Wrapper, list[str], list[str]] | None:
    """The wrapper at the beginning of a command, its own words, and the command in it."""
    wrapper = WRAPPER_PROGRAMS.get(Path(words[0]).name) if words else None
    if wrapper is None:
        return None
    at = _after_options(wrapper, words, 1)
    if wrapper.verb:
        if words[at : at + 1] != [wrapper.verb]:
            return None
        at = _after_options(wrapper, words, at + 1)
    at += at < len(words) and words[at] == "--"
    at += wrapper.operands
    return wrapper, list(words[:at]), list(words[at:])


def _after_options(wrapper: Wrapper, words: Sequence[str], at: int) -> int:
    while at < len(words) and words[at].startswith("-") and words[at] != "--":
        at += 2 if words[at] in wrapper.valued else 1
    return at


_MODULE, _SCRIPT = {"-m", "--module"}, {"-s", "--script"}
_INLINE = re.compile(r"^# /// script\s*$", re.MULTILINE)
"""Begins the requirements in a script (PEP 723), which uv installs for it alone."""


def in_python(wrapper: Wrapper, own: Sequence[str], inner: list[str]) -> list[str]:
    """The command in a wrapper, with `python` where the wrapper adds that."""
    if not wrapper.starts_files or not inner:
        return inner
    if _MODULE & {*own}:
        return ["python", "-m", *inner]
    return ["python", *inner] if _SCRIPT & {*own} or inner[0].endswith(".py") else inner


def before_python(wrapper: Wrapper, own: Sequence[str], script: Path) -> list[str]:
    """The words of a wrapper that start an interpreter with the packages of the command, which may be a script."""
    at = own.index(wrapper.verb) + 1
    more = list(() if "--isolated" in own else wrapper.quietly or ())  # an environment that uv removes again
    if wrapper.program == "uv" and script.is_file() and _INLINE.search(script.read_text("utf-8", "replace")):
        more = ["--no-project", "--with-requirements", str(script)]
    words = [*own[:at], *(each for each in more if each not in own), *own[at:]]
    return [word for word in words if not wrapper.starts_files or word not in _MODULE | _SCRIPT]


_OF_RUN = {"--env-file": 2, "-w": 2, "--with": 2, "--with-editable": 2, "--with-requirements": 2}
_OF_RUN |= {"--exact": 1, "--no-env-file": 1, "--no-sync": 1, "--": 1}
"""Options of `uv run` that `uv sync` does not have, with the number of their words."""


def sync_check(interpreter: Sequence[str]) -> list[str]:
    """What ends with exit status 1 if `uv run` installs packages before it starts this; empty if it does not."""
    apart = {"--no-project", "--isolated"} & {*interpreter}
    if Path(interpreter[0]).name != "uv" or "run" not in interpreter or apart:
        return []
    at = interpreter.index("run")
    shared, rest = list[str](), list(interpreter[at + 1 : -1])
    while rest:
        name, given, _ = rest[0].partition("=")
        size = 1 if given else _OF_RUN.get(name, 1)
        shared += [] if name in _OF_RUN else rest[:size]
        rest = rest[size:]
    return [*interpreter[:at], "sync", "--check", "--inexact", *shared]
