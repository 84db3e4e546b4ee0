"""Programs that run another command, such as `uv run` and `nohup`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Wrapper:
    """A program that runs the command after its own options and operands.

    `valued` are its options with a value. `quietly` is what makes it start an interpreter without installing anything;
    None if the command has the same Python without the wrapper.
    """

    words: tuple[str, ...]
    valued: frozenset[str] = frozenset()
    operands: int = 0
    quietly: tuple[str, ...] | None = None


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
WRAPPERS = (
    Wrapper(("uv", "run"), frozenset(_OF_UV.split()), quietly=("--no-sync",)),
    Wrapper(("poetry", "run"), quietly=()),
    *(Wrapper((name, "run"), _OF_CONDA, quietly=()) for name in ("conda", "mamba", "micromamba")),
    Wrapper(
        ("pixi", "run"),
        frozenset(("-e", "--environment", "--manifest-path", "--color")),
        quietly=("--as-is",),
    ),
    Wrapper(("nohup",)),
    Wrapper(("setsid",)),
    Wrapper(("exec",)),
    Wrapper(("time",), frozenset(("-f", "--format", "-o", "--output"))),
    Wrapper(("nice",), frozenset(("-n", "--adjustment"))),
    Wrapper(("ionice",), frozenset(("-c", "-n", "--class", "--classdata"))),
    Wrapper(("stdbuf",), frozenset(("-i", "-o", "-e", "--input", "--output", "--error"))),
    Wrapper(("taskset",), operands=1),
    Wrapper(("timeout",), frozenset(("-k", "--kill-after", "-s", "--signal")), operands=1),
    Wrapper(
        ("numactl",),
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


def unwrapped(words: Sequence[str]) -> tuple[Wrapper, list[str], list[str]] | None:
    """The wrapper at the beginning of a command, its own words, and the command in it."""
    name = (Path(words[0]).name, *words[1:2]) if words else ()
    wrapper = next((each for each in WRAPPERS if each.words == name[: len(each.words)]), None)
    if wrapper is None:
        return None
    at = len(wrapper.words)
    while at < len(words) and words[at].startswith("-") and words[at] != "--":
        at += 2 if words[at] in wrapper.valued else 1
    at += at < len(words) and words[at] == "--"
    at += wrapper.operands
    return wrapper, list(words[:at]), list(words[at:])
