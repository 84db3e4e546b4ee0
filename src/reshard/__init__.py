"""reshard: LLM weights between Hugging Face and every distributed-training checkpoint.

import reshard

print(reshard.inspect("ckpt").as_dict())
reshard.convert("ckpt", "model-hf")
assert reshard.verify("ckpt", "model-hf").equal
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reshard.version import __version__

__all__ = ["ReshardError", "__version__", "convert", "diagnose", "inspect", "open", "verify"]

if TYPE_CHECKING:
    from reshard.api import convert, inspect, open, verify
    from reshard.doctor import diagnose
    from reshard.errors import ReshardError


def __getattr__(name: str) -> Any:
    # Loaded when first used, so that `reshard --help` need not import numpy.
    if name == "ReshardError":
        from reshard.errors import ReshardError

        return ReshardError
    if name == "diagnose":
        from reshard.doctor import diagnose

        return diagnose
    if name in __all__:
        from reshard import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
