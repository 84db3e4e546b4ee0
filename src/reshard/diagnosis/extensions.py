"""Compiled extensions that do not fit the installed torch or CUDA, by the symbol that they miss."""

from __future__ import annotations

import re

from reshard.diagnosis.finding import Finding, Text
from reshard.diagnosis.log import Log, Traceback
from reshard.diagnosis.reading import clipped
from reshard.diagnosis.rules import told_at
from reshard.diagnosis.words import words

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


def of_symbol(root: Traceback, log: Log) -> Finding | None:
    """The finding for an undefined symbol: it shows whether an extension was built for another torch."""
    match = _SYMBOL.search(root.root.said) or _SYMBOL.search(root.said)
    if match is None:
        return None
    values: dict[str, object] = {
        "file": match["file"].rpartition("/")[2],
        "symbol": clipped(match["symbol"], 80),
    }
    if _OF_TORCH.search(match["symbol"]):
        package = package_of_extension(match["file"])
        found = "extension-abi", {**values, "package": package, "way": way_to_rebuild(package)}
        return told_at(found, log.name, root.last, root.said)
    if _OF_CUDA.search(match["symbol"]):
        return told_at(("cuda-libraries-mixed", values), log.name, root.last, root.said)
    return None


def way_to_rebuild(package: str) -> Text:
    """How an extension of torch is installed for the installed torch."""
    kind = (
        "for-one-torch" if package in _FOR_ONE_TORCH else "apex-here" if package == "apex" else "built-here"
    )
    return words(kind, package=package)


def package_of_extension(file: str) -> str:
    """The package of an extension, by its file name or its folder."""
    name = file.rpartition("/")[2].partition(".")[0]
    folder = re.search(r"(?:site|dist)-packages/(\w+)/", file)
    own = re.sub(r"_(?:cuda|C|ext|lib|torch|extensions)$", "", name)
    if not own.strip("_"):  # `_C`, in a folder that is not among those of Python
        own = file.rpartition("/")[0].rpartition("/")[2]
    return _NAMED_OTHERWISE.get(name, folder[1] if folder else own).replace("_", "-")
