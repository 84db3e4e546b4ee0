"""What a failure's message reports as missing, and what the history of releases knows about it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from packaging.version import Version

from reshard.base.suggest import closest
from reshard.diagnosis.finding import Text
from reshard.diagnosis.history.calls import base_of
from reshard.diagnosis.history.having import having
from reshard.diagnosis.history.table import (
    NOWHERE,
    PACKAGES,
    ROOTS,
    Bounds,
    Presence,
    Span,
    Table,
    table,
    tables,
)
from reshard.diagnosis.log import Log, Traceback
from reshard.diagnosis.upstream import package_of
from reshard.diagnosis.words import words

QUOTE = r"[`'\"‘’“”]"
IMPORT = re.compile(
    rf"cannot import name {QUOTE}(?P<name>\w+){QUOTE}? from {QUOTE}(?P<module>[\w.]+){QUOTE}(?: \((?P<path>[^)]+)\))?"
)
MODULE = re.compile(
    rf"(?:No module named {QUOTE}|(?<!ImportError: )No module named )"
    rf"(?P<module>\w+(?:\.\w+)+){QUOTE}?(?!.*is not a package)"
)
ATTRIBUTE = re.compile(
    rf"(?<!initialized )module {QUOTE}(?P<module>[\w.]+){QUOTE} has no attribute {QUOTE}(?P<name>\w+)"
)
MEMBER = re.compile(
    rf"(?:type object )?{QUOTE}(?P<kind>\w+){QUOTE}(?: object)? has no attribute {QUOTE}(?P<name>\w+)"
)
_F = r"(?<![\w.<>])(?P<function>[\w.<>]+)\(\)"
_UNDERSCORED = re.compile(r"(?<=\.)(?:\*\*)?init(?:\*\*)?$")
"""`__init__` as Markdown shows it."""
_KEYWORD = re.compile(rf"{_F} got an unexpected keyword argument {QUOTE}(?P<name>\w+)")
_NEEDED = re.compile(
    rf"{_F} missing \d+ required (?:positional|keyword-only) arguments?: {QUOTE}(?P<name>\w+)"
)
_GIVEN = re.compile(
    rf"{_F} takes (?:from \d+ to )?(?P<takes>\d+) positional arguments?"
    r" but (?P<given>\d+) (?:was|were)"
)
KEY = re.compile(r"KeyError: ['\"](?P<name>[a-z][\w-]{2,60})['\"]")
MODEL_TYPES = re.compile(r"CONFIG_MAPPING|configuration_auto|Auto(?:Config|Model|Processor|Tokenizer)\b")
TYPE = re.compile(rf"model type {QUOTE}(?P<name>[\w.-]+){QUOTE} but Transformers does not recognize")
_ARCHITECTURE = re.compile(
    rf"Model architectures? \[{QUOTE}(?P<name>\w+){QUOTE}.*(?:not supported|no vLLM implementation)"
)


EARLY = 0.2
"""The share of the known releases that may lack a name that a package always has."""


@dataclass(frozen=True)
class Missing:
    """A missing name, in the form that people write, and when its package has it."""

    name: str | Text
    presence: Presence
    instead: str | None = None
    target: str = ""
    """`module:name` as another package would import it."""
    of_object: bool = False
    """Whether it is an attribute of a class of this name, which may be another class."""
    wider: Presence | None = None
    """When it may have been accepted, counting decorators and `**`."""

    def bounds(self, version: Version | None) -> Bounds | None:
        """The releases that have it, relative to one that does not."""
        known = self.wider.bounds(version) if self.wider and version else None
        return known or self.presence.bounds(version)

    @property
    def table(self) -> Table:
        return self.presence.table

    @property
    def everywhere(self) -> bool:
        """Whether every release has it, of the past years at least."""
        first = min(self.presence.there, default=self.table.last)
        whole = len(self.presence.there) == self.table.last + 1 - first
        return whole and first < self.table.last * EARLY


def imported(said: str, root: Traceback, log: Log) -> Iterator[Missing]:
    match = IMPORT.search(said)
    if match and not (is_shadowed(match["path"]) and not checkout_of(match["path"], match["module"])):
        yield from imported_name(match)


def imported_name(match: re.Match[str]) -> Iterator[Missing]:
    """What a match of `IMPORT` names, wherever it was imported from."""
    for found in table_of(match["module"]):
        yield _name(found, match["module"], match["name"], f"{match['module']}.{match['name']}")


def _attribute(said: str, root: Traceback, log: Log) -> Iterator[Missing]:
    if match := ATTRIBUTE.search(said):
        for found in table_of(match["module"]):
            yield _name(found, match["module"], match["name"], f"{match['module']}.{match['name']}")


def _name(found: Table, module: str, name: str, shown: str) -> Missing:
    presence = found.name(module, name)
    instead = _REPLACED.get(f"{module}.{name}") or _moved(presence, name, module)
    return Missing(shown, presence, instead, f"{module}:{name}")


_REPLACED = {
    "peft.prepare_model_for_int8_training": "from peft import prepare_model_for_kbit_training",
    "transformers.AdamW": "from torch.optim import AdamW",
    "trl.DataCollatorForCompletionOnlyLM": "SFTConfig(..., completion_only_loss=True)",
}
"""Names that others replace, which the tables cannot know."""


def _moved(presence: Presence, name: str, module: str) -> str | None:
    """Where a name is after the last release that has it in this module."""
    after = max(presence.there, default=presence.table.last) + 1
    if after > presence.table.last:
        return None
    other = presence.table.elsewhere(name, module, presence.table.versions[after])
    return f"from {other} import {name}" if other else None


def _module(said: str, root: Traceback, log: Log) -> Iterator[Missing]:
    match = MODULE.search(said)
    for found in table_of(match["module"]) if match else ():
        presence = found.module(match["module"]) if match else None
        if match and presence and presence.there:
            yield Missing(match["module"], presence, _module_moved(presence, match["module"]))


def _module_moved(presence: Presence, module: str) -> str | None:
    """A module with the same last name after the last release that has it; None if there are several."""
    after = max(presence.there) + 1
    last = f".{module.rpartition('.')[2]}"
    every = presence.table.modules.items()
    found = [
        other for other, span in every if other.endswith(last) and after in span and after - 1 not in span
    ]
    return f"import {found[0]}" if len(found) == 1 else None


def _member(said: str, root: Traceback, log: Log) -> Iterator[Missing]:
    if (match := MEMBER.search(said)) and not ATTRIBUTE.search(said):
        kind, name = match["kind"], match["name"]
        ask = partial(_attribute_of, kind=kind, name=name)
        found = list(_wherever(root, log, ask, (kind, f".{name}")))
        yield from found or _through(kind, name) or (() if kind == "NoneType" else _inherited(kind, name))


def _attribute_of(found: Table, kind: str, name: str) -> Missing:
    return Missing(f"{kind}.{name}", found.attribute(kind, name), of_object=True)


def forwarded(kind: str, name: str) -> Span:
    """The releases in which a wrapper of PEFT finds an attribute in the LoRA model inside it."""
    own = table("peft") if kind.startswith(("PeftModel", "LoraModel")) else None
    return own.attribute("LoraModel", name).there if own else NOWHERE


def _through(kind: str, name: str) -> list[Missing]:
    """The same as what is missing."""
    own = table("peft") if forwarded(kind, name) else None
    return [Missing(f"{kind}.{name}", own.attribute("LoraModel", name), of_object=True)] if own else []


def _inherited(kind: str, name: str) -> Iterator[Missing]:
    """An attribute that a class inherits from a base in another package."""
    bases = {base for own in tables(having(ROOTS, kind)) for base in own.ancestors(kind)}
    bases |= {
        last[0] for last in [re.search(r"(?<=[a-z0-9A-Z])[A-Z][a-z]+$", kind)] if last
    }  # GRPOTrainer is a Trainer
    every = (
        (base, own.attribute(base, name))
        for base in sorted(bases)
        for own in tables(having(ROOTS, base, f".{name}"))
        if kind not in own.raw["attributes"]
    )
    found = {presence.table.package: (base, presence) for base, presence in every if presence.there}
    if len(found) == 1:
        ((base, presence),) = found.values()
        yield Missing(f"{base}.{name}", presence, of_object=True)


def _keyword(said: str, root: Traceback, log: Log) -> Iterator[Missing]:
    if match := _KEYWORD.search(said):
        for function in _functions(match["function"], root, log):
            kind = function.removesuffix(".__init__")
            ask = partial(_taken, function=function, name=match["name"])
            yield from _of_others(root, _wherever(root, log, ask, (kind,), kind))


def _taken(found: Table, function: str, name: str) -> Missing:
    """A parameter of a function, or of its class's bases in other packages."""
    presence, renames = found.own_parameter(function, name), dict(found.renames)
    wider = found.parameter(function, name)
    for base in map(base_of, found.marked(function)):
        if base and not presence.there:
            presence, renames = base[0].own_parameter(base[1], name), {**base[0].renames, **renames}
            wider = base[0].parameter(base[1], name)
    new = renames.get(name)
    shown = f"{function.removesuffix('.__init__')}({name}=…)"
    instead = _in_config(found, function, new or name) or (f"{new}=…" if new else None)
    return Missing(shown, presence, instead, wider=wider)


def _in_config(found: Table, function: str, name: str) -> str | None:
    """How a trainer's config takes a parameter that the trainer itself no longer takes; None if it does not."""
    kind = function.removesuffix(".__init__")
    config = re.sub(r"Trainer$", "Config", kind)
    takes = config != kind and _takes_now(found, config, name)
    return f'{kind}(..., args={config}(output_dir="OUT", {name}=…))' if takes else None


def _takes_now(found: Table, kind: str, name: str) -> bool:
    """Whether a class takes a parameter in the last known release."""
    return found.last in found.own_parameter(f"{kind}.__init__", name).there


def meant(found: Table, function: str, name: str) -> str | None:
    """What was meant by a parameter that no release has: a new name, one of the trainer or config, or a similar one."""
    kind = function.removesuffix(".__init__")
    new = found.renames.get(name, name)
    if in_config := _in_config(found, function, new):
        return in_config
    trainer = re.sub(r"Config$", "Trainer", kind)
    if trainer != kind and _takes_now(found, trainer, new):
        return f"{trainer}(..., {new}=…)"
    near = closest(
        name, {each for each in found.ever(function) if _takes_now(found, kind, each)}, cutoff=CLOSE
    )
    known = new if _takes_now(found, kind, new) else next(iter(near), None)
    return f"{kind}({known}=…)" if known else None


CLOSE = 0.85
"""Minimum similarity of a parameter that may have been meant."""


def _needed(said: str, root: Traceback, log: Log) -> Iterator[Missing]:
    if match := _NEEDED.search(said):
        for function in _functions(match["function"], root, log):
            kind = function.removesuffix(".__init__")
            ask = partial(
                _required,
                words("without-argument", function=kind, name=match["name"]),
                function,
                match["name"],
            )
            yield from _of_others(root, _wherever(root, log, ask, (kind,)))


def _given(said: str, root: Traceback, log: Log) -> Iterator[Missing]:
    if match := _GIVEN.search(said):
        more = int(match["given"]) - int(match["takes"])
        for function in _functions(match["function"], root, log):
            kind = function.removesuffix(".__init__")
            ask = partial(_counted, words("more-arguments", function=kind, count=more), function, more)
            yield from _of_others(root, _wherever(root, log, ask, (kind,)))


def _of_others(root: Traceback, found: Iterable[Missing]) -> Iterator[Missing]:
    """Without functions of the package that calls them: it is one release, so what it calls is somebody's override.

    A config that it makes of the keys in a file, or of keywords that it got, is not: these are another release's.
    """
    at = -2 if _FORWARDS.search(root.source) and len(root.frames) > 1 else -1
    caller = package_of(root.frames[at]) if root.frames else None
    of_file = root.frames and "**" in root.source and _CONFIGS.search(root.frames[-1])
    passed = of_file or _PASSES.search(root.source)
    return (each for each in found if passed or each.table.raw["root"] != caller)


_PASSES = re.compile(r"\b\w+(?:Args|Arguments|Config)\($")
"""The first line of a call that ends with the keywords of somebody else."""
_CONFIGS = re.compile(r"[/\\]config\w*(?:\.py|[/\\])")
"""A package's code that reads configs, by its path."""
_FORWARDS = re.compile(r"^(?:return |\w+ = )?\w+\((?:self, )?(?:\*args, )?\*\*kwargs\)$")
"""The line of a decorator that passes on what it got: the caller is in the frame before."""


def _required(shown: Text, function: str, name: str, found: Table) -> Missing:
    return Missing(shown, found.needed(function, name))


def _counted(shown: Text, function: str, more: int, found: Table) -> Missing:
    return Missing(shown, found.arity(function, more))


def _functions(function: str, root: Traceback, log: Log) -> list[str]:
    """The qualified names that a message may mean: Python 3.9 writes `__init__()` for any class's."""
    if function != "__init__":
        return [_UNDERSCORED.sub("__init__", function)]
    source = root.source or next((line.text for line in log.lines if line.number == root.last - 1), "")
    return [f"{name}.__init__" for name in called_in(source)]


def called_in(source: str) -> list[str]:
    """The classes that a line of code calls, by their names."""
    return re.findall(r"\b([A-Z]\w*)\(", source)


def _type(said: str, root: Traceback, log: Log) -> Iterator[Missing]:
    match = TYPE.search(said)
    if match is None and MODEL_TYPES.search(log.text):
        match = KEY.search(said)
    if match and (found := table("transformers")):
        yield Missing(f"model_type {match['name']}", found.key(match["name"]))


def _architecture(said: str, root: Traceback, log: Log) -> Iterator[Missing]:
    if (match := _ARCHITECTURE.search(said)) and (found := table("vllm")):
        yield Missing(match["name"], found.key(match["name"]))


ASKED: tuple[Callable[[str, Traceback, Log], Iterator[Missing]], ...] = (
    *(imported, _attribute, _module, _keyword, _needed, _given, _type, _architecture, _member),
)


OF_NAMES = (imported, _attribute, _member)


def _wherever(
    root: Traceback, log: Log, ask: Callable[[Table], Missing], names: tuple[str, ...], kind: str = ""
) -> Iterator[Missing]:
    """What only one package has: among those that the failure mentions, or among all if none of these has it.

    Only packages are asked that may have all of `names`.
    If several have a class of the same name, the one from whose root it is imported counts.
    """
    mentioned = _mentioned(root, log)
    known = [each for each in map(ask, tables(having(mentioned, *names))) if each.presence.there]
    if not known:
        others = [package for package in ROOTS if package not in {*mentioned, *_PROGRAMS}]
        known = [each for each in map(ask, tables(having(others, *names))) if each.presence.there]
    known = list({each.table.package: each for each in known}.values())  # a subclass has what its base has
    if len(known) > 1 and kind:
        known = [each for each in known if each.table.name(each.table.raw["root"], kind).there]
    yield from known if len(known) == 1 else []


_PROGRAMS = ("llamafactory", "ms-swift")
"""Packages whose classes are called only by themselves: a failure in one mentions it."""


def checkout_of(path: str | None, module: str) -> str:
    """The folder of a checkout of a package, by the path of one of its modules; "" for an installed package."""
    whole = module.replace(".", "/")
    if not path or "." not in module or not is_shadowed(path):
        return ""
    found = re.search(rf"^(?P<folder>.*)/{re.escape(whole)}(?:\.py|/__init__\.py)$", path.replace("\\", "/"))
    return found["folder"] if found else ""


_INIT = r"/(?:__|\*\*)init(?:__|\*\*)\.py$"


def copy_of(match: re.Match[str]) -> str:
    """The folder of a package from whose `__init__.py`, or a subpackage's, `IMPORT` reports a name as missing."""
    path, (package, _, rest) = (match["path"] or "").replace("\\", "/"), match["module"].partition(".")
    inside = "".join(f"/{part}" for part in rest.split(".") if part)
    found = re.search(rf"^(?P<folder>.*/{re.escape(package)}){re.escape(inside)}{_INIT}", path)
    return found["folder"] if found else ""


def is_shadowed(path: str | None) -> bool:
    """Whether a module was loaded from outside of the folders for installed packages."""
    return path is not None and not re.search(r"(?:site|dist)-packages|/\.local/", path)


def table_of(module: str) -> Iterator[Table]:
    return tables([PACKAGES[root]] if (root := module.partition(".")[0]) in PACKAGES else [])


def _mentioned(root: Traceback, log: Log) -> list[str]:
    """Packages whose files or names appear in the failure's own lines."""
    shown = "\n".join(line.text for line in log.lines if root.first <= line.number <= root.end)
    text = "\n".join([*root.frames, root.said, shown])
    return [package for package, name in ROOTS.items() if re.search(rf"(?<![\w-]){name}(?![\w-])", text)]
