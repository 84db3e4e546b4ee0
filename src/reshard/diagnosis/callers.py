"""Calls with wrong arguments, and values that code did not expect, by Python's own messages.

The caller and the called code are from different releases, or the data (a batch, a list) is not what they expect.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from reshard.base.suggest import closest
from reshard.diagnosis.finding import Finding, Text
from reshard.diagnosis.history.calls import base_of
from reshard.diagnosis.history.missing import called_in, meant
from reshard.diagnosis.history.table import ROOTS, Span, Table, tables
from reshard.diagnosis.log import Log, Traceback
from reshard.diagnosis.rules import Told, told_at
from reshard.diagnosis.undefined import of_undefined, optional
from reshard.diagnosis.upstream import installed_of, place_in_code, update_of
from reshard.diagnosis.words import words


def of_call(root: Traceback, log: Log) -> Finding | None:
    """The finding for a call or a line of code that failed; None for other kinds of exceptions."""
    first = root.root
    found = next((each for ask in _ASKED if (each := ask(first))), None)
    if found is None:
        return None
    identifier, values = found
    shown = {"where": place_in_code(first), "update": update_of(first), **values}
    finding = told_at((identifier, shown), log.name, first.last, first.said)
    return None if finding.certainty == "possible" and installed_of(first) in _REWRITING else finding


_REWRITING = ("unsloth", "unsloth-zoo")
"""Packages that rewrite the source of others: what fails in them is a release that they do not know."""
_TERM = r"[a-z]{2,20}(?: [a-z]{2,20})?"
_CHOSEN = r"[`'\"]?(?P<{}>[\w.-]{{2,60}})[`'\"]?"
_UNHEARD = re.compile(
    rf"(?:ValueError|KeyError|NotImplementedError|RuntimeError): (?:(?P<kind>(?=[A-Z])(?i:{_TERM}))"
    rf" {_CHOSEN.format('value')} (?:does not exist|is not (?:registered|recognized|known|defined))"
    rf"|(?:Unknown|Unrecognized|[Uu]nhandled) (?P<other>{_TERM}):? {_CHOSEN.format('given')})\.?\s*$",
    re.MULTILINE,
)


def _unheard(root: Traceback) -> Told | None:
    """A choice of the user's by name that a package does not know, for which another of its releases is meant."""
    match, package = _UNHEARD.match(root.said), installed_of(root)
    if match is None or not package:
        return None
    kind, value = match["kind"] or match["other"], match["value"] or match["given"]
    return "choice-of-other-release", {"kind": kind.lower(), "value": value, "package": package}


_MISSING = re.compile(
    r"TypeError: (?P<function>[\w.<>]+)\(\) missing (?P<count>\d+) required (?:positional"
    r"|keyword-only) arguments?: (?P<names>(?:['‘`]\w+['’`](?:,? and |, )?)+)"
)
_COUNT = re.compile(
    r"TypeError: (?P<function>[\w.<>]+)\(\) (?P<what>takes (?:from \d+ to "
    r"|exactly )?\d+ (?:positional )?arguments? (?:but \d+ (?:was|were) given|\(\d+ given\)))"
)
_GIVEN_TWICE = re.compile(
    r"TypeError: (?P<function>[\w.<>]+)\(\) got multiple values for (?:keyword )?argument ['‘`](?P<name>\w+)"
)
_UNKNOWN = re.compile(
    r"TypeError: (?P<function>[\w.<>]+)\(\) got an unexpected keyword argument ['‘`](?P<name>\w+)['’`]"
)
_BUILT_FROM = re.compile(r"\*\*(?P<what>\w*(?:config|cfg|dict|kwargs|args)\w*)")

_OF_FILE = re.compile(r"(?:Config|Configuration|Arguments|Args|Params|Parameters|Settings|Options|Cfg)$")
"""Ends of the names of classes that hold the keys of a file."""


def _unknown(root: Traceback) -> Told | None:
    """An unknown argument of a call; if it came from a file, it is a key of that file."""
    match = _UNKNOWN.match(root.said)
    if match is None:
        return None
    function = _with_class(match["function"], root)
    if misspelled := _misspelled(function, match["name"]):
        return misspelled
    if _OF_MODEL.fullmatch(match["name"]) and _OF_ADAPTER.match(function):
        return "adapter-config-of-model", {"function": function, "name": match["name"]}
    kind, _, method = function.rpartition(".")
    if method == "__init__" and match["name"] in FROM_PRETRAINED and _MODEL.search(kind):
        since, until = FROM_PRETRAINED[match["name"]]
        span = words("span-between" if until else "span-since", since=since, last=until)
        pin = f"transformers>={since}" + (",<5" if until else "")
        return "keyword-of-loading", {"kind": kind, "name": match["name"], "span": span, "pin": pin}
    if method == "forward" and not function.startswith("_"):
        return _of_forward(function, match["name"], root)
    if refused := _of_no_release(function, match["name"]):
        return refused
    package = installed_of(root) or (_owner_of(kind) if kind else "")
    made = _BUILT_FROM.search(root.source)
    if not package and made and method == "__init__" and root.frames and _OF_FILE.search(kind):
        return "config-key-of-other", {"kind": kind, "name": match["name"], "frame": root.frames[-1]}
    if function == "__init__" and (owned := _of_owners(match["name"], package)):
        return owned
    if not package:
        return None
    shown = {"function": function, "name": match["name"], "package": package}
    if made and method == "__init__" and re.search(r"/config\w*/|config\w*\.py", "".join(root.frames[-1:])):
        return "config-newer", shown
    return "call-unknown", {**shown, "update": words("update-asker", package=package)}


_OF_ADAPTER = re.compile(
    r"(?:Peft|Lora|AdaLora|PrefixTuning|PromptLearning|PromptTuning|IA3)Config\.__init__$"
)
_OF_MODEL = re.compile(
    r"_name_or_path|architectures|hidden_size|vocab_size|num_(?:hidden_)?layers|num_attention_heads|torch_dtype"
    r"|add_bias_linear|attention_dropout|hidden_act|max_position_embeddings|rope_theta|rms_norm_eps"
)
"""Keys of a model's config.json that no adapter has."""


def _with_class(function: str, root: Traceback) -> str:
    """A function with the class that the line of code calls: Python 3.9 writes `__init__()` for any class's."""
    classes = called_in(root.source) if function == "__init__" else []
    return f"{classes[0]}.__init__" if len(classes) == 1 else function


def _misspelled(function: str, name: str) -> Told | None:
    """An argument that no release of a function has, although one has a similar name."""
    for own in tables(ROOTS) if "." in function else ():
        known = own.ever(function)
        near = closest(name, known, cutoff=ALIKE) if name not in known else []
        if near:
            there = own.own_parameter(function, near[0]).there
            shown = {"function": function, "name": name, "near": near[0], "package": own.package}
            return "argument-misspelled", {**shown, "since": own.versions[min(there, default=0)]}
    return None


FROM_PRETRAINED = {
    "load_in_4bit": ("4.30.0", "4.57"),
    "load_in_8bit": ("4.22.0", "4.57"),
    "use_flash_attention_2": ("4.34.0", "4.57"),
    "attn_implementation": ("4.36.0", ""),
    "quantization_config": ("4.27.0", ""),
    "dtype": ("4.56.0", ""),
}
"""Arguments of `from_pretrained`, which passes those that it does not know to the model's class, and their releases."""
_MODEL = re.compile(r"For[A-Z]\w+$|Model$|LMHeadModel")
FROM_TRAINER = {"num_items_in_batch": "4.46.0", "return_dict": "3.0.0", "logits_to_keep": "4.49.0"}
"""Arguments that transformers itself passes to models, and since when."""


_LAYER = re.compile(
    r"(?<!\w)\w{0,60}(?:Attention\w*|Layer\w*|Block|MLP|MoE|Experts|Router|Linear\w*|Norm|RotaryEmbedding|Decoder|Mixin)\.forward"
)
"""Functions of a model's layers, which the model calls, not the Trainer."""


def _of_layer(function: str, name: str, root: Traceback) -> Told:
    """An argument that a layer's `forward` refuses: model and layer are of different releases."""
    package = installed_of(root) or _owner_of(function.rpartition(".")[0])
    of_caller = [own for own in tables(ROOTS) if package in ("", own.package) and _passes(own, name)]
    since = _passes(of_caller[0], name) if len(of_caller) == 1 else ""
    package = of_caller[0].package if len(of_caller) == 1 else package
    shown = {"function": function, "name": name, "package": package or "transformers"}
    back = (
        words("forward-of-layer-pin", pin=f"{package}<{since}")
        if since
        else words("forward-of-layer-fit", **shown)
    )
    return "forward-refuses", {
        **shown,
        "why": words("forward-of-layer", **shown),
        "cure": words("forward-of-layer-cure", back=back, **shown),
    }


def _passes(own: Table, name: str) -> str:
    """The release since which layers of a package take an argument that they did not always take; "" if none does."""
    layers = (each for each in own.raw["functions"] if _LAYER.fullmatch(each))
    there = [own.own_parameter(each, name).there for each in layers]
    first = min((min(each) for each in there if each), default=0)
    return own.versions[first] if first else ""


def _of_forward(function: str, name: str, root: Traceback) -> Told:
    """An argument that a model's `forward` refuses: passed by the Trainer, or a column of the batch."""
    if _LAYER.fullmatch(function):
        return _of_layer(function, name, root)
    since = FROM_TRAINER.get(name)
    why, cure = (
        ("forward-of-trainer", "forward-of-trainer-cure")
        if since
        else ("forward-of-batch", "forward-of-batch-cure")
    )
    shown = {"function": function, "name": name, "since": since or ""}
    return "forward-refuses", {**shown, "why": words(why, **shown), "cure": words(cure, **shown)}


def _of_no_release(function: str, name: str) -> Told | None:
    """An argument that no release of a class accepts: it belongs to somebody's own class, or to another one."""
    kind = function.removesuffix(".__init__")
    known = (
        [own for own in tables(ROOTS) if own.own_parameter(function, "self").among]
        if kind != function
        else []
    )
    own = known[0] if len(known) == 1 else None
    if own is None or not own.name(own.raw["root"], kind).there:
        return None
    bases = [base for marked in own.marked(function) if (base := base_of(marked))]
    if (
        "**" in own.ever(function)
        or name in own.ever(function)
        or any(name in each.ever(to) for each, to in bases)
    ):
        return None
    new = meant(own, function, name)
    instead = words("write-instead-of-none", new=new) if new else Text.same("")
    shown = {"function": kind, "name": name, "package": own.package, "instead": instead}
    return "argument-of-none", {**shown, "first": own.versions[0], "last": own.versions[-1]}


_TAKE_SETTINGS = ("transformers", "accelerate", "peft", "trl", "datasets", "pytorch-lightning")
"""Packages whose classes scripts give many settings by name."""
FEW = 3
"""Maximum number of classes from which an argument is recognized."""


def _of_owners(name: str, package: str) -> Told | None:
    """The public classes that accept an argument in some release, for a message without the name of its class.

    Only those of the package whose code failed, if it is one of these.
    """
    found: list[tuple[Table, str, Span]] = []
    for own in tables([package] if package in _TAKE_SETTINGS else _TAKE_SETTINGS):
        kinds = [
            each.removesuffix(".__init__") for each in own.raw["functions"] if each.endswith(".__init__")
        ]
        having = {kind: own.own_parameter(f"{kind}.__init__", name).there for kind in kinds}
        having = {kind: there for kind, there in having.items() if there}
        heirs = {kind for kind in having if own.ancestors(kind) & having.keys() - {kind}}
        public = (kind for kind in having if own.name(own.raw["root"], kind).there)
        found += [(own, kind, having[kind]) for kind in public if kind not in heirs]
    if not 0 < len(found) <= FEW:
        return None
    each_with_span = [
        words("owner-of-keyword", kind=kind, package=own.package, span=_span(own, there))
        for own, kind, there in found
    ]
    owners = Text(
        "; ".join(each.en for each in each_with_span), "；".join(each.zh for each in each_with_span)
    )
    packages = " ".join(dict.fromkeys(own.package for own, _, _ in found))
    return "keyword-owners", {"name": name, "owners": owners, "packages": packages}


def _span(own: Table, there: Span) -> Text:
    """The releases that have something, in words."""
    first, last = min(there), max(there)
    kind = {(True, True): "all", (False, True): "since", (True, False): "until"}.get(
        (first == 0, last == own.last), "between"
    )
    return words(f"span-{kind}", since=own.versions[first], last=own.versions[last])


ALIKE = 0.85
"""Minimum similarity of an argument to the one that was meant."""


def _owner_of(kind: str) -> str:
    """The only package with a class of this name, or that has it in its root; "" if there are several or none."""
    owners = [each for each in tables(ROOTS) if each.elsewhere(kind, "", each.versions[-1])]
    if len(owners) > 1:
        owners = [each for each in owners if each.name(each.raw["root"], kind).there]
    return owners[0].package if len(owners) == 1 else ""


_UNPACK = re.compile(
    r"ValueError: (?P<what>(?:too many|not enough) values to unpack \((?:expected (?:at least )?\d+(?:, got \d+)?)\))"
)


def _missing(root: Traceback) -> Told | None:
    match = _MISSING.match(root.said)
    if match is None:
        return None
    shown: dict[str, object] = {"function": match["function"], "names": match["names"]}
    if match["function"].rpartition(".")[2] in ("forward", "compute_loss", "_forward"):
        return "batch-lacks", shown
    made = (
        re.search(r"\b(?P<kind>[A-Z]\w+)\(", root.source) if match["function"].endswith("__init__") else None
    )
    kind = match["function"].rpartition(".")[0] or (made["kind"] if made else "")
    if root.frames and not installed_of(root) and kind and not _is_known(kind):
        return "call-lacks-own", {**shown, "kind": kind, "frame": root.frames[-1]}
    return "call-lacks", shown


def _is_known(kind: str) -> bool:
    """Whether any package of the history has a class of this name."""
    return any(own.elsewhere(kind, "", own.versions[-1]) for own in tables(ROOTS))


_INPUT = re.compile(
    r"ValueError: (?:`(?P<name>\w+)` is required as a model input"
    r"|You (?:have to|must|should|cannot)[^\n]{0,20} specify[^\n]{0,40}?"
    r"(?P<names>\w*input_ids[^\n]{0,80}inputs_embeds)(?! at the same time$))"
)


def _input(root: Traceback) -> Told | None:
    """What a model reports as missing from its forward arguments."""
    match = _INPUT.match(root.said)
    return (
        ("batch-lacks", {"function": "forward", "names": match["name"] or match["names"]}) if match else None
    )


_TWICE = re.compile(
    r"(?:\w*Error|\w*Exception)?:? ?(?P<what>[^\n:]{3,80}?) (?:is|are|was|has been|have been|had been)? ?"
    r"already (?:been )?(?P<how>initiali[sz]ed|set up|created|started|wrapped|prepared)\b"
)


def _twice(root: Traceback) -> Told | None:
    """Something that reports that it was already set up in this process."""
    match = _TWICE.match(root.said)
    return ("set-up-twice", {"what": match["what"].strip(), "how": match["how"]}) if match else None


_NOT_YET = re.compile(
    r"(?:\w*Error|\w*Exception): (?P<what>[^\n:,]{3,80}?) (?:is|are|has|have) not (?:been )?(?:yet )?"
    r"(?P<how>initiali[sz]ed|set up|registered)\b"
)


def _not_yet(root: Traceback) -> Told | None:
    """Something that reports that it was not set up in this process."""
    match = _NOT_YET.match(root.said)
    return ("not-set-up", {"what": match["what"].strip()}) if match else None


_BARE = re.compile(r"raise \w+(?:\(\))?$")


def _without_words(root: Traceback) -> Told | None:
    """An exception that a line of code raises without a message: the last branch of a function's cases."""
    if root.message or not _BARE.match(root.source) or len(root.frames) < 2:
        return None
    return "no-case-for-it", {"function": root.frames[-1].rpartition(" ")[2], "by": root.frames[-2]}


def _count(root: Traceback) -> Told | None:
    if match := _GIVEN_TWICE.match(root.said):
        return "call-twice", {"function": match["function"], "name": match["name"]}
    match = _COUNT.match(root.said)
    return ("call-differs", {"function": match["function"], "what": match["what"]}) if match else None


_LOOP = re.compile(
    r"for [\w, ()]{3,60} in (?:enumerate\(|tqdm\()?(?:tqdm\()?(?P<loader>\w{0,30}?(?:[Ll]oader|_dl|_iter)\b)"
)
"""A loop over batches that takes them apart."""


def _unpack(root: Traceback) -> Told | None:
    match = _UNPACK.match(root.said)
    if match is None:
        return None
    shape = re.search(r"=\s*(?P<of>[\w.\[\]\"']+?)\.(?:shape|size\(\))\s*$", root.source)
    if shape:
        return "dimensions-differ", {"what": match["what"], "of": shape["of"]}
    batch = _LOOP.match(root.source)
    if batch:
        return "batch-unpacked", {"what": match["what"], "loader": batch["loader"], "source": root.source}
    model = re.search(r"=\s*(?P<model>(?:\w+\.)?\w*model\w*)\((?!.*\)\.)", root.source)
    if model:
        return "model-returns-other", {"what": match["what"], "model": model["model"]}
    return "unpack-differs", {"what": match["what"]}


_LENGTHS = re.compile(
    r"len\((?P<one>[^()\n]{1,40})\)=(?P<a>\d+)[^\n]{1,20}?len\((?P<two>[^()\n]{1,40})\)=(?P<b>\d+)"
    r"|(?P<all>All arrays must be of the same length)"
    r"|Length of (?P<of>values) \((?P<has>\d+)\) does not match length of (?P<other>index) \((?P<wants>\d+)\)"
    r"|zip\(\) argument (?P<longer>\d) is (?:shorter|longer) than argument"
)


def _lengths(root: Traceback) -> Told | None:
    """Two lists that belong together and are not equally long."""
    match = _LENGTHS.search(root.message.split("\n")[0])
    if match is None:
        return None
    one, two = match["one"] or match["of"], match["two"] or match["other"]
    if one is None:
        return "lengths-differ", {"what": words("lists-that-belong-together")}
    a, b = match["a"] or match["has"], match["b"] or match["wants"]
    return "lengths-differ", {"what": words("lists-of-two-lengths", one=one, a=a, two=two, b=b)}


_BEYOND = re.compile(
    r"IndexError: (?P<what>(?:list|tuple|string|index|pop)[^\n]{0,60}(?:out of range|empty list))"
)
_NO_ITEMS = re.compile(
    r"ValueError: (?P<function>max|min)\(\) (?:arg is an empty sequence|iterable argument is empty)"
    r"|(?:ValueError|RuntimeError): (?P<other>torch\.cat|stack)\S*: expected a non-empty list of Tensors"
)
_ZERO = re.compile(r"ZeroDivisionError: (?P<what>[^\n]+)")
_UNBOUND = re.compile(
    r"UnboundLocalError: (?:local variable '(?P<name>\w+)' referenced before assignment"
    r"|cannot access local variable '(?P<other>\w+)')"
)


def _empty(root: Traceback) -> Told | None:
    if match := _BEYOND.match(root.said):
        return "index-beyond", {"what": match["what"]}
    if match := _NO_ITEMS.match(root.said):
        trained = bool(re.search(r"param|numel|/(?:zero|optim)", root.source + "".join(root.frames[-1:])))
        return "nothing-to-choose", {
            "function": match["function"] or match["other"],
            "why": words("none-trainable" if trained else "none-to-choose"),
        }
    if _ZERO.match(root.said):
        return "count-is-zero", {}
    if match := _UNBOUND.match(root.said):
        name = match["name"] or match["other"]
        if name.endswith("_pb2"):  # a module generated by protobuf
            return "name-of-optional", optional(name, "protobuf", "google.protobuf")
        return "never-assigned", {"name": name}
    return None


_OLD = re.compile(
    r"TypeError: (?:unsupported operand type\(s\) for \|: '(?:type|_?GenericAlias|\w*Meta|NoneType)' and '[\w.]+'"
    r"|'(?:type|ABCMeta|function)' object is not subscriptable)|SyntaxError: (?:invalid syntax|f-string: )"
)


def _python(root: Traceback) -> Told | None:
    if not _OLD.match(root.said):
        return None
    version = next((hit[1] for frame in root.frames if (hit := re.search(r"python(3\.\d+)", frame))), "")
    return "python-too-old", {"version": Text(f" {version}", f" {version}") if version else Text.same("")}


_DEVICE = re.compile(r"RuntimeError: Invalid device string: ['\"](?P<name>[^'\"\n]{0,40})['\"]")


def _device(root: Traceback) -> Told | None:
    """A device by a name that torch does not know."""
    match = _DEVICE.match(root.said)
    if match is None:
        return None
    number = re.search(r"\d+", match["name"])
    near = f"cuda:{number[0]}" if number else "cuda"
    return "device-name", {"name": match["name"], "near": near, "where": place_in_code(root)}


_DENIED = re.compile(
    r"(?:PermissionError|OSError): \[Errno (?P<number>13|30|1)\] (?P<what>Permission denied"
    r"|Read-only file system|Operation not permitted)(?:: ['\"](?P<path>[^'\"\n]+))?"
)


def _denied(root: Traceback) -> Told | None:
    match = _DENIED.match(root.said)
    return ("path-denied", {"what": match["what"], "path": match["path"] or "?"}) if match else None


_ASKED: tuple[Callable[[Traceback], Told | None], ...] = (
    *(
        _missing,
        _input,
        _twice,
        _not_yet,
        _without_words,
        _count,
        _unknown,
        _unpack,
        _lengths,
        of_undefined,
        _empty,
        _python,
        _denied,
        _device,
        _unheard,
    ),
)
