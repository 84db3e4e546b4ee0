"""Foreign text for display: names in files, values of configs, paths, lines of logs.

A terminal takes some characters as commands, and a newline makes one value look like two lines of ours. They are shown
as escapes (`\\x1b`, `\\n`). Passwords and signatures in URLs are left out. All other text is unchanged, in any script.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from reshard.base.schemes import AZURE, BUCKETS, HUB, IMAGES, WEB

_HIDDEN = re.compile(
    r"[\x00-\x1f\x7f-\x9f"  # C0 and C1, which contain ESC and the one-byte CSI
    r"\u2028\u2029"  # line and paragraph separators
    r"\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # controls of the text direction
    r"\xad\u180e\u200b\u2060-\u2064\u206a-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"  # invisible characters
)


_USER = re.compile(
    r"""([a-z][a-z0-9+.-]{0,19})?(:/+|//+)              # the scheme, maybe misspelled, or a path made of it
    (?:([^\s/"<>]*@)                                   # a user, up to the last @ before a slash
    |([^\s/@"<>:]{0,100}:[^\s@"<>]{0,200}@))           # or one with a password that contains slashes
    |(?<=/)[^\s/@"<>:]*:[^\s/"<>]*@(?!sha256:)         # user:password@ in a path""",
    re.IGNORECASE | re.VERBOSE,
)
_UNENDED = re.compile(
    rf"((?:(?<![a-z0-9+.-])(?!(?:{'|'.join(IMAGES)}):)[a-z][a-z0-9+.-]{{0,19}}://"
    rf"|(?:{'|'.join((*WEB, *BUCKETS, *AZURE, *HUB))})(?::/+|//+))"
    r"""(?!arn:)[^\s/@"'<>:?#\[]{1,100})           # what precedes a colon
    :(?!\d{1,5}(?![\w%])|port\b|[${*\[%\\])[^\s/"'<>?#]+  # and what cannot be a port""",
    re.IGNORECASE | re.VERBOSE,
)
"""A user with a password whose @ is missing: in any URL, and in a misspelled one of a store that is known here."""
_QUERY = re.compile(r"""(?<![(\s])\?[\w.%[\]-]+=[^\s"'<>)]*|(?<=://)([^\s?"<>]{1,300})\?[^\s"'<>)]*""")


def without_secrets(text: str) -> str:
    """A text that may quote URLs, however misspelled, without their users, passwords and queries."""
    if "@" in text and "/" in text:
        text = _USER.sub(_without_user, text)
    if ":" in text and "/" in text:
        text = _UNENDED.sub(r"\1", text)
    if "?" in text:
        text = _QUERY.sub(_without_query, text)
    return text


def _without_user(match: re.Match[str]) -> str:
    scheme, slashes, user, longer = match.groups()
    before = (scheme or "") + (slashes or "")
    kind = (scheme or "").lower()
    if user is not None:
        may_be_name = ":" not in slashes or kind in AZURE  # /data//model@v2
        return match[0] if may_be_name and ":" not in user else before
    if longer is None or kind in BUCKETS or not re.match(r"[^:]*:\d{1,5}/", longer):
        return before
    host, slash, path = longer.partition("/")  # a port
    return before + host + slash + without_secrets(path)


def _without_query(match: re.Match[str]) -> str:
    """Names in buckets may contain a question mark, but hardly one that is followed by NAME=VALUE."""
    if match[1] is None:
        return ""
    scheme = re.search(r"[a-z][a-z0-9+.-]*$", match.string[: match.start() - 3][-20:], re.IGNORECASE)
    is_name = scheme and scheme[0].lower() in (*BUCKETS, *AZURE, *HUB)
    return match[0] if is_name and "=" not in match[0] else match[1]


def printable_line(text: str) -> str:
    """A text as one line without control characters, and without secrets in URLs."""
    text = without_secrets(text)
    return text if text.isprintable() else _HIDDEN.sub(_escaped, text)


def natural_key(name: str) -> str:
    """A sort key by which the numbers in names are in the order of their values: layer 2 before layer 10."""
    return re.sub(r"\d+", lambda number: number[0].zfill(20), name)


def typeable(path: str) -> str:
    """A path as an argument of a command, which must not look like an option."""
    return f"./{path}" if path.startswith("-") else path


def printable_lines(text: str) -> str:
    """The same for a text of several lines, which remain separate."""
    return "\n".join(printable_line(line.expandtabs(4)) for line in text.split("\n"))


def clipped(text: str, length: int) -> str:
    """The first `length` characters of a text, with an ellipsis if there are more."""
    return text if len(text) <= length else text[:length].rstrip() + " …"


def printable_json(text: str) -> str:
    """The same JSON, without characters that JSON allows but a terminal does not show."""
    return re.sub(_HIDDEN, lambda match: match[0] if match[0] == "\n" else _in_json(match), text)


def strict(content: Any) -> Any:
    """The same content without secrets in URLs, and with NaN and infinities as strings: JSON has no such numbers."""
    if isinstance(content, (str, Path)):
        return without_secrets(str(content))
    if isinstance(content, Mapping):
        return {key: strict(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [strict(value) for value in content]
    return str(content) if isinstance(content, float) and not math.isfinite(content) else content


def escape(text: str) -> str:
    """A text as one line in the markup of rich."""
    from rich.markup import escape as of_markup

    return of_markup(printable_line(text))


def escape_lines(text: str) -> str:
    """A text of several lines in the markup of rich."""
    from rich.markup import escape as of_markup

    return of_markup(printable_lines(text))


def html_table(rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    """Rows of foreign text as a notebook table; the first cell of each names the row."""

    def cell(text: str) -> str:
        return "<br>".join(html.escape(printable_line(line)) for line in text.split("\n"))

    heads = "".join(f"<th>{cell(text)}</th>" for text in head)
    body = [
        f"<tr><th style='text-align:left'>{cell(first)}</th>"
        + "".join(f"<td style='text-align:left'>{cell(text)}</td>" for text in rest)
        + "</tr>"
        for first, *rest in rows
    ]
    return "".join(["<table>", f"<tr>{heads}</tr>" if heads else "", *body, "</table>"])


def _escaped(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode("ascii")


def _in_json(match: re.Match[str]) -> str:
    units = match[0].encode("utf-16-be").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))
