"""Options and overrides in the words of a command, whoever reads them: `--a b c`, `--a=b`, `a.b=c`."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

_OVERRIDE = re.compile(r"\+{0,2}(?P<name>[A-Za-z_][\w./@-]*)=(?P<value>.*)", re.DOTALL)
"""As Hydra and OmegaConf read it."""
_NUMBER = re.compile(r"-[\d.][\d.e-]*|-")


class Option(NamedTuple):
    """An option without its dashes, or an override, with its values; `words` are those that it consists of."""

    name: str
    values: tuple[str, ...]
    words: tuple[str, ...]

    def value(self, otherwise: object) -> object:
        """Its value, or all of them; `otherwise` if it has none."""
        if len(self.values) == 1:
            return self.values[0]
        return list(self.values) or otherwise


def options_in(words: Sequence[str], ends: Callable[[str], object] = lambda word: False) -> Iterator[Option]:
    """The options of a command in order, each with the words up to the next one, or to one that `ends` its values."""
    left = deque(words)
    while left:
        word = left.popleft()
        match = _OVERRIDE.fullmatch(word)
        if match:
            yield Option(match["name"], (match["value"],), (word,))
        if not is_option(word):
            continue
        name, equals, value = word.lstrip("-").partition("=")
        values = [value] if equals else []
        while not equals and left and not (is_option(left[0]) or ends(left[0])):
            values.append(left.popleft())
        yield Option(name, tuple(values), (word,) if equals else (word, *values))


def is_option(word: str) -> bool:
    """Whether a word begins an option, and is not a negative number."""
    return word.startswith("-") and _NUMBER.fullmatch(word) is None
