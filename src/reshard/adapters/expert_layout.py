"""How the factors of all experts lie in the one pair of their stack, which has changed, and differs between tools.

PEFT gives a parameter [E, rows, columns] one lora_A [E·r, …] and one lora_B […, r·E]. Rows of lora_A are ordered by
expert, then by rank; columns of lora_B by rank, then by expert. Which side of the matrices either belongs to depends on
the release:

    before 0.19      lora_A has the rows of the matrices, lora_B their columns: the pair is turned
    0.19.0           the same, except where the module has `is_transposed`
    0.19.1 and later the other way round: turned only where the module has `is_transposed`

Matrices that are not square show it by their shape. For square ones `peft_version` of adapter_config.json tells, which
PEFT writes from 0.18 on. Two tools order the columns of lora_B by expert, then by rank: Megatron-Bridge 0.5 and 0.6,
and Unsloth until September 2026, which has written `lora_B_layout` since.

Sources: `ParamWrapper` in `tuners/lora/layer.py` of PEFT 0.17 to 0.21; `models/conversion/peft_bridge.py` of
Megatron-Bridge 0.6; `temporary_patches/moe_utils.py` of unsloth-zoo.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from reshard.adapters.adapter_settings import AdapterSettings
from reshard.base.errors import Problem
from reshard.formats.peft import ADAPTER_CONFIG

VERSION, ORDER = "peft_version", "lora_B_layout"
WRITTEN_LAYOUT = {VERSION: "0.19.1"}
"""What adapter_config.json says of the layout that `--for` writes: the first release of PEFT with today's."""

_BY_EXPERT = {"rank_major": False, "grouped_by_expert": True}
"""The values of `lora_B_layout`."""

_FULL_NAME = re.compile(r"\.\d+\.")


class ExpertLayout(NamedTuple):
    """How factors lie in the pair of a stack [E, rows, columns]; None where it is not known.

    With `turned`, lora_A belongs to the rows of each matrix and lora_B to its columns. With `by_expert`, the columns of
    lora_B are ordered by expert, then by rank.
    """

    turned: bool | None
    by_expert: bool | None


def expert_layout(settings: AdapterSettings, *, transposed: bool) -> ExpertLayout:
    """The layout according to the settings. `transposed` says that the module in memory has `is_transposed`."""
    return ExpertLayout(_is_transposed(settings, transposed), _by_expert(settings))


def _is_transposed(settings: AdapterSettings, transposed: bool) -> bool | None:
    """A development build does not say which changes it has."""
    release = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)(?!.*dev).*", str(settings.config.get(VERSION)))
    if not release:
        return None
    version = tuple(map(int, release.groups()))
    if version < (0, 19, 0):
        return True
    return transposed if version > (0, 19, 0) else not transposed


def _by_expert(settings: AdapterSettings) -> bool | None:
    if ORDER in settings.config:
        return _BY_EXPERT.get(str(settings.config[ORDER]))
    return None if _saved_by_unsloth(settings) or _saved_by_bridge(settings) else False


def _saved_by_unsloth(settings: AdapterSettings) -> bool:
    mapping = settings.config.get("auto_mapping")
    return isinstance(mapping, dict) and bool(mapping.get("unsloth_fixed"))


def _saved_by_bridge(settings: AdapterSettings) -> bool:
    """Megatron-Bridge names each parameter in full, and no version of PEFT."""
    return VERSION not in settings.config and any(map(_FULL_NAME.search, settings.parameters))


def sides_unknown(module: str, settings: AdapterSettings) -> Problem:
    """The problem of a pair of square matrices without a version of PEFT."""
    return Problem(
        "adapter-expert-sides-unknown",
        "nothing says which side of the experts' matrices lora_A belongs to",
        tensor=module,
        file=settings.source or None,
        rule="PEFT 0.19.1 exchanged lora_A and lora_B of stacked experts, and square matrices do not show it",
        expected=f"{VERSION} in {ADAPTER_CONFIG}",
        found=str(settings.config.get(VERSION) or f"no {VERSION}"),
        remedy=f'add the release of PEFT that trained it to {ADAPTER_CONFIG}, for example "{VERSION}": "0.18.1"',
    )


def order_unknown(module: str, settings: AdapterSettings) -> Problem:
    """The problem of a pair of a tool that may not order the columns of lora_B as PEFT does."""
    tool = "Unsloth" if _saved_by_unsloth(settings) else "Megatron-Bridge"
    return Problem(
        "adapter-expert-order-unknown",
        "nothing says which columns of lora_B belong to which expert",
        tensor=module,
        file=settings.source or None,
        rule="PEFT orders them by rank; Megatron-Bridge, and Unsloth until September 2026, by expert",
        expected=f"{ORDER} in {ADAPTER_CONFIG}: {' or '.join(_BY_EXPERT)}",
        found=str(settings.config.get(ORDER) or f"an adapter saved by {tool}, without {ORDER}"),
        remedy=f'add the order to {ADAPTER_CONFIG}: "{ORDER}": "grouped_by_expert" if Megatron-Bridge 0.5 or 0.6, or '
        'Unsloth until September 2026 saved it, and "rank_major" otherwise',
    )
