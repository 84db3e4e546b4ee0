"""Why the names of weights in a checkpoint and a model differ, from the two sets of names in a failure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import product
from typing import NamedTuple

from reshard.runs.checks import rules
from reshard.runs.checks.finding import Finding
from reshard.runs.checks.phrases import phrase_text
from reshard.runs.doctor.text.log import Log, Traceback

_LIST = r"(?P<names>[^\n]*)"
_MISSING = re.compile(
    rf"(?i:missing key(?:\(s\)|s)?(?: in (?:the )?(?:source )?state_dict)?)\s*[:=]\s*{_LIST}"
)
_UNEXPECTED = re.compile(
    r"(?i:unexpected key(?:\(s\)|s)?(?: in (?:the )?(?:source )?state_dict)?|received \d{1,9} parameters not in model)"
    rf"\s*[:=]\s*{_LIST}"
)
_ONE = re.compile(
    r"Can ?not map tensor '([\w.]+)'|[Uu]nexpected key \"([\w.]+)\" in state_dict"
    r"|no module or parameter named ['\"]([\w.]+)['\"]|['\"]([\w.]+\.(?:SCB|absmax|quant_map|weight_format))['\"]"
    r"|(?i:unknown|unrecognized|unexpected|unhandled|unsupported) (?i:tensor|weight|param(?:eter)?|key)(?: name)?:? "
    r"['\"`]?(\w+(?:\.\w+){2,})"
    r"|KeyError: ['\"](\w+(?:\.\w+)+\.(?:\w*weight\w*|bias|scales|qweight|\w+_scale\w*))['\"]"
)
"""Messages about one name of the file that the program does not know."""
_OF_GGUF = re.compile(r"tensor '([\w.]+)' not found|missing tensor '([\w.]+)'")
_ABSENT = re.compile(rf"{_OF_GGUF.pattern}|Tensor ([\w.]+) required but not present")
"""Messages of llama.cpp, and of mergekit, about a missing tensor."""
_ENGINE = re.compile(r"no module or parameter named |/(?:vllm|sglang)/")
"""A message of vLLM, and frames of the engines that map the names of a checkpoint to their own."""
_NAME = re.compile(r"[\w][\w.]*")
_IN_QUOTES = re.compile(r"['\"](\w[\w.]*)['\"]")
_QUANTIZED = re.compile(
    r"(?:^|\.)(?:SCB|weight_format|(?:nested_)?absmax|(?:nested_)?quant_map|quant_state(?:\.\w+)*|qweight"
    r"|qzeros|g_idx|scales|weight_scale(?:_inv|_2)?|input_scale|weight_packed|weight_shape|weight_zero_point)$"
)
_ADAPTER = re.compile(
    r"\blora_(?:[ABab]|embedding_[AB])\b|\bbase_layer\b|^base_model\.model\.|modules_to_save"
)
_INSIDE = re.compile(r"^(?:\w*state_dict|model|module|net\w*|weights|params|ema|generator|encoder)$")
_ALIKE = {
    "extra-state": re.compile(r"_extra_state$"),
    "buffers": re.compile(
        r"(?:rotary_(?:pos_)?emb\.inv_freq|position_ids|masked_bias|attn\.bias|num_batches_tracked)$"
    ),
    "head": re.compile(r"(?:lm_head|embed_out|output_layer|embed_tokens|shared)\.weight$"),
}
"""Kinds of names that tell the case if all that differ are of one kind."""
_EXPERTS = re.compile(r"\bexperts\.(?:\d+\.)?(?:gate|up|down|gate_up|w\d|linear_fc\d)\w*")
_LAYER = re.compile(r"\b(?:layers|layer|h|blocks?|resblocks)\.(?P<index>\d+)\.")
_OF_EVERY_LAYER = re.compile(
    r"\.\d+\.(?:self_attn|self_attention|attention|attn|mlp|block_sparse_moe|feed_forward|ffn|\w*_?norm|ln_\d"
    r"|\w*layernorm|eh_proj|enorm|hnorm|shared_head|embed_tokens)\b"
)
"""Parts of every decoder layer, and of MTP layers."""
_AFTER = re.compile(r"(?:^|\.)(?:norm|ln_f|final_\w*norm|lm_head|embed_out|output_layer)\.(?:weight|bias)$")
"""What a model has after its last layer."""
_PROGRAMS = {
    program: re.compile(pattern)
    for program, pattern in {
        "meta": r"^tok_embeddings\.weight$|^layers\.\d+\.(?:attention\.w[qkvo]|feed_forward\.w[123]|ffn_norm)\b",
        "megatron": r"^(?:module\.|model\.)*(?:decoder\.layers\.(?:\d+\.)?(?:self_attention\.linear_|mlp\.(?:linear_fc"
        r"|experts\.))|embedding\.word_embeddings\b|language_model\.(?:encoder|embedding)\.)",
        "internevo": r"^(?:model\.)?layers\.\d+\.attention\.wqkv\b",
        "gguf": r"^blk\.\d+\.(?:attn|ffn)_|^token_embd\.",
        "huggingface": r"^(?:model\.)?(?:layers\.\d+\.(?:self_attn\.[qkvo]_proj|mlp\.(?:gate|up|down)_proj)"
        r"|embed_tokens)\b",
    }.items()
}
"""Names that only one program's weights have: Meta's Llama (torchtitan's are the same), Megatron, InternEvo, …"""
MAX_NAMES = 60
"""Maximum names of each list that are compared."""
MODEL_MISSING_FROM = 5
"""Number of missing names, including the first layer's, from which the complete model is missing."""
LEAST_AGREEMENT = 0.5
"""The share of the shorter list that must agree."""


NamesClass = tuple[str, Mapping[str, object]]
"""The class of names that differ, and the values for its texts."""


class NameLists(NamedTuple):
    """Names that the model has and the file lacks, and vice versa."""

    missing: list[str]
    unexpected: list[str]

    @property
    def one_side(self) -> list[str]:
        """The names if only one side has any; a truncated last one left out."""
        names = [] if self.missing and self.unexpected else self.missing or self.unexpected
        return [name for name in names if not any(other.startswith(f"{name}.") for other in names)]


def of_names(root: Traceback, log: Log) -> Finding | None:
    """The finding from the names that a failure lists; None if it lists none."""
    names = _names_in(root.error_text)
    if not names.missing and not names.unexpected:
        return None
    kind, values = class_of(names)
    kind = _of_reader(kind, names, root)
    return rules.finding(
        f"names-{kind}",
        values={
            "missing": ", ".join(names.missing[:2]) or "–",
            "unexpected": ", ".join(names.unexpected[:2]) or "–",
            **values,
        },
    )


def _of_reader(kind: str, names: NameLists, root: Traceback) -> str:
    """The class, or the one for what reads the names: llama.cpp, an inference engine, a program that looks one up."""
    if _OF_GGUF.search(root.error_text):
        return "gguf"
    if names.missing:
        return kind
    if _ENGINE.search("\n".join([root.error_text, *root.frames])):
        return "engine"
    unexplained = kind in ("only-file", "other-model") or (kind == "head" and "embed" in root.error_text)
    return "lookup" if root.exception == "KeyError" and unexplained else kind


def _names_in(message: str) -> NameLists:
    missing, unexpected = _MISSING.search(message), _UNEXPECTED.search(message)
    if missing or unexpected:
        return NameLists(_listed(missing), _listed(unexpected))
    absent, one = _ABSENT.search(message), _ONE.search(message)
    if absent:
        return NameLists([absent[absent.lastindex or 0]], [])
    return NameLists([], [one[one.lastindex or 0]] if one else [])


def _listed(match: re.Match[str] | None) -> list[str]:
    """The names of a list, quoted or not, up to the other list."""
    if match is None:
        return []
    text = re.split(r"(?i)\b(?:unexpected|missing) key", match["names"])[0]
    named = _IN_QUOTES.findall(text) or _NAME.findall(text)
    return [name.rstrip(".") for name in named][:MAX_NAMES]


def class_of(names: NameLists) -> NamesClass:
    """The class of two lists of names, the most specific first, and the values for its text."""
    missing, unexpected = names
    both = [*unexpected, *missing]
    if example := next(filter(_QUANTIZED.search, unexpected), None):
        return "quantized", {"example": example}
    inside = next(filter(_INSIDE.search, unexpected), None)
    if inside and not any("." in name for name in unexpected):
        return "inside", {"key": inside, "keys": ", ".join(unexpected[:5])}
    if renamed := _renamed(names):
        return renamed
    if example := next(filter(_ADAPTER.search, both), None):
        return ("adapter" if example in unexpected else "no-adapter"), {"example": example}
    if kind := next((kind for kind, pattern in _ALIKE.items() if all(map(pattern.search, both))), ""):
        return kind, {"example": both[0]}
    return _of_program(names) or _deeper(names) or _of_parts(names)


def _of_parts(names: NameLists) -> NamesClass:
    """The class of names that are neither renamed nor of another program: what is on one side only."""
    missing, unexpected = names
    if any(map(_EXPERTS.search, missing)) and any(map(_EXPERTS.search, unexpected)):
        return "experts", {}
    if missing and unexpected:
        return "other-model", {}
    if len(missing) >= MODEL_MISSING_FROM and any(_LAYER.search(name) and ".0." in name for name in missing):
        return "none", {}
    parts = Counter(name.split(".")[0] for name in names.missing or names.unexpected)
    listed = ", ".join(part for part, _ in parts.most_common(4))
    return ("only-file" if unexpected else "only-model"), {"parts": listed}


def program_of(names: Iterable[str]) -> str | None:
    """Whose names these are; None if no program is known by any of them."""
    listed = list(names)
    return next((program for program, pattern in _PROGRAMS.items() if any(map(pattern.search, listed))), None)


def _of_program(names: NameLists) -> NamesClass | None:
    """The class if the file's names are those of another program than the model's."""
    file, model = program_of(names.unexpected), program_of(names.missing)
    if file is None or file == model or (file == "huggingface" and model is None):
        return None
    expected = phrase_text(f"names-of-{model or 'others'}")
    return "of-program", {
        "file": phrase_text(f"names-of-{file}"),
        "model": expected,
        "way": phrase_text(f"names-way-{file}"),
    }


def _renamed(names: NameLists) -> NamesClass | None:
    """The prefix that most names have on one side, where the other side has another or none."""
    pairs = Counter(
        pair for lacks, has in product(names.missing, names.unexpected) if (pair := _prefixes(lacks, has))
    )
    if not pairs:
        return None
    (model, file), count = pairs.most_common(1)[0]
    if count < max(2, LEAST_AGREEMENT * min(len(names.missing), len(names.unexpected))):
        return None
    values = {"model": model, "file": file, "count": count}
    if not model:
        return "prefix-of-file", values
    return ("prefixes" if file else "prefix-of-model"), values


def _prefixes(lacks: str, has: str) -> tuple[str, str] | None:
    """The prefixes of two names before their common end; one of the two may be empty."""
    ours, theirs = lacks.split("."), has.split(".")
    same = 0
    while same < min(len(ours), len(theirs)) and ours[-1 - same] == theirs[-1 - same]:
        same += 1
    before = ours[: len(ours) - same], theirs[: len(theirs) - same]
    if same < 2 or ours == theirs or (all(before) and (same < 3 or max(map(len, before)) > 3)):
        return None
    model, file = (".".join(part) + "." if part else "" for part in before)
    return None if re.search(r"\d", model + file) else (model, file)


def _deeper(names: NameLists) -> NamesClass | None:
    """The class if one side has layers after the last one of the other."""
    one_side = [name for name in names.one_side if not _AFTER.search(name)]
    indices = [int(hit["index"]) for name in one_side if (hit := _LAYER.search(name))]
    if not indices or len(indices) < len(one_side) or not min(indices):
        return None
    if len(one_side) == 1 and not _OF_EVERY_LAYER.search(one_side[0]):
        return None  # a part that only some layers have
    values = {"first": min(indices), "last": max(indices)}
    return ("layers-of-file" if names.unexpected else "layers-of-model"), values
