"""The keys that programs accept in their configs, from the classes that read them; and problems of a key."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from reshard.base.suggest import closest
from reshard.runs.checks.history.api_table import ApiTable, table
from reshard.runs.checks.history.call_parameters import RefusedParameter, base_of, of_other_release
from reshard.runs.checks.history.versions_in_use import Versions


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


@dataclass
class KnownKeys:
    """What a program ("" for a script) accepts in the versions in use, and the constructors that read it."""

    program: str
    versions: Versions
    functions: list[tuple[ApiTable, str]]
    known: set[str]

    def near(self, key: str) -> str | None:
        """The key that was probably meant instead of an unknown one."""
        if key in self.known or self.gone(key):
            return None
        return next(iter(closest(key, self.known, cutoff=0.85)), None)

    def gone(self, key: str) -> RefusedParameter | None:
        """When a key was added or removed, if other versions accept it."""
        if key in self.known:
            return None
        refusals = (of_other_release(*each, key, self.versions, self.known) for each in self.functions)
        return next(filter(None, refusals), None)


class ConfigKeys(KnownKeys):
    """What a program accepts in its config in the installed or newest version, and what it accepted in others."""

    def __init__(self, program: str, versions: Versions) -> None:
        self.schema = SCHEMAS[program]
        self.table = table(self.schema.package)
        super().__init__(self.schema.program, versions, [], {*self.schema.own})
        self.functions = [*self._constructors()]
        self.known |= set().union(*(self._taken(*each) for each in self.functions))
        if self.schema.words and self.table:
            self.known |= self.table.reader_keys()

    def span(self, name: str) -> tuple[str, str] | None:
        """The first and the last known release in which the program accepts a key; None if none does."""
        own = [each.own_parameter(function, name) for each, function in self.functions if each is self.table]
        there = {at for presence in own for at in presence.there}
        return (
            (self.table.versions[min(there)], self.table.versions[max(there)])
            if self.table and there
            else None
        )

    def _constructors(self) -> Iterator[tuple[ApiTable, str]]:
        """The classes that read the config."""
        name = re.compile(rf"(?:{self.schema.classes})\.__init__")
        for function, modules in self.table.raw["functions"].items() if self.table else ():
            if name.fullmatch(function) and any(re.fullmatch(self.schema.modules, each) for each in modules):
                assert self.table
                yield self.table, function
        base = base_of(_TRAINS) if self.schema.trains and self.table else None
        yield from [base] if base else []

    def _taken(self, own: ApiTable, function: str, depth: int = 0) -> set[str]:
        """What a class accepts in the relevant version, or in any if that version does not have the class."""
        if own is not self.table and self.versions.of(self.schema.package) is None and not depth:
            return own.ever(function)  # it is unknown which transformers is used
        modules = self.schema.modules if own is self.table else ".*"
        parameters: set[str] = set()
        for each in own.parameters(function, self.versions.assumed(own), modules) or ():
            base = base_of(each) if each[0] == "@" and depth < 4 else None
            parameters |= self._taken(*base, depth + 1) if base else {each}
        return parameters
