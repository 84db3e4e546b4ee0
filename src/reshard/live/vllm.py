"""A model loader of vLLM: `vllm serve CKPT --load-format reshard`, for a checkpoint in any format that reshard reads.

vLLM finds it by an entry point and imports it in each of its processes. It uses only what vLLM documents for plugins:
a subclass of `BaseModelLoader`, and `get_all_weights`, which `reload_weights` calls.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.platforms import current_platform

import reshard
from reshard.base.errors import Problem, ReshardError, size
from reshard.base.suggest import meant
from reshard.commands.weights import Weights
from reshard.live import vllm_companions
from reshard.live.deferred import DeferredTensor, Tally
from reshard.live.parameters import Loading
from reshard.model.configs import config_of
from reshard.stores import source_path

NAME = "reshard"
OPTIONS = ("source", *[each for each in inspect.signature(reshard.open).parameters if each != "path"])
"""Keys of `--model-loader-extra-config`: where the weights are, if not in vLLM's model folder, and the arguments of
`reshard.open`."""
FROM_CONFIG = ("input_scale_ub",)
"""Parameters that vLLM fills from the config: no checkpoint has them."""
SHARED = ("embed_tokens", "lm_head")
"""Modules that a draft model shares with the model that it drafts for, if its checkpoint has none."""

NOTES = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"}
"""Keys of a config that do not change what a model computes in vLLM."""

logger = init_logger("vllm.reshard")  # vLLM prints only the messages of its own loggers


@cache
def register() -> None:
    """Make reshard's load format, config format and tokenizer mode known to vLLM, which calls this in each process."""
    register_model_loader(NAME)(Loader)
    vllm_companions.register(NAME)


@dataclass
class Loaded:
    """What is in a model: the path that vLLM had for it at first and has now, and the shapes of the tensors it used."""

    first: str
    path: str
    shapes: Mapping[str, tuple[int, ...]]


_LOADED: WeakKeyDictionary[torch.nn.Module, Loaded] = WeakKeyDictionary()


class Loader(BaseModelLoader):  # type: ignore[misc]
    """Loads the weights of any checkpoint under their Hugging Face names, and of each tensor only what a rank uses."""

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        self._options = _options(load_config.model_loader_extra_config)

    def download_model(self, model_config: Any) -> None:
        """Check that the checkpoint can be opened. Weights are read from where they are."""
        len(self._opened(model_config, self._options))

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """Load a model. Raises ReshardError if a parameter is not in the checkpoint, or does not fit it."""
        _refuse_what_needs_another_loader(model, model_config)
        weights = self._opened(model_config, self._options_of(model_config))
        tally, start = Tally(), time.perf_counter()
        with Loading(model) as loading:
            reported = model.load_weights(_tensors(weights, tally))
        shared = SHARED if model_config.runner_type == "draft" else ()
        _refuse_missing(model, loading, {*(reported or ()), *_without_weights(model, shared)}, weights)
        if partial := loading.partial():
            logger.warning(
                "Only a part of these parameters was loaded; the engine may have padded them: %s", partial
            )
        shapes = {name: weights[name].shape for name in weights if name in tally.used}
        _LOADED[model] = Loaded(model_config.model, model_config.model, shapes)
        logger.info(
            "Loaded %d of %d tensors from %s, %s in %.2f seconds",
            len(tally.used),
            len(weights),
            weights.format,
            size(tally.nbytes),
            time.perf_counter() - start,
        )

    def get_all_weights(
        self, model_config: Any, model: torch.nn.Module
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights that replace those of a loaded model: those at vLLM's new path, or at the same one.

        Raises ReshardError before any weight is replaced if they are not those of the same model.
        """
        loaded = _LOADED[model]
        is_first = model_config.model == loaded.first
        base = self._options.get("base") or model_config.hf_config_path or loaded.first
        elsewhere = {} if is_first else {"source": None, "base": base}
        try:
            _refuse_experts_on_cpu(model_config)
            weights = self._opened(model_config, {**self._options, **elsewhere})
            _refuse_another_model(weights, loaded)
        except ReshardError:
            model_config.model = loaded.path  # which vLLM has already replaced
            raise
        loaded.path = model_config.model
        return _tensors(weights, Tally())

    def _options_of(self, model_config: Any) -> dict[str, Any]:
        """The options, unless a model is only the draft for another one, and in a folder of its own."""
        if model_config.runner_type == "draft":
            target = get_current_vllm_config().speculative_config.target_model_config
            return self._options if model_config.model == target.model else {}
        return self._options

    def _opened(self, model_config: Any, options: Mapping[str, Any]) -> Weights:
        """The checkpoint, whose base is the folder of vLLM's config unless another is set."""
        folder = _with_revision(model_config)
        source = options.get("source")
        base = options.get("base") or model_config.hf_config_path or (folder if source else None)
        path = source or folder
        weights = reshard.open(
            path, **{key: options[key] for key in options if key != "source"} | {"base": base}
        )
        _refuse_adapter(weights, path)
        _refuse_quantized(weights, model_config, options)
        if base and not options.get("merge"):
            _warn_of_another_config(weights, base)
        return weights


def _options(given: Any) -> dict[str, Any]:
    """The options of `--model-loader-extra-config`. Raises ReshardError for unknown ones."""
    if not isinstance(given, dict):
        raise ReshardError(
            "engine-options-malformed",
            "the options of the loader are not a JSON object",
            found=repr(given),
            remedy='pass for example --model-loader-extra-config \'{"source": "CKPT"}\'',
        )
    unknown = [str(key) for key in given if key not in OPTIONS]
    if unknown:
        near = {key: meant(key, OPTIONS) for key in unknown}
        raise ReshardError(
            [
                Problem(
                    "engine-option-unknown",
                    "--model-loader-extra-config has an unknown option",
                    expected=", ".join(OPTIONS),
                    found=key,
                    remedy=f"did you mean {guess}?" if guess else "correct or remove it",
                )
                for key, guess in near.items()
            ]
        )
    return dict(given)


def _with_revision(model_config: Any) -> str:
    """The path of vLLM's model, at its revision if it is on the Hub."""
    path = str(model_config.model)
    if model_config.revision is None or Path(path).exists():
        return path
    return f"hf://{path}@{str(model_config.revision).replace('/', '%2F')}"


def _tensors(weights: Weights, tally: Tally) -> Iterator[tuple[str, torch.Tensor]]:
    """The one place where weights are handed to vLLM."""
    for name, tensor in weights.items():
        yield name, DeferredTensor(tensor, tally)


def _refuse_adapter(weights: Weights, path: str) -> None:
    if any(".lora_A." in name or ".lora_magnitude_vector" in name for name in weights):
        raise ReshardError(
            "engine-source-is-adapter",
            "the source is an adapter, which is not a model",
            file=path,
            remedy="serve its base with --model-loader-extra-config "
            '\'{"source": "ADAPTER", "merge": true}\', or with --enable-lora',
        )


def _refuse_quantized(weights: Weights, model_config: Any, options: Mapping[str, Any]) -> None:
    if weights.checkpoint.quantization and model_config.quantization is None and "dtype" not in options:
        raise ReshardError(
            "engine-model-not-quantized",
            "the checkpoint is quantized, and the model that vLLM built is not",
            file=str(weights.checkpoint.path),
            rule="the config determines whether vLLM's weights are quantized",
            remedy='serve the config of the checkpoint, or dequantize it: add "dtype": "bfloat16" to '
            "--model-loader-extra-config",
        )


def _warn_of_another_config(weights: Weights, folder: str) -> None:
    """Settings of which the tensors show nothing: reshard compares the others itself."""
    own, served = (config_of(weights.checkpoint, each) or {} for each in (None, source_path(folder)))
    other = [key for key in sorted(own.keys() & served.keys() - NOTES) if own[key] != served[key]]
    if other:
        told = ", ".join(f"{key}: {served[key]} instead of {own[key]}" for key in other)
        logger.warning(
            "The config in %s differs from that of the checkpoint in %s: %s",
            folder,
            weights.checkpoint.root,
            told,
        )


def _refuse_experts_on_cpu(model_config: Any) -> None:
    """vLLM packs experts for a CPU when it first loads them, and puts unpacked ones in their place on a reload."""
    if current_platform.is_cpu() and model_config.is_moe:
        raise ReshardError(
            "engine-reload-unsupported",
            "vLLM cannot reload the experts of a model on a CPU",
            found=model_config.model,
            remedy="start vLLM again with this checkpoint",
        )


def _refuse_what_needs_another_loader(model: torch.nn.Module, model_config: Any) -> None:
    """Models and quantizations for which vLLM's own loader does more than to iterate over one checkpoint."""
    more = [str(each.model_or_path) for each in getattr(model, "secondary_weights", ())]
    if more:
        raise ReshardError(
            "engine-model-of-several-sources",
            "vLLM loads this model from several sources, and reshard reads only one",
            found=", ".join(more),
            remedy="serve it without --load-format reshard",
        )
    if model_config.quantization == "torchao":
        raise ReshardError(
            "engine-quantization-unsupported",
            "vLLM's own loader has to build tensors of this quantization",
            found="torchao",
            remedy="serve it without --load-format reshard, or without --quantization torchao",
        )


def _refuse_missing(model: torch.nn.Module, loading: Loading, reported: set[str], weights: Weights) -> None:
    """Raise ReshardError if the checkpoint has no weights for some parameters."""
    missing = loading.missing(reported)
    if missing:
        raise ReshardError(
            [
                Problem(
                    "engine-parameter-missing",
                    "the checkpoint has no weights for a parameter of the engine's model",
                    tensor=name,
                    file=str(weights.checkpoint.path),
                    remedy="pass the config that belongs to the checkpoint, or the complete checkpoint",
                )
                for name in missing
            ]
        )


def _without_weights(model: torch.nn.Module, shared: tuple[str, ...]) -> set[str]:
    """Parameters that no checkpoint needs: from the config, scales of the KV cache, and those of another model."""
    return {
        f"{name}.{parameter}"
        for name, module in model.named_modules()
        for parameter, _ in module.named_parameters(recurse=False)
        if parameter in FROM_CONFIG
        or isinstance(getattr(module, "quant_method", None), BaseKVCacheMethod)
        or name.rpartition(".")[2] in shared
    }


def _refuse_another_model(weights: Weights, loaded: Loaded) -> None:
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
        for name, shape in loaded.shapes.items()
        if name not in weights or weights[name].shape != shape
    ]
    if problems:
        raise ReshardError(problems)
