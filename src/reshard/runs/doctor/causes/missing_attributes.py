"""A value that is None, an attribute that an object lacks, a name that nobody defined: in whose code the mistake is."""

from __future__ import annotations

import re

from reshard.base.languages import Text
from reshard.runs.checks.history.api_table import table, tables
from reshard.runs.checks.history.bloom_filters import packages_with
from reshard.runs.checks.phrases import words
from reshard.runs.checks.rules import RuleValues
from reshard.runs.doctor.causes.pip_commands import installed_for
from reshard.runs.doctor.text.log import Log, Traceback
from reshard.runs.doctor.upstream_search import INSTALLED_PATH, installed_of, package_of

# -------------------------------------------------------------------------------------------- values that are None

_NONE = re.compile(r"(?:Attribute|Type)Error: (?![^\n]*(?:'type' and|<class))[^\n]{0,160}\bNoneType\b")
"""What Python says of None, unless it is about the types themselves."""
_DOTTED = r"[A-Za-z_][\w.]*"
_VALUE = rf"({_DOTTED}(?:\([^()]*\)|\[[^\[\]]*\])?)"
_USES = (
    (re.compile(r"has no attribute '(\w+)'"), rf"{_VALUE}\.{{}}\b"),
    (re.compile(r"is not subscriptable"), rf"(?<![\w.])({_DOTTED})\["),
    (re.compile(r"is not callable"), rf"(?<![\w.])({_DOTTED})\("),
    (re.compile(r"is not iterable"), rf"(?:\bin |\(\*?|\*){_VALUE}"),
    (re.compile(r"cannot unpack"), rf"(?<![=!<>])= ?({_DOTTED}\()"),
)
"""What a message says of None, and where the value stands in the line of code."""
_OPTION = re.compile(
    r"(?<![\w.])(?:self\.)?\w{0,30}(?:args|cfg|hparams|opts?|arguments)\.[a-z]\w{0,60}(?![\w(])"
)
"""An option of a run, as code reads it."""
_CHECKS_OPTIONS = re.compile(r"(?:args|arguments|config)\w*\.py:\d+ __post_init__$")
"""Where a class of options checks its own: whatever it reads is one."""


def of_none(root: Traceback, log: Log) -> RuleValues | None:
    """What is None where a value is needed, and in whose code; None for other failures."""
    if not _NONE.match(root.said) or not (root.frames or root.source):
        return None
    what = _none_in(root.source, root.said)
    options = _OPTION.findall(root.source)
    if what.startswith("self.") and root.frames and _CHECKS_OPTIONS.search(root.frames[-1]):
        options = [what]
    if options and what in ("", *options):
        unset = [what] if what else options
        names = "`, `".join(each.rpartition(".")[2] for each in unset)
        return "setting-is-none", {"names": names, "what": " and ".join(unset)}
    shown = words("none-named", what=what) if what else words("none-unnamed")
    return "value-is-none", {"shown": shown, "whose": _whose(what, root)}


def _none_in(source: str, said: str) -> str:
    """The expression in a line of code that is None; "" if unknown."""
    for message, place in _USES:
        if match := message.search(said):
            found = set(re.findall(place.format(*match.groups()), source))
            return found.pop() if len(found) == 1 else ""
    return ""


def _whose(what: str, root: Traceback) -> Text:
    """Whose code works with None: a package that was not set up, its caller's, or the user's own."""
    package = installed_of(root)
    if not package:
        return words("none-of-own")
    caller = root.frames[-2] if len(root.frames) > 1 else ""
    if what.isidentifier() and caller and _is_own(caller):
        return words("none-passed", name=what, by=caller)
    return words("none-of-package", package=package)


def _is_own(frame: str) -> bool:
    """Whether a frame is in the user's own script."""
    path = frame.replace("\\", "/")
    return not (INSTALLED_PATH.search(path) or package_of(path) or "/lib/python" in path)


# ---------------------------------------------------------------------------------- attributes that are missing

_ATTRIBUTE = re.compile(
    r"AttributeError: (?:type object )?'(?P<kind>\w+)' object has no attribute '(?P<name>\w+)'"
)
_CLASSES = {
    "config": r"\w*(?:Config|Configuration)",
    "arguments": r"\w*(?:Arguments|Args|Namespace|Options|Params|Settings)|EasyDict|Munch|DictConfig",
    "wrapper": r"\w*(?:DataParallel|PipelineEngine|DeepSpeedEngine|DataLoader)\w*|OptimizedModule|Peft\w+|DDP|FSDP",
    "optimizer": r"\w*(?:Adam\w*|SGD|Lion|Adafactor|Optimizer|Scheduler|LambdaLR)",
    "tokenizer": r"\w*(?:Tokenizer\w*|Processor|FeatureExtractor|TokenizersBackend)",
    "cache": r"(?:Dynamic|Static|Hybrid|EncoderDecoder)Cache",
    "model": r"\w*(?:Model|For[A-Z]\w+|Module|Transformer|Attention\w*|MLP|Linear\w*|Layer|Embedding\w*|Head)"
    r"|ModuleList|Sequential",
}
"""What an object is, by the name of its class. The first match counts."""
_GENERATES = re.compile(
    r"\w{1,60}(?:ForCausalLM|ForConditionalGeneration|LMHeadModel|ForVision2Seq|ForSpeechSeq2Seq)"
)
_DATA = {each.__name__: each for each in (list, dict, tuple, set, int, float, bool)}


def of_attribute(root: Traceback, log: Log) -> RuleValues | None:
    """Why an object lacks an attribute, by its class and by who asks for it; None for other failures."""
    match = _ATTRIBUTE.match(root.said)
    if match is None:
        return None
    kind, name, package = match["kind"], match["name"], installed_of(root)
    shown: dict[str, object] = {"kind": kind, "name": name, "package": package}
    if owner := _wrapper_with(kind, name):
        return "attribute-of-other", {**shown, "package": owner}
    if kind in _DATA and hasattr(str, name) and not hasattr(_DATA[kind], name):
        return "text-expected", shown
    if releases := _gone_from_models(kind, name):
        return "attribute-gone", {**shown, **releases}
    if name == "generate" and _GENERATES.fullmatch(kind):
        return "attribute-generate", shown
    if package not in ("", "torch") and re.search(rf"\bself\.{name}\b", root.source):
        return "attribute-of-itself", shown
    found = next((each for each, names in _CLASSES.items() if re.fullmatch(names, kind)), None)
    launch = words("on-several-gpus") if kind == "DataParallel" else Text.same("")
    return (f"attribute-of-{found}", {**shown, "launch": launch}) if found else None


_WRAPPERS = {
    "peft": ("PeftModel", "LoraModel"),
    "accelerate": ("Accelerator",),
    "deepspeed": ("DeepSpeedEngine",),
    "trl": ("PreTrainedModelWrapper",),
}
"""Packages whose objects wrap those of others, and the classes of these objects."""
_UNKNOWN_TO_TABLES = {
    "peft": ("print_trainable_parameters",),
    "deepspeed": ("save_checkpoint", "load_checkpoint", "save_16bit_model", "zero_optimization_stage"),
}
"""More attributes of these classes."""
MAX_COMMON_NAME = 8
"""Maximum letters of a name that many classes have."""


def _wrapper_with(kind: str, name: str) -> str | None:
    """The only package whose wrappers have an attribute, if the class that lacks it is not its own."""
    if len(name) <= MAX_COMMON_NAME:
        return None
    found = [package for package, names in _UNKNOWN_TO_TABLES.items() if name in names]
    found += [
        own.package
        for own in tables(packages_with(_WRAPPERS, f".{name}"))
        if kind not in own.raw["attributes"]
        and any(own.attribute(each, name).there for each in _WRAPPERS[own.package])
    ]
    return found[0] if len(found) == 1 else None


MOVED_CLASSES = 5
"""Classes that lost an attribute in one release: it moved elsewhere, for every model."""


def _gone_from_models(kind: str, name: str) -> dict[str, object] | None:
    """The last release of transformers whose classes had an attribute that a model's own class expects from them."""
    of_model = any(re.fullmatch(_CLASSES[each], kind) for each in ("config", "tokenizer", "cache", "model"))
    if len(name) <= MAX_COMMON_NAME or not of_model or not packages_with(["transformers"], f".{name}"):
        return None
    own = table("transformers")
    if own is None or kind in own.raw["attributes"]:
        return None
    ends = own.last_of_classes(name)
    last = max(ends, default=own.last)
    if last == own.last or ends.count(last) < MOVED_CLASSES:
        return None
    return {"last": own.versions[last], "next": own.versions[last + 1]}


# ------------------------------------------------------------------------------------ names that nobody defined

_NAME = re.compile(r"NameError: (?:free variable|global name|name) ['‘`](?P<name>\w+)['’`] ")
_OPTIONAL = {
    "flash_attn": r"(?:un)?pad_input|index_(?:put_)?first_axis|flash_attn\w*",
    "transformer_engine": r"te|tex|transformer_engine|TE[A-Z]\w+",
    "xformers": r"xops|xformers",
    "einops": r"rearrange|einops",
    "apex": r"Fused(?:Layer|RMS)Norm|amp_C|apex",
    "sentencepiece": r"spm|sentencepiece",
    "torch": r"nn|torch|F|dist",
    "pydantic": r"TypeAdapter|BaseModel",
    "bitsandbytes": r"bnb",
    "triton": r"tl",
}
"""Modules that packages import only if they can, and the names that they import them or their parts under."""
_EXPORTING = (
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


def of_undefined(root: Traceback, log: Log) -> RuleValues | None:
    """The optional package to which an undefined name belongs, or that nobody defined it; None for other failures."""
    match = _NAME.match(root.said)
    if match is None:
        return None
    name, frame = match["name"], root.frames[-1] if root.frames else ""
    own, module = INSTALLED_PATH.search(frame), _optional(match["name"])
    if module is None or (frame and _is_own(frame)) or (own and own["name"] == module):
        return "name-undefined", {"name": name}
    values = {
        "name": name,
        "other": module.replace("_", "-"),
        "module": module,
        "install": installed_for(module),
    }
    return "name-of-optional", values


def _optional(name: str) -> str | None:
    """The module to which a name belongs that packages import only if they can; None if unknown."""
    if found := next((module for module, names in _OPTIONAL.items() if re.fullmatch(names, name)), None):
        return found
    exporting = tables(packages_with(_EXPORTING, name))
    return next((str(own.raw["root"]) for own in exporting if own.name(own.raw["root"], name).there), None)
