"""The plugin of SGLang: `sglang serve --model-path CKPT --load-format reshard`, for a checkpoint in any format.

SGLang finds it by an entry point, and runs it early in each of its processes, when the loaders of models should not be
imported yet. That `LoadConfig` accepts a class as its format, and `get_model_loader` builds it, is part of SGLang;
only the name is new.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from reshard.live.engine_loading import LOAD_FORMAT

LOAD_CONFIG = "sglang.srt.configs.load_config.LoadConfig"


@cache
def register() -> None:
    """Make the load format `reshard` known to SGLang: to its command line, and to its configs of loaders."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.server_args import add_load_format_choices

    add_load_format_choices([LOAD_FORMAT])
    HookRegistry.register(f"{LOAD_CONFIG}.__post_init__", _put_class, HookType.BEFORE)


def _put_class(config: Any) -> None:
    """Put the class in place of its name, before SGLang compares it with its own formats."""
    if config.load_format == LOAD_FORMAT:
        from reshard.live.sglang import SGLangLoader

        config.load_format = SGLangLoader
