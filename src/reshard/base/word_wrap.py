"""A console that breaks lines between words at the edge of a terminal, in English and in Chinese.

Without a terminal, and for tables, lines stay as they are. So do commands, which users copy.
"""

from __future__ import annotations

import re
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

_WIDE = "\u3000-\u303f\u4e00-\u9fff\uff00-\uffef"
"""Chinese characters and punctuation, between which a line may break."""
_CLOSING = "，。、；：？！）】」』》”’"
"""Punctuation that no line begins with."""
_OPENING = "（「『《【“‘"
"""Punctuation that no line ends with."""
_UNBROKEN = re.compile(
    rf"[{_OPENING}]*"
    rf"(?:`[^`]+`[{_CLOSING}]* ?"  # code
    rf"|(?:reshard|python|pip|hf) [a-z-][^;,`)]*"  # commands
    rf"|[{_WIDE}][{_CLOSING}]* ?|[^\s{_WIDE}]+[{_CLOSING}]*\s*|\s+)"
)


class WrappingConsole(Console):
    """A console of rich that wraps single texts at words. `no_wrap` prints one as it is."""

    def print(self, *objects: Any, **how: Any) -> None:
        if self.is_terminal and len(objects) == 1 and isinstance(objects[0], str) and not how.get("no_wrap"):
            text = self.render_str(objects[0], highlight=False)
            objects = (
                Text("\n").join(wrapped(line, self.width) for line in text.split("\n", allow_blank=True)),
            )
        super().print(*objects, **how)


def wrapped(line: Text, width: int) -> Text:
    """A line in parts of at most `width` cells, each indented as the first; words that are longer stay whole."""
    indent = " " * (len(line.plain) - len(line.plain.lstrip(" ")))
    breaks, used = [], 0
    for match in _UNBROKEN.finditer(line.plain):
        needed = cell_len(match[0].rstrip())
        if used > len(indent) and used + needed > width:
            breaks.append(match.start())
            used = len(indent)
        used += cell_len(match[0])
    first, *rest = line.divide(breaks)
    first.rstrip()
    for part in rest:
        part.rstrip()
    return Text("\n" + indent).join([first, *rest])
