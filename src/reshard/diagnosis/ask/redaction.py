"""Remove from a text what concerns no failure: secrets, and who ran it where.

Names of people and machines are learned where the text shows what they are, and are then replaced everywhere.
Names of models, files and data sets stay: without them, nobody can explain the failure.
"""

from __future__ import annotations

import getpass
import re
import socket
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from reshard.base.foreign_text import without_secrets
from reshard.diagnosis.ask.expressions import expressions
from reshard.diagnosis.history.api_table import PACKAGE_OF_ROOT, PACKAGE_ROOTS

MAX_LINE = 1_000
"""Characters of a line that are searched and kept: an expression may take quadratic time."""


def redacted(text: str, context: str = "") -> str:
    """A text without secrets, users, machines, addresses and home folders; `context` shows more of their names."""
    given = expressions("private")
    text, context = ("\n".join(map(_begin, each.split("\n"))) for each in (text, context))
    text = without_keys(text)
    seen = f"{context}\n{text}"
    hosts = {*_named(given["hosts"], seen), socket.gethostname()}
    users = _named([*given["homes"], *given["users"]], seen)
    with suppress(KeyError, OSError):  # the system may know no name of this process's user
        users.add(getpass.getuser())
    if (home := str(Path.home())) != "/":
        text = text.replace(home, "~")
    for pattern in given["homes"]:
        text = pattern.sub("~", text)
    text = given["mail"].sub("<e-mail>", text)
    for sign, names in (("address", _addresses(text)), ("host", hosts), ("user", users)):
        text = _without(text, names, sign)
    return text


def without_keys(text: str) -> str:
    """A text without what opens something: tokens, keys, passwords."""
    given = expressions("private")
    for pattern in given["secrets"]:
        text = pattern.sub("<secret>", text)
    for pattern in given["after"]:
        text = pattern.sub(r"\1<secret>", text)
    return "\n".join(map(without_secrets, text.split("\n")))


def _begin(line: str) -> str:
    """The words at the beginning of a line: part of a secret is not recognized as one."""
    return line if len(line) <= MAX_LINE else line[:MAX_LINE].rpartition(" ")[0]


def _named(patterns: Iterable[re.Pattern[str]], text: str) -> set[str]:
    """The names in the groups of these expressions."""
    found = (match for pattern in patterns for match in pattern.finditer(text))
    return {name for match in found for name in match.groups() if name}


def _addresses(text: str) -> set[str]:
    """The addresses in a text; four numbers behind the name of a package are its version."""
    found = (match for pattern in expressions("private")["addresses"] for match in pattern.finditer(text))
    is_version = expressions("private")["version"].search
    return {match[0] for match in found if not is_version(text[max(match.start() - 40, 0) : match.start()])}


def _without(text: str, names: Iterable[str], sign: str) -> str:
    """A text with numbers in place of names, the longest first: one may be part of another."""
    known = {*PACKAGE_OF_ROOT, *PACKAGE_ROOTS}
    kept = expressions("private")["kept"]
    private = [
        name for name in names if len(name) > 2 and name.lower() not in known and not kept.fullmatch(name)
    ]
    for at, name in enumerate(sorted(private, key=lambda name: (-len(name), name)), 1):
        text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", f"<{sign}-{at}>", text)
    return text
