"""Errors that one line of a log reports: an exception, a failed assertion, a logger's or a shell's message, an exit."""

from __future__ import annotations

import re

from reshard.runs.doctor.text.exit_status import reports_exit
from reshard.runs.doctor.text.line_prefixes import TRACEBACK_START
from reshard.runs.doctor.text.python_messages import message_kind

EXCEPTION_NAME = (
    r"(?a:(?:[A-Za-z_]\w*\.)*(?:Exception|(?:[A-Z]|nccl[A-Z])\w*"
    r"(?:Error|Exception|Interrupt|Exit|Invalid|Mismatch|Failure|Failed|NotFound|Timeout|Iteration|Unavailable|nsupported(?:Operation)?)))"
)
"""In ASCII only: in Chinese sentences, words stand next to it without a space."""
_EXCEPTION = re.compile(
    rf"\s*(?P<name>{EXCEPTION_NAME})\s?: ?(?P<message>.*\S)"
    r"|\s*(?P<bare>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Iteration)):?$"
)
"""At the beginning of a line."""
_WITHIN = re.compile(rf"\((?P<name>{EXCEPTION_NAME}): (?P<message>[^()]*(?:\([^()]*\)[^()]*)*)\)")
"""In parentheses, as `python -m` and torchrun print it."""
_NAMED = re.compile(rf"(?<![A-Za-z0-9_.])(?P<name>{EXCEPTION_NAME}): (?P<message>.*\S)")
QUIET_LINE = re.compile(
    r"\bXFAIL\b|(?<![=\w])(?:DEBUG|INFO|WARN|WARNING|Warning|UserWarning|\w+Warning)\b|^\s*(?:except"
    r"|#)\b|^\s*raise(?: +[\w.]+ *(?:[(\[]|from\b|$)| *$)|^\[?[IW]\d{3,4}"
)
"""Lines that only mention an exception: of a lower level, and code."""
_ASSERTION = re.compile(
    r"\bAssertion [`'\"].{0,1000} failed|\.(?:cpp|cc|h|cu):\d+: [^\n]{0,500}: Assertion [`'\"]"
)
_LOGGED = re.compile(
    r"""^\[?[EF]\d{3,4}\ \d\d:\d\d | \[[EF]\ ?[\w./]+\.(?:cpp|cc|h|cu|py):\d+   # glog, c10d
      | \b\d\d:\d\d:\d\d,\d+\ [EF]\ \d+\ \d+                                    # raylet
      | ^.{0,100}?(?:^|[\s\[|(-])(?:ERROR|FATAL|CRITICAL)(?=[\]:|\s,-]|$)(?!\s*\|)
      | \bNCCL\ WARN\ .{0,300}(?:[Ff]ail|[Ee]rror|[Tt]imed?\ ?out)
      | ^(?:\S+:\ )?(?:(?:fatal|Fatal|internal)\ )?(?:error|Error|fatal):\ | ^Fatal\ Python\ error
      | ^\*\*\*\ An\ error\ occurred | ^terminate\ called\ after\ throwing | \bpanicked\ at\ # MPI, C++, Rust
      | No\ solution\ found\ when\ resolving                                    # uv
      | \b(?:[Uu]nable|[Cc]annot|not|exited)\b.{0,300}\b[Ee]xiting\b              # Megatron's tools
      | :\ [Cc]ommand\ not\ found$ | sh:\ \d+:\ \S+:\ not\ found$ """,
    re.VERBOSE,
)
HEADING = re.compile(r"^\W{0,80}(?i:errors?|fatal|critical)\W{0,80}$")
_OF_LAUNCHER = re.compile(
    r"failed \(exitcode|exitcode\s*:|sigkill_handler|closing signal|Root Cause|ChildFailedError|CalledProcessError"
)

ErrorMessage = tuple[str, str]
"""The name of an exception, "" if there is none, and its message."""


def is_error(text: str) -> bool:
    """Whether a line reports an error, whosever it is."""
    if TRACEBACK_START in text or _EXCEPTION.match(text):
        return True
    return bool(_LOGGED.search(text) or _ASSERTION.search(text)) or reports_exit(text)


def is_of_launcher(text: str) -> bool:
    """Whether a launcher reports in this line that a worker failed."""
    return bool(_OF_LAUNCHER.search(text))


def exception_in(text: str) -> ErrorMessage | None:
    """The exception at the beginning of a line."""
    match = _EXCEPTION.match(text)
    if match is None or QUIET_LINE.search(text[: match.start("message")] if match["name"] else text):
        return None
    return match["name"] or match["bare"], match["message"] or ""


def embedded_in(text: str) -> ErrorMessage | None:
    """An exception that another program quotes, or that a logger wrote."""
    if QUIET_LINE.search(text):
        return None
    match = _WITHIN.search(text)
    if match is None and _LOGGED.search(text):
        match = _NAMED.search(text)
    return (match["name"], match["message"]) if match else None


def assertion_in(text: str) -> ErrorMessage | None:
    """An assertion of C++ or of a GPU's kernel that failed."""
    return ("", text.strip()) if _ASSERTION.search(text) else None


def logged_in(text: str) -> ErrorMessage | None:
    """An error as a logger or a shell writes it, and no report of a launcher."""
    if HEADING.fullmatch(text) or not _LOGGED.search(text):
        return None
    if reports_exit(text) or is_of_launcher(text):
        return None
    message = text.rpartition("rror: ")[2].strip()  # of an exception that a program caught and logged
    return (kind, message) if (kind := message_kind(message)) else ("", text.strip())


_CLOSING = {"`": "`", "“": "”", '"': '"', "「": "」", "'": "' "}


def quoted_in(text: str) -> ErrorMessage | None:
    """An exception in a person's own sentence, up to the closing quotation mark."""
    match = None if QUIET_LINE.search(text) else _NAMED.search(text)
    if match is None:
        return None
    before, message = text[: match.start()].rstrip()[-1:], match["message"]
    return match["name"], message.split(_CLOSING[before])[0] if before in _CLOSING else message
