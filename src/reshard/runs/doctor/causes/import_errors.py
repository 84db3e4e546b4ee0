"""What cannot be imported: a module, a part of a package, a symbol of another build."""

from __future__ import annotations

import re
import sys

from reshard.base.foreign_text import clipped
from reshard.base.languages import Text
from reshard.runs.checks import rules
from reshard.runs.checks.finding import Finding
from reshard.runs.checks.history.api_table import PACKAGE_OF_ROOT
from reshard.runs.checks.phrases import phrase_text
from reshard.runs.doctor.causes.pip_commands import installed_for
from reshard.runs.doctor.frame_packages import INSTALLED_PATH, package_of
from reshard.runs.doctor.text.log import Log, Traceback

_MODULE = re.compile(r"No module named ['\"](?P<module>(?P<package>[A-Za-z_]\w*)(?:\.\w+)*)['\"]")
_SHARED = frozenset(
    (
        *("google", "megatron", "nvidia", "azure", "ruamel", "mpl_toolkits", "transformers_modules"),
        *sys.stdlib_module_names,
    )
)
"""Packages that several distributions fill, and those of Python itself."""


def of_module(root: Traceback, log: Log) -> Finding | None:
    """The finding that a module is missing: a package, or a part of a package that could be imported."""
    match = _MODULE.search(root.error_text)
    if match is None:
        return None
    package = match["package"]
    if match["module"] == package or package in _SHARED:
        return _without_package(package, root)
    own = imports_itself(root, log) or (root.frames and _owner(root.frames[-1]) == package)
    values = {**match.groupdict(), "distribution": PACKAGE_OF_ROOT.get(package, package)}
    identifier = "package-without-part" if own else "submodule-missing"
    return rules.finding(identifier, values=values)


def _without_package(package: str, root: Traceback) -> Finding:
    """The finding for a package that is not there: likely if the code that asked for it is known."""
    evidence = [phrase_text("asked-by", frame=root.frames[-1])] if root.frames else []
    values = {"package": package, "install": installed_for(package)}
    certainty = "likely" if evidence else "possible"
    return rules.finding("module-not-found", values=values, certainty=certainty, evidence=evidence)


_RELATIVE = re.compile(r"^\s*from \.[\w.]* import\b")


def imports_itself(root: Traceback, log: Log) -> bool:
    """Whether the import that failed is relative, so that a package lacks a part of its own."""
    before = (line.text for line in log.lines if line.stream == root.stream and line.number == root.last - 1)
    return bool(_RELATIVE.match(root.source or next(before, "")))


def _owner(frame: str) -> str | None:
    """The package of a frame's file; None for a script."""
    match = INSTALLED_PATH.search(frame)
    folder = match["name"] if match else package_of(frame)
    return folder.partition("/")[0] if folder else None


_SYMBOL = re.compile(
    r"(?<![\w./+@~-])(?P<file>[\w./+@~-]{1,400}?\.so[\w.]{0,80}):\s{1,3}undefined\s{1,3}symbol:\s{1,3}(?P<symbol>\w{1,300})"
)
_OF_TORCH = re.compile(r"^_Z\w{0,8}?(?:3c10|2at|5torch|6caffe2)(?=\d|[A-Z])|^(?:aoti_)?torch_|^THP")
"""Mangled C++ names in torch's namespaces, and names of its C interfaces."""
_OF_CUDA = re.compile(r"^_*(?:nvJitLink|cu(?:blas|sparse|solver|fft|rand|dnn)|nccl|nvrtc|cu[A-Z])")
_EXTENSIONS = {
    "amp_C": "apex",
    "fused_layer_norm_cuda": "apex",
    "fused_weight_gradient_mlp_cuda": "apex",
    "flash_attn_2_cuda": "flash-attn",
    "rotary_emb": "flash-attn",
    "selective_scan_cuda": "mamba-ssm",
    "transformer_engine_torch": "transformer-engine",
}
"""Packages by their extensions that are named otherwise and are not in the package's folder."""
_FOR_ONE_TORCH = ("vllm", "torchvision", "torchaudio", "xformers", "torchao", "sglang", "sgl-kernel")
"""Packages whose wheels are built for one release of torch, which they require."""


def of_symbol(root: Traceback, log: Log) -> Finding | None:
    """The finding for an undefined symbol of an extension that was built for another torch or CUDA."""
    match = _SYMBOL.search(root.root.error_text) or _SYMBOL.search(root.error_text)
    if match is None:
        return None
    package = _package_of_extension(match["file"])
    values: dict[str, object] = {
        "file": match["file"].rpartition("/")[2],
        "symbol": clipped(match["symbol"], 80),
        "package": package,
        "way": _rebuilt(package),
    }
    built_for = (("extension-abi", _OF_TORCH), ("cuda-libraries-mixed", _OF_CUDA))
    code = next((code for code, symbols in built_for if symbols.search(match["symbol"])), None)
    return rules.finding(code, values=values) if code else None


def _rebuilt(package: str) -> Text:
    """How an extension of torch is installed for the installed torch."""
    if package == "apex":
        return phrase_text("apex-here")
    return phrase_text("for-one-torch" if package in _FOR_ONE_TORCH else "built-here", package=package)


def _package_of_extension(file: str) -> str:
    """The package of an extension, by its folder or its file name."""
    folder, _, name = file.rpartition("/")
    name = name.partition(".")[0]
    if name in _EXTENSIONS:
        return _EXTENSIONS[name]
    if installed := INSTALLED_PATH.search(file):
        return installed["name"].replace("_", "-")
    stem = re.sub(r"_(?:cuda|C|ext|lib|torch|extensions)$", "", name)
    return (stem.strip("_") or folder.rpartition("/")[2]).replace("_", "-")
