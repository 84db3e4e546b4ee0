"""PEFT's names for the tensors of a wrapped model.

In a live model, and so in checkpoints of FSDP, DeepSpeed and DCP, tensor names contain the name of the adapter, and
what the adapter wraps is `base_layer`, or `original_module` if there is a trained copy:

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight
    base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight
    base_model.model.lm_head.modules_to_save.default.weight

`save_pretrained` omits the name of the adapter, and gives trained copies the names of the weights that they replace.
Source: `utils/save_and_load.py`, `utils/other.py` and `tuners/lora/` of PEFT 0.21.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

PREFIX = "base_model.model."
MAGNITUDE = "lora_magnitude_vector"
_PAIR = re.compile(
    rf"(?P<module>.+?)\.(?P<kind>lora_(?:embedding_)?[AB]|{MAGNITUDE})"
    r"(?:\.(?!weight$|bias$)(?P<adapter>.+?))?(?:\.(?P<leaf>weight|bias))?"
)
_SAVED = re.compile(r"\.modules_to_save\.(?P<adapter>[^.]+)(?=\.)")
_ORIGINAL = ".original_module"
_WRAPPED = ".base_layer"


class PairPart(NamedTuple):
    """One tensor of a low-rank pair: `kind` is lora_A, lora_B, lora_embedding_A …; `adapter` is "" if it is not named.

    `module` still contains `base_layer` if PEFT wrapped a module more than once.
    """

    module: str
    kind: str
    adapter: str
    leaf: str


class WholeWeight(NamedTuple):
    """A weight of the model: fully `trained` by an adapter, `replaced` by such a weight, or the base's own."""

    name: str
    adapter: str = ""
    trained: bool = False
    replaced: bool = False


def parse(name: str) -> PairPart | WholeWeight:
    """Parse the name of a tensor in a PEFT model, without any prefix of wrappers."""
    name = name[name.find(PREFIX) + len(PREFIX) :] if PREFIX in name else name
    pair = _PAIR.fullmatch(name)
    if pair:
        return PairPart(pair["module"], pair["kind"], pair["adapter"] or "", pair["leaf"] or "")
    saved = _SAVED.search(name)
    if saved:
        return WholeWeight(_SAVED.sub("", name), saved["adapter"], trained=True)
    replaced = _ORIGINAL in name
    return WholeWeight(name.replace(_ORIGINAL, "").replace(_WRAPPED, ""), replaced=replaced)


def holds_pairs(names: Iterable[str]) -> bool:
    """Whether any of these names is that of a low-rank pair."""
    return any(isinstance(parse(name), PairPart) for name in names if "lora_" in name)
