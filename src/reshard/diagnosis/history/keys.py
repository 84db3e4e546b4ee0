"""The keys that programs accept in their configs, from the classes that read them; and problems of a key."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from reshard.base.suggest import closest
from reshard.diagnosis.history.calls import Refused, base_of
from reshard.diagnosis.history.table import Table, table
from reshard.diagnosis.history.versions import Versions


@dataclass(frozen=True)
class Schema:
    """The classes of a package that read a program's config, by patterns of modules and names.

    `words` adds the words of its modules, `trains` also the arguments of transformers, and `own` keys of a class that
    no table has, because its base is a variable.
    """

    program: str
    package: str
    modules: str
    classes: str = r".*"
    words: bool = False
    trains: bool = False
    own: tuple[str, ...] = ()


SCHEMAS = {
    "trl": Schema("TRL", "trl", r"trl\.(?:trainer|scripts)\b.*", r"\w*(?:Config|Arguments)"),
    "accelerate": Schema("accelerate", "accelerate", r"accelerate\.commands\.config\..*", words=True),
    "deepspeed": Schema("DeepSpeed", "deepspeed", r"deepspeed\..*", r"\w*(?:Config|Params)\w*", words=True),
    "llamafactory": Schema(
        *("LLaMA-Factory", "llamafactory", r"llamafactory\.hparams\..*"),
        trains=True,
        own=("overwrite_output_dir",),  # TrainingArguments in hparams/training_args.py, 0.9.5
    ),
    "ms-swift": Schema("ms-swift", "ms-swift", r"swift\..*", r"\w*(?:Arguments?|Args|Mixin)", trains=True),
}
_TRAINS = "@transformers:Seq2SeqTrainingArguments"


class Keys:
    """What a program accepts in the installed or newest version, and what it accepted in others."""

    def __init__(self, program: str, versions: Versions) -> None:
        self.schema = SCHEMAS[program]
        self.versions = versions
        self.table = table(self.schema.package)
        self.functions = list(_functions(self.table, self.schema)) if self.table else []
        base = base_of(_TRAINS) if self.schema.trains else None
        self.functions += [base] if base else []
        self.known = self._known() if self.table else set()

    def span(self, name: str) -> tuple[str, str] | None:
        """The first and the last known release in which the program accepts a key; None if none does."""
        own = (
            found.own_parameter(function, name) for found, function in self.functions if found is self.table
        )
        there = {at for presence in own for at in presence.there}
        if self.table is None or not there:
            return None
        return self.table.versions[min(there)], self.table.versions[max(there)]

    def _known(self) -> set[str]:
        assert self.table is not None
        found = {name for each in self.functions for name in self._taken(*each)} | {*self.schema.own}
        if (
            self.schema.trains
            and self.versions.of(self.schema.package) is None
            and (base := base_of(_TRAINS))
        ):
            found |= base[0].ever(base[1])  # it is unknown which transformers is used
        return found | (self.table.words() if self.schema.words else set())

    def _taken(self, own: Table, function: str, depth: int = 0) -> set[str]:
        """What a class accepts in the relevant version, or in any if that version does not have the class."""
        found: set[str] = set()
        modules = self.schema.modules if own is self.table else ".*"
        for each in own.parameters(function, self.versions.assumed(own), modules) or ():
            base = base_of(each) if each[0] == "@" and depth < 4 else None
            found |= self._taken(*base, depth + 1) if base else {each}
        return found

    def near(self, key: str) -> str | None:
        """The key that was probably meant instead of an unknown one."""
        if not self.known or key in self.known or self.gone(key):
            return None
        near = closest(key, self.known, cutoff=0.85)
        return near[0] if near else None

    def gone(self, key: str) -> Refused | None:
        """When a key was added or removed, if other versions accept it."""
        if not self.table or key in self.known:
            return None
        seen: set[tuple[str, str]] = set()
        for own, function in self.functions:
            for each, target in ((own, function), *filter(None, map(base_of, own.marked(function)))):
                if (each.package, target) in seen:
                    continue
                seen.add((each.package, target))
                presence = each.parameter(target, key)
                bounds = presence.bounds(self.versions.assumed(each)) if presence.there else None
                if bounds:
                    new = each.renames.get(key) or own.renames.get(key)
                    return Refused(each, bounds, new if new in self.known else None)
        return None


def _functions(found: Table, schema: Schema) -> Iterator[tuple[Table, str]]:
    name = re.compile(rf"(?:{schema.classes})\.__init__")
    for function, modules in found.raw["functions"].items():
        if name.fullmatch(function) and any(re.fullmatch(schema.modules, module) for module in modules):
            yield found, function
