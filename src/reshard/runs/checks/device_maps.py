"""Device maps, which place the parts of one model on several devices: no process of several can train with one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from reshard.base.errors import Problem

SPREADING_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
"""Device maps of accelerate that distribute a model over devices."""


def spread_in(config: Any, prefix: str = "") -> Iterator[str]:
    """The keys of a config, joined by dots, whose device map distributes a model: also in `model_init_kwargs`."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(config, Mapping):
        items = config.items()
    elif isinstance(config, list):
        items = enumerate(config)
    for key, value in items:
        if key == "device_map" and value in SPREADING_MAPS:
            yield f"{prefix}{key}"
        yield from spread_in(value, f"{prefix}{key}.")


def misplaced(model: Any, processes: int, own: object = None, whose: str = "the model") -> Iterator[Problem]:
    """A problem of a model that was loaded with a device map over several devices, or over others than its `own`."""
    for name, module in model.named_modules():
        devices = {_name(each) for each in (vars(module).get("hf_device_map") or {}).values()}
        if len(devices) > 1 or (own is not None and devices - {_name(own)}):
            yield Problem(
                "guard-device-map",
                f"a device map splits {whose} over devices" + " in a multi-process run" * (processes > 1),
                tensor=name or type(module).__name__,
                found=f"hf_device_map over {', '.join(sorted(devices))}, {processes} processes",
                remedy="load with device_map=None, and shard with FSDP2 or ZeRO-3 what does not fit",
            )
            return


def _name(device: object) -> str:
    """The name of a device. 0, "cuda" and "cuda:0" are the same."""
    name = f"cuda:{device}" if isinstance(device, int) else str(device)
    return f"{name}:0" if name == "cuda" else name
