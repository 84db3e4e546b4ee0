"""Selects the files of a package to read."""

from __future__ import annotations

import re

from reshard.runs.checks.history.api_table import PACKAGE_ROOTS

_SKIPPED = re.compile(
    r"(?:^|/)(?:tests?|testing/_internal|benchmarks?|examples?|third_party|_vendor|cutlass|composable_kernel|f2py"
    r"|distutils|vllm_flash_attn|autotune_configs)/|/(?:test_|conftest)[^/]*$|/_inductor/(?:kernel|fx_passes/serialized)"
    r"|/models/\w+/(?:convert_|modeling_(?:tf|flax)_)|torch/(?:onnx/_internal|ao/pruning|_vendor|package)/"
)


def module_of(package: str, path: str) -> str | None:
    """The dotted name of a file of a package; None if it is not a module that others import."""
    path = re.sub(r"^(?:py_src|python|bindings/python/py_src|[\w.-]+\.data/purelib)/", "", path)
    if not path.startswith(f"{PACKAGE_ROOTS[package]}/") or _SKIPPED.search(path):
        return None
    dotted = re.sub(r"(?:/__init__)?\.pyi?$", "", path).replace("/", ".")
    return dotted if all(part.isidentifier() for part in dotted.split(".")) else None
