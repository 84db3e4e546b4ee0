"""Values and requests that something refuses in its own words: a schema, a parser, the Hub, torch (dtypes), pip."""

from __future__ import annotations

import re
from collections.abc import Callable

from reshard.base.suggest import closest
from reshard.diagnosis.builds import installed_for
from reshard.diagnosis.dtypes import of_dtypes
from reshard.diagnosis.finding import Finding, Text
from reshard.diagnosis.log import Log, Traceback
from reshard.diagnosis.match import first_sign
from reshard.diagnosis.reading import clipped
from reshard.diagnosis.rules import Told, told_at
from reshard.diagnosis.shortages import shortage
from reshard.diagnosis.upstream import installed_of
from reshard.diagnosis.words import words

_OWN = re.compile(
    r"\breshard(?:\.base)?\.errors\.ReshardError: (?P<title>[^\n]{1,400})"
    r"(?P<fields>(?:\n\s+(?:tensor|file|rule|expected|found): [^\n]*)*)(?:\n\s+remedy: (?P<cure>[^\n]*))?"
)


def _own(said: str, log: Log) -> Told | None:
    """An error of reshard, which says itself what to do."""
    match = _OWN.search(said)
    if match is None:
        return None
    fields = [clipped(line.strip(), 400) for line in match["fields"].split("\n") if line.strip()]
    why = Text.same("\n".join(fields)) if fields else words("reshard-refused-why")
    cure = Text.same(match["cure"]) if match["cure"] else words("reshard-refused-cure")
    return "reshard-refused", {"title": match["title"], "why": why, "cure": cure}


def of_refusal(root: Traceback, log: Log) -> Finding | None:
    """The finding for what was refused, and what is accepted instead; None for other failures."""
    first = root.root
    for failure in (first, root) if first is not root else (root,):
        for ask in _ASKED:
            if found := ask(failure.said, log):
                return told_at(found, log.name, failure.last, failure.said)
    return None


# ------------------------------------------------------------------------------------------ formats

_TIKTOKEN = re.compile(
    r"Error parsing line b.{0,400} in (?P<path>\S{1,400}(?:tokenizer\.model|spiece\.model|\.spm|\.bpe\.model))"
    r"|Converting from (?:Tiktoken|SentencePiece and Tiktoken) failed"
    r"|[Yy]ou need to have sentencepiece(?: or tiktoken)? installed"
)
_GENERATED = re.compile(
    r"cannot import name ['\"](?:builder|runtime_version)['\"] from ['\"]google\.protobuf"
    r"|module ['\"]google\.protobuf\.descriptor['\"] has no attribute ['\"]_internal_create_key"
)


def _tiktoken(said: str, log: Log) -> Told | None:
    match = _TIKTOKEN.search(said)
    return ("tokenizer-as-tiktoken", {"path": match["path"] or "tokenizer.model"}) if match else None


def _generated(said: str, log: Log) -> Told | None:
    match = _GENERATED.search(said)
    return (
        ("protobuf-older", {"since": "5.27" if "runtime_version" in match[0] else "3.20"}) if match else None
    )


_BROKEN_OFF = re.compile(r"(?:^|: )(?P<flag>--[\w-]{2,60}): command not found", re.MULTILINE)


def _broken_off(said: str, log: Log) -> Told | None:
    flags = dict.fromkeys(match["flag"] for match in _BROKEN_OFF.finditer(log.text[-LAST:]))
    return ("command-broken-off", {"flags": ", ".join(flags)}) if flags else None


LAST = 100_000
"""Characters at the end of a log that are searched for messages of the shell."""

# ------------------------------------------------------------------------------------------ values

_SCHEMA = re.compile(
    r"validation errors? for (?P<of>[\w.\[\],"
    r"| -]+)\n(?P<field>[\w.\[\]-]+)\n\s+(?P<what>[^\[\n]+?)(?: \[type=(?P<type>\w+)"
    r"(?:, input_value=(?P<value>[^\n]{0,200}?))?(?:, input_type=(?P<is>\w+))?\])?$",
    re.MULTILINE,
)
_OF_ALL = re.compile(
    r"validation errors? for (?P<of>[\w.]+)\n\s+(?:Value error|Assertion failed), (?P<what>[^\[\n]+)"
)
"""What pydantic prints about several values together."""
_CHOICE = tuple(
    re.compile(pattern)
    for pattern in (
        r"argument (?P<name>-{1,2}[\w/-]+): invalid choice: '?(?P<value>[^'\s]+)'? \((?:choose from "
        r"|maybe you meant: )(?P<there>[^)\n]+)\)",
        r"(?:^|: )['\"]?(?P<value>[\w.-]+)['\"]? is not a valid (?P<name>\w+)(?:, please select one of"
        r" (?P<there>\[[^\]\n]+\]))?",
        r"(?:argument )(?P<name>-{1,2}[\w/-]+): invalid (?P<there>\w+) value: '(?P<value>[^'\n]*)'",
        r"[Tt]he following arguments are required: (?P<name>[^\n]+)(?P<value>)(?P<there>)",
    )
)


def _schema(said: str, log: Log) -> Told | None:
    if whole := _OF_ALL.search(said):
        ordered = _ordered(whole["what"], log)
        return ordered or ("values-refused", {"of": whole["of"], "what": whole["what"]})
    match = _SCHEMA.search(said)
    if match is None or match["type"] == "extra_forbidden" or "Extra inputs" in match["what"]:
        return None  # an unknown key: see `arguments.py`
    value = match["value"] or ""
    given = Text.same("")
    if value:
        told_value = words("value-given", value=clipped(value, 120), kind=match["is"] or "?")
        given = Text(f" {told_value.en}", told_value.zh)
    shown = {
        "field": match["field"],
        "of": match["of"].strip(),
        "what": match["what"].strip(),
        "given": given,
    }
    return "value-refused", shown


def _choice(said: str, log: Log) -> Told | None:
    match = next((hit for pattern in _CHOICE if (hit := pattern.search(said))), None)
    if match is None:
        return None
    if not match["value"] and "required" in said:
        return "argument-required", {"name": match["name"]}
    return "choice-refused", {**match.groupdict("?")}


_NO_COMMAND = re.compile(
    r"(?i:no such command|unknown (?:sub)?command|unrecognized command|command error):? ?"
    r"['\"`]{0,2}(?P<value>[\w-]{2,60})"
    r"|['\"`](?P<named>[\w-]{2,60})['\"`] is not an? (?:known |valid )?(?:[\w-]{1,30} )?command"
)


def _command(said: str, log: Log) -> Told | None:
    """A subcommand that the installed program does not have."""
    match = _NO_COMMAND.search(said)
    if match is None:
        return None
    value = match["value"] or match["named"]
    typed = re.search(
        rf"(?m)^[$>\s]{{0,4}}(?:\S*/)?(?P<program>[a-z][\w.-]{{1,40}})(?: [\w-]{{2,30}}){{0,2}} {value}\b",
        log.text,
    )
    program = typed["program"] if typed else "PROGRAM"
    return "subcommand-unknown", {
        "value": value,
        "program": program,
        "distribution": installed_for(_PROGRAMS.get(program, program)),
    }


_PROGRAMS = {
    "llamafactory-cli": "llamafactory",
    "huggingface-cli": "huggingface_hub",
    "hf": "huggingface_hub",
}
"""Packages of programs with another name."""


_ORDERED = re.compile(
    r"(?<![\w.-])(?P<one>[A-Za-z_][\w.-]{1,60}) ?\(=?(?P<a>\d[\d.]*)\) "
    r"(?P<how>is|must be|should be|has to be|needs to be) "
    r"(?P<than>smaller|less|lower|fewer|larger|greater|bigger|higher|more) than (?:or equal to )?(?:the )?"
    r"(?P<two>[A-Za-z_][\w.-]{1,60}) ?\(=?(?P<b>\d[\d.]*)\)"
)
_SMALLER = ("smaller", "less", "lower", "fewer")


def _ordered(said: str, log: Log) -> Told | None:
    """Two settings of which one has to be at least as large as the other."""
    match = _ORDERED.search(said)
    if match is None or shortage(said):
        return None
    too_small = (match["than"] in _SMALLER) == (match["how"] == "is")
    least, most = ("one", "two") if too_small else ("two", "one")
    shown = {**match.groupdict(), "least": match[least], "most": match[most]}
    return "settings-ordered", shown


_THING = r"[\w.`'\"()]{3,80}"
_NO_CUDA = re.compile(r"Torch not compiled with CUDA enabled")
_OTHER_DEVICE = re.compile(r"(?i:torch[-_]npu|(?<![A-Za-z])npu(?![A-Za-z])|ascend)|昇腾")


def _no_cuda(said: str, log: Log) -> Told | None:
    """A request for CUDA on a machine with NPUs."""
    return ("cuda-on-npu", {}) if _NO_CUDA.search(said) and _OTHER_DEVICE.search(log.text) else None


_COUNTS = re.compile(
    r"[Mm]ismatch in `?(?:image|video|audio)`? token count between text and `?input_ids`?\. Got ids=\[(?P<ids>\d+)"
    r"[^\n]{0,200}?text=\[(?P<text>\d+)"
    r"|value tensor of shape \[(?P<values>\d+), \d+\] cannot be broadcast to indexing result of shape"
    r" \[(?P<marks>\d+), \d+\]"
    r"|[Nn]umber of image tokens is (?P<none>0) while the number of image given to the model is (?P<images>\d+)"
    r"|(?i:image|video|audio|vision|multi-?modal|placeholder)[^\n]{0,60}?(?:tokens?\b[^\n\d]{0,20}(?P<tokens>\d+)[^\n]{0,40}?"
    r"features?\b[^\n\d]{0,20}(?P<features>\d+)|(?P<given>\d+) multimodal tokens to (?P<places>\d+) placeholders)"
)


_MARKS = re.compile(
    r"[Nn]umber of (?P<what>image|video|audio)s? (?:does not match|doesn't match|is not equal to|must match|and)"
    r"[^\n]{0,60}?(?P<mark><[\w|]{2,30}>)?[^\n]{0,20}?\b(?:tokens?|placeholders?|tags?|marks?)\b"
)


def _counts(said: str, log: Log) -> Told | None:
    """Fewer or more placeholder tokens in a text than an image has features."""
    match = _COUNTS.search(said)
    if match is None:
        marks = _MARKS.search(said)
        return (
            ("modal-marks", {"what": marks["what"], "mark": marks["mark"] or f"<{marks['what']}>"})
            if marks
            else None
        )
    tokens = int(_first(match, "tokens", "places", "ids", "marks", "none"))
    features = int(_first(match, "features", "given", "text", "values", "images"))
    if tokens == 0:
        return "modal-none", {"where": Text.same("")}
    kind = "modal-fewer" if tokens < features else "modal-more"
    shown = {"why": words(kind), "way": words(f"{kind}-way")}
    return "modal-counts", {"tokens": tokens, "features": features, **shown}


def _first(match: re.Match[str], *names: str) -> str:
    """The first of some named groups that matched."""
    return next(match[name] for name in names if match[name])


_NO_OPERATOR = re.compile(
    r"NotImplementedError: (?:(?P<kind>[A-Z]\w+) dispatch: attempting to run unimplemented(?: operator/function:? ?)?"
    r"|Could not run '(?P<op>[\w:.]+)' with arguments from the '(?P<backend>\w+)' backend)(?P<rest>[^\n]{0,120})"
)


def _no_operator(said: str, log: Log) -> Told | None:
    """An operation that a kind of tensor, or a backend, does not have."""
    match = _NO_OPERATOR.search(said)
    if match is None:
        return None
    return "operator-missing", {
        "kind": match["kind"] or match["backend"],
        "op": match["op"] or match["rest"].strip(" :.") or words("operator-unnamed"),
    }


_YET = re.compile(
    rf"(?P<what>{_THING}) (?:does not|doesn't|do not) (?:yet )?support (?P<feature>[^\n.,]{{3,60}}?)(?: yet)?[.,!\n]"
    rf"|(?P<target>(?:Target module )?{_THING}) (?:is|are) not (?:yet )?supported"
)
_LATER_ONE = re.compile(r"\byet\b|[Cc]urrently")
"""What a message says about something that another release may support."""


_NAME_OF_MODEL = r"[`'\"]?(?P<{}>[\w./+-]{{2,200}}?)[`'\"]?"
_NO_MODEL = re.compile(
    r"\b[Mm]odel(?:[ _]type|[ _]name)?:? "
    + _NAME_OF_MODEL.format("named")
    + r" (?:is|are) not (?:yet )?supported\b"
    r"(?! (?:with|when|if|for))|[Uu]nsupported [Mm]odel(?:[ _]type)?:? "
    + _NAME_OF_MODEL.format("other")
    + r"(?:[.,;]|\s|$)"
)


_NOT_IN_YOURS = re.compile(
    r"(?P<what>[\w./-]{2,200}) is not supported (?:in|by) (?:your|the) (?:current|installed)"
    r" (?P<package>\w{2,40}) version"
)


def _not_yet(said: str, log: Log) -> Told | None:
    """Something that this release of a package does not support."""
    first = said.split("\n")[0]
    if yours := _NOT_IN_YOURS.search(first):
        update = words("update-alone", package=yours["package"].lower())
        return "model-not-supported", {"what": yours["what"], "update": update}
    match = _YET.search(f"{first}\n") if _LATER_ONE.search(first) else None
    if model := _NO_MODEL.search(first):
        root = first_sign(log)
        package = installed_of(root.root) if root else ""
        return "model-not-supported", {
            "what": model["named"] or model["other"],
            "update": words("update-alone", package=package) if package else words("update-unnamed"),
        }
    if match is None:
        return None
    what = match["what"] or match["target"].removeprefix("Target module ")
    package = (
        "peft" if "Target module " in first else next((each for each in ENGINES if each in log.text), "")
    )
    update = words("update-asker", package=package) if package else words("update-unnamed")
    if match["feature"] == "LoRA":  # what vLLM says of a model's class
        update = words("engine-without-lora")
    feature = Text(f": {match['feature']}", f"：{match['feature']}") if match["feature"] else Text.same("")
    return "not-supported-yet", {"what": what, "feature": feature, "update": update}


ENGINES = (
    "vllm",
    "sglang",
    "unsloth",
    "optimum",
    "auto_gptq",
    "autoawq",
    "deepspeed",
    "peft",
    "trl",
    "transformers",
)
"""Packages whose messages say what they do not support yet; the one that calls the others first."""


_GIVE = r"(?:specif(?:y|ied)|provided?|set|pass(?:ed)?|given?)"
_NOT_GIVEN = tuple(
    re.compile(pattern)
    for pattern in (
        rf"[Pp]lease {_GIVE} (?:(?:the|a|an) )?[`'\"](?P<name>[\w.-]+)[`'\"]"
        r"(?: (?:in|for|of|to) (?:the )?[`'\"](?P<of>[\w.-]+)[`'\"])?",
        rf"(?<!for )(?<!of )(?<!with )[`'\"](?P<name>[\w.-]+)[`'\"] (?:must|has to|should|needs to) be"
        rf" {_GIVE}\b(?P<of>)",
        rf"[Yy]ou (?:must|have to|should|need to) {_GIVE} (?:(?:the|a|an) )?[`'\"](?P<name>[\w.-]+)[`'\"](?P<of>)",
        rf"(?:didn['’]t|did not|haven['’]t|have not|not) {_GIVE} (?:(?:the|a|an|any) )?[`'\"]?"
        r"(?P<name>[a-z]+_\w+(?: or [a-z]+_\w+)*)[`'\"]? (?:argument|parameter|option|setting)s?\b(?P<of>)",
    )
)


def _not_given(said: str, log: Log) -> Told | None:
    """A setting without a value that the message requires."""
    match = next((hit for pattern in _NOT_GIVEN if (hit := pattern.search(said))), None)
    if match is None:
        return None
    of = Text(f" of `{match['of']}`", f"（属于 `{match['of']}`）") if match["of"] else Text.same("")
    return "setting-not-given", {"name": match["name"], "of": of}


_DEVICES = re.compile(
    r"`?Trainer\((?P<name>devices|gpus)=(?P<value>\[\]|0|'0'|None|'')\)`? value is not a valid input"
    r" using (?P<kind>\w+)"
)


def _devices(said: str, log: Log) -> Told | None:
    """An empty list of devices."""
    match = _DEVICES.search(said)
    return ("devices-none", match.groupdict()) if match else None


_FROM_GPUS = re.compile(r"found at least two devices, cuda:\d+ and cuda:\d+")
_COMBINES = re.compile(r"\b(?:zero_to_fp32|\w*(?:convert|merge|consolidate)\w*)\.py:")


def of_files_from_gpus(root: Traceback, log: Log) -> Finding | None:
    """The finding that a program combines files whose tensors return to the GPUs that saved them."""
    first = root.root
    combines = bool(first.frames and _COMBINES.search(first.frames[-1])) and "torch.cat" in first.source
    if not combines or not _FROM_GPUS.search(root.said):
        return None
    return told_at(("files-from-gpus", {"frame": first.frames[-1]}), log.name, root.last, root.said)


_RESIZED = "Trying to resize storage that is not resizable"


def of_empty_storage(root: Traceback, log: Log) -> Finding | None:
    """The finding that a file has tensors without their elements."""
    first = root.root
    rebuilt = bool(first.frames) and re.search(r"torch[/\\]_utils\.py\S* _rebuild_tensor", first.frames[-1])
    if _RESIZED not in first.said or not rebuilt:
        return None
    return told_at(("storage-without-elements", {}), log.name, first.last, first.said)


_METRIC = tuple(
    re.compile(pattern)
    for pattern in (
        r"\(monitor='(?P<name>[^'\n]+)'\) (?:not found in the returned metrics|could not find the monitored key in the"
        r" returned metrics): (?P<there>\[[^\]\n]*\])?",
        r"conditioned on metric `?(?P<name>[\w/.-]+)`? which is not available(?:[^\n]{0,160}?(?:"
        r"following|metrics are): (?P<there>[^\n]*))?",
        r"`metric_for_best_model` training argument is set to '(?P<name>[^'\n]+)', which is not found in the evaluation"
        r" metrics\. The available evaluation metrics are: (?P<there>\[[^\]\n]*\])?",
        r"[Mm]onitor(?:ed)? metric `?(?P<name>[\w/.-]+)`? (?:is )?not (?:found|available)(?P<there>)",
    )
)


def _metric(said: str, log: Log) -> Told | None:
    """A metric by which checkpoints or schedulers select, and which is not among those that were logged."""
    match = next((hit for pattern in _METRIC if (hit := pattern.search(said))), None)
    if match is None:
        return None
    there = re.findall(r"[\w/.-]+", match["there"] or "")
    best = closest(match["name"], there, cutoff=0.6)
    near = words("metric-near", near=best[0]) if best else Text.same("")
    shown = Text.same(", ".join(there[:12])) if there else words("metric-none")
    return "metric-not-there", {"name": match["name"], "there": shown, "near": near}


# ------------------------------------------------------------------------------------------ the hub

_STATUS = re.compile(r"\b(?P<status>40[134]|429|5\d\d) (?:Client|Server) Error\b")
_MISSING = re.compile(r"\b(?:Repository|Revision|(?<!Local)Entry)NotFoundError|Repository Not Found for url")
_NOT_FOUND = re.compile(r"Not Found for url: https?://[^\s)'\"]{1,300}")
"""What follows a status after an empty line."""
_TOKEN = re.compile(
    r"/whoami|Invalid user token|Invalid credentials in Authorization header|token (?:is|has) expired"
)
_WRITES = re.compile(
    r"/api/repos/create|/(?:commit|preupload|lfs-multipart)/|/info/lfs/|don't have the rights to create|write token"
    r"|write access|not have permission to (?:create|write)"
)
_URL = re.compile(r"https?://[^\s)'\"]+?(?=[.,]?(?:[\s)'\"]|$))")


def _hub(said: str, log: Log) -> Told | None:
    """An error response of the Hub: who is refused what, by its status and the address."""
    match, missing = _STATUS.search(said), _MISSING.search(said)
    if match is None and missing is None:
        return None
    below = _NOT_FOUND.search(log.text) if missing else None
    url = _URL.search(said) or (below and _URL.search(below[0]))
    status = match["status"] if match else "404"
    kind = {"401": "401", "403": "401", "404": "404", "429": "429"}.get(status, "5xx")
    if kind == "401":
        kind = (
            "token"
            if _TOKEN.search(said)
            else "write"
            if _WRITES.search(said)
            else "404"
            if missing
            else kind
        )
    shown = {"status": status, "url": url[0] if url else words("hub-a-request")}
    return "hub-answers", {**shown, "why": words(f"hub-{kind}"), "cure": words(f"hub-{kind}-cure")}


# ------------------------------------------------------------------------------------------ Python's own release

_PYTHON = re.compile(
    r"Package '(?P<package>[\w.-]+)' requires a different Python: (?P<has>[\d.]+) not in '(?P<spec>[^']+)'"
    r"|(?<![\w.-])(?P<other>[\w.-]{1,80}) requires Python"
    r" '?(?P<wants>[<>=!~]{1,2}\d[^'\n]{0,80}?)'? but the running Python is"
    r" (?P<running>[\d.]+)"
)


def _python(said: str, log: Log) -> Told | None:
    match = _PYTHON.search(said)
    if match is None:
        return None
    spec = match["spec"] or match["wants"]
    least = re.search(r">=?\s*(3\.\d+)", spec)
    shown = {
        "package": match["package"] or match["other"],
        "has": match["has"] or match["running"],
        "spec": spec,
    }
    return "python-refused", {**shown, "least": least[1] if least else "3.11"}


_CUDA = re.compile(
    r"detected CUDA version \((?P<has>[\d.]+)\) mismatches the version that was used to compile"
    r"\s+PyTorch \((?P<wants>[\d.]+)\)"
)


def _cuda(said: str, log: Log) -> Told | None:
    match = _CUDA.search(said)
    return ("cuda-toolkit-differs", match.groupdict()) if match else None


_ASKED: tuple[Callable[[str, Log], Told | None], ...] = (
    *(
        _own,
        _tiktoken,
        _generated,
        _broken_off,
        _schema,
        _ordered,
        _choice,
        _command,
        _not_yet,
        _python,
        _cuda,
        _hub,
    ),
    *(_no_cuda, _counts, _no_operator, of_dtypes, _devices, _metric, _not_given),
)
