"""What a missing attribute shows: a value that is None, or a class of another kind, release or wrapper."""

from __future__ import annotations

import re

from reshard.diagnosis.finding import Text
from reshard.diagnosis.history.having import having
from reshard.diagnosis.history.table import Table, table, tables
from reshard.diagnosis.log import Log, Traceback
from reshard.diagnosis.rules import Told
from reshard.diagnosis.upstream import INSTALLED, installed_of, package_of, place_in_code, update_of
from reshard.diagnosis.words import words

_NONE = re.compile(
    r"(?:Attribute|Type)Error: (?:'NoneType' object (?:has no attribute '(?P<name>\w+)'|is not (?P<use>\w+))"
    r"|cannot unpack non-iterable (?P<unpacked>NoneType) object"
    r"|argument of type 'NoneType' is not (?P<in>iterable)|object of type 'NoneType' has no (?P<len>len)\(\)"
    r"|expected str, bytes or os\.PathLike object, not (?P<path>NoneType)"
    r"|(?P<number>int|float)\(\) argument must be a [^\n]{1,80}, not 'NoneType'"
    r"|unsupported operand type\(s\) for (?P<operator>[^:|]{1,9}): (?P<operand>'NoneType'|'\w+' and 'NoneType')"
    r"(?P<both> and 'NoneType')?)"
)
_NATIVE = {
    "bitsandbytes": re.compile(r"c(?:(?:de)?quantize|get|adam|lion|gemm|igemm|lars|momentum|rmsprop)\w*_\w+")
}
"""Functions of packages' compiled libraries: None lacks them where the library was not loaded."""
_QUANT_STATE = ("absmax", "quant_state", "quant_type", "blocksize", "nested_absmax")
"""Fields of the state that bitsandbytes keeps with a 4-bit weight."""


def of_none(root: Traceback, log: Log) -> Told | None:
    match = _NONE.match(root.said)
    if match and match["name"]:
        for package, names in _NATIVE.items():
            if names.fullmatch(match["name"]):
                return "library-not-loaded", {"package": package, "symbol": match["name"]}
        if match["name"] in _QUANT_STATE:
            return "quant-state-none", {"name": match["name"], "where": place_in_code(root)}
    if match is None or not (root.frames or root.source):
        return None
    what = _none_of(root.source, match) + ("(…)" if match["unpacked"] else "")
    package = installed_of(root)
    whose = words("none-of-package", package=package) if package else words("none-of-own")
    if what in _ENTRIES and any(map(_GOES_THROUGH.search, root.frames[-1:])):
        whose = words("none-of-checkpoint", name=what)
    if package and what.isidentifier() and len(root.frames) > 1 and (by := _own_caller(root)):
        whose = words("none-passed", name=what, by=by)
    of_options = any(map(_READS_OPTIONS.search, root.frames[-1:])) and what.startswith("self.")
    if _SETTING.fullmatch(what) or of_options:
        unset = "`, `".join(each.rpartition(".")[2] for each in what.split(" and "))
        return "setting-is-none", {"names": unset, "what": what, "where": place_in_code(root)}
    if _IMAGE.search(what) and (match["name"] or match["use"]) in (
        "shape",
        "copy",
        "astype",
        "subscriptable",
    ):
        return "image-is-none", {"what": what, "where": place_in_code(root)}
    shown = words("none-named", what=what) if what else words("none-unnamed")
    if (output := what.rpartition(".")[2]) in OUTPUTS and "." in what:
        return "output-is-none", {
            "what": what,
            "why": words(f"output-{OUTPUTS[output]}"),
            "where": place_in_code(root),
        }
    return "value-is-none", {"shown": shown, "where": place_in_code(root), "whose": whose}


_IMAGE = re.compile(r"(?:^|[._])(?:img|image|im|frame|mask)\d?$")
"""Names for what `cv2.imread` returned."""
_ENTRIES = ("val", "value", "v", "tensor", "param", "weight", "w")
_GOES_THROUGH = re.compile(r"(?:convert|state_dict|checkpoint|merge|weights)[^/]*$")
"""Names for an entry of a state dict, and the frame of a function that goes through all entries."""
OUTPUTS = {
    "logits": "logits",
    "loss": "loss",
    "hidden_states": "hidden-states",
    "attentions": "attentions",
    "past_key_values": "cache",
}
"""Fields of a model's output that are None unless requested, and the phrases about how to request them."""
_SETTING = re.compile(
    r"(?<![\w.])(?:self\.)?\w{0,30}(?:args|cfg|hparams|opts?|arguments)\.[a-z]\w{0,60}(?: and [\w.]{1,90})?"
)
"""An option of a run, as code reads it."""
_READS_OPTIONS = re.compile(r"(?:args|arguments|config)\w*\.py:\d+ __post_init__$")
"""Where a dataclass of options checks its own."""


def _own_caller(root: Traceback) -> str:
    """The frame that called the innermost one, if it is in the user's own script; "" otherwise."""
    caller = root.frames[-2].replace("\\", "/")
    return "" if INSTALLED.search(caller) or package_of(caller) or "/lib/python" in caller else caller


_PASSED = re.compile(
    r"(?:\b(?:update|extend|list|tuple|set|sorted|enumerate|zip|sum|max|min)\(|\*)([A-Za-z_][\w.]*)\)"
)
"""Arguments over which a call iterates."""


def _none_of(source: str, match: re.Match[str]) -> str:
    """The expression in a line of code that is None; "" if unknown."""
    expression = r"[A-Za-z_][\w.]*(?:\([^()]*\)|\[[^\[\]]*\])?"
    if match["name"]:
        found = re.findall(rf"({expression})\.{match['name']}\b", source)
    elif match["use"] == "subscriptable":
        found = re.findall(r"(?<![\w.])([A-Za-z_][\w.]{0,80})\[", source)
    elif match["use"] == "callable":
        found = re.findall(r"(?<![\w.])([A-Za-z_][\w.]{0,80})\(", source)
    elif match["use"] == "iterable" or match["in"]:
        found = re.findall(r"\bin ([A-Za-z_][\w.]*(?:\([^()]*\))?)", source) or _PASSED.findall(source)
    elif match["unpacked"]:
        found = re.findall(r"(?<![=!<>])= ?(?:await )?([A-Za-z_][\w.]{0,80})\(", source)
    elif match["number"]:
        found = re.findall(rf"\b{match['number']}\(({expression})\)", source)
    elif match["len"]:
        found = re.findall(r"\blen\(([^()]+)\)", source)
    elif match["operand"]:
        return _operand_of(source, match)
    else:
        found = []
    return found[0] if len(set(found)) == 1 else ""


def _operand_of(source: str, match: re.Match[str]) -> str:
    """The operand that is None, or both of them, if a line of code has only one such operation between names."""
    name, operator = r"[A-Za-z_][\w.]*", match["operator"].split(" or ")[0].strip()
    found = re.findall(rf"(?<![\w.)\]])({name}) ?{re.escape(operator)}=? ?({name})(?![\w.(\[])", source)
    if len(found) != 1:
        return ""
    left, right = found[0]
    if match["both"]:
        return f"{left} and {right}"
    return str(left if match["operand"] == "'NoneType'" else right)


_ATTRIBUTE = re.compile(
    r"AttributeError: (?:type object )?'(?P<kind>\w+)' object has no attribute '(?P<name>\w+)'"
)
_CLASSES = (
    ("config", r"\w*(?:Config|Configuration)"),
    ("arguments", r"\w*(?:Arguments|Args|Namespace|Options|Params|Settings)|EasyDict|Munch|DictConfig"),
    (
        "wrapper",
        r"DistributedDataParallel|DataParallel|FullyShardedDataParallel|DeepSpeedEngine|PipelineEngine"
        r"|OptimizedModule|Peft\w+|DDP|FSDP|\w*DataLoader\w*",
    ),
    ("optimizer", r"\w*(?:Adam\w*|SGD|Lion|Adafactor|Optimizer|Scheduler|LambdaLR)"),
    ("tokenizer", r"\w*(?:Tokenizer\w*|Processor|FeatureExtractor|TokenizersBackend)"),
    ("exception", r"\w+(?:Error|Exception)"),
    (
        "tensor",
        r"(?:DT|T)ensor|Parameter|ndarray|BatchEncoding|BatchFeature|Dataset|DatasetDict|IterableDataset",
    ),
    (
        "model",
        r"\w*(?:Model|For[A-Z]\w+|Module|Transformer|Attention|MLP|Linear\w*|Layer|Embedding\w*"
        r"|ModuleList|Sequential|Head)",
    ),
)
"""What an object is, by the name of its class. The first match counts."""
WRAPPERS = ("peft", "accelerate", "deepspeed", "trl")
"""Packages whose objects wrap those of others."""


def owner_of(kind: str, name: str) -> Table | None:
    """The only package of `WRAPPERS` whose classes have an attribute, if the class that lacks it is not its own."""
    if len(name) <= SHORT or any(kind in own.raw["attributes"] for own in tables(having(WRAPPERS, kind))):
        return None
    known = {*having(WRAPPERS, f".{name}"), *(package for package, names in _ALSO.items() if name in names)}
    owners = [
        own
        for own in tables(package for package in WRAPPERS if package in known)
        if name in _ALSO.get(own.package, ())
        or any(own.attribute(each, name).there for each in _PUBLIC[own.package])
    ]
    return owners[0] if len(owners) == 1 else None


_PUBLIC = {
    "peft": ("PeftModel", "LoraModel"),
    "accelerate": ("Accelerator",),
    "deepspeed": ("DeepSpeedEngine",),
    "trl": ("PreTrainedModelWrapper",),
}
"""The classes that represent each of them."""
_ALSO = {"peft": ("print_trainable_parameters", "get_nb_trainable_parameters", "unmerge_adapter")}
"""Attributes that the tables leave out."""
SHORT = 8
"""Maximum letters of a name that many classes have."""


def _gone(kind: str, name: str) -> dict[str, object] | None:
    """The last release of transformers whose classes had an attribute that a model's own class expects from them."""
    if len(name) <= SHORT or not re.fullmatch(_OF_MODELS, kind) or not having(["transformers"], f".{name}"):
        return None
    own = table("transformers")
    if own is None or kind in own.raw["attributes"]:
        return None
    ends = own.last_of_classes(name)
    last = max(ends, default=own.last)
    if last == own.last or ends.count(last) < TOGETHER:
        return None
    return {"last": own.versions[last], "next": own.versions[last + 1]}


TOGETHER = 5
"""Classes that lost an attribute in one release: it moved elsewhere, for every model."""
_OF_MODELS = r"\w*(?:Model|For[A-Z]\w+|Attention\w*|Layer|Embedding\w*|Config|Tokenizer\w*|Processor|Cache)"
"""Names of classes that a model's own code derives from classes of transformers."""
_OF_PRETRAINED = {
    *(
        "config",
        "generation_config",
        "generate",
        "gradient_checkpointing_enable",
        "enable_input_require_grads",
    ),
    *("get_input_embeddings", "resize_token_embeddings", "prepare_inputs_for_generation", "save_pretrained"),
    *("add_model_tags", "warnings_issued", "is_gradient_checkpointing", "hf_device_map", "name_or_path"),
}
"""Attributes of transformers' `PreTrainedModel` that trainers use without checking for them."""


def _is_own(kind: str) -> bool:
    """Whether a class is in no known package: one of the user's own."""
    return not any(
        kind in own.raw["attributes"] for own in tables(having(("transformers", *WRAPPERS, "torch"), kind))
    )


_OUTPUTS = ("DynamicCache", "StaticCache", "HybridCache", "EncoderDecoderCache")
_GENERATES = re.compile(
    r"(?<!\w)\w{1,60}(?:ForCausalLM|ForConditionalGeneration|LMHeadModel|ForVision2Seq|ForSpeechSeq2Seq)"
)
_OF_TENSORS = (
    "detach",
    "cpu",
    "to",
    "size",
    "shape",
    "dim",
    "float",
    "numpy",
    "dtype",
    "device",
    "clone",
    "ndim",
)
"""Attributes of tensors, and objects in a model's output that are none."""


_OF_ENGINE = (
    *("save_checkpoint", "load_checkpoint", "save_16bit_model", "save_fp16_model", "zero_optimization_stage"),
    *("zero_optimization", "is_gradient_accumulation_boundary", "allreduce_gradients", "global_steps"),
)
"""Attributes of DeepSpeed's engine that no model has."""
_MODELS = r"\w*(?:Model(?:For\w+)?|For[A-Z]\w+|Module|Parallel)"
_BUILTIN = {each.__name__: each for each in (list, dict, tuple, set, int, float, bool)}


def of_attribute(root: Traceback, log: Log) -> Told | None:
    match = _ATTRIBUTE.match(root.said)
    if match is None:
        return None
    if owner := owner_of(match["kind"], match["name"]):
        shown = {**match.groupdict(), "package": owner.package, "where": place_in_code(root)}
        return "attribute-of-other", shown
    if re.fullmatch("(?:Parameter|Module|Buffer)Dict", match["kind"]) and match["name"] == "default":
        return "attribute-of-adapters", {**match.groupdict(), "where": place_in_code(root)}
    if match["name"] in _OF_ENGINE and re.fullmatch(_MODELS, match["kind"]):
        return "attribute-of-engine", {**match.groupdict(), "where": place_in_code(root)}
    builtin = _BUILTIN.get(match["kind"])
    if builtin and hasattr(str, match["name"]) and not hasattr(builtin, match["name"]):
        return "text-expected", {**match.groupdict(), "where": place_in_code(root)}
    if gone := _gone(match["kind"], match["name"]):
        return "attribute-gone", {**match.groupdict(), **gone}
    kind = next((kind for kind, names in _CLASSES if re.fullmatch(names, match["kind"])), None)
    if match["name"] == "generate" and _GENERATES.fullmatch(match["kind"]):
        return "attribute-generate", match.groupdict()
    if match["kind"] in _OUTPUTS and match["name"] in _OF_TENSORS:
        return "output-for-tensor", {**match.groupdict(), "where": place_in_code(root)}
    package = installed_of(root)
    if package and package != "torch" and re.search(rf"\bself\.{match['name']}\b", root.source):
        shown = {**match.groupdict(), "package": package, "where": place_in_code(root)}
        return "attribute-of-itself", shown
    if kind in (None, "model") and match["name"] in _OF_PRETRAINED and package and _is_own(match["kind"]):
        shown = {**match.groupdict(), "package": package, "where": place_in_code(root)}
        return "attribute-of-interface", shown
    if kind is None:
        return None
    return f"attribute-of-{kind}", {
        **match.groupdict(),
        "where": place_in_code(root),
        "update": update_of(root),
        "launch": words("on-several-gpus") if match["kind"] == "DataParallel" else Text.same(""),
    }
