"""How transformers renames weights when it loads them, and back: patterns with the operations between them.

A rule is the same in both directions: what are patterns in one are replacements in the other. The semantics are those
of `core_model_loading.py` of transformers 5: a pattern matches anywhere in a name, the first match is replaced once, a
`*` is any part of a name, a group in one pattern is `\\1` in the other, and look-arounds constrain only the side that
they are on. Rules of a part of a model apply below its path.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

Operation = Mapping[str, Any]
"""One operation on tensors: its `name` in transformers, and its settings."""

GUARDED = "GroupWeightRename"
PAIRED = "LayerPairCollapse"
LOADED = "LoadedOnly"
"""The kind of a rule of transformers that also changes other names when it saves."""


class Renamed(NamedTuple):
    """A new name, and the index of the pattern that matched; None if none did."""

    name: str
    matched: int | None


@dataclass(frozen=True)
class Renaming:
    """One rule, read in one direction: `before` are patterns of names, `after` replaces them.

    With `operations`, tensors are not only renamed: those whose new name is the same are the inputs of one conversion.
    `below` are the paths that the rule is for, the longest first; without any, it is for all names. `offset` is added
    to the number in the group of a pattern. Names that match `kept` are the same on both sides. With `kind` GUARDED,
    later patterns apply only if any name matches the first one. `again` are the two sides in the other direction,
    where they are not the same patterns.
    """

    before: tuple[str, ...]
    after: tuple[str, ...]
    operations: tuple[Operation, ...] = ()
    below: tuple[str, ...] = ()
    kind: str = ""
    offset: int = 0
    is_prefix: bool = False
    kept: re.Pattern[str] | None = None
    again: tuple[tuple[str, ...], tuple[str, ...]] | None = field(default=None, compare=False)

    @cached_property
    def patterns(self) -> tuple[str, ...]:
        """`before`, with the groups that `after` has."""
        groups = {
            group_match[0] for each in self.after if (group_match := _GROUP.search(_without_looks(each)))
        }
        group = groups.pop() if groups else ""
        paired = len(self.before) == len(self.after)
        begins = [paired and self.after[at].startswith("^") for at in range(len(self.before))]
        return tuple(
            ("^" if begin and not each.startswith("^") else "")
            + (each.replace(r"\1", group, 1) if group else each)
            for each, begin in zip(self.before, begins, strict=True)
        )

    @cached_property
    def replacements(self) -> tuple[str, ...]:
        """`after` without what only a pattern has."""
        return tuple(map(_replacement, self.after))

    @cached_property
    def _compiled(self) -> re.Pattern[str]:
        branches = []
        for at, each in sorted(enumerate(self.patterns), key=lambda item: -len(item[1])):
            pattern = each.replace("*.", r".*\.")
            branches.append(f"(?P<g{at}>{pattern}{_END if _WORD.search(pattern) else ''})")
        return re.compile("|".join(branches))

    def reversed(self) -> Renaming:
        """The same rule in the other direction."""
        before, after = self.again or (self.after, self.before)
        operations = tuple({**each, "inverse": not each.get("inverse")} for each in reversed(self.operations))
        if self.kind == GUARDED:
            pairs = sorted(zip(before, after, strict=True))
            before, after = (tuple(pair[side] for pair in pairs) for side in (0, 1))
        return replace(
            self,
            before=before,
            after=after,
            operations=operations,
            offset=-self.offset,
            again=(self.before, self.after),
        )

    def applied(self, name: str, *, guard: bool = True) -> Renamed:
        """The new name of a tensor. `guard` says whether any name matches the first pattern."""
        prefix = next((each for each in self.below if name.startswith(each)), None)
        if (prefix is None and self.below) or (self.kept and self.kept.fullmatch(name)):
            return Renamed(name, None)
        inner = name.removeprefix(prefix or "")
        match = self._compiled.search(inner)
        if match is None:
            return Renamed(name, None)
        group = next(key for key, value in match.groupdict().items() if value is not None)
        at = int(group[1:])
        if self.kind == GUARDED and at and not guard:
            return Renamed(name, None)
        new = self.replacements[at if self.kind == GUARDED else 0]
        start = self._compiled.groupindex[group]
        new = _REFERENCE.sub(lambda reference: self._referred(match[start + int(reference[1])]), new)
        return Renamed((prefix or "") + inner.replace(match[0], new, 1), at)

    def _referred(self, text: str) -> str:
        return str(int(text) + self.offset) if self.offset else text

    def matches_first(self, name: str) -> bool:
        """Whether a name matches the first pattern."""
        return self.applied(name).matched == 0


class LayerPair(Renaming):
    """A layer that the Hub has as two: one of attention, and one of the MLP. Saving does not undo it."""

    def applied(self, name: str, *, guard: bool = True) -> Renamed:
        match = _HALF.search(name)
        if match is None or (self.kept and self.kept.fullmatch(name)):
            return Renamed(name, None)
        layer, is_mlp = divmod(int(match[1]), 2)
        module = _SCALES.get(match[2], "mlp" if is_mlp else "self_attn")
        return Renamed(f"{name[: match.start()]}layers.{layer}.{module}{name[match.end() :]}", 0)


_HALF = re.compile(r"layers\.(\d+)\.(mixer|attn_alpha|mlp_alpha)(?=\.|$)")
_SCALES = {"attn_alpha": "lambda_1", "mlp_alpha": "lambda_2"}

_GROUP = re.compile(r"\(.+?\)")
_LOOK = re.compile(r"\(\?.+?\)?\)")
_WORD = re.compile(r"[a-zA-Z0-9]$")
_END = r"(?!\w)"
_REFERENCE = re.compile(r"\\(\d)")


def _without_looks(pattern: str) -> str:
    return _LOOK.sub("", pattern.removeprefix("^"))


def _replacement(pattern: str) -> str:
    pattern = _without_looks(pattern)
    if group := _GROUP.search(pattern):
        pattern = pattern.replace(group[0], r"\1", 1)
    return pattern.replace(r"\.", ".")


def renaming(
    data: Mapping[str, Any], below: Sequence[str] = (), kept: re.Pattern[str] | None = None
) -> Renaming:
    """The rule that loads weights of the Hub, from its entry in the data, for the paths `below`."""
    if "hub" not in data:
        return replace(_of_prefix(data, tuple(below)), kept=kept)
    hub, memory = (tuple([each] if isinstance(each, str) else each) for each in (data["hub"], data["memory"]))
    operations, kind, offset = tuple(data.get("operations", ())), data.get("kind", ""), data.get("offset", 0)
    return (LayerPair if kind == PAIRED else Renaming)(
        hub, memory, operations, tuple(below), kind, offset, kept=kept
    )


def rule_of(
    hub: str | tuple[str, ...], own: str | tuple[str, ...], *operations: Operation, below: str = ""
) -> Renaming:
    """A rule that makes a tool's `own` names of those of the Hub, for the names `below` a path.

    Both are patterns and replacements at once, so they may have `^`, `*.`, one group, look-arounds and escapes alone.
    Raises ValueError for a `$`, which a replacement would keep.
    """
    before, after = ((each,) if isinstance(each, str) else each for each in (hub, own))
    if ends := [each for each in (*before, *after) if "$" in _without_looks(each)]:
        raise ValueError(f"{ends[0]}: use `begun` for the beginnings of names, which may be complete names")
    return Renaming(before, after, operations, (below,) if below else ())


def begun(*pairs: tuple[str, str]) -> Iterator[Renaming]:
    """Rules for the beginnings of names, on the Hub and of a tool."""
    for hub, own in pairs:
        yield rule_of(f"^{re.escape(hub)}", f"^{re.escape(own)}")


def inner(pairs: Mapping[str, str], below: str) -> Iterator[Renaming]:
    """Rules for parts of names below a path, from those on the Hub to those of a tool."""
    for hub, own in pairs.items():
        yield rule_of(re.escape(hub), re.escape(own), below=below)


def in_all_layers(place: str, layers: int, names: Collection[str]) -> set[str]:
    """The names below a path that layers have if they are alike: those of any, in all, or in more than there are."""
    parts = {name.removeprefix(place).partition(".")[2] for name in names if name.startswith(place)}
    return {f"{place}{layer}.{part}" for layer in range(min(layers, len(names))) for part in parts}


def _of_prefix(data: Mapping[str, Any], below: tuple[str, ...]) -> Renaming:
    """A rule that adds a prefix where it is not there, or removes it."""
    within = rf"{data['model_prefix']}\." if data.get("model_prefix") else ""
    prefix = data.get("prefix_to_add") or data["prefix_to_remove"]
    add = ((rf"^{within}(?:(?!{prefix}\.))(.+)",), (rf"{within}{prefix}\.\1",))
    remove = ((rf"^{within}{prefix}\.(.+)",), (rf"{within}\1",))
    first, again = (add, remove) if data.get("prefix_to_add") else (remove, add)
    return Renaming(*first, below=below, is_prefix=True, again=again)


def saved(rules: Sequence[Renaming]) -> tuple[Renaming, ...]:
    """The rules that save what `rules` load, in reverse order.

    Without prefixes that a whole model may have or not, and without what saving does not undo.
    """
    return tuple(
        rule.reversed()
        for rule in reversed(rules)
        if not (rule.is_prefix and "" in (rule.below or ("",))) and rule.kind not in (PAIRED, LOADED)
    )
