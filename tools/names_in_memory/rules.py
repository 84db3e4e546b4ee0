"""The rules of a release of transformers as data, and since when each list of rules is there."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from reshard.families.renaming import LOADED
from tools.api_history.archive import sources
from tools.api_history.index import Index

PACKAGE = "transformers"
MODULE = "transformers/conversion_mapping.py"
PREFIX = "PrefixChange"
RENAMING = "WeightRenaming"
CONVERTER = "WeightConverter"

PATTERNS = ("source_patterns", "target_patterns", "operations")

Rules = dict[str, Any]
"""Lists of rules by the model type or the class that they are for; the name of another list, if they are the same."""


CORRECTED: dict[str, list[tuple[Any, list[Any]]]] = {
    "kimi_k25": [
        (
            {"hub": "vision_tower.encoder", "memory": "model.vision_tower"},
            [
                {
                    "hub": "vision_tower.encoder.(blocks|final_layernorm)",
                    "memory": r"model.vision_tower.\1",
                },
                {"hub": "^vision_tower.patch_embed.proj", "memory": "^model.vision_tower.patch_embed.proj"},
                {"hub": "^mm_projector.pre_norm", "memory": "^model.mm_projector.pre_norm"},
            ],
        ),
        (
            {"hub": "blocks", "memory": "layers"},
            [{"hub": "vision_tower.blocks", "memory": "vision_tower.layers"}],
        ),
    ]
}
"""Rules that do not undo themselves, by model type, and what is meant. The former load, and save nothing.

Transformers 5.24 saves the layers of Kimi-K2.5's language model as blocks, and its patches below an encoder. It loads
both spellings; other programs know only the Hub's.
"""


def _corrected(name: str, rules: list[Any]) -> list[Any]:
    for wrong, meant in CORRECTED.get(name, ()):
        if wrong in rules:
            at = rules.index(wrong)
            rules = [*rules[:at], *meant, {**wrong, "kind": LOADED}, *rules[at + 1 :]]
    return rules


class _Recorded:
    """An object of transformers as it was called: only its name and its arguments."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args, self.kwargs = args, kwargs

    @property
    def name(self) -> str:
        return type(self).__name__

    @property
    def given(self) -> dict[str, Any]:
        """Its arguments by name."""
        return {**dict(zip(PATTERNS, self.args, strict=False)), **self.kwargs}

    def __getattr__(self, name: str) -> Any:
        name = name.removeprefix("_original_")  # as given, before a rule is prepared for use
        try:
            value = self.given[name]
        except KeyError:
            raise AttributeError(name) from None
        return [value] if name.endswith("_patterns") and isinstance(value, str) else value


def rules_in(source: bytes) -> Rules:
    """The rules that the source of `conversion_mapping.py` makes, which is run with stand-ins for other modules."""
    text = source.decode()
    for line in ("from .core_model_loading import", "from .utils import"):
        text = text.replace(line, line.replace("from .", "from _recorded_"))
    module = types.ModuleType("conversion_mapping")
    import builtins

    def importing(name: str, *args: Any, **kwargs: Any) -> Any:
        return _Stand() if name.startswith("_recorded_") else builtins.__import__(name, *args, **kwargs)

    module.__dict__["__builtins__"] = {**vars(builtins), "__import__": importing}
    exec(compile(text, MODULE, "exec"), module.__dict__)  # the package that pip's own index serves
    made = module.__dict__["_build_checkpoint_conversion_mapping"]()
    found = {name: _corrected(name, [as_data(each) for each in rules]) for name, rules in made.items()}
    return _shared({name: rules for name, rules in found.items() if rules})


class _Stand:
    """A module whose every attribute is a class that records how it is called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (_Recorded,), {})


def _shared(found: dict[str, list[Any]]) -> Rules:
    """The same with the name of the first of equal lists in place of the others."""
    rules: Rules = {}
    first: dict[str, str] = {}
    for name, each in sorted(found.items()):
        rules[name] = first.get(repr(each), each)
        first.setdefault(repr(each), name)
    return rules


def as_data(rule: Any) -> dict[str, Any]:
    """One rule: patterns on the Hub and in memory, and the operations between them."""
    if rule.name == PREFIX:
        return {key: value for key, value in rule.kwargs.items() if value is not None}
    given = rule.given
    data = {"hub": given.get("source_patterns", ()), "memory": given.get("target_patterns", ())}
    if rule.name == CONVERTER:
        data["operations"] = [_operation(each) for each in given["operations"]]
    elif rule.name != RENAMING:
        data["kind"] = rule.name
        data |= {key: value for key, value in given.items() if key not in PATTERNS}
    return data


POSITIONS = {
    "Transpose": ("dim0", "dim1", "check_dims"),
    "PermuteForRope": ("subconfig_key", "permute_layer_names"),
}


def _operation(each: Any) -> dict[str, Any]:
    names = POSITIONS.get(each.name, ("dim",))
    return {"name": each.name, **dict(zip(names, each.args, strict=False)), **each.kwargs}


def installed_rules() -> Rules:
    """The rules of the installed release."""
    from transformers import conversion_mapping

    with open(str(conversion_mapping.__file__), "rb") as file:
        return rules_in(file.read())


def since(rules: Rules, oldest: tuple[int, int], tell: Callable[[str], None]) -> dict[str, str]:
    """The first release with each list of rules as it is now; of those that the index has."""
    index = Index()
    releases = [each for each in index.releases(PACKAGE, "2025-03-01") if not each.version.is_prerelease]
    first: dict[str, str] = {}
    for release in releases:
        if release.version.release[:2] < oldest:
            continue
        tell(str(release.version))
        read = list(sources(index.session, release, lambda path, _: path == MODULE))
        made = next((rules_in(content) for path, _, content in read if path == MODULE and content), {})
        now = {name for name in rules if listed(rules, name) == listed(made, name)}
        first = {name: first.get(name, str(release.version)) for name in sorted(now)}
    index.close()
    return first


def listed(rules: Rules, name: str) -> Any:
    """The list of rules for a name, also if it is that of another."""
    found = rules.get(name)
    return rules.get(found) if isinstance(found, str) else found
