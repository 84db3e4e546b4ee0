"""What the loaders of all inference engines share: options, refusals, and the weights themselves. Imports no engine."""

from __future__ import annotations

import inspect
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from logging import Logger
from pathlib import Path
from typing import Any

import torch

from reshard.api.weights import open as open_weights
from reshard.base.errors import Problem, ReshardError
from reshard.base.quantities import size
from reshard.base.suggest import meant
from reshard.commands.weights import Weights
from reshard.exchange.engine_recording import EngineRecording
from reshard.live.deferred_tensors import DeferredTensor, ReadTally
from reshard.live.loaded_parameters import LoadingNotes
from reshard.live.record_loading import Landings
from reshard.model.find_config import config_of
from reshard.stores import source_path

LOAD_FORMAT = "reshard"
LOADER_OPTIONS = (
    "source",
    "record",
    *[each for each in inspect.signature(open_weights).parameters if each != "path"],
)
"""Keys of `--model-loader-extra-config`: where the weights are, if not in the engine's model folder, a folder for a
recording of what the loaders do, and the arguments of `reshard.open`."""
SCALES_FROM_CONFIG = ("input_scale_ub",)
"""Parameters that engines fill from the config: no checkpoint has them."""
SHARED_WITH_DRAFT = ("embed_tokens", "lm_head")
"""Modules that a draft model shares with the model that it drafts for, if its checkpoint has none."""

IGNORED_KEYS = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"}
"""Keys of a config that do not change what a model computes in an engine."""

TensorShapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class InferenceEngine:
    """An inference engine: its name, the logger whose messages it prints, and its class of scales for a KV cache."""

    name: str
    logger: Logger
    of_kv_cache: type


@dataclass(frozen=True)
class EngineModel:
    """What an engine says about the model whose weights it wants: where it is, and how it is quantized."""

    folder: str
    quantization: str | None
    config: str | None = None
    """The folder of the config, if it is another one."""


class WeightsForModel:
    """The weights of a checkpoint on their way into a model."""

    def __init__(self, engine: InferenceEngine, weights: Weights, *, record: bool = False) -> None:
        self.weights, self.tally = weights, Landings() if record else ReadTally()
        self._engine, self._start = engine, time.perf_counter()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The one place where weights are handed to an engine."""
        for name, tensor in self.weights.items():
            yield name, DeferredTensor(tensor, self.tally)

    def shapes(self) -> TensorShapes:
        """The shapes of the tensors of which something was used."""
        return {name: self.weights[name].shape for name in self.weights if name in self.tally.used}

    def recording(
        self, model: torch.nn.Module, rank: int, ranks: int, release: str
    ) -> EngineRecording | None:
        """Where each element went in a model that is loaded, if that was recorded."""
        if not isinstance(self.tally, Landings):
            return None
        engine = f"{self._engine.name} {release}"
        return self.tally.recording(model, engine, self.shapes(), rank, ranks)

    def refuse_missing(self, model: torch.nn.Module, loading: LoadingNotes, reported: set[str]) -> None:
        """Raise ReshardError if the checkpoint has no weights for some parameters."""
        unloaded = loading.unloaded(reported | _without_weights(model, self._engine.of_kv_cache))
        if unloaded:
            raise ReshardError(
                [
                    Problem(
                        "engine-parameter-missing",
                        "the checkpoint has no weights for a parameter of the engine's model",
                        tensor=name,
                        file=str(self.weights.checkpoint.path),
                        remedy="pass the config that belongs to the checkpoint, or the complete checkpoint",
                    )
                    for name in unloaded
                ]
            )

    def report(self, loading: LoadingNotes) -> None:
        """Log what was loaded, and warn of parameters that were loaded in part."""
        if partial := loading.partial():
            self._engine.logger.warning(
                "Only a part of these parameters was loaded; the engine may have padded them: %s", partial
            )
        self._engine.logger.info(
            "Loaded %d of %d tensors from %s, %s in %.2f seconds",
            len(self.tally.used),
            len(self.weights),
            self.weights.format,
            size(self.tally.nbytes),
            time.perf_counter() - self._start,
        )


def options_of(options: Any) -> dict[str, Any]:
    """The options of `--model-loader-extra-config`. Raises ReshardError for unknown ones."""
    if not isinstance(options, dict):
        raise ReshardError(
            "engine-options-malformed",
            "the options of the loader are not a JSON object",
            found=repr(options),
            remedy='pass for example --model-loader-extra-config \'{"source": "CKPT"}\'',
        )
    unknown = [str(key) for key in options if key not in LOADER_OPTIONS]
    if unknown:
        near = {key: meant(key, LOADER_OPTIONS) for key in unknown}
        raise ReshardError(
            [
                Problem(
                    "engine-option-unknown",
                    "--model-loader-extra-config has an unknown option",
                    expected=", ".join(LOADER_OPTIONS),
                    found=key,
                    remedy=f"did you mean {guess}?" if guess else "correct or remove it",
                )
                for key, guess in near.items()
            ]
        )
    return dict(options)


def elsewhere(options: Mapping[str, Any], base: str) -> dict[str, Any]:
    """The options for weights that replace others and are in another place."""
    return {**options, "source": None, "base": options.get("base") or base}


def with_revision(path: str, revision: str | None) -> str:
    """The path of an engine's model, at its revision if it is on the Hub."""
    if revision is None or Path(path).exists():
        return path
    return f"hf://{path}@{str(revision).replace('/', '%2F')}"


def opened(engine: InferenceEngine, place: EngineModel, options: Mapping[str, Any]) -> Weights:
    """The checkpoint, whose base is the folder of the engine's config unless another is set."""
    source = options.get("source")
    base = options.get("base") or place.config or (place.folder if source else None)
    path = source or place.folder
    opening = {key: options[key] for key in options if key not in ("source", "record")}
    weights = open_weights(path, **opening | {"base": base})
    _refuse_adapter(weights, path)
    _refuse_quantized(engine, weights, place, options)
    if base and not options.get("merge"):
        _warn_of_another_config(engine, weights, base)
    return weights


def _refuse_adapter(weights: Weights, path: str) -> None:
    if any(".lora_A." in name or ".lora_magnitude_vector" in name for name in weights):
        raise ReshardError(
            "engine-source-is-adapter",
            "the source is an adapter, which is not a model",
            file=path,
            remedy="serve its base with --model-loader-extra-config "
            '\'{"source": "ADAPTER", "merge": true}\', or with --enable-lora',
        )


def _refuse_quantized(
    engine: InferenceEngine, weights: Weights, place: EngineModel, options: Mapping[str, Any]
) -> None:
    if weights.checkpoint.quantization and place.quantization is None and "dtype" not in options:
        raise ReshardError(
            "engine-model-not-quantized",
            f"the checkpoint is quantized, and the model that {engine.name} built is not",
            file=str(weights.checkpoint.path),
            rule=f"the config determines whether {engine.name}'s weights are quantized",
            remedy='serve the config of the checkpoint, or dequantize it: add "dtype": "bfloat16" to '
            "--model-loader-extra-config",
        )


def _warn_of_another_config(engine: InferenceEngine, weights: Weights, folder: str) -> None:
    """Settings of which the tensors show nothing: reshard compares the others itself."""
    own, served = (config_of(weights.checkpoint, each) or {} for each in (None, source_path(folder)))
    other = [key for key in sorted(own.keys() & served.keys() - IGNORED_KEYS) if own[key] != served[key]]
    if other:
        differences = ", ".join(f"{key}: {served[key]} instead of {own[key]}" for key in other)
        engine.logger.warning(
            "The config in %s differs from that of the checkpoint in %s: %s",
            folder,
            weights.checkpoint.description.folder,
            differences,
        )


def refuse_several_sources(engine: InferenceEngine, more: Collection[str]) -> None:
    """Models for which an engine's own loader does more than to iterate over one checkpoint."""
    if more:
        raise ReshardError(
            "engine-model-of-several-sources",
            f"{engine.name} loads this model from several sources, and reshard reads only one",
            found=", ".join(more),
            remedy="serve it without --load-format reshard",
        )


def refuse_quantization(engine: InferenceEngine, quantization: str) -> None:
    """Quantizations for which an engine's own loader does more than to iterate over one checkpoint."""
    raise ReshardError(
        "engine-quantization-unsupported",
        f"{engine.name}'s own loader has to build tensors of this quantization",
        found=quantization,
        remedy=f"serve it without --load-format reshard, or without --quantization {quantization}",
    )


def refuse_another_model(weights: Weights, shapes: TensorShapes) -> None:
    """Raise ReshardError if a checkpoint lacks tensors that a loaded model used, or has them in other shapes."""
    problems = [
        Problem(
            "engine-reload-of-another-model",
            "the checkpoint is not of the model that is loaded",
            tensor=name,
            file=str(weights.checkpoint.path),
            expected=str(list(shape)),
            found=str(list(weights[name].shape)) if name in weights else "not in the checkpoint",
            remedy="reload a checkpoint of the same model",
        )
        for name, shape in shapes.items()
        if name not in weights or weights[name].shape != shape
    ]
    if problems:
        raise ReshardError(problems)


def shared_by_draft(model: torch.nn.Module) -> set[str]:
    """Parameters of a draft model that may be those of the model that it drafts for."""
    named = model.named_parameters(remove_duplicate=False)
    return {name for name, _ in named if {*name.split(".")[-2:-1]} & {*SHARED_WITH_DRAFT}}


def _without_weights(model: torch.nn.Module, of_kv_cache: type) -> set[str]:
    """Parameters that no checkpoint needs: from the config, and scales of the KV cache."""
    return {
        f"{name}.{parameter}"
        for name, module in model.named_modules()
        for parameter, _ in module.named_parameters(recurse=False)
        if parameter in SCALES_FROM_CONFIG or isinstance(getattr(module, "quant_method", None), of_kv_cache)
    }
