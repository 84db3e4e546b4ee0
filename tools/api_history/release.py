"""The public API of one release: each module's names with star imports resolved, and each class's constructor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from reshard.runs.checks.history.api_table import PACKAGE_ROOTS
from tools.api_history.collect import Collected
from tools.api_history.surface import Surface

Key = tuple[str, str]
"""A module, and a qualified name in it."""
MODELS = ("pydantic:BaseModel", "pydantic.dataclasses:dataclass")


@dataclass
class Release:
    """A release, with a cache of names."""

    content: Collected
    root: str
    _names: dict[str, dict[str, bool]] = field(default_factory=dict)

    @cached_property
    def modules(self) -> set[str]:
        """All modules, and the packages that contain them."""
        found = set(self.content.surfaces)
        for each in self.content.surfaces:
            module = each
            while "." in module:
                module = module.rpartition(".")[0]
                found.add(module)
        return found

    def names(self, module: str, within: tuple[str, ...] = ()) -> dict[str, bool]:
        """Names in a module, without its submodules; false if the module only imports it from another package."""
        if module in self._names:
            return self._names[module]
        surface = self.content.surfaces.get(module)
        if surface is None or module in within:
            return {}
        found = {name: self._is_own(target) for name, target in surface.get("imports", {}).items()}
        for star in surface.get("stars", ()):
            found.update(self.starred(star, (*within, module)))
        found.update(dict.fromkeys(surface.get("names", ()), True))
        if not within:
            self._names[module] = found
        return found

    def starred(self, module: str, within: tuple[str, ...]) -> dict[str, bool]:
        """The names that `from module import *` imports."""
        if module in within:
            return {}
        names = self.names(module, within)
        exported = self.content.surfaces.get(module, {}).get("all")
        if exported is not None:
            # `__all__ += other.__all__` comes with `from other import *`: those names are exported, too
            more = [self.starred(each, (*within, module)) for each in self.surface(module).get("stars", ())]
            return {
                name: names.get(name, True) for name in {*exported, *(name for each in more for name in each)}
            }
        return {name: is_own for name, is_own in names.items() if not name.startswith("_")}

    def is_open(self, module: str, within: tuple[str, ...] = ()) -> bool:
        """Whether a module may have names that its source does not show."""
        surface = self.content.surfaces.get(module)
        if surface is None or module in within:
            return not self._is_own(module)  # a missing module of this package adds no names
        stars = surface.get("stars", ())
        return bool(surface.get("open")) or any(self.is_open(star, (*within, module)) for star in stars)

    def _is_own(self, target: str) -> bool:
        return target.replace(":", ".").startswith(f"{self.root}.") or target == self.root

    # ---------------------------------------------------------------------------------------------- classes

    def resolved(self, module: str, name: str, depth: int = 0) -> str | Key:
        """The origin of a name: a class or function of this release, or `module:name` of another package."""
        surface = self.content.surfaces.get(module, {})
        if name in surface.get("classes", {}) or name in surface.get("functions", {}):
            return module, name
        first, _, rest = name.partition(".")
        target = surface.get("imports", {}).get(first)
        if target is None or depth > 12:
            for star in surface.get("stars", ()) if depth <= 12 else ():
                found = self.resolved(star, name, depth + 1)
                if not isinstance(found, str):
                    return found
            return f"?:{name}"
        origin, _, origin_name = target.partition(":")
        whole = ".".join(part for part in (origin_name, rest) if part)
        while not origin_name and "." in whole and f"{origin}.{whole.partition('.')[0]}" in self.modules:
            first, _, whole = whole.partition(".")
            origin = f"{origin}.{first}"
        if not self._is_own(target):
            return f"{origin}:{whole}"
        if origin_name and f"{origin}.{origin_name}" in self.modules and rest:
            return self.resolved(f"{origin}.{origin_name}", rest, depth + 1)
        return self.resolved(origin, whole, depth + 1) if whole else f"?:{name}"

    def bases(self, key: Key) -> list[str | Key]:
        """The bases of a class, in the form that `resolved` returns."""
        kind = self.content.surfaces[key[0]]["classes"].get(key[1], {})
        plain = (base.split("[")[0] for base in kind.get("bases", ()))
        return [self.resolved(key[0], base) for base in plain if base not in ("object", "Generic", "ABC")]

    def constructor(self, key: Key, depth: int = 0) -> list[str] | None:
        """The parameters of a class, without self; None if they are unknown. `@module:name` are those of a class
        of another package, which come first.
        """
        surface = self.content.surfaces[key[0]]
        kind, functions = surface["classes"].get(key[1]), surface.get("functions", {})
        if kind is None or kind.get("open") or f"{key[1]}.__new__" in functions or depth > 12:
            return None
        if (own := functions.get(f"{key[1]}.__init__")) is not None:
            return own[1:]
        bases = self.bases(key)
        inherited: list[str] = []
        for base in bases:
            if isinstance(base, str):
                if base in MODELS:
                    continue
                if base.split(".")[0].split(":")[0] not in PACKAGE_ROOTS.values():
                    return None
                inherited.append(f"@{base}")
            else:
                more = self.constructor(base, depth + 1)
                if more is None:
                    return None
                inherited += [each for each in more if each not in inherited]
        if kind.get("dataclass") or self._is_model(key):
            own_names = {each.rstrip("=") for each in kind.get("fields", ())}
            return [each for each in inherited if each.rstrip("=") not in own_names] + kind.get("fields", [])
        return inherited if bases else []

    def _is_model(self, key: Key, depth: int = 0) -> bool:
        """Whether inherited fields are parameters, as in pydantic models."""
        bases = self.bases(key) if depth < 12 else []
        return any(
            base in MODELS if isinstance(base, str) else self._is_model(base, depth + 1) for base in bases
        )

    def has_fields(self, key: Key) -> bool:
        """Whether the parameters of a class are its fields."""
        kind = self.content.surfaces[key[0]]["classes"][key[1]]
        return bool(kind.get("dataclass")) or self._is_model(key)

    def functions(self) -> Iterator[tuple[Key, list[str]]]:
        """All functions and methods with their parameters, without self; for classes, their constructors."""
        for module, surface in self.content.surfaces.items():
            if module.rpartition(".")[2].startswith("dummy_"):
                continue  # placeholders for modules that need a missing package
            for name, parameters in surface.get("functions", {}).items():
                is_method = "." in name and parameters[:1] and parameters[0] in ("self", "cls")
                yield (module, name), parameters[1:] if is_method else parameters
            for name in surface.get("classes", {}):
                if f"{name}.__init__" not in surface.get("functions", {}):
                    parameters = self.constructor((module, name))
                    inherited = parameters == [] and name.endswith(
                        "Mixin"
                    )  # base of classes in other packages
                    if parameters is not None and (inherited or self.has_fields((module, name))):
                        yield (module, f"{name}.__init__"), parameters

    def uses(self) -> set[str]:
        """Names imported from other packages of the history: `module:name`."""
        roots = set(PACKAGE_ROOTS.values()) - {self.root}
        return {
            target
            for surface in self.content.surfaces.values()
            for target in surface.get("imports", {}).values()
            if ":" in target and target.split(":")[0].split(".")[0] in roots
        }

    def surface(self, module: str) -> Surface:
        """The surface of a module."""
        return self.content.surfaces.get(module, {})
