"""`reshard.support`: the formats and families that reshard knows."""

from __future__ import annotations

from typing import Any

from reshard.families import FAMILIES
from reshard.families.family import ENGINE_TITLES, JUDGE_TITLES
from reshard.families.undeclared import BEYOND_MEGATRON, BUILT_ALIKE
from reshard.formats import FORMATS
from reshard.formats.quantization_schemes import TESTED


def support() -> dict[str, list[dict[str, Any]]]:
    """List the formats and families that reshard knows.

    Returns
    -------
    dict
        "formats", "families", "quantizations" and "undeclared" (known models that are not converted to Megatron-Core).
        Each is a list of rows, as in `reshard support --json`.

    Examples
    --------
    >>> [row["name"] for row in reshard.support()["formats"] if row["written"]][:3]
    ['megatron', 'megatron-legacy', 'megatron-fsdp']
    """
    formats = [
        {
            "name": each.name,
            "what": each.what,
            "read": True,
            "written": each.target is not None,
            "judged": [*each.judged],
            "aliases": [*each.aliases],
        }
        for each in FORMATS.values()
    ]
    families = [
        {
            "name": name,
            "architecture": family.architecture,
            "engine": ENGINE_TITLES[family.computed_by],
            "judged": [JUDGE_TITLES[judge] for judge in family.judged],
            "carried": [part.hub for part in family.within.carried] if family.within else [],
            "aliases": [*family.aliases],
        }
        for name, family in FAMILIES.items()
    ]
    undeclared = sorted((BEYOND_MEGATRON | BUILT_ALIKE).items())
    return {
        "formats": formats,
        "families": families,
        "quantizations": [{**each._asdict(), "judged": [*each.judged]} for each in TESTED],
        "undeclared": [{"name": name, "why": why} for name, why in undeclared],
    }
