"""Findings about names, parameters and keys that only other releases have than those in use."""

from __future__ import annotations

from reshard.runs.checks import rules
from reshard.runs.checks.finding import Finding
from reshard.runs.checks.history.api_table import ApiTable
from reshard.runs.checks.history.call_parameters import RefusedParameter
from reshard.runs.checks.history.release_ranges import Bounds
from reshard.runs.checks.history.versions_in_use import Versions
from reshard.runs.checks.location import Location
from reshard.runs.checks.phrases import phrase_text


def added_later(name: str, own: ApiTable, bounds: Bounds, place: Location, versions: Versions) -> Finding:
    """That a later release added something."""
    values = {"name": name, "package": own.package, "release": bounds.since_text}
    values["pin"] = f"{own.package}{bounds.specifier}"
    return rules.finding("script-name-later", [place], values, **versions.proof(own, bounds.until))


def of_other_release(
    owner: str, name: str, why: RefusedParameter, place: Location, versions: Versions, *, style: str = "{}"
) -> Finding:
    """That only other releases of `owner` accept a parameter, a key or an option, which is written in this style."""
    assert why.bounds is not None
    old, new = style.format(name), style.format(why.renamed) if why.renamed else None
    if why.bounds.since:
        return added_later(f"{owner}: {old}", why.table, why.bounds, place, versions)
    values = {
        "name": owner,
        "old": old,
        "became": phrase_text("name-became" if new else "name-gone", old=old, new=new),
        "cure": phrase_text("write-new" if new else "delete-old", old=old, new=new),
        "pin": f"{why.table.package}{why.bounds.specifier}",
    }
    proof = versions.proof(why.table, why.bounds.until)
    return rules.finding("script-removed-keyword", [place], values, **proof)
