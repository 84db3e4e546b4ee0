"""Towers that an engine builds of Megatron's own modules, where the Hub has those of transformers.

Megatron-Core's distributed checkpoints stack alike layers: the key `decoder.layers.mlp.linear_fc2.weight` has those of
all layers along its first axis.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from reshard.algebra.views import View
from reshard.families.rules import Rule, native

Shapes = Mapping[str, tuple[int, ...]]

_LAYER = re.compile(r"(decoder\.\w+\.)(\d+)\.")
_STACKED = re.compile(r"decoder\.\w+\.(?!\d)")


@dataclass(frozen=True)
class Tower:
    """`renames` are parts of names, in the order in which they are replaced: pairs (on the Hub, in the engine).

    `fused` is the engine's part of the names of fused queries, keys and values, whose rows it orders by head; the Hub
    has all queries first. `heads` is the key of their number in the Hub's `vision_config`.
    """

    renames: tuple[tuple[str, str], ...]
    fused: str
    heads: str = "num_heads"

    def rules(self, carried: Shapes, hub: str, own: str, config: Mapping[str, Any]) -> Iterator[Rule]:
        """A rule for each of the Hub's tensors `carried`, whose prefix is `hub`; the engine's is `own`."""
        layers: dict[str, int] = {}
        names = {name: self._to_native(name.removeprefix(hub)) for name in carried}
        for match in filter(None, map(_LAYER.search, names.values())):
            layers[match[1]] = max(layers.get(match[1], 0), int(match[2]) + 1)
        for name, shape in carried.items():
            layer = _LAYER.search(names[name])
            key = own + _LAYER.sub(r"\1", names[name])
            view = native(key, layers[layer[1]], *shape)[int(layer[2])] if layer else native(key, *shape)
            yield Rule(name, self._as_hub(names[name], view, config))

    def on_hub(self, name: str, view: View, config: Mapping[str, Any]) -> Iterator[tuple[str, View]]:
        """The Hub's tensors in an engine's tensor, which may stack layers; both names are without their prefix."""
        stack = _STACKED.search(name)
        each = view.unstacked() if stack else [view]
        for layer, part in enumerate(each):
            own = f"{name[: stack.end()]}{layer}.{name[stack.end() :]}" if stack else name
            yield self._to_hub(own), self._as_hub(own, part, config)

    def _to_native(self, name: str) -> str:
        for hub, own in self.renames:
            name = name.replace(hub, own, 1)
        return name

    def _to_hub(self, name: str) -> str:
        """The inverse of `_to_native`; names of the Hub are returned unchanged."""
        for hub, own in reversed(self.renames):
            name = name.replace(own, hub, 1)
        return name

    def _as_hub(self, name: str, view: View, config: Mapping[str, Any]) -> View:
        """A tensor of one layer with its rows in the order of the Hub."""
        if not name.endswith((f"{self.fused}.weight", f"{self.fused}.bias")):
            return view
        rows, *rest = view.shape
        heads = int(config["vision_config"][self.heads])
        by_head = view.reshape(heads, 3, rows // (3 * heads), *rest)
        return by_head.permute(1, 0, *range(2, 3 + len(rest))).reshape(rows, *rest)
