"""The tables of the history: one per package, read on first use. Made by `python -m tools.api_history`."""

from __future__ import annotations

import json
import lzma
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from packaging.version import Version

from reshard.runs.checks.history.release_ranges import LONG_LIVED, NOWHERE, Presence, Releases, Span

TABLES_FOLDER = Path(__file__).with_name("tables")
PACKAGE_ROOTS = {
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
PACKAGE_OF_ROOT = {root: package for package, root in PACKAGE_ROOTS.items()}


class Replaced(NamedTuple):
    """The modules of a class and of the one that replaced it; the first release of the new, and the last of the old."""

    old: str
    new: str
    since: int
    last: int


class ApiTable(Releases):
    """What the releases of one package have, as written by `tools/api_history/table.py`.

    Names are grouped by the releases that have them: `{"0-": "a b", "3-7,9-": "c"}`.
    """

    def __init__(self, package: str, raw: Mapping[str, Any]) -> None:
        super().__init__(raw["versions"])
        self.package = package
        self.raw = raw
        self.every = Span(range(len(self.versions)))
        self._spans: dict[str, Span] = {}

    @property
    def root(self) -> str:
        """The folder that is imported."""
        return str(self.raw["root"])

    @property
    def date(self) -> str:
        """The date on which the table was made."""
        return str(self.raw["date"])

    def span(self, text: str) -> Span:
        """The indices in a span's text: `"3-7,9-"`."""
        if text not in self._spans:
            releases: set[int] = set()
            for part in text.split(","):
                first, dash, last = part.partition("-")
                if dash:
                    releases.update(range(int(first), (int(last) if last else self.last) + 1))
                else:
                    releases.add(int(first))
            self._spans[text] = frozenset(releases)
        return self._spans[text]

    def _of(self, groups: Mapping[str, str], name: str) -> Span:
        """When a name exists."""
        return next((self.span(span) for span, names in groups.items() if name in names.split(" ")), NOWHERE)

    def _at(self, groups: Mapping[str, str], at: int) -> set[str]:
        """The names in the release at an index."""
        return {name for span, names in groups.items() if at in self.span(span) for name in names.split(" ")}

    # ------------------------------------------------------------------------------------ modules and names

    @cached_property
    def modules(self) -> dict[str, Span]:
        """When each module exists."""
        groups = self.raw["modules"].items()
        return {name: self.span(span) for span, names in groups for name in names.split(" ")}

    def module(self, name: str) -> Presence:
        """A module, by its dotted name."""
        return Presence(self, self.modules.get(name, NOWHERE), self.every)

    def name(self, module: str, name: str) -> Presence:
        """A name in a module; submodules are names too."""
        there = self._of(self.raw["names"].get(module, {}), name)
        there |= self.modules.get(f"{module}.{name}", NOWHERE)
        return Presence(self, there, self.modules.get(module, NOWHERE) | there)

    def exports(self, module: str) -> set[str]:
        """The names that a module has in any release."""
        return _names(self.raw["names"].get(module, {}))

    def is_open(self, module: str, version: Version) -> bool:
        """Whether a module may have names in a version that cannot be listed; `*` means the whole package."""
        opened = self._of(self.raw["open"], module) | self._of(self.raw["open"], "*")
        return self.place(version)[0] in opened

    def elsewhere(self, name: str, module: str, at: int) -> str | None:
        """The module to which a name moved: the shortest public one that has it in the release at an index."""
        names = [
            other
            for other, groups in self.raw["names"].items()
            if other != module
            and "._" not in other
            and at in (there := self._of(groups, name))
            and (at - 1 not in there or name != name.lower())  # a plain word names many things
        ]
        return min(names, key=lambda other: (other.count("."), other), default=None)

    def moved(self, module: str, name: str) -> str | None:
        """The module that has a name after the last release that has it in `module`; None if it did not move."""
        after = max(self.name(module, name).there, default=self.last) + 1
        return self.elsewhere(name, module, after) if after <= self.last else None

    def module_moved(self, module: str) -> str | None:
        """The module that got the last name of one after the last release that has it; None if several did."""
        after = max(self.module(module).there, default=self.last) + 1
        ends = f".{module.rpartition('.')[2]}"
        every = self.modules.items()
        modules = [
            each for each, span in every if each.endswith(ends) and after in span and after - 1 not in span
        ]
        return modules[0] if len(modules) == 1 else None

    def key(self, name: str) -> Presence:
        """A key of a registry: a model type in transformers, an architecture in vLLM."""
        return Presence(self, self._of(self.raw["keys"], name), self.every)

    def reader_keys(self) -> set[str]:
        """Keys that the package's own config readers know in any release."""
        return _names(self.raw["words"])

    def dropped(self, target: str) -> str | None:
        """The first release that no longer imports `module:name` of another package."""
        span = self._of(self.raw["uses"], target)
        return self.after(max(span)) if span else None

    # ------------------------------------------------------------------------------------ functions

    def functions(self, function: str) -> Mapping[str, Mapping[str, str]]:
        """The parameters of all functions of a qualified name, by module; `()` is the function itself.

        `x!` means that x is required, `**` that there may be others, `@module:name` stands for those of another class.
        """
        functions: Mapping[str, Mapping[str, str]] = self.raw["functions"].get(function, {})
        return functions

    def parameter(self, function: str, name: str) -> Presence:
        """A parameter of a function or method, also where `**` may accept it."""
        return self.own_parameter(function, name, "**")

    def own_parameter(self, function: str, name: str, *also: str) -> Presence:
        """A parameter only under its own name, for a call that was refused: no `**` accepted it. `also` are others."""
        every = self.functions(function).values()
        there = [
            self._of(groups, each) for groups in every if self._of(groups, name) for each in (name, *also)
        ]
        return Presence(self, NOWHERE.union(*there), NOWHERE.union(*(self._of(each, "()") for each in every)))

    def arity(self, function: str, more: int) -> Presence:
        """When a function takes `more` parameters than in its other releases; nowhere if the number grew in steps."""
        counts: dict[int, int] = {}
        for groups in self.functions(function).values():
            for at in self._of(groups, "()"):
                counts[at] = max(counts.get(at, 0), len(_own(self._at(groups, at))))
        levels = sorted(set(counts.values()))
        is_one_step = len(levels) == 2 and levels[1] - levels[0] >= more
        there = frozenset(at for at, count in counts.items() if is_one_step and count == levels[1])
        return Presence(self, there, frozenset(counts))

    def own_parameters(self, function: str, at: int) -> set[str] | None:
        """The parameters of a function in the release at an index, as far as known; None if that release lacks it."""
        parameters = set().union(*(self._at(groups, at) for groups in self.functions(function).values()))
        return _own(parameters) if "()" in parameters else None

    def parameters(self, function: str, version: Version, modules: str = ".*") -> set[str] | None:
        """All parameters of a dataclass, or of a function that the package's root exports; None if they are unknown.

        Only functions in `modules` count.
        """
        around, parameters = self.around(version), None
        for module, groups in self.functions(function).items():
            whole = self._of(groups, "()")
            if not re.fullmatch(modules, module) or not around & whole:
                continue
            own = set().union(*(self._at(groups, at) for at in around))
            if not around <= whole or "**" in own:
                return None
            parameters = (parameters or set()) | {each for each in own if each[-1] != "!" and each != "()"}
        return parameters

    def ever(self, function: str) -> set[str]:
        """All parameters of a function in any release."""
        every = self.functions(function).values()
        return {name.rstrip("!") for groups in every for name in _names(groups)}

    def marked(self, function: str) -> set[str]:
        """The `@module:name` among a function's parameters in any release."""
        return {each for each in self.ever(function) if each[0] == "@"}

    @property
    def renames(self) -> Mapping[str, str]:
        """Parameters that replaced others, by the old name."""
        return {**dict(self.raw["renames"]), **_RENAMES.get(self.package, {})}

    # ------------------------------------------------------------------------------------ classes

    def has_class(self, kind: str) -> bool:
        """Whether any release has a class of this name whose attributes changed."""
        return kind in self.raw["attributes"]

    def attribute(self, kind: str, name: str, depth: int = 0) -> Presence:
        """An attribute of a class or of its instances, by the name of the class, its bases included."""
        groups = self.raw["attributes"].get(kind, {})
        there, among = set(self._of(groups, name)), set(self._of(groups, "()"))
        unknown: set[int] = set()
        for span, bases in self.raw["bases"].get(kind, {}).items():
            for base in bases.split(" ") if depth < MAX_BASES else ():
                more = self.attribute(base, name, depth + 1)
                there |= more.there & self.span(span)
                among |= self.span(span)
                if more.among and self.last not in more.among and not more.there:
                    unknown |= self.span(span)  # what a class always has is not in its table
        return Presence(self, frozenset(there), frozenset(among - (unknown - there)))

    def replaced(self, kind: str, name: str) -> Replaced | None:
        """How another class replaced the one that has an attribute; None unless the attribute is of the old one.

        A class that only moved is in both modules for a few releases.
        """
        there = self.attribute(kind, name).there
        every = self.functions(f"{kind}.__init__").items()
        spans = sorted(
            ((module, self._of(groups, "()")) for module, groups in every), key=lambda each: min(each[1])
        )
        for (old, before), (new, after) in pairwise(spans):
            is_older = bool(there) and min(there) < min(after) and max(there) >= max(before)
            if is_older and self.last not in before and len(before & after) >= LONG_LIVED:
                return Replaced(old, new, min(after), max(before))
        return None

    def ancestors(self, kind: str, depth: int = 0) -> set[str]:
        """The names of all classes from which a class derives in any release, including other packages."""
        own = _names(self.raw["bases"].get(kind, {}))
        own |= {re.split(r"[.:]", each)[-1] for each in self.marked(f"{kind}.__init__")}
        more = (self.ancestors(base, depth + 1) for base in own if base != kind and depth < MAX_BASES)
        return own.union(*more)


MAX_BASES = 8
"""Maximum number of classes between one and a base of it."""


def _own(parameters: set[str]) -> set[str]:
    """Those of a function that it names itself."""
    return {each for each in parameters if each[0] not in "(@*" and each[-1] != "!"}


def _names(groups: Mapping[str, str]) -> set[str]:
    return {name for names in groups.values() for name in names.split(" ")}


_RENAMES = {
    "transformers": {"tokenizer": "processing_class", "no_cuda": "use_cpu", "warmup_ratio": "warmup_steps"},
    "trl": {"tokenizer": "processing_class", "vllm_device": "vllm_mode"},
}
"""Replacements that the packages' code does not state in a readable way. A ratio becomes warmup_steps below 1."""


REPLACED_NAMES = {
    "peft.prepare_model_for_int8_training": "from peft import prepare_model_for_kbit_training",
    "transformers.AdamW": "from torch.optim import AdamW",
    "trl.DataCollatorForCompletionOnlyLM": "SFTConfig(..., completion_only_loss=True)",
}
"""Names that were removed, and what to write instead, which the tables cannot know."""


@cache
def table(package: str) -> ApiTable | None:
    """The table of a package, None if there is none."""
    path = TABLES_FOLDER / f"{package}.json.xz"
    if package not in PACKAGE_ROOTS or not path.is_file():
        return None
    return ApiTable(package, json.loads(lzma.decompress(path.read_bytes())))


def table_of(module: str) -> ApiTable | None:
    """The table of the package to which a module belongs."""
    package = PACKAGE_OF_ROOT.get(module.partition(".")[0])
    return table(package) if package else None


def tables(packages: Iterable[str]) -> Iterator[ApiTable]:
    """The tables of the packages that have one."""
    return (known for package in packages if (known := table(package)) is not None)
