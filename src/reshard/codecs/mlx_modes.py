"""How MLX quantizes: affine, and with small floats. Nothing here reads a file.

A weight is stored in groups of consecutive elements of a row, as `weight` (32-bit items, where element j has the bits
from j · bits on) and `scales`. Affine groups have `biases` too. Source: mlx 0.32.4, `mlx/ops.cpp` (`quantize`,
`dequantize`, `fp_quantize`); the tests compare with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import lcm
from typing import Any, NamedTuple

import numpy as np

from reshard.transfer.elements import small_floats

Array = np.ndarray[Any, Any]

AFFINE = "affine"
BITS, GROUPS = (2, 3, 4, 5, 6, 8), (32, 64, 128)
"""What mlx offers for affine weights."""
USUAL_BITS, USUAL_GROUP = 4, 64


class SmallFloats(NamedTuple):
    """A mode whose elements and scales are small floats; `elements` and `scales` are the values of their codes."""

    bits: int
    group: int
    elements: Array
    scales: Array


def _powers() -> Array:
    """The values of exponents; the last one, for NaN elsewhere, is infinite in MLX."""
    powers = 2.0 ** (np.arange(256, dtype=np.float64) - 127)
    powers[0xFF] = np.inf
    return powers.astype(np.float32)


_E2M1, _E4M3 = small_floats(2, 1, 1), small_floats(4, 3, 7, "fn")
SMALL_FLOAT_MODES = {
    "mxfp4": SmallFloats(4, 32, _E2M1, _powers()),
    "nvfp4": SmallFloats(4, 16, _E2M1, _E4M3),
    "mxfp8": SmallFloats(8, 32, _E4M3, _powers()),
}
"""The modes without biases, by name."""


class ModeSettings(NamedTuple):
    """How a weight is quantized: the settings of its module in config.json."""

    group: int = USUAL_GROUP
    bits: int = USUAL_BITS
    mode: str = AFFINE

    @property
    def items(self) -> int:
        """The 32-bit items of a group."""
        return self.group * self.bits // 32

    @property
    def is_known(self) -> bool:
        """Whether mlx has such weights."""
        if small := SMALL_FLOAT_MODES.get(self.mode):
            return (small.bits, small.group) == (self.bits, self.group)
        return self.mode == AFFINE and self.bits in BITS and self.group in GROUPS

    def as_dict(self) -> dict[str, Any]:
        """As in config.json."""
        return {"group_size": self.group, "bits": self.bits, "mode": self.mode}

    def __str__(self) -> str:
        return f"{self.mode}, {self.bits} bits, groups of {self.group}"


def settings_in(config: Mapping[str, Any]) -> ModeSettings:
    """The settings in an object of config.json, in which older versions name no mode. Raises ValueError."""
    mode = config.get("mode", AFFINE)
    small = SMALL_FLOAT_MODES.get(str(mode))
    usual = ModeSettings(small.group, small.bits, mode) if small else ModeSettings()
    settings = ModeSettings(config.get("group_size", usual.group), config.get("bits", usual.bits), mode)
    if [type(each) for each in settings] != [int, int, str] or not settings.is_known:
        raise ValueError(f"group_size {settings.group}, bits {settings.bits}, mode {mode}")
    return settings


def unpacked(items: Array, bits: int) -> Array:
    """The codes [..., elements] in packed items [..., items] of 32 bits."""
    whole = lcm(bits, 8) // 8  # the least bytes with complete elements
    octets = items.view(np.uint8).reshape(-1, whole)
    word = np.uint16 if whole == 1 else np.uint64
    joined = np.zeros(len(octets), word)
    for at in range(whole):
        joined |= octets[:, at].astype(word) << word(8 * at)
    steps = np.arange(8 * whole // bits, dtype=word) * word(bits)
    codes: Array = ((joined[:, None] >> steps) & word((1 << bits) - 1)).astype(np.uint8)
    return codes.reshape(*items.shape[:-1], -1)


def packed(codes: Array, bits: int) -> Array:
    """The reverse of `unpacked`."""
    whole = lcm(bits, 8) // 8
    each = codes.reshape(-1, 8 * whole // bits)
    joined = np.zeros(len(each), np.uint64)
    for at in range(each.shape[1]):
        joined |= each[:, at].astype(np.uint64) << np.uint64(at * bits)
    octets = joined.view(np.uint8).reshape(-1, 8)[:, :whole]
    items: Array = np.ascontiguousarray(octets).reshape(-1).view(np.uint32)
    return items.reshape(*codes.shape[:-1], -1)


class AffineCodes(NamedTuple):
    """The codes [groups, elements], and a scale and a bias for each group, as float32."""

    codes: Array
    scales: Array
    biases: Array


def quantized(groups: Array, bits: int) -> AffineCodes:
    """Affine codes of finite float32 elements [groups, elements], as mlx computes them on a CPU."""
    highest, lowest = groups.max(1, keepdims=True), groups.min(1, keepdims=True)
    is_negative = np.abs(lowest) > np.abs(highest)
    most = np.float32((1 << bits) - 1)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # checked by the caller
        scales = np.maximum((highest - lowest) / most, np.float32(1e-7))
        scales = np.where(is_negative, scales, -scales)
        edge = np.where(is_negative, lowest, highest)
        steps = np.rint(edge / scales)
        scales = np.where(steps != 0, edge / steps, scales)
        biases = np.where(steps != 0, edge, np.float32(0))
        codes = np.clip(np.rint((groups - biases) / scales), 0, most)
    return AffineCodes(codes.astype(np.uint8), scales, biases)
