"""Whose fault a failure is, by the caller: another package, the user's own code, the interpreter."""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from importlib import import_module

from reshard.diagnosis.builds import installed_for
from reshard.diagnosis.finding import Finding, Place, Text
from reshard.diagnosis.history.missing import IMPORT, copy_of
from reshard.diagnosis.history.table import PACKAGES
from reshard.diagnosis.log import Log, Traceback
from reshard.diagnosis.rules import told, told_at
from reshard.diagnosis.upstream import is_of_package, package_of
from reshard.diagnosis.words import words

_SUSPECTS = (
    *(
        "flash_attn",
        "vllm",
        "lmdeploy",
        "sglang",
        "transformer_engine",
        "mamba_ssm",
        "deepspeed",
        "bitsandbytes",
    ),
    *("xformers", "apex", "triton", "liger_kernel", "unsloth", "tensorflow"),
)
"""Modules that packages import only if they can, and that often do not fit the installed torch."""
_CHECK = re.compile(r"^is[a-z]|available|version|greater")
"""Names of functions that look whether a package is there, which are defined in any case."""
_OF_MODEL = re.compile(r"(?:For[A-Z]\w+|Model|Attention|Transformer)$")


def of_hidden_import(root: Traceback, log: Log) -> Finding | None:
    """The finding that a package's `__init__.py` lacks a name because it hid the error of that name's own import.

    A package knows its own names, so it is not another release of itself. Of known packages only for names of an
    optional dependency: these packages hide nothing else.
    """
    match = IMPORT.search(root.said)
    folder = copy_of(match) if match else ""
    if match is None or not folder or "partially initialized" in root.said:
        return None
    above, _, package = folder.rpartition("/")
    named = match["name"].lower().replace("_", "")
    suspect = next((each for each in _SUSPECTS if each.replace("_", "") in named), None)
    frame = root.frames[-1].replace("\\", "/") if root.frames else ""
    if (package in PACKAGES and (not suspect or _CHECK.search(named))) or not (
        frame or "." in match["module"]
    ):
        return None
    if frame and not frame.startswith(f"{folder if is_installed(folder) else above}/"):
        return None
    suspect = suspect or next((each for each in _SUSPECTS if _named_in(log.text, each)), None)
    if suspect is None and _OF_MODEL.search(match["name"]):
        suspect = "flash_attn"
    own = frame.startswith(f"{folder}/") and not (is_installed(folder) and package not in PACKAGES)
    values: dict[str, object] = {**match.groupdict(), "package": package, "folder": folder, "above": above}
    values["why"] = words("hidden-suspect", suspect=suspect) if suspect else words("hidden-optional")
    install = installed_for(suspect) if suspect else ""
    again = "--force-reinstall --no-deps --no-cache-dir " if "isolation" in install else "-U "
    cure = (
        words("hidden-suspect-cure", suspect=suspect, install=f"{again}{install}")
        if suspect
        else Text.same("")
    )
    place = Place.of(log.name, root.last, root.said)
    return told("import-hidden", [place], {**values, "cure": cure}, certainty="likely" if own else "possible")


def is_installed(folder: str) -> bool:
    """Whether a folder is among installed packages, not a checkout."""
    return bool(re.search(r"(?:site|dist)-packages/", folder))


def _named_in(text: str, module: str) -> bool:
    """Whether a log names a module or its package."""
    return bool(re.search(rf"(?<![A-Za-z]){module.replace('_', '[-_]')}(?![A-Za-z])", text))


_TYPES = r"(?P<kind>list|dict|tuple|str|int|float|bool|set|bytes|function|method|OrderedDict|NoneType)"
_PATTERNS = tuple(
    re.compile(pattern)
    for pattern in (
        rf"AttributeError: ['\"`‘’“”]{_TYPES}['\"`‘’“”] object has no attribute",
        rf"TypeError: ['\"`‘’“”]{_TYPES}['\"`‘’“”] object is not (?:callable|subscriptable|iterable|a mapping)",
        r"TypeError: (?P<kind>list|string|tuple|str) indices must be integers",
    )
)
_INSTALLED = re.compile(r"(?:site|dist)-packages/(?P<name>[A-Za-z_]\w*)")


def of_wrong_type(root: Traceback, log: Log) -> Finding | None:
    """The finding that a package got a plain Python value of a wrong type, and from whom; None for user code."""
    match = next((hit for pattern in _PATTERNS if (hit := pattern.search(root.said))), None)
    if match is None or not is_of_package(root):
        return None
    owners = [owner(frame) for frame in root.frames]
    asked = owners[-1]
    if asked is None:
        return None
    caller = next((at for at in reversed(range(len(owners))) if owners[at] != asked), None)
    by = owners[caller] if caller is not None else asked
    values: dict[str, object] = {
        "package": PACKAGES.get(asked, asked.replace("_", "-")),
        "kind": match["kind"],
    }
    values["frame"] = root.frames[-1]
    if by == asked:
        values["whose"] = words("type-of-itself", package=values["package"])
    elif by is None and caller is not None:
        values["whose"] = words("type-of-script", frame=root.frames[caller], package=values["package"])
    else:
        values["whose"] = words("type-of-other", other=str(by).replace("_", "-"), package=values["package"])
    return told_at(("value-of-another-type", values), log.name, root.last, root.said)


_OF_PYTHON = re.compile(
    r"cannot import name ['\"`‘’](?P<name>\w+)['\"`‘’] from ['\"`‘’](?P<module>\w+)(?:\.\w+)*['\"`‘’]"
    r" \([^)]{0,300}/lib/python(?P<version>3\.\d+)/(?!(?:site|dist)-packages)"
)


def of_python(root: Traceback, log: Log) -> Finding | None:
    """The finding that the interpreter is too old or too new for a name of its standard library."""
    match = _OF_PYTHON.search(root.said)
    if match is None or match["module"] not in sys.stdlib_module_names:
        return None
    here, there = sys.version_info[:2], tuple(map(int, match["version"].split(".")))
    with suppress(ImportError):
        later = hasattr(import_module(match["module"]), match["name"]) and there < here
        which = words("a-newer" if later else "an-older")
        other = f"{here[0]}.{here[1]}" if later else f"{there[0]}.{there[1] - 1}"
        values = {**match.groupdict(), "which": which, "other": other}
        return told_at(("python-release", values), log.name, root.last, root.said)
    return None


_PYTHON_2 = re.compile(r"ImportError: No module named (?P<module>[A-Za-z_][\w.]*)\s*$", re.MULTILINE)
"""Python 3 raises ModuleNotFoundError here, with quotes around the name."""


def of_python_2(root: Traceback, log: Log) -> Finding | None:
    """The finding that the interpreter is Python 2, by its message for a missing module."""
    match = _PYTHON_2.search(root.said)
    if match is None:
        return None
    return told_at(
        ("python-two", {"module": match["module"].partition(".")[0]}), log.name, root.last, root.said
    )


_SUBMODULE = re.compile(r"No module named ['\"](?P<module>(?P<package>[A-Za-z_]\w*)(?:\.\w+)+)['\"]")
_NAMESPACES = frozenset(
    ("google", "megatron", "nvidia", "azure", "ruamel", "mpl_toolkits", "transformers_modules")
)
"""Packages that several distributions fill."""


def of_submodule(root: Traceback, log: Log) -> Finding | None:
    """The finding that a package was imported that has no such part; None if the package itself is missing."""
    match = _SUBMODULE.search(root.said)
    if match is None or match["package"] in _NAMESPACES | sys.stdlib_module_names:
        return None
    values = {**match.groupdict(), "distribution": PACKAGES.get(match["package"], match["package"])}
    own = imports_itself(root, log) or (root.frames and owner(root.frames[-1]) == match["package"])
    identifier = "package-without-part" if own else "submodule-missing"
    return told_at((identifier, values), log.name, root.last, root.said)


_RELATIVE = re.compile(r"^\s*from \.[\w.]* import\b")


def imports_itself(root: Traceback, log: Log) -> bool:
    """Whether the import that failed is relative, so that a package lacks a part of its own."""
    before = (line.text for line in log.lines if line.stream == root.stream and line.number == root.last - 1)
    return bool(_RELATIVE.match(root.source or next(before, "")))


_PAIR = re.compile(
    r"cannot import name ['\"`‘’](?P<name>\w+)['\"`‘’]? from "
    r"['\"`‘’](?P<module>(?P<package>[A-Za-z]\w*)(?:\.\w+)*)['\"`‘’]"
    r"(?! \(unknown location)(?: \((?P<path>[^)\n]{0,300}))?"
)


_PARTNERS = {"unsloth_zoo": "unsloth"}
"""Packages that only one other package imports."""


def of_pair(root: Traceback, log: Log) -> Finding | None:
    """The finding that a package imports a name which the installed release of another one does not have.

    For packages whose history is not known.
    """
    match = _PAIR.search(root.said)
    asking = owner(root.frames[-1]) if root.frames else match and _PARTNERS.get(match["package"])
    if match is None or not asking or "partially initialized" in root.said:
        return None
    called = match["package"]
    own = match["path"] and not _INSTALLED.search(match["path"])
    if own or called in (asking, *_NAMESPACES) or called in sys.stdlib_module_names or called in PACKAGES:
        return None
    values: dict[str, object] = {
        **match.groupdict(),
        "package": called,
        "distribution": installed_for(called),
        "importer": PACKAGES.get(asking, asking.replace("_", "-")),
    }
    return told_at(("import-of-other-release", values), log.name, root.last, root.said)


_OF_ENGINE = re.compile(
    r"'(?P<kind>LLM|LLMEngine|AsyncLLM|EngineCore\w*|InprocClient|SyncMPClient|MultiprocExecutor|UniProcExecutor)'"
    r" object has no attribute '(?P<name>model_executor|driver_worker|workers?|model_runner|scheduler|llm_engine)'"
)


def of_engine(root: Traceback, log: Log) -> Finding | None:
    """The finding that code reaches into vLLM's first engine, and the second one runs."""
    match = _OF_ENGINE.search(root.said)
    if match is None:
        return None
    return told_at(("vllm-engine-of-v0", match.groupdict()), log.name, root.last, root.said)


def owner(frame: str) -> str | None:
    """The package of a frame's file; None for a script."""
    match = _INSTALLED.search(frame)
    found = match["name"] if match else package_of(frame)
    return found.partition("/")[0] if found else None
