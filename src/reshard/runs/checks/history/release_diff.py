"""What changed of a name between two releases of a package, as plain data for programs.

>>> found = changes("trl", "SFTTrainer", before="0.11.0", after="0.13.0")
>>> found["kind"], found["added"], found["removed"], found["there"]
('class', '0.4.7', None, {'before': True, 'after': True})
>>> found["parameters"]["renamed"]
{'tokenizer': 'processing_class'}
>>> found = changes("trl", "trl.PPOTrainer")
>>> found["removed"], found["moved_to"]
('0.29.0', 'trl.experimental.ppo')
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from packaging.version import InvalidVersion, Version

from reshard.base.errors import ReshardError
from reshard.base.suggest import closest, did_you_mean
from reshard.runs.checks.history.api_table import PACKAGE_ROOTS, ApiTable, table
from reshard.runs.checks.history.release_ranges import Presence, Span

_PARAMETER = re.compile(r"(?P<function>[\w.]{1,200})\((?P<name>\w{1,80})(?:=[^)]{0,80})?\)")


@dataclass(frozen=True)
class _Named:
    """What a name means in a table: its kind, when it exists, and the function whose parameters belong to it."""

    kind: str
    presence: Presence
    function: str = ""
    moved_to: str | None = None
    module: str = ""
    """The module of a name: in some releases, its names cannot be listed."""

    def is_in(self, own: ApiTable, at: int) -> bool | None:
        """Whether a release has it; None if that cannot be known."""
        if at in self.presence.there:
            return True
        return None if self.module and own.is_open(self.module, Version(own.versions[at])) else False


def changes(package: str, name: str, before: str | None = None, after: str | None = None) -> dict[str, Any]:
    """What the known releases of a package have of a name, and what changed of it between two of them.

    Parameters
    ----------
    package : str
        The installed name of a package, for example "huggingface-hub".
    name : str
        A module ("trl.trainer"), a class or function ("trl.SFTTrainer", or "SFTTrainer"), a method or attribute
        ("Trainer.log"), a parameter ("SFTConfig(max_length)"), a model type or an architecture ("qwen3").
        The package's own name may be left out.
    before, after : str, optional
        Releases. By default the oldest and the newest known one. A release that the table lacks counts as the known
        one before it.

    Returns
    -------
    dict
        JSON values. `added` is the first release with the name, None if the oldest known release has it already;
        `removed` is the first release without it, None if the newest has it; either is None as well where a module's
        names cannot be listed, and `there` too. `renamed` stands for `removed` of a parameter that has another name
        since: the old one may still be accepted. `moved_to` is the module that has the name instead, or a parameter's
        new name. `there` says whether each of the two releases has it, `parameters`
        what changed of the function or constructor. `known` are the releases in the table, and when it was made.

    Raises
    ------
    ReshardError
        The package or the name is unknown, or a release is no version.
    """
    own = _table_of(package)
    named = _named(own, name)
    first, last = min(named.presence.there), max(named.presence.there)
    without = own.after(last) if last < own.last and named.is_in(own, last + 1) is False else None
    is_renamed = named.kind == "parameter" and named.moved_to is not None
    one = _place(own, "before", before or own.versions[0])
    two = _place(own, "after", after or own.versions[-1])
    return {
        "package": package,
        "name": name,
        "kind": named.kind,
        "added": own.versions[first] if first > 0 and named.is_in(own, first - 1) is False else None,
        "removed": None if is_renamed else without,
        "renamed": without if is_renamed else None,
        "moved_to": named.moved_to,
        "before": own.versions[one],
        "after": own.versions[two],
        "there": {"before": named.is_in(own, one), "after": named.is_in(own, two)},
        "parameters": _parameters(own, named.function, one, two),
        "known": {"releases": list(own.versions), "date": own.date},
    }


def _table_of(package: str) -> ApiTable:
    own = table(package)
    if own is None:
        raise ReshardError(
            "history-package-unknown",
            "the history of this package is not known",
            found=package,
            expected=", ".join(PACKAGE_ROOTS),
            remedy=did_you_mean(package, PACKAGE_ROOTS, "choose one of these packages"),
        )
    return own


def _place(own: ApiTable, which: str, version: str) -> int:
    """The index of the release that counts for a version."""
    at = -1
    with suppress(InvalidVersion):
        at, _ = own.place(Version(version))
    if at < 0:
        raise ReshardError(
            "history-release-unknown",
            f"`{which}` is no release of {own.package} that the history knows",
            found=version,
            expected=f"a version from {own.versions[0]} on, for example {own.versions[-1]}",
        )
    return at


def _named(own: ApiTable, name: str) -> _Named:
    """The meaning of a name. Raises ReshardError if no known release has it."""
    meaning = next((each for each in _meanings(own, name) if each.presence.there), None)
    if meaning is None:
        near = closest(name.rpartition(".")[2], own.exports(own.root), most=3)
        raise ReshardError(
            "history-name-unknown",
            f"no release of {own.package} from {own.versions[0]} to {own.versions[-1]} is known to have this name",
            found=name,
            expected="a public name; of methods and attributes, one that some of the releases lack",
            remedy=f"did you mean {' or '.join(near)}?" if near else None,
        )
    return meaning


def _meanings(own: ApiTable, name: str) -> Iterator[_Named]:
    """What a name may mean, the likeliest first."""
    whole = name if f"{name}.".startswith(f"{own.root}.") else f"{own.root}.{name}"
    if match := _PARAMETER.fullmatch(whole):
        function = _function(own, match["function"])
        yield _Named(
            "parameter", own.own_parameter(function, match["name"]), "", own.renames.get(match["name"])
        )
        return
    module, _, last = whole.rpartition(".")
    owner = module.rpartition(".")[2]
    function, method = _function(own, last), f"{owner}.{last}"
    kind = "function" if function else "name"
    if own.has_class(last) or function.endswith(".__init__"):
        kind = "class"
    yield _Named("module", own.module(whole))
    yield _Named(kind, own.name(module, last), function, own.moved(module, last), module)
    if module in own.modules:
        yield _Named(kind, own.attribute(last, "()"), function)
    if own.functions(method):  # a method that each release has is no attribute in the table
        there = own.attribute(owner, last).there or own.own_parameter(method, "()").there
        yield _Named("method", Presence(own, there, own.every), method)
    replaced, there = own.replaced(owner, last), own.attribute(owner, last).there
    of_old = Span(at for at in there if not replaced or at <= replaced.last)
    yield _Named("attribute", Presence(own, of_old, own.every))
    yield _Named("model type" if own.package == "transformers" else "architecture", own.key(name))


def _function(own: ApiTable, name: str) -> str:
    """The qualified name of a function, method or constructor; "" if the table has none of them."""
    parts = name.split(".")
    names = (".".join(parts[-count:]) for count in (2, 1))
    qualified = (each for name in names for each in (f"{name}.__init__", name))
    return next((each for each in qualified if own.functions(each)), "")


def _parameters(own: ApiTable, function: str, before: int, after: int) -> dict[str, Any]:
    """The parameters that were added, removed and renamed. What comes from bases in other packages is left out."""
    old, new = (own.own_parameters(function, at) for at in (before, after))
    if old is None or new is None:
        return {"added": [], "removed": [], "renamed": {}}
    renamed = {name: own.renames[name] for name in sorted(old - new) if own.renames.get(name) in new}
    return {"added": sorted(new - old), "removed": sorted(old - new), "renamed": renamed}
