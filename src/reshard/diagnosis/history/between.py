"""What changed of a name between two releases of a package, as plain data for programs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from packaging.version import InvalidVersion, Version

from reshard.base.errors import ReshardError
from reshard.base.suggest import closest, did_you_mean
from reshard.diagnosis.history.releases import Presence
from reshard.diagnosis.history.table import ROOTS, Table, table

_PARAMETER = re.compile(r"(?P<function>[\w.]+)\((?P<name>\w+)(?:=[^)]*)?\)")


@dataclass(frozen=True)
class _Named:
    """What a name means in a table: its kind, when it exists, and the function whose parameters belong to it."""

    kind: str
    presence: Presence
    function: str = ""
    moved_to: str | None = None


def changes(package: str, name: str, before: str | None = None, after: str | None = None) -> dict[str, Any]:
    """What the known releases of a package have of a name, and what changed of it between two of them.

    Parameters
    ----------
    package : str
        The installed name of a package, for example "huggingface-hub".
    name : str
        A module ("trl.trainer"), a class or function ("trl.SFTTrainer", or "SFTTrainer"), a method or attribute
        ("SFTTrainer.train"), a parameter ("SFTConfig(max_length)"), a model type or an architecture ("qwen3").
        The package's own name may be left out.
    before, after : str, optional
        Releases. By default the oldest and the newest known one. A release that the table lacks counts as the known
        one before it.

    Returns
    -------
    dict
        JSON values. `added` is the first release with the name, None if the oldest known release has it already;
        `removed` is the first release without it, None if the newest has it; `moved_to` is the module that has the
        name instead, or a parameter's new name. `there` says whether each of the two releases has it, `parameters`
        what changed of the function or constructor. `known` are the releases in the table, and when it was made.

    Raises
    ------
    ReshardError
        The package or the name is unknown, or a release is no version.

    Examples
    --------
    >>> found = changes("trl", "SFTTrainer", before="0.11.0", after="0.13.0")
    >>> found["kind"], found["added"], found["removed"], found["there"]
    ('class', '0.4.7', None, {'before': True, 'after': True})
    >>> found["parameters"]["renamed"]
    {'tokenizer': 'processing_class'}
    >>> found = changes("trl", "trl.PPOTrainer")
    >>> found["removed"], found["moved_to"]
    ('0.29.0', 'trl.experimental.ppo')
    """
    own = _table_of(package)
    named = _named(own, name)
    there = named.presence.there
    at = {
        "before": _place(own, before or own.versions[0], "before"),
        "after": _place(own, after or own.versions[-1], "after"),
    }
    last = max(there)
    return {
        "package": package,
        "name": name,
        "kind": named.kind,
        "added": own.versions[min(there)] if min(there) > 0 else None,
        "removed": own.versions[last + 1] if last < own.last else None,
        "moved_to": named.moved_to,
        "before": own.versions[at["before"]],
        "after": own.versions[at["after"]],
        "there": {end: place in there for end, place in at.items()},
        "parameters": _parameters(own, named.function, at["before"], at["after"]),
        "known": {"releases": list(own.versions), "date": own.date},
    }


def _table_of(package: str) -> Table:
    found = table(package)
    if found is None:
        known = ", ".join(ROOTS)
        raise ReshardError(
            "history-package-unknown",
            "the history of this package is not known",
            found=package,
            expected=known,
            remedy=did_you_mean(package, ROOTS, "choose one of these packages"),
        )
    return found


def _place(own: Table, version: str, which: str) -> int:
    """The index of the release that counts for a version."""
    try:
        at, _ = own.place(Version(version))
    except InvalidVersion:
        raise ReshardError(
            "history-version-invalid",
            f"`{which}` is not a version",
            found=version,
            expected=f"a release of {own.package}, for example {own.versions[-1]}",
        ) from None
    if at < 0:
        raise ReshardError(
            "history-version-too-old",
            f"`{which}` is older than all known releases of {own.package}",
            found=version,
            expected=f"{own.versions[0]} or newer",
        )
    return at


def _named(own: Table, name: str) -> _Named:
    """The meaning of a name. Raises ReshardError if no known release has it."""
    for kind in (_parameter, _module, _export, _member, _key):
        named = kind(own, name)
        if named is not None and named.presence.there:
            return named
    near = closest(name.rpartition(".")[2], own.exports(own.root), most=3)
    raise ReshardError(
        "history-name-unknown",
        f"no release of {own.package} from {own.versions[0]} to {own.versions[-1]} is known to have this name",
        found=name,
        expected="a public name; of methods and attributes, one that some of the releases lack",
        remedy=f"did you mean {' or '.join(near)}?" if near else None,
    )


def _parameter(own: Table, name: str) -> _Named | None:
    match = _PARAMETER.fullmatch(name)
    if match is None:
        return None
    function = _function(own, match["function"].removeprefix(f"{own.root}."))
    return _Named("parameter", own.own_parameter(function, match["name"]), "", own.renames.get(match["name"]))


def _module(own: Table, name: str) -> _Named:
    return _Named("module", own.module(_whole(own, name)))


def _export(own: Table, name: str) -> _Named:
    """A class or function in a module, or a class of any module."""
    module, _, last = _whole(own, name).rpartition(".")
    presence, function = own.name(module, last), _function(own, last)
    kinds = {f"{last}.__init__": "class", last: "function"}
    kind = "class" if last in own.raw["attributes"] else kinds.get(function, "name")
    if presence.there or module not in (own.root, *own.modules):
        return _Named(kind, presence, function, own.moved(module, last))
    return _Named(kind, own.attribute(last, "()"), function)


def _whole(own: Table, name: str) -> str:
    root = own.root
    return name if f"{name}.".startswith(f"{root}.") else f"{root}.{name}"


def _member(own: Table, name: str) -> _Named | None:
    """A method or attribute of a class."""
    owner, _, last = name.rpartition(".")
    kind = owner.rpartition(".")[2]
    function = _function(own, f"{kind}.{last}")
    presence = own.attribute(kind, last)
    if function and not presence.there:  # each release has it that has the class
        presence = own.own_parameter(function, "()")
    return _Named("method" if function else "attribute", presence, function)


def _key(own: Table, name: str) -> _Named | None:
    return _Named("model type" if own.package == "transformers" else "architecture", own.key(name))


def _function(own: Table, name: str) -> str:
    """The qualified name of a function, or of a class's constructor; "" if the table has neither."""
    return next((each for each in (f"{name}.__init__", name) if each in own.raw["functions"]), "")


def _parameters(own: Table, function: str, before: int, after: int) -> dict[str, Any]:
    """The parameters that were added, removed and renamed. What comes from bases in other packages is left out."""
    old, new = (own.own_parameters(function, at) for at in (before, after))
    if old is None or new is None:
        return {"added": [], "removed": [], "renamed": {}}
    renamed = {name: own.renames[name] for name in sorted(old - new) if own.renames.get(name) in new}
    return {"added": sorted(new - old), "removed": sorted(old - new), "renamed": renamed}
