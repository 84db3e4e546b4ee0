"""What the message of a failure says is missing: of a module, a class, a function, or a registry of models."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from reshard.runs.doctor.text.log import Log, Traceback


class MissingKind(Enum):
    """What is missing, and of what."""

    IMPORT = "a name that is imported from a module"
    NAME = "a name that is read from a module"
    MODULE = "a module of a package"
    ATTRIBUTE = "an attribute of a class or of its instances"
    KEYWORD = "a parameter that a call names"
    POSITION = "a parameter for an argument without a name"
    MODEL_TYPE = "a model type of transformers"
    ARCHITECTURE = "an architecture of vLLM"


NAME_KINDS = (MissingKind.IMPORT, MissingKind.NAME)


@dataclass(frozen=True)
class Missing:
    """Something that a message reports as missing. `owner` is the module, the class or the function that lacks it."""

    kind: MissingKind
    owner: str
    name: str
    path: str = ""
    """The file of the module, if the message tells it."""
    count: int = 0
    """How many arguments were too many."""

    @property
    def root(self) -> str:
        """The first part of a module's name."""
        return self.owner.partition(".")[0]

    @property
    def whole(self) -> str:
        """A module, or a name with what it belongs to."""
        return f"{self.owner}.{self.name}" if self.name else self.owner


QUOTE = r"[`'\"‘’“”]"
_NAME = rf"{QUOTE}(?P<name>\w+)"
_MODULE = rf"{QUOTE}(?P<owner>[\w.]+){QUOTE}"
_FUNCTION = r"(?<![\w.<>])(?P<owner>[\w.<>]+)\(\)"
PATTERNS = {
    MissingKind.IMPORT: rf"cannot import name {_NAME}{QUOTE}? from {_MODULE}(?: \((?P<path>[^)]+)\))?",
    MissingKind.NAME: rf"(?<!initialized )module {_MODULE} has no attribute {_NAME}",
    MissingKind.MODULE: rf"(?:No module named {QUOTE}|(?<!ImportError: )No module named )"
    rf"(?P<owner>\w+(?:\.\w+)+){QUOTE}?(?!.*is not a package)",
    MissingKind.KEYWORD: rf"{_FUNCTION} got an unexpected keyword argument {_NAME}",
    MissingKind.POSITION: rf"{_FUNCTION} takes (?:from \d+ to )?(?P<takes>\d+) positional arguments?"
    r" but (?P<given>\d+) (?:was|were)",
    MissingKind.MODEL_TYPE: rf"model type {QUOTE}(?P<name>[\w.-]+){QUOTE} but Transformers does not recognize",
    MissingKind.ARCHITECTURE: rf"Model architectures? \[{_NAME}{QUOTE}.*(?:not supported|no vLLM implementation)",
    MissingKind.ATTRIBUTE: (
        rf"(?<!module )(?:type object )?{QUOTE}(?P<owner>\w+){QUOTE}(?: object)? has no attribute {_NAME}"
    ),
}
_COMPILED = {kind: re.compile(pattern) for kind, pattern in PATTERNS.items()}
_REGISTRIES = {MissingKind.MODEL_TYPE: "transformers", MissingKind.ARCHITECTURE: "vllm"}
_KEY = re.compile(r"KeyError: ['\"](?P<name>[a-z][\w-]{2,60})['\"]")
_OF_MODELS = re.compile(r"CONFIG_MAPPING|configuration_auto|Auto(?:Config|Model|Processor|Tokenizer)\b")
_UNDERSCORED = re.compile(r"(?<=\.)(?:\*\*)?init(?:\*\*)?$")
"""`__init__` as Markdown shows it."""


def missing_in(failure: Traceback, log: Log) -> Iterator[Missing]:
    """What the message of a failure says is missing."""
    for kind, pattern in _COMPILED.items():
        if match := pattern.search(failure.error_text):
            yield from _missing(kind, match.groupdict(), failure, log)
    if (match := _KEY.search(failure.error_text)) and _OF_MODELS.search(log.text):
        yield Missing(MissingKind.MODEL_TYPE, "transformers", match["name"])


def imported_in(message: str) -> Missing | None:
    """The name that a message says cannot be imported."""
    match = _COMPILED[MissingKind.IMPORT].search(message)
    return Missing(MissingKind.IMPORT, match["owner"], match["name"], match["path"] or "") if match else None


def _missing(
    kind: MissingKind, parts: dict[str, str | None], failure: Traceback, log: Log
) -> Iterator[Missing]:
    owner, name = parts.get("owner") or _REGISTRIES.get(kind, ""), parts.get("name") or ""
    if kind not in (MissingKind.KEYWORD, MissingKind.POSITION):
        yield Missing(kind, owner, name, parts.get("path") or "")
        return
    count = int(parts.get("given") or 0) - int(parts.get("takes") or 0)
    for function in _functions(owner, failure, log):
        yield Missing(kind, function, name, count=count)


def _functions(function: str, failure: Traceback, log: Log) -> list[str]:
    """The qualified names that a message may mean: Python 3.9 writes `__init__()` for that of any class."""
    if function != "__init__":
        return [_UNDERSCORED.sub("__init__", function)]
    before = (line.text for line in log.lines if line.number == failure.last - 1)
    called = re.findall(r"\b([A-Z]\w*)\(", failure.source or next(before, ""))
    return [f"{name}.__init__" for name in called]


def is_shadowed(path: str) -> bool:
    """Whether a module was loaded from outside of the folders for installed packages."""
    return bool(path) and not re.search(r"(?:site|dist)-packages|/\.local/", path)


def checkout_of(missing: Missing) -> str:
    """The folder outside of those for installed packages with the package that lacks a name; "" if it has none."""
    inside, path = re.escape(missing.owner.replace(".", "/")), missing.path.replace("\\", "/")
    match = re.fullmatch(rf"(?P<folder>.*)/{inside}(?:\.py|/(?:__|\*\*)init(?:__|\*\*)\.py)", path)
    return match["folder"] if match and is_shadowed(path) else ""
