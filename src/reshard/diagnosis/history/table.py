"""The tables of the history: one per package, read on first use. Made by `python -m tools.api_history`."""

from __future__ import annotations

import json
import lzma
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from packaging.version import Version

FOLDER = Path(__file__).with_name("tables")
ROOTS = {
    "accelerate": "accelerate",
    "bitsandbytes": "bitsandbytes",
    "datasets": "datasets",
    "deepspeed": "deepspeed",
    "flash-attn": "flash_attn",
    "huggingface-hub": "huggingface_hub",
    "llamafactory": "llamafactory",
    "megatron-core": "megatron",
    "ms-swift": "swift",
    "numpy": "numpy",
    "peft": "peft",
    "safetensors": "safetensors",
    "tokenizers": "tokenizers",
    "torch": "torch",
    "transformers": "transformers",
    "triton": "triton",
    "trl": "trl",
    "vllm": "vllm",
    "xformers": "xformers",
}
"""The imported folder, by the installed name."""
PACKAGES = {root: package for package, root in ROOTS.items()}
LONG = 8
"""Releases for which a name existed that is gone: who lacks it has a newer release, not one from before all these."""
FEW = 3
"""Newest releases that alone lack a name: who lacks it may as well have one from before it was added."""
Span = frozenset[int]
NOWHERE: Span = frozenset()


@dataclass(frozen=True)
class Presence:
    """The releases of a table in which something exists, among those that have what it belongs to."""

    table: Table
    there: Span
    among: Span
    maybe: bool = False
    """Whether releases after the last known one may still have it, invisibly in their source."""

    def at(self, version: Version) -> bool | None:
        """Whether it exists in a version; None if the releases around it differ, or lack what it belongs to."""
        before, exact = self.table.place(version)
        around = {before} if exact else {before, min(before + 1, self.table.last)}
        if not around <= self.among:
            return None
        return None if len({at in self.there for at in around}) > 1 else before in self.there

    def bounds(self, version: Version | None) -> Bounds | None:
        """The releases that have it, relative to one that does not; None if the table does not show them.

        Without a version: only if all that lack it are older, or all newer, or if it exists between two releases.
        """
        if not self.there:
            return None
        if version is None:
            return None if self.there >= self.among else self._around(min(self.there), max(self.there))
        if self.at(version):
            return None
        before, _ = self.table.place(version)
        later = [at for at in self.there if at > before]
        if later:
            earlier = [at for at in self.there if at <= before]
            again = self.table.versions[max(earlier)] if earlier else None
            return replace(self._since(min(later)), again=again)
        last = max(self.there)
        until = self._next(last)
        if until is None or Version(until) > version:
            until = str(version)  # a release between two known ones
        return Bounds(None, until, self.table.versions[last])

    def _around(self, first: int, last: int) -> Bounds | None:
        inside = {at for at in self.among if first <= at <= last}
        if inside - self.there:
            return None  # it was added and removed more than once
        until = self._next(last) if max(self.among) > last else None
        recent = until is None or last - first < LONG or max(self.among) - last <= FEW
        oldest = self.table.versions[first] if min(self.among) < first else None
        newest = self.table.versions[last]
        if recent:
            return Bounds(oldest, until, newest, self._is_patch(first))
        return Bounds(None, until, newest, self._is_patch(first), first=oldest)

    def _since(self, first: int) -> Bounds:
        last = first
        while last + 1 in self.there:
            last += 1
        until = self._next(last)
        return Bounds(self.table.versions[first], until, self.table.versions[last], self._is_patch(first))

    def _is_patch(self, at: int) -> bool:
        """Whether a release has the same minor version as the one before it."""
        versions = self.table.versions
        return at > 0 and versions[at].split(".")[:2] == versions[at - 1].split(".")[:2]

    def _next(self, at: int) -> str | None:
        return self.table.versions[at + 1] if at < self.table.last else None


@dataclass(frozen=True)
class Bounds:
    """The first release that has something after one that lacks it, the next that lacks it, the last that has it."""

    since: str | None
    until: str | None
    last: str
    is_patch: bool = False

    again: str | None = None
    """The last release that had it before it was missing for a while."""
    first: str | None = None
    """The first release that has it, if older ones that lack it are hardly installed anywhere."""

    @property
    def shown(self) -> str:
        """`since` as far as it is known: 0.8 for 0.8.5, if 0.8.0 lacks it and 0.8.1 is not in the table."""
        return ".".join(self.since.split(".")[:2]) if self.since and self.is_patch else self.since or ""

    @property
    def specifier(self) -> str:
        """A specifier for pip, by PEP 440."""
        newest = f"<={self.last}" if not self.until or self._ends_inside_a_minor else f"<{self.until}"
        oldest = self.since or self.first
        parts = [f">={oldest}"] * bool(oldest) + [newest] * bool(self.until or not self.since)
        return ",".join(parts)

    @property
    def _ends_inside_a_minor(self) -> bool:
        """Whether it was removed in a patch release: the ones between the two known releases may lack it."""
        return str(self.until).split(".")[:2] == self.last.split(".")[:2]


@dataclass
class Table:
    """What the releases of one package have, as written by `tools/api_history/table.py`."""

    package: str
    raw: Mapping[str, Any]
    _spans: dict[str, Span] = field(default_factory=dict)

    @cached_property
    def versions(self) -> list[str]:
        """The releases in the table, oldest first."""
        return list(self.raw["versions"])

    @cached_property
    def _parsed(self) -> list[Version]:
        return [Version(each) for each in self.versions]

    @property
    def last(self) -> int:
        return len(self.versions) - 1

    @property
    def date(self) -> str:
        """The date on which the table was made."""
        return str(self.raw["date"])

    @property
    def every(self) -> Span:
        return self.span("0-")

    def place(self, version: Version) -> tuple[int, bool]:
        """The index of the last release not newer than a version, -1 if all are newer; and whether it is the same."""
        plain = Version(version.public)
        at = bisect_right(self._parsed, plain) - 1
        return at, at >= 0 and self._parsed[at] == plain

    def span(self, text: str) -> Span:
        """The indices in a span's text: `"3-7,9-"`."""
        if text not in self._spans:
            found: set[int] = set()
            for part in text.split(","):
                first, dash, last = part.partition("-")
                found.update(
                    range(int(first), (int(last) if last else self.last if dash else int(first)) + 1)
                )
            self._spans[text] = frozenset(found)
        return self._spans[text]

    def _of(self, groups: Mapping[str, str], name: str) -> Span:
        """When something exists, from names grouped by span."""
        return next((self.span(span) for span, names in groups.items() if name in names.split(" ")), NOWHERE)

    # ------------------------------------------------------------------------------------ what is asked

    @cached_property
    def modules(self) -> dict[str, Span]:
        """When each module exists."""
        return {
            name: self.span(span) for span, names in self.raw["modules"].items() for name in names.split(" ")
        }

    def module(self, name: str) -> Presence:
        """A module, by its dotted name."""
        return Presence(self, self.modules.get(name, NOWHERE), self.every)

    def name(self, module: str, name: str) -> Presence:
        """A name in a module; submodules are names too."""
        there = self._of(self.raw["names"].get(module, {}), name)
        there |= self.modules.get(f"{module}.{name}", NOWHERE)
        maybe = bool(there) and any(at > max(there) for at in self._opened(module))
        return Presence(self, there, self.modules.get(module, NOWHERE) | there, maybe)

    def is_open(self, module: str, version: Version) -> bool:
        """Whether a module may have names in a version that cannot be listed."""
        return self.place(version)[0] in self._opened(module)

    def _opened(self, module: str) -> Span:
        """Releases in which a module may have more names than its source shows; `*` means the whole package."""
        return self._of(self.raw["open"], module) | self._of(self.raw["open"], "*")

    def elsewhere(self, name: str, module: str, version: str) -> str | None:
        """The module to which a name moved: the shortest public one that has it in a release."""
        at = self.versions.index(version)
        found = [
            other
            for other, groups in self.raw["names"].items()
            if other != module
            and "._" not in other
            and at in (there := self._of(groups, name))
            and (at - 1 not in there or name != name.lower())  # a plain word names many things
        ]
        return min(found, key=lambda other: (other.count("."), other), default=None)

    def exports(self, module: str) -> set[str]:
        """The names that a module has in any release."""
        groups = self.raw["names"].get(module, {})
        return {name for names in groups.values() for name in names.split(" ")}

    def moved(self, module: str, name: str) -> str | None:
        """The module that has a name after the last release that has it in `module`; None if it did not move."""
        after = max(self.name(module, name).there, default=self.last) + 1
        return self.elsewhere(name, module, self.versions[after]) if after <= self.last else None

    def parameter(self, function: str, name: str) -> Presence:
        """A parameter of a function or method, by its qualified name, in any module."""
        return self._parameter(function, name, "**")

    def own_parameter(self, function: str, name: str) -> Presence:
        """A parameter only under its own name, for a call that was refused: no `**` accepted it."""
        return self._parameter(function, name)

    def needed(self, function: str, name: str) -> Presence:
        """When a parameter is optional, among the releases that have the function."""
        needed = self._parameter(function, f"{name}!")
        return Presence(self, needed.among - needed.there, needed.among) if needed.there else needed

    def arity(self, function: str, more: int) -> Presence:
        """When a function takes `more` parameters than in its other releases; nowhere if the number grew in steps."""
        counts: dict[int, int] = {}
        for groups in self.raw["functions"].get(function, {}).values():
            for at in self._of(groups, "()"):
                own = [each for each in self._at(groups, at) if each[0] not in "(@*" and each[-1] != "!"]
                counts[at] = max(counts.get(at, 0), len(own))
        levels = sorted(set(counts.values()))
        two = len(levels) == 2 and levels[1] - levels[0] >= more
        there = frozenset(at for at, count in counts.items() if two and count == levels[1])
        return Presence(self, there, frozenset(counts))

    def _parameter(self, function: str, name: str, *also: str) -> Presence:
        there: set[int] = set()
        among: set[int] = set()
        for groups in self.raw["functions"].get(function, {}).values():
            own = self._of(groups, name)
            there |= own
            among |= self._of(groups, "()")
            if own:
                for each in also:
                    there |= self._of(groups, each)
        return Presence(self, frozenset(there), frozenset(among))

    def parameters(self, function: str, version: Version, modules: str = ".*") -> set[str] | None:
        """All parameters of a dataclass, or of a function that the package's root exports; None if they are unknown.

        `@module:name` stands for those of a class in another package. Only functions in `modules` count.
        """
        before, exact = self.place(version)
        around = {before} if exact else {before, min(before + 1, self.last)}
        found: set[str] | None = None
        for module, groups in self.raw["functions"].get(function, {}).items():
            whole = self._of(groups, "()")
            if not re.fullmatch(modules, module) or not around & whole:
                continue
            own = {each for at in around for each in self._at(groups, at)}
            if not around <= whole or "**" in own:
                return None
            found = (found or set()) | {each for each in own if each[-1] != "!" and each != "()"}
        return found

    def own_parameters(self, function: str, at: int) -> set[str] | None:
        """The parameters of a function in the release at an index, as far as known; None if that release lacks it."""
        every = self.raw["functions"].get(function, {}).values()
        found = {each for groups in every for each in self._at(groups, at)}
        return {each for each in found if each[0] not in "(@*" and each[-1] != "!"} if "()" in found else None

    def ever(self, function: str) -> set[str]:
        """All parameters of a function in any release."""
        every = self.raw["functions"].get(function, {}).values()
        return {
            each.rstrip("!") for groups in every for names in groups.values() for each in names.split(" ")
        }

    def marked(self, function: str) -> set[str]:
        """The `@module:name` among a function's parameters in any release."""
        return {each for each in self.ever(function) if each[0] == "@"}

    def _at(self, groups: Mapping[str, str], at: int) -> Iterator[str]:
        for span, names in groups.items():
            if at in self.span(span):
                yield from names.split(" ")

    def attribute(self, kind: str, name: str, depth: int = 0) -> Presence:
        """An attribute of a class or of its instances, by the name of the class, its bases included."""
        groups = self.raw["attributes"].get(kind, {})
        there, among = set(self._of(groups, name)), set(self._of(groups, "()"))
        unknown: set[int] = set()
        for span, bases in self.raw["bases"].get(kind, {}).items():
            for base in bases.split(" ") if depth < 8 else ():
                more = self.attribute(base, name, depth + 1)
                there |= more.there & self.span(span)
                among |= self.span(span)
                if more.among and self.last not in more.among and not more.there:
                    unknown |= self.span(span)  # what a class always has is not in its table
        return Presence(self, frozenset(there), frozenset(among - (unknown - there)))

    def last_of_classes(self, name: str) -> list[int]:
        """The last release in which each class that has an attribute itself has it."""
        spans = (self._of(groups, name) for groups in self.raw["attributes"].values())
        return [max(span) for span in spans if span]

    def ancestors(self, kind: str, depth: int = 0) -> set[str]:
        """The names of all classes from which a class derives in any release, including other packages."""
        own = {base for bases in self.raw["bases"].get(kind, {}).values() for base in bases.split(" ")}
        own |= {re.split(r"[.:]", each)[-1] for each in self.marked(f"{kind}.__init__")}
        more = (self.ancestors(base, depth + 1) for base in own if base != kind and depth < 8)
        return own.union(*more)

    def key(self, name: str) -> Presence:
        """A key of a registry: a model type in transformers, an architecture in vLLM."""
        return Presence(self, self._of(self.raw["keys"], name), self.every)

    def words(self, version: Version | None = None) -> set[str]:
        """Keys that the package's own config readers know: in a version, or in any."""
        groups: Mapping[str, str] = self.raw["words"]
        if version is None:
            return {name for names in groups.values() for name in names.split(" ")}
        return set(self._at(groups, max(0, self.place(version)[0])))

    def dropped(self, target: str) -> str | None:
        """The first release that no longer imports `module:name` of another package."""
        span = self._of(self.raw["uses"], target)
        return self.versions[max(span) + 1] if span else None

    @property
    def renames(self) -> Mapping[str, str]:
        """Parameters that replaced others, by the old name."""
        return {**dict(self.raw["renames"]), **_RENAMES.get(self.package, {})}


_RENAMES = {
    "transformers": {"tokenizer": "processing_class", "no_cuda": "use_cpu", "warmup_ratio": "warmup_steps"},
    "trl": {"tokenizer": "processing_class", "vllm_device": "vllm_mode"},
}
"""Replacements that the packages' code does not state in a readable way. A ratio becomes warmup_steps below 1."""


@cache
def table(package: str) -> Table | None:
    """The table of a package, None if there is none."""
    path = FOLDER / f"{package}.json.xz"
    if package not in ROOTS or not path.is_file():
        return None
    return Table(package, json.loads(lzma.decompress(path.read_bytes())))


def tables(packages: Iterable[str]) -> Iterator[Table]:
    """The tables of the packages that have one."""
    return (found for package in packages if (found := table(package)) is not None)
