"""What Python's own exceptions show: keys, None, attributes, files, unpicklable functions, bytes that are not text.

The line of code that raised it shows what the thing is: a config, a record of the data, the environment, a table.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from reshard.diagnosis.artefacts import kind_of_file
from reshard.diagnosis.attributes import of_attribute, of_none
from reshard.diagnosis.builds import supplied
from reshard.diagnosis.finding import Finding
from reshard.diagnosis.history.table import PACKAGES
from reshard.diagnosis.log import Log, Traceback
from reshard.diagnosis.lookups import of_key
from reshard.diagnosis.rules import Told, told_at
from reshard.diagnosis.upstream import place_in_code
from reshard.diagnosis.words import words


def of_pythons(root: Traceback, log: Log) -> Finding | None:
    """The finding for an exception of Python itself; None if nothing follows from it."""
    first = root.root
    for ask in _ASKED:
        if found := ask(first, log):
            return told_at(found, log.name, first.last, first.said)
    return None


# ------------------------------------------------------------------------------------------ files

_NO_FILE = re.compile(
    r"FileNotFoundError: (?:\[Errno 2\] (?:Failed to open[^']{0,40}'"
    r"|No such file or directory: )['\"]?(?P<path>[^'\"\n]+)"
    r"|(?:Unable to find|Couldn't find|Could not find|[Cc]annot find|File not found:|[Cc]an't find"
    r"|No such file or directory:?) ['\"]?(?P<other>[^'\"\n]*/[^'\"\n]+|\S+\.\w{2,8}\b))"
)
_SOUGHT = r"(?<![\w.~/\\-])(?P<path>[\w.~/\\-]{1,300}\.\w{2,12})\b['\"`]?"
_IN_FOLDER = r"(?: (?:found )?in (?P<folder>[\w.~/\\-]{1,300}))?"
_UNNAMED = tuple(
    re.compile(pattern)
    for pattern in (
        rf"(?i:no such file or directory|no file with name|find(?: the)?(?: file)?|missing file):? ['\"`]?{_SOUGHT}"
        rf"{_IN_FOLDER}",
        rf"{_SOUGHT} (?:was |is |could )?not (?:be )?found{_IN_FOLDER}",
    )
)
"""Messages of programs about a file, in other words than Python's."""
_LEGACY = re.compile(r"mp_rank_\d\d(?:_\d{3})?|model_optim_rng\.pt|model_rng\.pt")
_DISTRIBUTED = re.compile(r"\.distcp\b|torch_dist|common\.pt|\.metadata\b")
_OF_MODEL = re.compile(
    r"(?:[/\\]|^(?=tokenizer))(?P<file>(?:config|generation_config|tokenizer|tokenizer_config|special_tokens_map|vocab"
    r"|preprocessor_config|processor_config|added_tokens)\.json|merges\.txt|(?:tokenizer|spiece|sentencepiece\.bpe)\.model"
    r"|chat_template\.jinja|(?:configuration|modeling|tokenization|processing)_\w+\.py)$"
)
"""Files of a Hugging Face model other than its weights."""
_OWN_FILE = re.compile(r"/(?:site|dist)-packages/(?P<package>\w+)/(?P<part>\S+)$")
_REPLACED = re.compile(r"[{<\[]\w+[}>\]]|path[_/]to|your[_-]|/path/|\$\{?\w|XXX", re.IGNORECASE)


def _file(root: Traceback, log: Log) -> Told | None:
    match = _NO_FILE.match(root.said)
    if match is None:
        return _file_of_kind(root)
    path = (match["path"] or match["other"]).strip()
    if re.fullmatch(r"[a-z][\w+-]{1,30}", path) and (program := supplied("programs", path)):
        return "program-missing", program
    if named := _of_kind(path):
        return named
    if _LEGACY.search(path):
        way = words("legacy-of-dist" if _DISTRIBUTED.search(log.text) else "legacy-or-dist")
        return "file-of-legacy", {"path": path, "way": way}
    if _REPLACED.search(path):
        return "file-placeholder", {"path": path}
    if (own := _OWN_FILE.search(path)) and root.frames and f"/{own['package']}/" in root.frames[-1]:
        package = own["package"]
        distribution = PACKAGES.get(package, package.replace("_", "-"))
        return "package-without-part", {
            "package": package,
            "module": own["part"],
            "distribution": distribution,
        }
    if of_model := _OF_MODEL.search(path):
        return "file-of-model", {"file": of_model["file"], "folder": path[: of_model.start()] or "FOLDER"}
    if path.startswith("/tmp/") or "/.cache/" in path or "torchelastic" in path:
        return "file-of-cache", {"path": path, "folder": path.rpartition("/")[0] or "."}
    absolute = bool(re.match(r"/|[A-Za-z]:|~", path))
    kind = "file-missing" if absolute else "file-relative"
    return kind, {"path": path, "folder": path.rpartition("/")[0] or ".", "where": place_in_code(root)}


def _file_of_kind(root: Traceback) -> Told | None:
    """The same for a message in a program's own words, if the file's name shows what the program reads."""
    match = next((hit for pattern in _UNNAMED if (hit := pattern.search(root.said))), None)
    if match is None:
        return None
    path, folder = match["path"].rstrip("."), (match["folder"] or "").rstrip(".")
    return _of_kind(f"{folder.rstrip('/')}/{path}" if folder else path)


def _of_kind(path: str) -> Told | None:
    """What a program reads that looks for a file whose name only one kind of checkpoint has."""
    kind = kind_of_file(path)
    if kind is None:
        return None
    folder = path.rpartition("/")[0] or "."
    return "file-of-kind", {"path": path, "kind": kind.name, "way": words(kind.sought, folder=folder)}


# ------------------------------------------------------------------------------------------ processes, bytes, JSON

_LOCAL = re.compile(
    r"(?:AttributeError|_?pickle\.PicklingError|PicklingError|TypeError): (?:Can't (?:get local object"
    r"|pickle local object|pickle) "
    r"'?<?(?P<local>[\w.<> ]+)|cannot pickle '(?P<kind>[\w. ]+)' object)"
)


def _not_sendable(root: Traceback, log: Log) -> Told | None:
    match = _LOCAL.match(root.said)
    if match is None:
        return None
    name = (match["local"] or match["kind"]).strip()
    saving = any(
        re.search(r"/serialization\.py:\d+ (?:save|_save)|save_checkpoint|save_pretrained", each)
        for each in root.frames
    )
    return ("not-storable" if saving else "not-sendable"), {"name": name}


_BYTES = re.compile(
    r"UnicodeDecodeError: '(?P<codec>[\w-]+)' codec can't decode bytes? (?:0x(?P<byte>[0-9a-f]{2}) )?in"
    r" position (?P<at>\d+)"
)
_ENCODES = re.compile(r"UnicodeEncodeError: '(?P<codec>[\w-]+)' codec can't encode")
_STARTS = {"8b": "gzip", "80": "pickle", "ff": "UTF-16", "fe": "UTF-16", "89": "PNG", "b5": "zstd"}


def _bytes(root: Traceback, log: Log) -> Told | None:
    if encodes := _ENCODES.match(root.said):
        return "text-of-platform", {"codec": encodes["codec"]}
    match = _BYTES.match(root.said)
    if match is None:
        return None
    if match["codec"].lower().replace("_", "-") not in ("utf-8", "utf8"):
        return "text-of-platform", {"codec": match["codec"]}
    kind = _STARTS.get(match["byte"] or "") if int(match["at"]) <= 1 else None
    if kind:
        return "bytes-no-text", {
            "byte": match["byte"],
            "at": match["at"],
            "kind": kind,
            "where": place_in_code(root),
        }
    return "text-of-other-encoding", {"at": match["at"], "where": place_in_code(root)}


_JSON = re.compile(
    r"(?:json\.(?:decoder\.)?)?JSONDecodeError: (?P<what>[^:\n]+): line (?P<line>\d+) column (?P<column>\d+)"
)


def _json(root: Traceback, log: Log) -> Told | None:
    match = _JSON.match(root.said)
    if match is None:
        return None
    what, line, column = match["what"], int(match["line"]), int(match["column"])
    if what == "Expecting value" and (line, column) == (1, 1):
        why = words("json-empty")
    elif what == "Extra data":
        why = words("json-lines" if line == 2 and column == 1 else "json-twice", line=line)
    elif what.startswith("Expecting property name"):
        why = words("json-comma", line=line)
    else:
        why = words("json-cut", line=line, column=column)
    way = words("json-lines-way" if what == "Extra data" and line > 1 else "json-way", line=line)
    return "json-broken", {
        "why": why,
        "where": place_in_code(root),
        "line": line,
        "way": way,
        "column": column,
    }


_ASKED: tuple[Callable[[Traceback, Log], Told | None], ...] = (
    *(of_key, of_none, of_attribute, _file, _not_sendable, _bytes, _json),
)
