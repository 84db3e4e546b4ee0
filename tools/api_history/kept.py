"""What of a table is stored: not what only a package's own code calls, so that all tables stay small."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

INTERNAL = {
    "torch": (
        r"torch\._(?!six|utils|tensor$|higher_order_ops|(?:dynamo|inductor|functorch)(?:\.config)?$)"
        r"|torch\.(?:testing|onnx|ao|jit|fx|utils\.(?:tensorboard|data\.datapipes))\b"
    ),
    "transformers": r"transformers\.(?:testing_utils|commands|sagemaker|utils\.dummy_|.*[._](?:tf|flax)(?:_|$))",
    "vllm": (
        r"vllm\.(?:model_executor\.(?:models|layers|kernels|warmup)|models|attention\.(?:ops|backends)|_custom_ops"
        r"|v1\.(?:worker|attention|kv_offload|spec_decode|sample|core)|distributed\.(?:kv_transfer|eplb)"
        r"|compilation\.passes)\b"
    ),
}
"""Modules from which no other code imports, by their names. That they exist is kept."""
USED = ("transformers",)
"""Packages whose private attributes and functions other packages use."""
_PRIVATE = re.compile(r"(?:^|\.)_(?!_)")

Groups = dict[str, str]
"""Names, separated by spaces, by the span of the releases that have them."""


def kept(content: Mapping[str, Any]) -> dict[str, Any]:
    """A table without internal modules' names, functions and classes, and without private functions and attributes.

    What is left stays the same if this is done again.
    """
    package = content["package"]
    internal = _matcher(INTERNAL.get(package))
    is_private = _matcher(None) if package in USED else _is_private
    inner = _classes(content, internal)
    names = {module: groups for module, groups in content["names"].items() if not internal(module)}
    attributes = {
        kind: _without(groups, is_private)
        for kind, groups in content["attributes"].items()
        if kind not in inner and not is_private(kind)
    }
    return {
        **content,
        "names": names,
        "functions": _functions(content["functions"], internal, is_private),
        "attributes": {kind: groups for kind, groups in attributes.items() if {*groups.values()} != {"()"}},
        "bases": {kind: groups for kind, groups in content["bases"].items() if kind not in inner},
    }


def _matcher(pattern: str | None) -> Callable[[str], bool]:
    """Whether a name begins with what a pattern matches; never without a pattern."""
    if not pattern:
        return lambda name: False
    compiled = re.compile(pattern)
    return lambda name: compiled.match(name) is not None


def _is_private(name: str) -> bool:
    return _PRIVATE.search(name) is not None


def _without(groups: Groups, is_left_out: Callable[[str], bool]) -> Groups:
    found = {
        span: [name for name in names.split(" ") if not is_left_out(name)] for span, names in groups.items()
    }
    return {span: " ".join(names) for span, names in found.items() if names}


def _functions(
    functions: Mapping[str, Mapping[str, Groups]],
    is_internal: Callable[[str], bool],
    is_private: Callable[[str], bool],
) -> dict[str, dict[str, Groups]]:
    public = {name: modules for name, modules in functions.items() if not is_private(name)}
    found = {
        name: {module: groups for module, groups in modules.items() if not is_internal(module)}
        for name, modules in public.items()
    }
    return {name: modules for name, modules in found.items() if modules}


def _classes(content: Mapping[str, Any], is_internal: Callable[[str], bool]) -> set[str]:
    """The classes that only internal modules have, as far as the table shows modules of classes."""
    modules: dict[str, set[str]] = defaultdict(set)
    for module, groups in content["names"].items():
        for names in groups.values():
            for name in names.split(" "):
                modules[name].add(module)
    for function, having in content["functions"].items():
        modules[function.partition(".")[0]] |= having.keys()
    kinds = content["attributes"].keys() | content["bases"].keys()
    return {kind for kind in kinds if modules[kind] and all(map(is_internal, modules[kind]))}
