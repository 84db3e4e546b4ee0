"""Options of TRL and transformers that need a package: checked before the start by the framework's own functions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from reshard.base.errors import Problem
from reshard.training.findings import version_of
from reshard.training.option_checks import without_package

SWITCHES = {
    "use_vllm": ("trl.import_utils:is_vllm_available", "pip install 'trl[vllm]'"),
    "use_liger_kernel": ("transformers.utils:is_liger_kernel_available", "pip install liger-kernel"),
}
"""On/off options, the framework's function that checks for the package, and the command that installs it."""
KERNELS = ("transformers.utils:is_kernels_available", "pip install kernels")
"""The same for kernels of the Hub, whose names have a slash."""
FLASH = {
    "flash_attention_2": "flash-attn",
    "flash_attention_3": "flash-attn-3",
    "flash_attention_4": "flash-attn-4",
}
"""Kinds of flash attention, and their packages. If `kernels` is installed, transformers takes them from the Hub."""
OF_TORCH = ("adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop")
"""Optimizers that come with torch or transformers."""


_INSTALL = re.compile(r"`(pip install [^`]*?)[.`]+(?:$|\s)")
"""The install command in an error of transformers."""


def lacking(typed: Mapping[str, Any], told: Mapping[str, Any]) -> Iterator[Problem]:
    """Problems for packages that are not installed. `typed` are the options that were given, `told` are all options."""
    for name, (asked, install) in SWITCHES.items():
        if typed.get(name) and not _is_there(asked):
            yield without_package(f"--{name}", install)
    yield from _attention(str(typed.get("attn_implementation")))
    yield from _optimizer(typed, told)


def _attention(chosen: str) -> Iterator[Problem]:
    """Attention from the Hub, whose names have a slash, and flash attention, which also the Hub may provide."""
    package = FLASH.get(chosen)
    needed = "/" in chosen or (package and version_of(package) is None)
    if needed and not _is_there(KERNELS[0]):
        option = f"--attn_implementation {chosen}"
        yield without_package(
            option, KERNELS[1] if "/" in chosen else f"pip install {package}, which needs a GPU"
        )


def _is_there(asked: str) -> bool:
    module, _, name = asked.partition(":")
    return bool(getattr(import_module(module), name)())


def _optimizer(typed: Mapping[str, Any], told: Mapping[str, Any]) -> Iterator[Problem]:
    """Let transformers make the optimizer: it reports a missing package before it uses the model."""
    chosen = typed.get("optim")
    chosen = str(getattr(chosen, "value", chosen))
    if "optim" not in typed or chosen in OF_TORCH:
        return
    from transformers import Trainer
    from transformers.training_args import OptimizerNames

    option = f"--optim {chosen}"
    try:
        Trainer.get_optimizer_cls_and_kwargs(
            SimpleNamespace(**{**told, "optim": OptimizerNames(chosen)}), None
        )
    except (ImportError, ValueError) as error:
        why = str(error).split("\n")[0]
        told_how = _INSTALL.search(why)
        if isinstance(error, ImportError) or "install" in why:
            yield without_package(
                option, told_how[1] if told_how else "install what transformers asks for", why
            )
    except Exception:  # the package is there, and transformers has gone on to the model
        return
