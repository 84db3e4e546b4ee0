"""The weights of a checkpoint as a tree of modules, small enough to draw."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from reshard.algebra.tensors import Tensor, cells_of
from reshard.base.foreign_text import natural_key, printable_line
from reshard.base.quantities import count, size
from reshard.formats.checkpoint import Checkpoint

EXPERT_LISTS = ("experts", "local_experts")
MAX_NODES = 6_000
"""The most nodes that a browser draws smoothly."""
MAX_FILES = 3
"""Files listed by name; the others are counted."""


@dataclass
class _Node:
    name: str
    elements: int = 0
    nbytes: int = 0
    tensors: int = 0
    what: str = ""
    files: set[str] = field(default_factory=set)
    children: dict[str, _Node] = field(default_factory=dict)

    def add(self, path: list[str], name: str, tensor: Tensor, files: Iterable[str]) -> None:
        """Add a tensor below this node."""
        self.elements += tensor.elements
        self.nbytes += tensor.nbytes
        self.tensors += 1
        self.files.update(files)
        if path:
            self.children.setdefault(path[0], _Node(path[0])).add(path[1:], name, tensor, files)
        else:
            self.what = f"{tensor.dtype} {list(tensor.shape)}"

    def drawn(self, depth: int, prefix: str = "") -> dict[str, Any]:
        """The chart's data; nodes below `depth` are merged."""
        if len(self.children) == 1:  # show a module with only a weight as that weight
            (only,) = self.children.values()
            return replace(only, name=f"{self.name}.{only.name}").drawn(depth, prefix)
        name = f"{prefix}.{self.name}" if prefix else self.name
        names = sorted(Path(each).name for each in self.files)
        more = f" and {len(names) - MAX_FILES:,} more" if len(names) > MAX_FILES else ""
        node: dict[str, Any] = {
            "name": printable_line(self.name),
            "value": self.elements,
            "path": printable_line(name),
            "told": [
                f"{count(self.elements)} parameters, {size(self.nbytes)}",
                self._tensors_in_words(),
                printable_line(", ".join(names[:MAX_FILES]) + more),
            ],
        }
        if depth and self.children:
            node["children"] = [child.drawn(depth - 1, name) for child in self.children.values()]
        return node

    def _tensors_in_words(self) -> str:
        if self.tensors == 1:
            return self.what
        return f"{self.tensors:,} tensors" + (f", each {self.what}" if self.what else "")

    def nodes(self, depth: int) -> int:
        """The number of nodes down to `depth`."""
        return 1 + (sum(child.nodes(depth - 1) for child in self.children.values()) if depth else 0)


def tree_of(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """The modules of a checkpoint under their stored names. The experts of a layer are one module."""
    root = _Node("")
    for name, tensor in sorted(checkpoint.tensors.items(), key=lambda each: natural_key(each[0])):
        files = {cells.storage.path for cells in cells_of(tensor.view)} - {""}
        root.add([*_modules(name)], name, tensor, files)
    depth = 8
    while depth > 1 and root.nodes(depth) > MAX_NODES:
        depth -= 1
    return [child.drawn(depth - 1) for child in root.children.values()]


def _modules(name: str) -> Iterator[str]:
    """The parts of a name: a layer is one part, and so are all experts of a layer."""
    parts = name.split(".")
    index = 0
    while index < len(parts):
        part = parts[index]
        if index + 1 < len(parts) and parts[index + 1].isdecimal():
            yield f"{part}.*" if part in EXPERT_LISTS else f"{part}.{parts[index + 1]}"
            index += 2
        else:
            yield part
            index += 1
