"""The one launch of a shell script, if it is plain: its words, with the variables that the script sets."""

from __future__ import annotations

import re
import shlex
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path

UNKNOWN_VALUE = "$\ufffd"
"""Stands for what only the shell can compute."""
CONTINUED_LINE = "\x1f"
"""A white space that stands for the end of a line in the middle of a command."""
OWN_FOLDER = "OWN_FOLDER"
"""A variable for the folder of the script: `$(dirname "$0")`."""
QUOTED_TEXT = "\x02"
"""Stands before a variable in quotes, which remains one word."""
_HEREDOC = re.compile(r"<<-?[ \t]*(['\"]?)(\w+)\1(.*?)^\t*\2$", re.DOTALL | re.MULTILINE)
_COMPUTED = re.compile(r"\$\(\([^()]*(?:\([^()]*\)[^()]*)*\)\)|\$\([^()]*(?:\([^()]*\)[^()]*)*\)|`[^`]*`")
_OWN_FOLDER = re.compile(
    r'\$\((?:cd "?)?\$?\(?dirname "?\$\{?(?:0|BASH_SOURCE(?:\[0\])?)\}?"?\)?"?(?: *&& *pwd)?\)'
)
_COMMENT = re.compile(r"^[ \t]*#.*$", re.MULTILINE)
_VARIABLE = re.compile(r"\$(?:\{(\w+|[@*])(?::?-([^}]*)|\[[@*]\])?\}|(\w+|[@*]))")
_LONE = re.compile(r'"(?=\$(?:\{\w+(?::?-[^}"]*)?\}|\w+)")')
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_ARRAY = re.compile(r"^([ \t]*(?:(?:export|local|declare -a) +)?\w+\+?=)\(([^()]*)\)", re.MULTILINE)
_BREAKS = re.compile(r"[;|&\n()]+")
_KEYWORDS = ("if", "then", "else", "elif", "do", "while", "!", "{", "}", "fi", "done")


@dataclass
class ShellLaunch:
    """A command of a script, in the environment and folder that the lines before it have made."""

    words: list[str]
    line: int
    environment: dict[str, str]
    folder: Path
    other_python: bool = False
    """Whether `conda activate` or the like chose a Python that the script does not name."""


@dataclass
class _Shell:
    """The state of a shell, as far as its plain statements change it."""

    environment: dict[str, str]
    folder: Path
    variables: dict[str, list[str]] = field(default_factory=dict)
    other_python: bool = False

    def expansion(self, token: str) -> list[str]:
        """A word with its variables. One that is nothing but a variable may become several words."""
        alone = _VARIABLE.fullmatch(token)
        value = self._value(alone) if alone else None
        if value is not None:
            return value if len(value) != 1 else value[0].split()
        return [_VARIABLE.sub(self.joined, token).replace(QUOTED_TEXT, "")]

    def joined(self, match: re.Match[str]) -> str:
        value = self._value(match)
        return match[0] if value is None else " ".join(value)

    def _value(self, match: re.Match[str]) -> list[str] | None:
        name, otherwise = match[1] or match[3], match[2]
        values = self.variables.get(name)
        if values is None and name in self.environment:
            values = [self.environment[name]]
        return [otherwise] if not values and otherwise is not None else values

    def assign(self, name: str, added: str, values: list[str], *, exported: bool) -> None:
        """`name=value`, or `name+=value`."""
        self.variables[name] = [*(self.variables.get(name, []) if added else []), *values]
        if exported or name in self.environment:
            self.environment[name] = " ".join(self.variables[name])

    def obey(self, words: Sequence[str]) -> None:
        """The commands that change where and how later ones run."""
        if words[0] == "cd" and words[1:]:
            if "$" in words[1]:
                raise ValueError("the folder is unknown")
            self.folder /= words[1]
        elif words[0] in ("source", ".") and words[1:] and Path(words[1]).name == "activate":
            there = self.folder / Path(words[1]).parent
            self.environment["PATH"] = f"{there}:{self.environment.get('PATH', '')}"
        elif words[:2] in (
            ["conda", "activate"],
            ["source", "activate"],
            ["module", "load"],
            ["mamba", "activate"],
        ):
            self.other_python = True
        elif words[0] == "unset":
            for name in words[1:]:
                self.environment.pop(name, None)
                self.variables.pop(name, None)


def the_launch(
    text: str,
    of: Path,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    rank: Callable[[list[str]], int],
) -> ShellLaunch | None:
    """The command of a script with the highest `rank`, if there is exactly one; those of rank 0 do not count."""
    try:
        ranked = [(rank(each.words), each) for each in commands_in(text, of, arguments, environment, folder)]
    except ValueError:
        return None
    highest = max((worth for worth, _ in ranked), default=0)
    best = [launch for worth, launch in ranked if worth == highest > 0]
    return best[0] if len(best) == 1 else None


def commands_in(
    text: str, of: Path, arguments: Sequence[str], environment: Mapping[str, str], folder: Path
) -> Iterator[ShellLaunch]:
    """The commands of a script. Raises ValueError for quotes without an end, and for an unknown folder."""
    shell = _Shell(dict(environment), folder)
    shell.variables = {str(at): [word] for at, word in enumerate(arguments, 1)}
    shell.variables |= {OWN_FOLDER: [str(of)], "@": list(arguments), "*": list(arguments)}
    for line, tokens in _statements(text):
        if words := _run(shell, tokens):
            yield ShellLaunch(words, line, dict(shell.environment), shell.folder, shell.other_python)


def _run(shell: _Shell, tokens: list[str]) -> list[str]:
    """Obey a statement, and return its words; none for assignments."""
    while tokens and tokens[0] in _KEYWORDS:
        tokens = tokens[1:]
    exported = tokens[:1] == ["export"]
    rest = tokens[1:] if tokens[:1] in (["export"], ["declare"], ["local"], ["readonly"]) else tokens
    matches = [_ASSIGNED.fullmatch(token) for token in rest]
    count = next((at for at, match in enumerate(matches) if match is None), len(matches))
    if count == len(matches) or exported:
        for match in filter(None, matches):
            values = match[3].split("\0")[1:] if match[3].startswith("\0") else [match[3]]
            expanded = [word for value in values for word in _kept(shell, value, split=len(values) > 1)]
            shell.assign(match[1], match[2], expanded, exported=exported)
        return []
    words = [word for token in rest for word in shell.expansion(token)]
    if words:
        shell.obey(words)
    return words


def _kept(shell: _Shell, value: str, *, split: bool) -> list[str]:
    """The value of an assignment; elements of an array may become several."""
    return shell.expansion(value) if split else [_VARIABLE.sub(shell.joined, value).replace(QUOTED_TEXT, "")]


def _statements(text: str) -> Iterator[tuple[int, list[str]]]:
    """Simple commands as tokens, with the line on which each begins. Redirections are left out."""
    plain = _plain(text)
    stream = StringIO(plain)
    lexer = shlex.shlex(stream, posix=True, punctuation_chars=";|&\n()<>")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = f" \t\r{CONTINUED_LINE}", True, ""
    breaks = [match.start() for match in re.finditer(f"[\n{CONTINUED_LINE}]", plain)]
    begin, tokens, redirected = 0, list[str](), False
    while (token := lexer.get_token()) is not None:
        if token.startswith("#"):
            stream.readline()
            token = "\n"
        if _BREAKS.fullmatch(token):
            yield begin, tokens
            tokens, redirected = [], False
        elif set(token) <= set("<>&|"):
            redirected = True
            if tokens and tokens[-1].isdecimal():
                tokens.pop()
        elif redirected:
            redirected = False
        else:
            begin = begin if tokens else _line(plain, breaks, stream.tell(), token)
            tokens.append(token)
    yield begin, tokens


def _plain(text: str) -> str:
    """A script of as many lines without comments, here-documents, and what only the shell can compute."""
    text = _HEREDOC.sub(lambda match: "\n" * match[0].count("\n"), text)
    text = _OWN_FOLDER.sub(f"${{{OWN_FOLDER}}}", text)
    text = _COMPUTED.sub(
        lambda match: UNKNOWN_VALUE + CONTINUED_LINE * match[0].count("\n"), _COMMENT.sub("", text)
    )
    text = _LONE.sub(f'"{QUOTED_TEXT}', text).replace("\\\n", f" {CONTINUED_LINE}")
    return _ARRAY.sub(_one_word, text)


def _one_word(match: re.Match[str]) -> str:
    """An array as one word, with \\0 before each element."""
    words = shlex.split(match[2].replace(CONTINUED_LINE, " "), comments=True)
    lines = sum(match[2].count(mark) for mark in ("\n", CONTINUED_LINE))
    return match[1] + shlex.quote("".join(f"\0{word}" for word in words)) + CONTINUED_LINE * lines


def _line(text: str, breaks: list[int], end: int, token: str) -> int:
    """The line on which a token begins that ends before `end`, or before the end of a line there."""
    end -= text[end - 1 : end] == "\n"
    inside = sum(token.count(mark) for mark in ("\n", CONTINUED_LINE))
    return bisect_left(breaks, end) - inside + 1
