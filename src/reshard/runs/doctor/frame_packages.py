"""Which package a frame of a traceback belongs to, and whether it only passes a call on."""

from __future__ import annotations

import re

from reshard.base.languages import Text
from reshard.runs.checks.history.api_table import PACKAGE_OF_ROOT
from reshard.runs.checks.phrases import phrase_text
from reshard.runs.doctor.text.tracebacks import Traceback

KNOWN_FOLDERS = frozenset(
    (
        *("accelerate", "axolotl", "bitsandbytes", "datasets", "deepspeed", "flash_attn", "huggingface_hub"),
        *(
            "internlm",
            "llama.cpp",
            "llamafactory",
            "megatron",
            "megatron/bridge",
            "nemo",
            "numpy",
            "openrlhf",
        ),
        *("peft", "ray", "safetensors", "sglang", "slime", "swift", "tokenizers", "torch", "torchtitan"),
        *("transformer_engine", "transformers", "triton", "trl", "unsloth", "verl", "vllm", "xformers"),
        "xtuner",
    )
)
"""Folders of packages, also in a checkout of their repository."""
REPOSITORY_SCRIPTS = {
    "zero_to_fp32.py": "deepspeed",
    "ds_to_universal.py": "deepspeed",
    "convert_hf_to_gguf.py": "llama.cpp",
}
"""A package's own scripts that are in a checkout, or next to a checkpoint."""


_LIBRARY = re.compile(
    r"(?:site|dist)-packages/|/lib(?:64)?/python\d|^<|pip-install-|pip-build-env-|/opt/|/usr/|(?:^|/)(?:Cell|ipython)"
)
_GENERATED = re.compile(r"(?i)/\.\w|cache[^/]*/|^/(?:var/)?te?mp/|/AppData/|/transformers_modules/")
"""Paths of files that a program wrote or downloaded: hidden folders, caches, temporary files."""


_PASSES_ON = re.compile(
    r" (?:wrapp(?:er|ed)\w*|inner\w*|_inner_fn|decorate_context|__getattr__|_(?:wrapped_)?call_impl|\S*<locals>.*)"
    r"(?:\(.*)?$"
)
"""Functions between caller and called code: decorators, lookups, hooks."""


def asker(root: Traceback) -> str:
    """The innermost frame of the caller, not of packages' decorators, which only pass a call on; "" without frames."""
    frames = list(root.frames)
    while len(frames) > 1 and _PASSES_ON.search(frames[-1]) and _LIBRARY.search(frames[-1]):
        frames.pop()
    return frames[-1] if frames else ""


def package_of(frame: str) -> str | None:
    """The folder of the known package to which a frame's file belongs."""
    path = frame.rsplit(":", 1)[0].replace("\\", "/")
    if script := next((folder for name, folder in REPOSITORY_SCRIPTS.items() if path.endswith(name)), None):
        return script
    if "-packages/" not in path and _GENERATED.search(path):
        return None  # /tmp/ray is no checkout of Ray
    path = f"/{path.rpartition('-packages/')[2].lstrip('/')}"  # an environment may be named like a package
    names = [match["name"] for match in re.finditer(r"(?<=/)(?P<name>megatron/bridge|[a-z_]\w*)(?=/)", path)]
    known = [name for name in names if name in KNOWN_FOLDERS]
    if not known:
        return None
    if "-packages/" in frame.replace("\\", "/"):
        return known[0]  # a folder inside a package may be named like another one
    outer = re.search(rf"/(?P<name>\w+)/{known[-1]}/", path)
    return outer["name"] if outer and outer["name"] in KNOWN_FOLDERS else known[-1]


def place_in_code(root: Traceback) -> Text:
    """Where the exception was raised: the innermost frame with its code, as far as the log shows them."""
    frame = root.frames[-1] if root.frames else ""
    return Text.same(" — ".join(f"`{part}`" for part in (frame, root.source) if part))


def update_of(root: Traceback) -> Text:
    """What to update: the package of the innermost frame, or both caller and called code."""
    if "/transformers_modules/" in "".join(root.frames[-2:]).replace("\\", "/"):
        return phrase_text("update-remote")
    package = installed_of(root)
    return phrase_text("update-asker", package=package) if package else phrase_text("update-both")


def installed_of(root: Traceback) -> str:
    """The package of a failure's innermost frame; "" for a script and for Python itself."""
    frame = root.frames[-1].replace("\\", "/") if root.frames else ""
    match = INSTALLED_PATH.search(frame)
    package = (match["name"] if match else package_of(frame) or "").partition("/")[0]
    return PACKAGE_OF_ROOT.get(package, package.replace("_", "-"))


INSTALLED_PATH = re.compile(r"(?:site|dist)-packages/(?P<name>[A-Za-z]\w*)/")
