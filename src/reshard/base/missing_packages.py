"""How to install a missing package in the way that reshard itself was installed."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlparse

if TYPE_CHECKING:
    from importlib.metadata import Distribution

_NEEDS_NO_QUOTES = re.compile(r"[\w@%+=:,./-]+")

PACKAGE_OF_MODULE = {"megatron": "megatron-core", "yaml": "pyyaml"}
"""Modules whose package has another name."""


def install_command(*packages: str) -> str:
    """The shell command that installs packages.

    It names the smallest extra of reshard that has them all, and where reshard was installed from (PEP 610). If that
    is not recorded or gone, it names what the extra requires, because no index may have reshard. Packages that no extra
    has are named directly.
    """
    names = {_normal(name) for name in packages}
    reshard = _installed("reshard")
    if reshard is None:  # a checkout on PYTHONPATH
        return _line(*packages)
    extras = _extras(reshard)
    having = [extra for extra, brought in extras.items() if names <= brought.keys()]
    if not having:
        return _line(*packages)
    extra = min(having, key=lambda extra: (len(extras[extra]), extra))
    required = extras[extra]
    return _line(
        *(_origin(reshard, extra) or (required.values() if extra else map(required.__getitem__, names)))
    )


def remedy(error: ImportError) -> str:
    """What to do about a failed import.

    A module may have another name than its package, and that name may belong to someone else: only packages that
    reshard knows are named.
    """
    module = (error.name or "").partition(".")[0]
    package = _normal(PACKAGE_OF_MODULE.get(module, module))
    if package == "megatron-core":
        return f"{install_command('psutil', 'torch')} && {_line('--no-deps', package)}"
    reshard = _installed("reshard")
    known = _extras(reshard) if reshard else {}
    if any(package in brought for brought in known.values()):
        return install_command(package)
    return (
        f"install the package that has the module {module!r}"
        if module
        else "see which package cannot be loaded"
    )


def _installed(name: str) -> Distribution | None:
    # Imported here, as packaging is below: otherwise every command would take 30 ms longer for a rare message.
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def _extras(reshard: Distribution) -> dict[str, dict[str, str]]:
    """The requirements of each extra, with "" for reshard itself, by normalised name."""
    from packaging.requirements import Requirement

    extras: dict[str, dict[str, str]] = defaultdict(dict)
    for line in reshard.requires or ():
        requirement = Requirement(line)
        extra = re.search(r"extra == ['\"]([\w.-]+)", str(requirement.marker))
        requirement.marker = None
        extras[extra[1] if extra else ""][_normal(requirement.name)] = str(requirement)
    return extras


def _origin(reshard: Distribution, extra: str) -> list[str]:
    """reshard with an extra, as arguments of pip for where it was installed from; empty if that is unknown or gone."""
    origin = json.loads(reshard.read_text("direct_url.json") or "{}")
    if not origin:
        return []
    name = f"reshard[{extra}]" if extra else "reshard"
    url = origin["url"]
    part = f"#subdirectory={origin['subdirectory']}" if "subdirectory" in origin else ""
    if vcs := origin.get("vcs_info"):
        url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    elif url.startswith("file:"):
        local = Path(unquote(urlparse(url).path))
        if not local.exists():
            return []
        if origin.get("dir_info", {}).get("editable"):
            return ["-e", f"{local}[{extra}]" if extra else str(local)]
    return [f"{name} @ {url}{part}"]


def _line(*arguments: str) -> str:
    quoted = (word if _NEEDS_NO_QUOTES.fullmatch(word) else f"'{word}'" for word in arguments)
    return " ".join([_installer(), *quoted])


def _installer() -> str:
    """`pip install` if the shell finds the pip of this Python; otherwise an equivalent command."""
    python = Path(sys.executable)
    if not _installed("pip"):  # searching for the module would make setuptools give up its distutils
        return f"uv pip install --python {python}"
    pip = shutil.which("pip")
    return "pip install" if pip and Path(pip).parent == python.parent else f"{python} -m pip install"


def _normal(name: str) -> str:
    """A package name as indexes normalise it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()
