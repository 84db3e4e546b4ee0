"""Arguments and keys that a program does not know, and the ones that were probably meant."""

from __future__ import annotations

import re
from collections.abc import Iterator

from packaging.version import Version

from reshard.base.languages import Text
from reshard.base.suggest import closest
from reshard.runs.checks import rules
from reshard.runs.checks.finding import Finding
from reshard.runs.checks.history.api_table import table
from reshard.runs.checks.history.config_keys import ConfigKeys
from reshard.runs.checks.history.versions_in_use import Versions
from reshard.runs.checks.phrases import phrase_text
from reshard.runs.doctor.remedy_spelling import RunTools, keys_of
from reshard.runs.doctor.text.log import Log, Traceback

_REFUSED = re.compile(
    r"unrecognized arguments?: (?P<arguments>[^\n]+)"
    r"|(?:not used by the HfArgumentParser|remaining_argv): \[(?P<list>[^\]\n]*)\]"
    r"|had unknown keys \(\[(?P<keys>[^\]\n]*)\]\)"
    r"|[Nn]o such option:? (?P<option>--[\w-]+)"
    r"|[Uu]nrecognized (?:option|argument)s?:? (?P<other>--?[\w-]+)"
    r"|[Kk]ey '\w+' is not in struct[^\n]*\n\s*full_key: (?P<full>[\w.]+)|[Kk]ey '(?P<struct>\w+)' is not in struct"
    r"|Could not override '(?P<override>[\w.]+)'"
    r"|^(?P<extra>[\w.]+)\n\s+Extra inputs are not permitted",
    re.MULTILINE,
)
_FLAG = re.compile(r"(?<![\w-])--?([A-Za-z][\w.-]*)")
_NAME = re.compile(r"[A-Za-z_][\w.-]*")
MAX_NAMES = 5
"""Maximum unknown names that are told."""


def of_arguments(root: Traceback, log: Log) -> Finding | None:
    """The finding for what a program does not know; None for other failures."""
    unknown = list(dict.fromkeys(_unknown(root.error_text)))
    known = _known(root.error_text, log) if unknown else set()
    texts = _of_releases(unknown, root, log) or [_near(name, known) for name in unknown[:MAX_NAMES]]
    texts += [phrase_text("argument-value", name=value) for value in _values(root.error_text)]
    if not texts:
        return None
    lines = Text("; ".join(each.en for each in texts), "；".join(each.zh for each in texts))
    return rules.finding("unknown-key", values={"told": lines})


def _unknown(message: str) -> Iterator[str]:
    """The names in a message, without their values."""
    for match in _REFUSED.finditer(message):
        given = next(each for each in match.groups() if each is not None)
        flags = _FLAG.findall(given)
        yield from flags if flags or match["arguments"] else _NAME.findall(given)


def _values(message: str) -> list[str]:
    """What argparse refuses behind a flag that takes no value: words alone, without a flag that it does not know."""
    match = _REFUSED.search(message)
    given = match["arguments"] if match else None
    return given.split()[:MAX_NAMES] if given and not _FLAG.search(given) else []


# ------------------------------------------------------------------------------------------ what other releases know

_PRINTED_BY = (("remaining_argv", "ms-swift"), ("HfArgumentParser", "llamafactory"))
"""Messages about unknown arguments, and the programs that print them."""


def _of_releases(unknown: list[str], root: Traceback, log: Log) -> list[Text]:
    """For each unknown key the releases of its program that accept it; empty unless some release accepts each."""
    program = next((name for phrase, name in _PRINTED_BY if phrase in root.error_text), None)
    keys = ConfigKeys(program, Versions()) if program else None
    spans = {name: span for name in unknown if keys and (span := keys.span(name))}
    if keys is None or len(spans) < len(unknown):
        return []
    return [_accepted(name, *span, keys, log) for name, span in spans.items()]


def _accepted(name: str, since: str, last: str, keys: ConfigKeys, log: Log) -> Text:
    """That the releases of a program from one to another accept a key."""
    assert keys.table is not None
    package, releases = keys.table.package, keys.table.versions
    values = {"name": name, "since": since, "last": last, "package": package, "program": keys.schema.program}
    if last == releases[-1]:
        return phrase_text("argument-since", **values)
    if now := keys.table.renames.get(name):
        return phrase_text("argument-renamed", now=now, **values)
    is_newer = package in log.versions and Version(log.versions[package]) > Version(last)
    return phrase_text("argument-until" if is_newer or since == releases[0] else "argument-between", **values)


# ----------------------------------------------------------------------------------------- what was probably meant

_USAGE = re.compile(r"--([a-z][\w-]+)")
_PROGRAMS = {"trl": "trl", "llamafactory": "llamafactory", "accelerate": "accelerate", "swift": "ms-swift"}
"""Programs whose keys are known from their releases, by the tool that a log shows."""
LEAST_SIMILARITY = 0.75


def _known(message: str, log: Log) -> set[str]:
    """The program's arguments: from its usage, if the log shows it, or from its releases."""
    if "usage:" in log.text:
        lines = (line.text for line in log.lines if re.match(r"\s*[\[-]|.*usage:", line.text))
        return {flag for line in lines for flag in _USAGE.findall(line)}
    usage = RunTools()
    usage.see(log.text)
    named = [each for each in ("accelerate", "deepspeed") if each in message.lower()]
    if programs := named or [_PROGRAMS[tool] for tool in usage.tools if tool in _PROGRAMS]:
        return ConfigKeys(programs[0], Versions()).known
    if "is not in struct" in message or "Could not override" in message:  # Hydra, which verl uses
        return {key.rpartition(".")[2] for key in keys_of("verl")}
    of_files = ("llamafactory", "trl") if "HfArgumentParser" in message else ()
    trains = table("transformers")
    options = trains.ever("Seq2SeqTrainingArguments.__init__") if trains else set()
    return options.union(*(ConfigKeys(each, Versions()).known for each in of_files))


def _near(name: str, known: set[str]) -> Text:
    """An unknown name and the one that was probably meant. Dashes and underscores are equivalent."""
    if name.replace("-", "_") == "local_rank":
        return phrase_text("argument-of-launcher", name=name)
    plain = {each.replace("-", "_"): each for each in known}
    prefix, dot, last = name.replace("-", "_").rpartition(".")
    if near := closest(last, plain, cutoff=LEAST_SIMILARITY):
        return phrase_text("argument-near", name=name, near=f"{prefix}{dot}{plain[near[0]]}")
    return phrase_text("argument-unknown", name=name)
