"""A Python script as rules see it: its calls in order, what names stand for, and under which guard. Never run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reshard.doctor.finding import Place
from reshard.errors import ReshardError

_GUARD = re.compile(
    r"\brank\b\W*(?:==|in|<=|<)\W*(?:0|\(|\[|-)|get_rank\(\)\s*==\s*0|is_(?:local_)?(?:main_process|world_process_zero)"
    r"|(?:LOCAL_)?RANK\W+.*==|not\s+(?:\w+\.)*(?:local_)?rank\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Call:
    """A call of `name` (dotted, as it is written). `guard` is the line of the rank guard that it stands under."""

    name: str
    node: ast.Call
    assigned: tuple[str, ...] = ()
    guard: int | None = None

    @property
    def last(self) -> str:
        """The last part of the name: the class or method."""
        return self.name.rsplit(".", 1)[-1]

    @property
    def owner(self) -> str:
        """What the method is called on, as it is written."""
        return self.name.rpartition(".")[0]

    def keyword(self, name: str) -> ast.keyword | None:
        """A keyword argument."""
        return next((each for each in self.node.keywords if each.arg == name), None)

    def constant(self, name: str) -> Any:
        """The value of a keyword argument that is a constant, else None."""
        found = self.keyword(name)
        return found.value.value if found and isinstance(found.value, ast.Constant) else None

    def names(self) -> set[str]:
        """All variables among the arguments."""
        arguments = [*self.node.args, *(each.value for each in self.node.keywords)]
        return {node.id for each in arguments for node in ast.walk(each) if isinstance(node, ast.Name)}


@dataclass
class Source:
    """A parsed script. `calls` are in the order of the text."""

    path: str
    text: str
    tree: ast.Module
    calls: list[Call] = field(default_factory=list)

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    def place(self, line: int, mended: str = "") -> Place:
        """A line of the script, with what it should become."""
        return Place(self.path, line, self.lines[line - 1].strip(), mended.strip())

    def find(self, *last: str) -> list[Call]:
        """Calls of any of these classes, functions or methods."""
        return [call for call in self.calls if call.last in last]

    def assignments(self, variable: str, before: int) -> list[Call]:
        """The calls whose result a variable held, before a line; the latest first."""
        found = [call for call in self.calls if variable in call.assigned and call.node.lineno < before]
        return found[::-1]


def read_source(path: str) -> Source:
    """Parse a script. Raises ReshardError if it is no Python."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        source = Source(path, text, ast.parse(text))
    except (SyntaxError, ValueError, OSError) as error:
        line = getattr(error, "lineno", None)
        raise ReshardError(
            "the script cannot be read as Python",
            file=f"{path}:{line}" if line else path,
            found=str(error),
            remedy="mend its syntax first",
        ) from None
    source.calls = sorted(_calls(source.tree), key=lambda call: (call.node.lineno, call.node.col_offset))
    return source


def _calls(node: ast.AST, guard: int | None = None, assigned: tuple[str, ...] = ()) -> Iterator[Call]:
    if isinstance(node, ast.Call):
        yield Call(ast.unparse(node.func), node, assigned, guard)
        assigned = ()
    if isinstance(node, ast.Assign):
        assigned = tuple(_targets(node.targets))
    elif isinstance(node, ast.If) and _GUARD.search(ast.unparse(node.test)):
        yield from _calls(node.test)
        for inside in node.body:
            yield from _calls(inside, node.lineno)
        for other in node.orelse:
            yield from _calls(other, guard)
        return
    for child in ast.iter_child_nodes(node):
        yield from _calls(child, guard, assigned if child is getattr(node, "value", None) else ())


def _targets(targets: list[ast.expr]) -> Iterator[str]:
    for target in targets:
        for node in ast.walk(target):
            if isinstance(node, ast.Name | ast.Attribute):
                yield ast.unparse(node)
