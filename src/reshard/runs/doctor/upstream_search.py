"""Where a failure that the catalogue does not have may be known: the repository of the code that raised it."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

from reshard.base.data_files import read_data
from reshard.base.languages import Text
from reshard.runs.checks.history.api_table import PACKAGE_OF_ROOT
from reshard.runs.checks.phrases import phrase_text
from reshard.runs.doctor.text.tracebacks import Traceback

REPOSITORY_SCRIPTS = {
    "zero_to_fp32.py": "deepspeed",
    "ds_to_universal.py": "deepspeed",
    "convert_hf_to_gguf.py": "llama.cpp",
}
"""A package's own scripts that are in a checkout, or next to a checkpoint."""


@lru_cache(maxsize=1)
def repositories() -> dict[str, str]:
    """Repositories on GitHub by the folder of their package (`repositories.yaml`)."""
    content: dict[str, str] = read_data(Path(__file__).with_name("repositories.yaml"))
    return content


def issues_of(root: Traceback) -> tuple[str, str]:
    """The package whose code raised an exception ("" if unknown), and the address where its issues are searched.

    torch's wrappers that only pass a call on (`torch/nn/modules/module.py`, `torch/autograd`) count as little as a
    script: the innermost frame of another package takes precedence.
    """
    packages = [name for frame in reversed(root.frames) if (name := package_of(frame))]
    name = next((each for each in packages if each != "torch"), next(iter(packages), ""))
    return (name, f"https://github.com/{repositories()[name]}/issues") if name else ("", ALL_ISSUES)


ALL_ISSUES = "https://github.com/search"
MAX_QUERY = 100
"""Characters of a message to search for: GitHub takes 256, and the rest of a message is about this run."""
_OF_THIS_RUN = re.compile(r"[\\/\d]|^0x[0-9a-f]+$")
"""In a word: a path, an address or a number. Others who had this failure had other ones."""
_SIGNS = re.compile(r"[^\w\s.'-]+")


def search_words(message: str) -> str:
    """The words of a message by which others find it."""
    of_message = (word for word in message.split("\n")[0].split() if not _OF_THIS_RUN.search(word))
    query = " ".join(_SIGNS.sub(" ", " ".join(of_message)).split())
    return query if len(query) <= MAX_QUERY else query[:MAX_QUERY].rpartition(" ")[0]


_LIBRARY = re.compile(
    r"(?:site|dist)-packages/|/lib(?:64)?/python\d|^<|pip-install-|pip-build-env-|/opt/|/usr/|(?:^|/)(?:Cell|ipython)"
)
_GENERATED = re.compile(r"(?i)/\.\w|cache[^/]*/|^/(?:var/)?te?mp/|/AppData/|/transformers_modules/")
"""Paths of files that a program wrote or downloaded: hidden folders, caches, temporary files."""


def own_code(root: Traceback) -> str | None:
    """The innermost frame, if somebody wrote its file for this run.

    Such a file is neither in a package, or a copy of a known one, nor generated or downloaded by a program.
    """
    frame = asker(root)
    if not frame or not root.exception:
        return None
    path = frame.replace("\\", "/")
    is_foreign = _LIBRARY.search(path) or _GENERATED.search(path) or package_of(frame)
    return None if is_foreign else frame


_PASSES_ON = re.compile(
    r" (?:wrapp(?:er|ed)\w*|inner\w*|_inner_fn|decorate_context|__getattr__|_(?:wrapped_)?call_impl|\S*<locals>.*)"
    r"(?:\(.*)?$"
)
"""Functions between caller and called code: decorators, lookups, hooks."""


def asker(root: Traceback) -> str:
    """The innermost frame of the caller, not of packages' decorators, which only pass a call on; "" without frames."""
    frames = list(root.frames)
    while len(frames) > 1 and _PASSES_ON.search(frames[-1]) and _LIBRARY.search(frames[-1]):
        frames.pop()
    return frames[-1] if frames else ""


def package_of(frame: str) -> str | None:
    """The folder of the known package to which a frame's file belongs."""
    path = frame.rsplit(":", 1)[0].replace("\\", "/")
    if script := next((folder for name, folder in REPOSITORY_SCRIPTS.items() if path.endswith(name)), None):
        return script
    if "-packages/" not in path and _GENERATED.search(path):
        return None  # /tmp/ray is no checkout of Ray
    path = f"/{path.rpartition('-packages/')[2].lstrip('/')}"  # an environment may be named like a package
    names = [match["name"] for match in re.finditer(r"(?<=/)(?P<name>megatron/bridge|[a-z_]\w*)(?=/)", path)]
    known = [name for name in names if name in repositories()]
    if not known:
        return None
    if "-packages/" in frame.replace("\\", "/"):
        return known[0]  # a folder inside a package may be named like another one
    outer = re.search(rf"/(?P<name>\w+)/{known[-1]}/", path)
    return outer["name"] if outer and outer["name"] in repositories() else known[-1]


def place_in_code(root: Traceback) -> Text:
    """Where the exception was raised: the innermost frame with its code, as far as the log shows them."""
    frame = root.frames[-1] if root.frames else ""
    return Text.same(" — ".join(f"`{part}`" for part in (frame, root.source) if part))


def update_of(root: Traceback) -> Text:
    """What to update: the package of the innermost frame, or both caller and called code."""
    if "/transformers_modules/" in "".join(root.frames[-2:]).replace("\\", "/"):
        return phrase_text("update-remote")
    package = installed_of(root)
    return phrase_text("update-asker", package=package) if package else phrase_text("update-both")


def installed_of(root: Traceback) -> str:
    """The package of a failure's innermost frame; "" for a script and for Python itself."""
    frame = root.frames[-1].replace("\\", "/") if root.frames else ""
    match = INSTALLED_PATH.search(frame)
    package = (match["name"] if match else package_of(frame) or "").partition("/")[0]
    return PACKAGE_OF_ROOT.get(package, package.replace("_", "-"))


INSTALLED_PATH = re.compile(r"(?:site|dist)-packages/(?P<name>[A-Za-z]\w*)/")
