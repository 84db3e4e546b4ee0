"""Data that a run could not read: messages of datasets, pyarrow and chat templates about files, columns and records."""

from __future__ import annotations

import re
from collections.abc import Callable

from reshard.diagnosis.finding import Finding, Text
from reshard.diagnosis.log import Log, Traceback
from reshard.diagnosis.rules import Told, told_at
from reshard.diagnosis.words import words

_OF_DATASETS = re.compile(
    r"datasets\.\w+\.Dataset\w*|Dataset(?:Generation)?(?:Cast)?Error|generating the dataset|Arrow\w+|pyarrow|CastError"
    r"|Not able to read records in the JSON file"
)
SAID = 200
"""Lines before a failure of datasets in which it reports the reason."""


def of_records(root: Traceback, log: Log) -> Finding | None:
    """The finding if a failure is about data; None otherwise, or if nothing follows."""
    texts = _texts(root, log)
    if _WHOLE_FILE.search(texts[0][0]) and (match := _TYPE.search(log.text)):
        texts = [
            (match[0], root.last)
        ]  # a JSON array: datasets then reads it as a whole, and fails for this reason
    for text, number in texts:
        for ask in _ASKED:
            if found := ask(text):
                given = {**found[1], "of_python": _of_python(texts)}
                return told_at((found[0], given), log.name, number, text)
    return None


_OF_PYTHON = re.compile(r"JSONDecodeError: (?P<what>[^:\n]{1,80}): line (?P<line>\d+) column (?P<column>\d+)")


def _of_python(texts: list[tuple[str, int]]) -> Text:
    """What Python's own reader said about the same file, which counts lines instead of records."""
    match = next((hit for text, _ in texts if (hit := _OF_PYTHON.search(text))), None)
    return words("json-also", **match.groupdict()) if match else Text.same("")


def _texts(root: Traceback, log: Log) -> list[tuple[str, int]]:
    """The message of each failure in the chain, the first one first, then the lines above if it is only a wrapper."""
    chain: list[tuple[str, int]] = []
    failure: Traceback | None = root
    while failure is not None:
        chain.insert(0, (failure.said, failure.last))
        failure = failure.before
    if _OF_DATASETS.search(root.said):
        near = [
            line for line in log.lines if 0 <= root.last - line.number < SAID and line.stream == root.stream
        ]
        chain.append(("\n".join(line.text for line in near), root.last))
    return chain


# ------------------------------------------------------------------------------------------ columns and types

_COLUMN = re.compile(r"^(?P<name>[\w. -]{1,80}): \w", re.MULTILINE)
_FEATURE = re.compile(r"'(?P<name>[\w. -]{1,80})': (?:Value|Sequence|List|\[|\{|Class|Image|Audio|Large)")
_ADDED = re.compile(r"there (?:are|is) (?P<more>\d+) new columns? \((?P<new>[^)\n]{1,500})\)")
_LACKS = re.compile(r"(?<!\d)(?P<fewer>\d{1,6}) missing columns? \((?P<lost>[^)\n]{1,500})\)")


def _text_in_batch(text: str) -> Told | None:
    """A text column, if a tensor is made from all columns."""
    return (
        ("text-in-batch", {})
        if re.search(r"[Tt]oo many (?:dimensions '?)?str|new\(\): invalid data type 'str'", text)
        else None
    )


def _empty(text: str) -> Told | None:
    return ("data-files-empty", {}) if "SchemaInferenceError" in text else None


def _cast(text: str) -> Told | None:
    new, lost = _ADDED.search(text), _LACKS.search(text)
    if new or lost:
        return _columns(new["new"] if new else "", lost["lost"] if lost else "")
    _, cast, rest = text.partition("Couldn't cast\n")
    was, between, rest = rest.partition("\nto\n")
    to, differ, _ = rest.partition("\nbecause column names don't match")
    if not (cast and between and differ):
        return None
    found = set(_COLUMN.findall(was.split("-- schema metadata")[0]))
    wanted = set(_FEATURE.findall(to))
    return _columns(", ".join(sorted(found - wanted)), ", ".join(sorted(wanted - found)))


def _columns(new: str, lost: str) -> Told:
    return "data-columns", {"new": new or "–", "lost": lost or "–"}


_CHANGED = re.compile(
    r"JSON parse error: Column\((?P<column>[^)\n]*)\) changed from (?P<was>\w+) to (?P<is>\w+) in row (?P<row>\d+)"
)
_WHOLE_FILE = re.compile(r"JSON parse error: Column\(\) changed from object to array in row 0")
_PARSE = re.compile(
    r"(?:JSON|CSV) parse error: (?P<what>[^\n]{1,200}?)(?: in row (?P<row>\d+))?$", re.MULTILINE
)
_TYPE = re.compile(
    r"(?:ArrowTypeError|ArrowInvalid|TypeError|ValueError)(?:'>)?: (?:\([\"'])?(?P<what>(?:"
    r"Expected bytes, got|cannot mix|Could not convert|Couldn't cast array of type"
    r"|Failed to parse string|Integer value|Float value|Expected object or value|Trailing data"
    r"|Mixing dicts)[^\n]{0,200})"
)


_OF_COLUMN = re.compile(r"Conversion failed for column (?P<name>[\w.-]{1,80}) with type")


def _changed(text: str) -> Told | None:
    if match := _CHANGED.search(text):
        shown = {"column": match["column"].strip("/") or "?", "was": match["was"], "now": match["is"]}
        return "data-type-changes", {**shown, "row": match["row"]}
    if "straddling object straddles two block boundaries" in text:
        return "data-one-object", {}
    if match := _PARSE.search(text):
        return "data-unreadable", {"what": match["what"], "row": match["row"] or "?"}
    if match := _TYPE.search(text):
        column = _OF_COLUMN.search(match["what"])
        what = match["what"].partition("\", 'Conv")[0]
        return "data-mixed-types", {"what": what, "field": column["name"] if column else "FIELD"}
    return None


# ------------------------------------------------------------------------------------------ names that do not exist

_NAMED = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        ("config", r"BuilderConfig '?(?P<name>[^'\s]+)'? not found\. Available: (?P<there>\[[^\]\n]*\])"),
        (
            "config",
            r"Config name is missing\.\s*\n?Please pick one among the available configs:"
            r" (?P<there>\[[^\]\n]*\])(?P<name>)",
        ),
        ("split", r"Unknown split \"?(?P<name>[\w\[\]:%.]+)\"?\. Should be one of (?P<there>\[[^\]\n]*\])"),
        (
            "column",
            r"Column name '?(?P<name>[^'\n]{1,80}?)'? not in the dataset\. Current columns in the"
            r" dataset: (?P<there>\[[^\]\n]*\])",
        ),
        (
            "column",
            r"Original column name (?P<name>[^\n]{1,80}?) not in the dataset\. Current columns in the"
            r" dataset: (?P<there>\[[^\]\n]*\])",
        ),
        (
            "column",
            r"Column to remove (?P<name>\[[^\]\n]*\]) not in the dataset\. Current columns in the"
            r" dataset: (?P<there>\[[^\]\n]*\])",
        ),
        (
            "column",
            r"Columns? (?P<name>\[[^\]\n]*\]) not in the dataset\. Current columns in the dataset:"
            r" (?P<there>\[[^\]\n]*\])",
        ),
    )
)


def _name(text: str) -> Told | None:
    for kind, pattern in _NAMED:
        if match := pattern.search(text):
            what = words(f"data-{kind}")
            shown = {"name": match["name"] or "–", "there": match["there"]}
            return "data-name", {"what": what, "way": words(f"data-{kind}-way", **shown), **shown}
    return None


_SCRIPT = re.compile(r"Dataset scripts are no longer supported, but found (?P<name>\S+)")


def _scripts(text: str) -> Told | None:
    match = _SCRIPT.search(text)
    return ("data-script", {"name": match["name"]}) if match else None


# ------------------------------------------------------------------------------------------ chats

_TEMPLATE = re.compile(
    r"(?:jinja2\.exceptions\.)?(?P<kind>TemplateError|UndefinedError|TemplateSyntaxError"
    r"|TemplateAssertionError): (?P<what>[^\n]{1,300})"
)


def _chat(text: str) -> Told | None:
    match = _TEMPLATE.search(text)
    if match is None:
        return None
    what = match["what"]
    if match["kind"] in ("TemplateSyntaxError", "TemplateAssertionError"):
        why = "chat-syntax"
    elif re.search(r"alternat|after the optional system|must be user|First message", what):
        why = "chat-order"
    elif re.search(r"[Ss]ystem", what):
        why = "chat-system"
    else:
        why = "chat-fields"
    return "chat-refused", {"what": what, "why": words(why), "cure": words(f"{why}-cure")}


_ASKED: tuple[Callable[[str], Told | None], ...] = (
    _text_in_batch,
    _empty,
    _cast,
    _changed,
    _name,
    _scripts,
    _chat,
)
