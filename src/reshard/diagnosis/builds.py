"""What compilers, linkers, shells and the system report as missing: a program, a header, a symbol, a host.

Such lines name the missing thing. The package that provides it, or was built for another one, follows from the name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

from reshard.diagnosis.data import data
from reshard.diagnosis.finding import Finding, Text
from reshard.diagnosis.log import Log, Traceback
from reshard.diagnosis.reading import clipped
from reshard.diagnosis.rules import Told, told_at
from reshard.diagnosis.words import words

_BUILDING = re.compile(
    r"Error building extension|CalledProcessError|subcommand failed|subprocess-exited-with-error|CompilationError"
    r"|[Ff]ailed building wheel|metadata-generation-failed|compilation terminated|cpp_extension|InductorError"
    r"|\b(?:gcc|g\+\+|nvcc|make|ninja)\b|exit(?:ed)?(?: with)?(?: exit)? (?:code|status)|fatal error:"
)
ABOVE = 400
"""Lines before a failed build in which the compiler reports the reason."""


def of_build(root: Traceback, log: Log) -> Finding | None:
    """The finding for what a failure, or the compiler output before it, reports as missing; None if nothing."""
    for ask in _ASKED:
        for text, number in _texts(root, log):
            if found := ask(text, log):
                return told_at(found, log.name, number, text)
    return None


def _texts(root: Traceback, log: Log) -> Iterator[tuple[str, int]]:
    """The message of the failure, then, if something was built, the lines above it; with line numbers."""
    failure: Traceback | None = root
    while failure is not None:
        yield failure.said, failure.last
        failure = failure.before
    if _BUILDING.search(root.said) or "subprocess-exited-with-error" in log.text:
        for line in log.lines:
            if line.stream in (root.stream, "") and 0 <= root.last - line.number < ABOVE:
                yield line.text, line.number


# ------------------------------------------------------------------------------------------ undefined symbols

_SYMBOL = re.compile(
    r"(?<![\w./+@~-])(?P<file>[\w./+@~-]{1,400}?\.so[\w.]{0,80}):\s{1,3}undefined\s{1,3}symbol:\s{1,3}(?P<symbol>\w{1,300})"
)
_OF_TORCH = re.compile(r"^_Z\w{0,8}?(?:3c10|2at|5torch|6caffe2)(?=\d|[A-Z])|^(?:aoti_)?torch_|^THP")
"""Mangled C++ names in torch's namespaces, and names of its C interfaces."""
_OF_CUDA = re.compile(r"^_*(?:nvJitLink|cu(?:blas|sparse|solver|fft|rand|dnn)|nccl|nvrtc|cu[A-Z])")
_NAMED_OTHERWISE = {
    "amp_C": "apex",
    "apex_C": "apex",
    "syncbn": "apex",
    "mlp_cuda": "apex",
    "fused_adam_cuda": "apex",
    "fused_dense_cuda": "apex",
    "fused_layer_norm_cuda": "apex",
    "fused_weight_gradient_mlp_cuda": "apex",
    "scaled_masked_softmax_cuda": "apex",
    "scaled_upper_triang_masked_softmax_cuda": "apex",
    "causal_conv1d_cuda": "causal-conv1d",
    "flash_attn_2_cuda": "flash-attn",
    "selective_scan_cuda": "mamba-ssm",
    "rotary_emb": "flash-attn",
    "dropout_layer_norm": "flash-attn",
    "fused_dense_lib": "flash-attn",
    "xentropy_cuda_lib": "flash-attn",
    "transformer_engine_torch": "transformer-engine",
}
"""Packages by the names of their extensions, if these are outside of the package's folder."""
_FOR_ONE_TORCH = frozenset(
    ("vllm", "torchvision", "torchaudio", "xformers", "torchao", "sglang", "sgl-kernel")
)
"""Packages whose wheels are built for one release of torch, which they require."""


def _undefined(text: str, log: Log) -> Told | None:
    match = _SYMBOL.search(text)
    if match is None:
        return None
    symbol = match["symbol"]
    values: dict[str, object] = {"file": match["file"].rpartition("/")[2], "symbol": clipped(symbol, 80)}
    if _OF_TORCH.search(symbol):
        package = package_of_extension(match["file"])
        return "extension-abi", {**values, "package": package, "way": way_to_rebuild(package)}
    if _OF_CUDA.search(symbol):
        return "cuda-libraries-mixed", values
    own = re.search(r"(?:site|dist)-packages/(\w+)/", match["file"])
    if own is None or not text.startswith("AttributeError"):  # what ctypes raises, not an import
        return None
    values["package"] = own[1].replace("_", "-")
    return ("library-for-cpu" if _FOR_CPU.search(match["file"]) else "library-of-other-release"), values


def way_to_rebuild(package: str) -> Text:
    """How an extension of torch is installed for the installed torch."""
    kind = (
        "for-one-torch" if package in _FOR_ONE_TORCH else "apex-here" if package == "apex" else "built-here"
    )
    return words(kind, package=package)


_FOR_CPU = re.compile(r"_cpu\.so")
"""A package's library for machines without a GPU, loaded if none was found."""


def package_of_extension(file: str) -> str:
    """The package of an extension, by its file name or its folder."""
    name = file.rpartition("/")[2].partition(".")[0]
    folder = re.search(r"(?:site|dist)-packages/(\w+)/", file)
    own = re.sub(r"_(?:cuda|C|ext|lib|torch|extensions)$", "", name)
    if not own.strip("_"):  # `_C`, in a folder that is not among those of Python
        own = file.rpartition("/")[0].rpartition("/")[2]
    return _NAMED_OTHERWISE.get(name, folder[1] if folder else own).replace("_", "-")


# ------------------------------------------------------------------------------------------ programs, header files

_HEADER = re.compile(
    r"fatal error: '?(?P<name>[\w./+-]{2,100}?)'?(?:: No such file or directory| file not found)"
)
_PATH = r"(?:[\w./+~-]{0,200}/)?(?P<name>[\w+.-]{2,60})"
_PROGRAM = tuple(
    re.compile(pattern)
    for pattern in (
        rf"No such file or directory: ['\"`]{_PATH}['\"`]",
        rf"(?:^|[\s:]){_PATH}: (?:[Cc]ommand )?not found\b",
        rf"\bexecv[ep]{{0,2}}\(\): {_PATH}: No such file",
        rf"Command '\['which', '{_PATH}'\]' returned non-zero",
        rf"(?:unable to execute|error: command) '{_PATH}'(?: failed)?: No such file",
        r"(?P<name>[Nn]inja) is required to load C\+\+ extensions",
        r"\b(?P<name>[\w+-]{2,40}) (?:was|is|could) not (?:be )?(?:found|installed)\b",
        r"(?P<name>[\w+.-]{2,60})['’”]? (?:is not recognized as |不是内部或外部命令)",
        r"无法将[“\"'](?P<name>[\w+.-]{2,60})[”\"']项识别为",
    )
)


_NO_NVCC = re.compile(
    r"raise_if_cuda_home_none|CUDA_HOME (?:environment variable )?is not set|nvcc was not found|Could not find nvcc"
)


def _program(text: str, log: Log) -> Told | None:
    if _NO_NVCC.search(text) and (found := supplied("programs", "nvcc")):
        return "program-missing", found
    for match in (hit for pattern in _PROGRAM for hit in pattern.finditer(text)):
        if found := supplied("programs", match["name"].lower()):
            return "program-missing", found
    return None


def _header(text: str, log: Log) -> Told | None:
    match = _HEADER.search(text)
    found = supplied("headers", match["name"]) if match else None
    return ("header-missing", found) if found else None


_LINKED = re.compile(r"\bld: cannot find -l(?P<library>[\w+.-]{1,60})")


def _linked(text: str, log: Log) -> Told | None:
    match = _LINKED.search(text)
    return ("library-not-linked", match.groupdict()) if match else None


def supplied(kind: str, name: str) -> dict[str, object] | None:
    """The command that installs a program, a header file or a library, as values for a rule; None if unknown."""
    command = next((each for pattern, each in _supplies()[kind].items() if re.fullmatch(pattern, name)), None)
    return {"name": name, "command": Text.same(command.replace("{name}", name))} if command else None


def installed_for(module: str) -> str:
    """What to give `pip install` for a module."""
    found = supplied("modules", module)
    return str(found["command"].en) if found and isinstance(found["command"], Text) else module


def at_fault(module: str, what: Text) -> Told:
    """The rule for a package, by its module, whose own code is wrong."""
    return "package-at-fault", {
        "what": what,
        "module": module,
        "package": installed_for(module).split()[-1].strip("'"),
    }


@lru_cache(maxsize=1)
def _supplies() -> dict[str, dict[str, str]]:
    content: dict[str, dict[str, Any]] = data("supplies.yaml")
    return content


# ------------------------------------------------------------------------------------------ pip's build environments

_ISOLATED = re.compile(
    r"pip-build-env-|get_requires_for_build_wheel|prepare_metadata_for_build|egg_info did not run|build_editable"
    r"|Getting requirements to build wheel did not run"
    r"|build backend returned an error|Failed to (?:build|prepare distributions)"
)
_IMPORTED = re.compile(r"No module named '(?P<name>torch|numpy|wheel|setuptools|packaging|psutil|pybind11)'")
_BUILT = re.compile(
    r"(?:Collecting|Preparing metadata for|Building wheels? for(?: collected packages:)?"
    r"|Failed to build|Failed to download and build|pip install(?: -\S{1,80}){0,8})"
    r" [`'\"]?(?P<name>[A-Za-z][\w-]{0,60})"
)


def _isolated(text: str, log: Log) -> Told | None:
    match = _IMPORTED.search(text)
    if match is None or not _ISOLATED.search(log.text):
        return None
    packages = [each["name"] for each in _BUILT.finditer(log.text)]
    return "build-isolation", {"name": match["name"], "package": packages[-1] if packages else "PACKAGE"}


# ------------------------------------------------------------------------------------------ commands that failed

_COMMAND = (
    re.compile(
        r"CalledProcessError: Command ['\"]?\[?['\"](?!\S{0,300}(?:python|torchrun|accelerate|deepspeed|/bash|/sh\b))"
        rf"{_PATH}['\", ]"
    ),
    re.compile(
        r"(?P<name>ssh|pdsh|mpirun|nvcc|ninja|gcc|g\+\+|cmake|make|git) exited with (?:exit )?(?:code|status)"
    ),
    re.compile(rf"error: command '{_PATH}' failed with exit"),
)
_SAYS = re.compile(
    r"(?i:\berror\b|\bfatal\b|denied|cannot find|verification failed|undefined reference|not found|no such file"
    r"|could not resolve|refused|unsupported|failed)"
)
_SELF = re.compile(
    r"CalledProcessError|exited with|error: command|^\s{0,80}File \"|^\s{1,80}raise |Traceback"
)


_UNREACHED = re.compile(r"^fatal: unable to access 'http", re.MULTILINE)
"""Git without a network: a rule by its message tells more."""


def _failed_command(text: str, log: Log) -> Told | None:
    match = next((hit for pattern in _COMMAND if (hit := pattern.search(text))), None)
    if match is None or _PYTHON.match(match["name"]):
        return None
    if _UNREACHED.search(log.text):
        return None
    lines = [line.text.strip() for line in log.lines]
    said = [each for each in lines if _SAYS.search(each) and not _SELF.search(each)][-MOST_SAID:]
    quoted = "\n".join(f"  {clipped(each, 300)}" for each in said)
    if not said and "-lcuda" in text:
        return "triton-helper-failed", {"name": match["name"]}
    says = words("command-says", lines=Text.same(quoted)) if said else words("command-says-nothing")
    return "command-failed", {"name": match["name"], "says": says}


_PYTHON = re.compile(r"python|torchrun|accelerate|deepspeed|bash$|sh$")
MOST_SAID = 4
"""Lines of a failed command that are shown."""

# ------------------------------------------------------------------------------------------ hosts

_UNKNOWN_HOST = re.compile(
    r"network addresses? of \((?P<host>[\w.:-]+), \d+\) cannot be retrieved[^\n]{0,40}?"
    r"(?P<why>Name or service not known|Temporary failure in name resolution|No address associated with hostname)"
)
_UNREACHABLE = re.compile(
    r"[Cc]onnect(?:ion)?(?: call)? (?:to |with |from )?\S{0,40}?(?P<host>\d{1,3}(?:\.\d{1,3}){3})\S{0,20}"
    r".{0,80}?(?P<why>No route to host|Connection refused|Connection timed out|[Nn]etwork is unreachable)"
)


_SOCKET = re.compile(
    r"client socket has (?P<why>timed out|failed)[^\n]{0,120}?connect(?: to)?(?: any network address of)? "
    r"\((?P<host>[\w.:-]+), (?P<port>\d+)\)"
)


def _unreachable(text: str, log: Log) -> Told | None:
    """A host that cannot be reached, by the system's messages."""
    if match := _SOCKET.search(text):
        why = words("store-silent" if "timed out" in match["why"] else "store-refuses")
        return "store-unreachable", {"host": match["host"], "port": match["port"], "why": why}
    match = _UNKNOWN_HOST.search(text) or _UNREACHABLE.search(text)
    return ("host-unreachable", {"host": match["host"], "why": match["why"]}) if match else None


_NOT_INSTALLED = re.compile(
    r"(?:Assertion|Import|Runtime|Value)Error: [`'\"]?(?P<name>[A-Za-z_][\w.-]{1,50})[`'\"]?"
    r" (?:is|was) not installed(?:[.!]| ?[,.;]? ?please (?:build|install) it(?P<source> from source)?\.?)?\s*$",
    re.IGNORECASE,
)


def _not_installed(text: str, log: Log) -> Told | None:
    """A package that a program tried to import earlier, and whose absence it reports in its own words."""
    match = _NOT_INSTALLED.match(text)
    if match is None:
        return None
    package = _NAMED_OTHERWISE.get(match["name"], match["name"]).replace("_", "-")
    module = match["name"].replace("-", "_")
    if (known := installed_for(module.lower())) != module.lower() and not module.islower():
        module, package = module.lower(), known  # a product's name, as in a sentence
    if (module, match["source"]) == ("megatron", " from source"):  # what accelerate says
        return "backend-of-config", {"name": "Megatron-LM", "type": "MEGATRON_LM", "package": package}
    return "not-installed", {"name": match["name"], "module": module, "package": package}


_FAMILIES = re.compile(
    r"ss_family\b[^\n]{0,40}?\. (?P<one>\d+) vs (?P<other>\d+)|Address family not supported by protocol"
)
_FAMILY = {"2": "IPv4", "10": "IPv6"}
"""AF_INET and AF_INET6 of Linux."""
_NO_INTERFACE = re.compile(
    r"(?:Unable to find (?:address|interface) for:?|unresolved host) \[?(?P<name>\w[\w.:%-]*)"
)


def _addresses(text: str, log: Log) -> Told | None:
    """What gloo reports about the addresses and interfaces of its processes."""
    if missing := _NO_INTERFACE.search(text):
        return "interface-missing", {"name": missing["name"]}
    match = _FAMILIES.search(text)
    if match is None:
        return None
    named = [_FAMILY.get(number, number) for number in (match["one"], match["other"]) if number]
    families = ", ".join(named)
    shown = Text(f" ({families})", f"（{families}）") if named else Text.same("")
    return "address-families", {"families": shown}


_ASKED: tuple[Callable[[str, Log], Told | None], ...] = (
    *(_undefined, _linked, _header, _program, _isolated, _failed_command, _unreachable, _addresses),
    _not_installed,
)
