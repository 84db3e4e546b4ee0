"""Options that the parser of a script or a tool does not accept in the releases in use."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping

from reshard.runs.checks.finding import Finding
from reshard.runs.checks.history.api_table import ApiTable, table_of
from reshard.runs.checks.history.call_parameters import parameters
from reshard.runs.checks.history.config_keys import SCHEMAS, ConfigKeys, KnownKeys
from reshard.runs.checks.history.versions_in_use import Versions
from reshard.runs.checks.location import Location
from reshard.runs.checks.other_releases import of_other_release
from reshard.runs.checks.script import Script
from reshard.runs.checks.script_api import imported_names

PARSERS = ("HfArgumentParser", "TrlParser")
_LENIENT = re.compile(
    r"(?:return_remaining_strings|allow_extra_keys)\s*=\s*True|fail_with_unknown_args\s*=\s*False"
    r"|parse_known_args|parse_args_\w+\((?!\s*\)|\w+=)"
)
"""A script that accepts unknown options, or parses others than those of its command line."""


def refuses_unknown(source: Script | None) -> bool:
    """Whether a script ends if its parser does not know an option, or a key of its config."""
    return source is not None and bool(source.find(*PARSERS)) and not _LENIENT.search(source.text)


def check_options(
    options: Mapping[str, Location], source: Script | None, tool: str, installed: Mapping[str, str] | None
) -> Iterator[Finding]:
    """Options of other releases: by the name of each, its place. They are those of a script, or of a tool."""
    versions = Versions(installed)
    keys: KnownKeys | None = ConfigKeys(tool, versions) if tool in SCHEMAS else _of_script(source, versions)
    if keys is None:
        return
    for name, place in options.items():
        is_abbreviated = any(each.startswith(name.removeprefix("no_")) for each in keys.known)
        if not is_abbreviated and (why := keys.gone(name)):
            style = "--{}" if place.text.startswith("--") else "{}"
            yield of_other_release(keys.program or why.owner, name, why, place, versions, style=style)


def _of_script(source: Script | None, versions: Versions) -> KnownKeys | None:
    """The options of a script's only parser; None if some are unknown, or if it accepts unknown ones."""
    calls = source.find(*PARSERS) if source else []
    if source is None or len(calls) != 1 or not calls[0].node.args or not refuses_unknown(source):
        return None
    classes = _Classes(source, versions)
    (given,) = [calls[0].node.args[0]]
    values = source.values.get(given.id, []) if isinstance(given, ast.Name) else []
    several = [each for each in (given, *values) if isinstance(each, ast.Tuple | ast.List)]
    nodes = several[0].elts if len(several) == 1 else [given]
    fields = [classes.fields(ast.unparse(node)) for node in nodes]
    if None in fields:
        return None
    added = (each for call in source.find("add_argument") for each in call.node.args)
    flags = {
        str(each.value).lstrip("-").replace("-", "_") for each in added if isinstance(each, ast.Constant)
    }
    return KnownKeys("", versions, classes.functions, flags.union(*filter(None, fields)))


class _Classes:
    """The dataclasses of a script: its own ones, and those of packages, whose constructors are in `functions`."""

    def __init__(self, source: Script, versions: Versions) -> None:
        self.versions = versions
        self.own = {node.name: node for node in ast.walk(source.tree) if isinstance(node, ast.ClassDef)}
        self.names = imported_names(source.tree)
        self.functions: list[tuple[ApiTable, str]] = []

    def fields(self, name: str) -> set[str] | None:
        """The fields of a class, by its name as it is written; None if they are unknown."""
        first, _, rest = name.partition(".")
        if name in self.own:
            parts = [self.fields(ast.unparse(base)) for base in self.own[name].bases]
            stated = (node.target for node in self.own[name].body if isinstance(node, ast.AnnAssign))
            here = {ast.unparse(target) for target in stated}
            return None if None in parts else here.union(*filter(None, parts))
        module, _, imported = self.names.get(first, "").partition(":")
        table, function = table_of(module), f"{rest or imported}.__init__"
        if table is None:
            return None
        self.functions.append((table, function))
        return parameters(table, function, self.versions)
