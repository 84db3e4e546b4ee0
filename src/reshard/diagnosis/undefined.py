"""Names that are not defined: in a notebook, in a package without an optional dependency, in a package's own code."""

from __future__ import annotations

import re

from reshard.diagnosis.finding import Finding
from reshard.diagnosis.history.having import having
from reshard.diagnosis.history.missing import IMPORT, table_of
from reshard.diagnosis.history.table import PACKAGES, tables
from reshard.diagnosis.installing import installed_for
from reshard.diagnosis.log import Log, Traceback
from reshard.diagnosis.rules import Told, told_at
from reshard.diagnosis.words import words

_NAME = re.compile(r"NameError: (?:free variable|global name|name) ['‘`](?P<name>\w+)['’`] ")


def of_undefined(root: Traceback, log: Log) -> Told | None:
    match = _NAME.match(root.said)
    if match is None:
        return None
    own = re.search(r"(?:site|dist)-packages/(\w+)", root.frames[-1]) if root.frames else None
    if root.frames and _CELL.search(root.frames[-1]):
        return "name-of-cell", {"name": match["name"]}
    module = _imported_as(match["name"]) if own or not root.frames else ""
    if module and not (own and module == own[1]):
        return "name-of-optional", optional(match["name"], module.replace("_", "-"), module)
    exporting = tables(having(_EXPORT, match["name"]))
    known = [each for each in exporting if each.name(each.raw["root"], match["name"]).there]
    other = next((each for each in known if own is None or each.raw["root"] != own[1]), None)
    if other:
        return "name-of-optional", optional(match["name"], other.package, other.raw["root"])
    return "name-undefined", {"name": match["name"]}


def of_guarded(root: Traceback, log: Log) -> Finding | None:
    """The finding that a module has a name only if it could import an optional package, to which the name belongs."""
    match = IMPORT.search(root.said)
    module = _imported_as(match["name"]) if match else ""
    if match is None or module in ("", "torch", match["module"].partition(".")[0]):
        return None
    own = next(table_of(match["module"]), None)
    there = own.name(match["module"], match["name"]).there if own else None
    if own and there and len(there) < len(own.versions):
        return None  # the release decides
    values = optional(match["name"], PACKAGES.get(module, module.replace("_", "-")), module)
    values["where"] = words("only-if-imported", module=match["module"], other=module)
    return told_at(("name-of-optional", values), log.name, root.last, root.said)


def optional(name: str, package: str, module: str) -> dict[str, object]:
    return {"name": name, "other": package, "module": module, "install": installed_for(module)}


_ALIASES = {
    **dict.fromkeys(("index_first_axis", "pad_input", "unpad_input", "index_put_first_axis"), "flash_attn"),
    **dict.fromkeys(("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"), "flash_attn"),
    **dict.fromkeys(("te", "tex", "transformer_engine"), "transformer_engine"),
    **dict.fromkeys(("xops", "xformers"), "xformers"),
    **dict.fromkeys(("rearrange", "einops"), "einops"),
    **dict.fromkeys(("FusedLayerNorm", "FusedRMSNorm", "amp_C", "apex"), "apex"),
    **dict.fromkeys(("spm", "sentencepiece"), "sentencepiece"),
    **dict.fromkeys(("nn", "torch", "F", "dist"), "torch"),
    **dict.fromkeys(("TypeAdapter", "BaseModel"), "pydantic"),
    "bnb": "bitsandbytes",
    "tl": "triton",
    "pd": "pandas",
    "plt": "matplotlib",
}
"""Names under which packages import optional ones, or their main parts."""
_OF_TE = re.compile(r"TE[A-Z]\w+")
"""Megatron's wrappers of Transformer Engine."""


def _imported_as(name: str) -> str:
    """The module to which a name belongs that a package imports only if it can; "" if unknown."""
    if _OF_TE.fullmatch(name):
        return "transformer_engine"
    return _ALIASES.get(name, "")


_CELL = re.compile(r"Cell In\s?\[|<ipython-input-|ipykernel_")
"""The frame of a notebook's cell, which uses names of cells above it."""
_EXPORT = (
    "accelerate",
    "peft",
    "bitsandbytes",
    "deepspeed",
    "flash-attn",
    "torch",
    "transformers",
    "datasets",
)
"""Packages that others import only if they are installed."""
