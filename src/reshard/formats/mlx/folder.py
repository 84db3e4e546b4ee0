"""Read MLX folders: the plain weights under the Hub's names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from reshard.algebra.tensors import Tensor
from reshard.base.errors import Problem, ReshardError, raise_all
from reshard.base.merged_problems import one_for_all
from reshard.codecs.mlx_modes import SMALL_FLOAT_MODES, ModeSettings, settings_in
from reshard.codecs.mlx_weights import WeightParts, dequantized
from reshard.families.dialects import mlx
from reshard.folders.companion_names import CONFIG
from reshard.folders.iterations import Iteration
from reshard.formats import apply_renamings, huggingface, safetensors_writers
from reshard.formats.checkpoint import Checkpoint, FormatData
from reshard.formats.detection import MLX
from reshard.formats.json_beside import object_beside
from reshard.transfer.source_files import Sources

QUANTIZATION_KEYS = ("quantization", "quantization_config")
"""mlx-lm stores its settings twice."""
FLOAT_DTYPES = ("float32", "float16", "bfloat16")


def open_checkpoint(path: Path, sources: Sources, iteration: Iteration | None = None) -> Checkpoint:
    """Open a folder or a file. Raises ReshardError."""
    checkpoint = huggingface.open_checkpoint(path, sources, iteration)
    if not safetensors_writers.has(path, MLX):
        return checkpoint
    config = _config(checkpoint.description.folder, sources)
    quantization = _settings(config, checkpoint.description.folder)
    weights = _MlxWeights(checkpoint.tensors, quantization, str(path))
    tensors, notes = weights.plain(), []
    if weights.kinds:
        notes.append(_settings_note(weights.kinds))
    naming = mlx.naming(config)
    if naming is None:
        raise unknown_model(
            config, checkpoint.description.folder, "convert the Hugging Face folder that it was made from"
        )
    hub = apply_renamings.on_hub(tensors, naming.rules, config)
    if naming.is_rounded:
        notes.append("mlx-lm stores zero-centred norms plus one, which rounded them: one is subtracted again")
    lacks = mlx.REMOVED_VISION in naming.left and not any(map(mlx.REMOVED_VISION.names.match, hub))
    if lacks:
        notes.append("mlx-lm keeps only the language model: pass the model that it was made from with --base")
    return replace(
        checkpoint,
        format=MLX,
        tensors=hub,
        native=FormatData(is_part=lacks),
        variant=", ".join(dict.fromkeys(map(str, weights.kinds))),
        notes=[*checkpoint.notes, *notes],
    )


def _config(folder: Path, sources: Sources) -> Mapping[str, Any]:
    config = object_beside(folder, CONFIG, sources)
    if config is not None:
        return config
    raise ReshardError(
        "mlx-without-config",
        "there is no config.json beside the weights of MLX",
        file=str(folder),
        rule="it says which model they are of, and how they are quantized",
        remedy="copy or download it into the same folder",
    )


def _settings(config: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    """The quantization settings, empty if there are none."""
    stated = [config[key] for key in QUANTIZATION_KEYS if config.get(key)]
    if any(not isinstance(each, dict) for each in stated):
        raise _no_settings(folder, ", ".join(str(each) for each in stated))
    settings: Mapping[str, Any] = stated[0] if stated else {}
    return settings


def _no_settings(folder: Path, found: str) -> ReshardError:
    return ReshardError(
        "mlx-settings-unreadable",
        "the quantization settings of MLX cannot be read",
        file=str(folder / CONFIG),
        expected='group_size, bits and mode, as in {"group_size": 64, "bits": 4, "mode": "affine"}; affine has 2, 3, '
        "4, 5, 6 or 8 bits in groups of 32, 64 or 128, mxfp4 4 in 32, nvfp4 4 in 16, mxfp8 8 in 32",
        found=found,
        remedy="copy or download config.json again",
    )


def unknown_model(config: Mapping[str, Any], folder: Path | None, remedy: str) -> ReshardError:
    """The error for a model whose names are not declared."""
    return ReshardError(
        "mlx-model-unsupported",
        "reshard does not know how MLX names the tensors of this model",
        file=str(folder / CONFIG) if folder else None,
        expected=f"model_type {', '.join(mlx.known())}",
        found=f"model_type {config.get('model_type')}",
        remedy=remedy,
    )


def _settings_note(kinds: Counter[ModeSettings]) -> str:
    how = "; ".join(f"{count} in {kind}" for kind, count in kinds.most_common())
    total = sum(kinds.values())
    return f"{total} weights are quantized by MLX, and dequantized the way MLX does: {how}"


class _MlxWeights:
    """The weights of a folder under MLX's names. `kinds` counts the quantized ones, after `plain`."""

    def __init__(self, tensors: Mapping[str, Tensor], settings: Mapping[str, Any], file: str) -> None:
        self._tensors, self._settings_note, self._file = tensors, settings, file
        self._default = self._parse_settings(settings) if settings else None
        self.kinds: Counter[ModeSettings] = Counter()

    def plain(self) -> dict[str, Tensor]:
        """All weights. Raises ReshardError naming those whose parts do not fit."""
        modules = {name.removesuffix(".scales") for name in self._tensors if name.endswith(".scales")}
        weights: dict[str, Tensor] = {}
        problems: list[Problem] = []
        parts = {f"{module}.{part}" for module in modules for part in ("weight", "scales", "biases")}
        for name, tensor in self._tensors.items():
            module = name.removesuffix(".weight")
            if name not in parts:
                problems += (
                    [_incomplete_problem(name, "scales", tensor)] if tensor.dtype.name == "uint32" else []
                )
                weights[name] = tensor
            elif name == f"{module}.weight":
                problems += self._dequantize(module, weights)
        problems += [
            _incomplete_problem(f"{module}.weight", "weight", self._tensors[f"{module}.scales"])
            for module in sorted(modules)
            if f"{module}.weight" not in self._tensors
        ]
        raise_all(one_for_all(problems, self._tensors, self._file))
        return weights

    def _dequantize(self, module: str, weights: dict[str, Tensor]) -> Iterator[Problem]:
        """Add the weight of a module to those `weights`; yields the problem if it cannot be."""
        items, scales = (self._tensors[f"{module}.{part}"] for part in ("weight", "scales"))
        biases = self._tensors.get(f"{module}.biases")
        if f"{module}.global_scale" in self._tensors:
            yield Problem(
                "mlx-global-scale-unsupported",
                "a quantized weight has a global scale, which reshard does not compute",
                tensor=f"{module}.weight",
                file=items.file,
                found=f"{module}.global_scale",
                remedy="dequantize it where MLX runs, with mlx_lm.convert",
            )
            return
        if scales.dtype.name != "uint8" and biases is None:
            yield _incomplete_problem(f"{module}.weight", "biases", scales)
            return
        settings = self._settings_of(module, items, scales)
        if settings is None or not _fits(settings, items, scales, biases):
            yield self._misfit_problem(module, items, scales, biases)
            return
        self.kinds[settings] += 1
        weights[f"{module}.weight"] = dequantized(WeightParts(items, scales, biases), settings)

    def _settings_of(self, module: str, items: Tensor, scales: Tensor) -> ModeSettings | None:
        """The settings of a module: its own, else those that its parts leave open; None if none fit."""
        own = self._settings_note.get(module)
        if isinstance(own, dict):
            return self._parse_settings(own)
        groups = scales.shape[-1] if scales.shape else 0
        bits_of_group = 32 * items.shape[-1] // groups if items.shape and groups else 0
        if scales.dtype.name == "uint8":
            modes = (ModeSettings(each.group, each.bits, mode) for mode, each in SMALL_FLOAT_MODES.items())
            return next((each for each in modes if each.bits * each.group == bits_of_group), None)
        return self._default

    def _parse_settings(self, settings: Mapping[str, Any]) -> ModeSettings:
        try:
            return settings_in(settings)
        except ValueError as error:
            raise _no_settings(Path(self._file), str(error)) from None

    def _misfit_problem(self, module: str, items: Tensor, scales: Tensor, biases: Tensor | None) -> Problem:
        parts = {"weight": items, "scales": scales, **({"biases": biases} if biases else {})}
        return Problem(
            "mlx-settings-differ",
            "the parts of a quantized weight do not have the sizes that its settings tell",
            tensor=f"{module}.weight",
            file=items.file,
            rule="a group of elements has one scale, and config.json has the size of groups and the bits of elements",
            expected=str(self._settings_note.get(module) or self._default or "quantization in config.json"),
            found=", ".join(f"{name} {each.dtype} {list(each.shape)}" for name, each in parts.items()),
            remedy="pass the folder with the config.json that was written with these weights",
        )


def _fits(settings: ModeSettings, items: Tensor, scales: Tensor, biases: Tensor | None) -> bool:
    """Whether the parts of a weight have the dtypes and shapes of these settings."""
    is_small = settings.mode in SMALL_FLOAT_MODES
    if (scales.dtype.name == "uint8") != is_small or (biases is None) != is_small:
        return False
    if biases is not None and (biases.dtype, biases.shape) != (scales.dtype, scales.shape):
        return False
    if items.dtype.name != "uint32" or not (is_small or scales.dtype.name in FLOAT_DTYPES):
        return False
    *outer, groups = scales.shape or (0,)
    return len(scales.shape) > 1 and items.shape == (*outer, groups * settings.items)


def _incomplete_problem(name: str, lacking: str, present: Tensor) -> Problem:
    """The problem of a weight that lacks a part; `present` is another one."""
    return Problem(
        "mlx-weight-incomplete",
        "a weight that MLX has quantized is incomplete",
        tensor=name,
        file=present.file,
        rule="MLX stores a weight as weight, scales and, if it is affine, biases",
        expected=lacking,
        found=f"{present.dtype} {list(present.shape)} without it",
        remedy="copy or download the files again: the values are meaningless without their scales",
    )
