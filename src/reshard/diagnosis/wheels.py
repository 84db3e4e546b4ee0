"""What pip offers, refuses and fails to build, and packages without a build for a platform."""

from __future__ import annotations

import re

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from reshard.diagnosis.finding import Text
from reshard.diagnosis.log import Log
from reshard.diagnosis.reading import clipped
from reshard.diagnosis.rules import Told
from reshard.diagnosis.words import words

_OFFERED = re.compile(
    r"Could not find a version that satisfies the requirement (?P<spec>[^\s(]{1,120})(?: \([^)]{0,80}\))?"
    r" \(from versions: (?P<versions>[^)]{0,2000})"
)
_PYTHON = re.compile(
    r"(?<![\w.])[Pp]ython ?(3\.\d{1,2})(?![\d])|\bcp3(\d{1,2})\b|[/\\][Pp]ython3?(\d{2})[/\\]"
)
_WINDOWS = re.compile(
    r"(?<![\w/])[A-Za-z]:\\|win_amd64|(?i:\bwindows(?: 1[01])?\b(?! subsystem)|\bwin1[01]\b)"
)
_MAC = re.compile(
    r"(?<!\w)/Users/\w|(?i:\bmacos\b|\bdarwin\b|apple silicon|\bmacbook\b|\bm[1-4] (?:pro|max|ultra)\b)"
)
_ARM = re.compile(r"\baarch64\b|linux_arm64")


def _python_of(text: str) -> str:
    """The first version of Python in a text; "" without one."""
    match = _PYTHON.search(text)
    number = next((each for each in match.groups() if each), "") if match else ""
    return f"3.{number.removeprefix('3').lstrip('.')}" if number else ""


def _system(log: Log) -> str:
    """The platform that a log shows: "windows", "mac", "arm" or ""."""
    shown = ((_WINDOWS, "windows"), (_MAC, "mac"), (_ARM, "arm"))
    return next((name for pattern, name in shown if pattern.search(log.text)), "")


def of_offered(said: str, log: Log) -> Told | None:
    """Releases that pip sees, none of which fits: too old or too new a Python, a mirror, another system."""
    match = _OFFERED.search(said)
    if match is None:
        return None
    try:
        asked = Requirement(match["spec"])
        package, specifier = asked.name, str(asked.specifier)
    except InvalidRequirement:
        package, specifier = match["spec"], ""
    if system := _platform_of(canonicalize_name(package), log):
        return system
    python = _python_of(log.text)
    shown = Text(f" with Python {python}", f"（Python {python}）") if python else Text.same("")
    kind = _direction(specifier, match["versions"])
    values: dict[str, object] = {"package": package, "spec": match["spec"], "python": shown}
    values["why"] = words(f"offered-{kind}", package=package, versions=clipped(match["versions"], 120))
    return "version-not-offered", {**values, "way": words(f"offered-{kind}-way", package=package)}


def _direction(specifier: str, versions: str) -> str:
    """How the releases on offer differ from the requested one: "none", "newer", "older" or "others"."""
    found, wanted = _versions(versions), _versions(specifier)
    if not found:
        return "none"
    if not wanted:
        return "others"
    return "newer" if max(wanted) < min(found) else "older" if min(wanted) > max(found) else "others"


_RELEASE = re.compile(r"(?<![\w.])\d+(?:\.\d+){0,3}(?:\.?(?:post|rc|dev)\d+)?(?![\w.])")


def _versions(text: str) -> list[Version]:
    return [Version(each) for each in _RELEASE.findall(text)]


_WHEEL = re.compile(r"(?P<file>[\w.+%-]{5,200}\.whl) is not a supported wheel on this platform")


def of_wheel(said: str, log: Log) -> Told | None:
    match = _WHEEL.search(said)
    if match is None:
        return None
    try:
        *_, tags = parse_wheel_filename(match["file"].replace("%2B", "+"))
    except InvalidWheelFilename:
        return None
    wants = ", ".join(sorted({f"{tag.interpreter} {tag.platform}" for tag in tags})[:3])
    python = _python_of(log.text.replace(match["file"], ""))
    has = (
        Text(f" (the log shows Python {python})", f"（日志里是 Python {python}）")
        if python
        else Text.same("")
    )
    return "wheel-refused", {"file": match["file"], "wants": wants, "has": has}


_FAILED_BUILD = re.compile(
    r"(?:Failed building wheel for|Could not build wheels for|Failed to build(?! PyTorch ext)"
    r"(?: installable wheels[^(\n]{0,80}\()?"
    r"|Failed to build `) ?(?P<name>[A-Za-z][\w.-]{0,60})"
)


def of_build(said: str, log: Log) -> Told | None:
    """A package that pip had to compile, if the log does not show the compiler's reason."""
    match = _FAILED_BUILD.search(said)
    if match is None:
        return None
    package = canonicalize_name(match["name"])
    kind = next((kind for kind, names in _COMPILED.items() if package in names), "other")
    values = {"package": package, "needs": words(f"build-{kind}")}
    return "build-failed", {**values, "way": words(f"build-{kind}-way", package=package)}


_COMPILED = {
    kind: frozenset(names.split())
    for kind, names in (
        (
            "cuda",
            "flash-attn flash-attn-3 apex xformers transformer-engine transformer-engine-torch mamba-ssm causal-conv1d"
            " deepspeed pycuda vllm auto-gptq gptqmodel autoawq grouped-gemm nv-grouped-gemm sgl-kernel torch-scatter",
        ),
        ("rust", "tokenizers safetensors tiktoken outlines-core hf-xet pydantic-core orjson"),
        (
            "c",
            "sentencepiece numpy pandas scipy scikit-learn pyarrow llama-cpp-python mpi4py fasttext psutil grpcio"
            " pyyaml cffi h5py opencv-python onnx",
        ),
    )
}
"""What packages are compiled with."""


# ------------------------------------------------------------------------------------------ platforms

_NO_MODULE = re.compile(r"No module named ['\"`‘’](?P<name>[A-Za-z_]\w*)")
_WITHOUT = {
    "windows": [
        "triton",
        "flash-attn",
        "vllm",
        "sglang",
        "deepspeed",
        "apex",
        "transformer-engine",
        "uvloop",
    ],
    "mac": [
        "triton",
        "flash-attn",
        "xformers",
        "bitsandbytes",
        "deepspeed",
        "vllm",
        "apex",
        "transformer-engine",
    ],
}
"""Packages without official wheels for a platform."""


def _platform_of(package: str, log: Log) -> Told | None:
    system = _system(log)
    if package not in _WITHOUT.get(system, ()):
        return None
    own = f"{system}-{package}" if package == "triton" else system
    shown = {"package": package, "system": words(f"system-{system}")}
    return "platform-without", {**shown, "way": words(f"without-{own}", package=package)}


def of_platform(said: str, log: Log) -> Told | None:
    """A package that cannot be imported because the platform has no build of it."""
    match = _NO_MODULE.search(said)
    return _platform_of(canonicalize_name(match["name"]), log) if match else None
