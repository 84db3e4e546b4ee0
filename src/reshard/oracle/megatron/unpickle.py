"""Read a legacy checkpoint's pickles without importing the classes that they name.

A legacy file contains Megatron-LM's argument namespace, and with it classes of `megatron.training` and of other
versions of megatron-core that are not installed here. None of them matters to the weights: each becomes an inert
stand-in, and so does any class that does not belong in a checkpoint.
"""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

_ALLOWED = frozenset(
    {
        ("collections", "OrderedDict"),
        ("argparse", "Namespace"),
        ("_codecs", "encode"),
        ("_io", "BytesIO"),
        ("torch", "Size"),
        ("torch", "Tensor"),
        ("torch.nn.parameter", "Parameter"),
        ("torch._tensor", "_rebuild_from_type_v2"),
        ("torch._utils", "_rebuild_parameter"),
        ("torch._utils", "_rebuild_tensor_v2"),
        ("numpy", "dtype"),
        ("numpy", "ndarray"),
        ("numpy.core.multiarray", "_reconstruct"),
        ("numpy._core.multiarray", "_reconstruct"),
    }
)


class Inert:
    """A stand-in for an object of a class that is not imported: accepts any arguments and state, does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED or (module == "torch" and _is_dtype(name)):
            return super().find_class(module, name)
        return type(name, (Inert,), {})


def _is_dtype(name: str) -> bool:
    import torch

    return isinstance(getattr(torch, name, None), torch.dtype)


# The `pickle_module` for torch.load.
inert_pickle = SimpleNamespace(Unpickler=_Unpickler, load=pickle.load, __name__="reshard.inert_pickle")
