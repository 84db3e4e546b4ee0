"""Weights of the Hub as a model has them in memory, and back, by the rules of transformers.

A rule that only renames applies to every name that it matches, and at most one that converts: on the way to memory
after all renamings, on the way to the Hub before them. The names in memory are not those of all releases alike, so
weights are first loaded as transformers would load them, and then saved as the Hub has them; which one they are already
is told by all names together.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from reshard.algebra.tensors import Tensor
from reshard.base.errors import Problem, ReshardError, raise_all
from reshard.base.foreign_text import natural_key
from reshard.families.renaming import GUARDED, Renaming, saved
from reshard.formats.unique_names import under_new_names
from reshard.formats.weight_operations import OperationContext, Tensors, UnfitError, convert
from reshard.transfer.plan import Planned

Rules = Sequence[Renaming]


def to_hub(tensors: Iterable[Planned], rules: Rules, config: Mapping[str, Any]) -> list[Planned]:
    """The tensors under the Hub's names, whether they have these, or those of some release in memory.

    Raises ReshardError if the tensors do not fit the rules.
    """
    originals, saving = list(tensors), saved(rules)
    as_hub = _try_applied(originals, saving, config, to_memory=False)
    if as_hub is not None and _names(as_hub) == _names(originals):
        return originals
    if as_hub is not None and _are(_try_applied(as_hub, rules, config), originals):
        return as_hub
    loaded = applied(originals, rules, config)
    renamed = applied(loaded, saving, config, to_memory=False)
    is_hub = _are(renamed, originals) or (
        _are(as_hub, renamed) and _none_in_memory(originals, renamed, loaded)
    )
    return originals if is_hub else renamed


def _none_in_memory(originals: list[Planned], renamed: list[Planned], loaded: list[Planned]) -> bool:
    """Whether no name that saving changes is one in memory: the Hub may have two names for the same weight."""
    return (_names(originals) - _names(renamed)).isdisjoint(_names(loaded))


def on_hub(tensors: Mapping[str, Tensor], rules: Rules, config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Tensors with a tool's names under the Hub's; `rules` make the tool's names of these.

    Raises ReshardError if the tensors do not fit the rules.
    """
    named = [Planned.of(name, each) for name, each in tensors.items()]
    renamed = applied(named, saved(rules), config, to_memory=False)
    return {each.name: Tensor(each.dtype, each.source()) for each in renamed}


def _try_applied(
    tensors: Iterable[Planned], rules: Rules, config: Mapping[str, Any], *, to_memory: bool = True
) -> list[Planned] | None:
    """`applied`; None if the tensors do not fit, because they are those of the other side."""
    try:
        return applied(tensors, rules, config, to_memory=to_memory)
    except ReshardError:
        return None


def _names(tensors: Iterable[Planned]) -> set[str]:
    return {tensor.name for tensor in tensors}


def _are(tensors: Iterable[Planned] | None, others: Iterable[Planned]) -> bool:
    return tensors is not None and {(each.name, each.shape) for each in tensors} == {
        (each.name, each.shape) for each in others
    }


def applied(
    tensors: Iterable[Planned], rules: Rules, config: Mapping[str, Any], *, to_memory: bool = True
) -> list[Planned]:
    """The tensors after all rules, in one direction. Raises ReshardError if they do not fit an operation."""
    ordered = sorted(tensors, key=lambda tensor: natural_key(tensor.name))
    renames = [rule for rule in rules if not rule.operations]
    converters = [rule for rule in rules if rule.operations]
    guards = _guards(renames, {_normalized_name(tensor.name)[0] for tensor in ordered})

    def rename(name: str) -> _MatchedName:
        for rule, guard in zip(renames, guards, strict=True):
            name = rule.applied(name, guard=guard).name
        return _MatchedName(name)

    renaming, converting = _SameForExperts(rename), _SameForExperts(partial(_matching_converter, converters))

    def renamed(name: str) -> str:
        return renaming(name).name

    positioned: list[tuple[int, str, Planned]] = []
    groups: dict[tuple[str, int], _ConversionInputs] = {}
    for position, tensor in enumerate(ordered):
        name = renamed(tensor.name) if to_memory else tensor.name
        hit = converting(name)
        if hit.rule is None:
            positioned.append((position, name if to_memory else renamed(name), tensor))
            continue
        group = groups.setdefault((hit.name, hit.rule), _ConversionInputs(position, {}))
        group.tensors.setdefault(converters[hit.rule].patterns[hit.pattern], []).append(tensor)
    problems: list[Problem] = []
    for (name, at), group in groups.items():
        rule = converters[at]
        try:
            converted = convert(
                group.tensors, rule.operations, OperationContext(rule.patterns, rule.replacements, config)
            )
        except UnfitError as why:
            problems.append(why.problem(name))
            continue
        positioned += [
            (group.position, new if to_memory else renamed(new), tensor)
            for new, tensor in _full_names(name, converted)
        ]
    raise_all(problems)
    positioned.sort(key=lambda each: each[0])
    return [
        *under_new_names(
            (tensor.name, name, tensor._replace(name=name)) for _, name, tensor in positioned
        ).values()
    ]


class _ConversionInputs(NamedTuple):
    """The inputs of one conversion by pattern, and the position of the first of them."""

    position: int
    tensors: Tensors


class _MatchedName(NamedTuple):
    """A new name, and the indices of the rule that converts the tensor, if there is one, and of its pattern."""

    name: str
    rule: int | None = None
    pattern: int = 0


def _matching_converter(converters: Rules, name: str) -> _MatchedName:
    """The first rule that converts a tensor."""
    for at, rule in enumerate(converters):
        new, matched = rule.applied(name)
        if matched is not None:
            return _MatchedName(new, at, matched)
    return _MatchedName(name)


def _guards(renames: Rules, names: set[str]) -> list[bool]:
    """For each rule, whether its later patterns apply: whether any name matches the first one when it is its turn."""
    if not any(rule.kind == GUARDED for rule in renames):
        return [True] * len(renames)
    guards = []
    for rule in renames:
        guards.append(rule.kind != GUARDED or any(map(rule.matches_first, names)))
        names = {rule.applied(name, guard=guards[-1]).name for name in names}
    return guards


class _SameForExperts:
    """A function of names that treats those alike that differ only in the number of the expert.

    A model may have a hundred thousand names of experts, which no rule tells apart.
    """

    def __init__(self, function: Callable[[str], _MatchedName]) -> None:
        self._function, self._known = function, dict[str, _MatchedName]()

    def __call__(self, name: str) -> _MatchedName:
        like, expert = _normalized_name(name)
        if not expert:
            return self._function(name)
        match = self._known.get(like)
        if match is None:
            match = self._known[like] = self._function(like)
        return match._replace(name=match.name.replace(_ANY, expert))


def _normalized_name(name: str) -> tuple[str, str]:
    """A name with a number that no expert has, and the number that it had; "" if it is of no expert."""
    expert = _EXPERT.search(name)
    return (name[: expert.start()] + _ANY + name[expert.end() :], expert[0]) if expert else (name, "")


_EXPERT = re.compile(r"(?<=\bexperts\.)\d+(?=\.)")
_ANY = "7000000000"


def _full_names(name: str, converted: Tensors) -> Iterator[tuple[str, Planned]]:
    """The converted names, each with what stands in `name` before and after the pattern that is part of it."""
    full = name.replace("*.", "0.")
    inner = next((key for key in converted if key in full), None)
    before, _, after = full.partition(inner) if inner is not None else ("", "", "")
    for key, (tensor,) in converted.items():
        yield before + key + after, tensor
