"""The model loader of SGLang that `--load-format reshard` selects; see `sglang_plugin`.

It is a `DefaultModelLoader`, since SGLang updates the weights of a running model only with such a one. The weights are
others, and every parameter must get some.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from sglang.srt.configs.load_config import LoadFormat
from sglang.srt.layers.quantization.kv_cache import BaseKVCacheMethod
from sglang.srt.model_loader.loader import DefaultModelLoader, get_model_loader
from sglang.srt.runtime_context import get_model, get_parallel, get_spec

from reshard.base.errors import ReshardError
from reshard.commands.weights import Weights
from reshard.live import engine_loading
from reshard.live.engine_loading import EngineModel, InferenceEngine, WeightsForModel
from reshard.live.loaded_parameters import LoadingNotes

ENGINE = InferenceEngine("SGLang", logging.getLogger(__name__), BaseKVCacheMethod)


@dataclass
class LoadedModel:
    """What is in a model: the path that it had at first and has now, the options, and the shapes of what it used."""

    first: str
    path: str
    options: Mapping[str, Any] = field(default_factory=dict)
    shapes: engine_loading.TensorShapes = field(default_factory=dict)


_LOADED: WeakKeyDictionary[Any, LoadedModel] = WeakKeyDictionary()
"""By SGLang's config of the model: for an update, it makes a loader without options, and gives it only this."""


class SGLangLoader(DefaultModelLoader):  # type: ignore[misc]
    """Loads the weights of any checkpoint under their Hugging Face names, and of each tensor only what a rank uses."""

    def __init__(self, load_config: Any) -> None:
        self._options = engine_loading.options_of(load_config.model_loader_extra_config)
        # As SGLang's own loaders do: adapters are read with the same config.
        load_config.load_format, load_config.model_loader_extra_config = LoadFormat.AUTO, {}
        super().__init__(load_config)
        self._config: Any = None
        self._filling: WeightsForModel | None = None

    def download_model(self, model_config: Any) -> None:
        """Check that the checkpoint can be opened. Weights are read from where they are."""
        len(_open_weights(model_config, self._options_of(model_config)))

    def load_model(self, *, model_config: Any, device_config: Any) -> torch.nn.Module:
        """Build and load a model. Raises ReshardError if a parameter is not in the checkpoint, or does not fit it."""
        _refuse_what_needs_another_loader(model_config, self.load_config)
        return super().load_model(model_config=model_config, device_config=device_config)

    def _get_all_weights(
        self, model_config: Any, model: torch.nn.Module
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights of a new model."""
        options = self._options_of(model_config)
        engine_loading.refuse_several_sources(ENGINE, _more_sources(model, options))
        path = model_config.model_path
        _LOADED[model_config] = LoadedModel(path, path, options)
        return self._tensors(model_config, _open_weights(model_config, options))

    def _get_weights_iterator(self, source: Any, **_: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights that replace those of a loaded model: those at SGLang's new path, or at the same one.

        Raises ReshardError before any weight is replaced if they are not those of the same model.
        """
        config = source.model_config
        loaded = _loaded_model(config)
        is_first = config.model_path == loaded.first
        options = loaded.options if is_first else engine_loading.elsewhere(loaded.options, loaded.first)
        try:
            weights = _open_weights(config, options)
            engine_loading.refuse_another_model(weights, loaded.shapes)
        except Exception:
            config.model_path = loaded.path  # which SGLang has already replaced
            raise
        return self._tensors(config, weights)

    def _tensors(self, config: Any, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        self._config, self._filling = config, WeightsForModel(ENGINE, weights)
        if self.load_config.draft_model_idx is None:
            return self._filling.tensors()
        filtered: Iterator[tuple[str, torch.Tensor]] = self._filter_mtp_weights(
            self._filling.tensors(), "", self.load_config.draft_model_idx
        )
        return filtered

    def load_weights_and_postprocess(
        self, model: torch.nn.Module, weights: Iterator[tuple[str, torch.Tensor]], target_device: Any
    ) -> None:
        """Load what one of the functions above returned.

        If it fails, SGLang wants to roll back, and reads the path of the model again: it is the former one then.
        """
        config, filling = self._config, self._filling
        assert filling is not None
        loaded = _LOADED[config]
        try:
            with LoadingNotes(model) as loading:
                self.load_weights_only(model, weights, target_device)
            if not loaded.shapes:
                shared = engine_loading.shared_by_draft(model) if config.is_draft_model else set()
                filling.refuse_missing(model, loading, shared)
        except Exception:
            config.model_path = loaded.path
            raise
        loaded.path, loaded.shapes = config.model_path, loaded.shapes or filling.shapes()
        filling.report(loading)
        self.postprocess_weights(model, target_device)

    def _options_of(self, model_config: Any) -> dict[str, Any]:
        """The options, unless a model is only the draft for another one, and in a folder of its own."""
        is_other = model_config.is_draft_model and model_config.model_path != get_model().model_path
        return {} if is_other else self._options


def _open_weights(model_config: Any, options: Mapping[str, Any]) -> Weights:
    folder = engine_loading.with_revision(str(model_config.model_path), model_config.revision)
    return engine_loading.opened(ENGINE, EngineModel(folder, model_config.quantization), options)


def _loaded_model(model_config: Any) -> LoadedModel:
    """What is in a model, also if another loader put it there."""
    served = get_model().model_path
    draft = get_spec().speculative_draft_model_path if model_config.is_draft_model else None
    loaded: LoadedModel = _LOADED.setdefault(model_config, LoadedModel(draft or served, draft or served))
    if not model_config.is_draft_model:
        loaded.path = served
    return loaded


def _refuse_what_needs_another_loader(model_config: Any, load_config: Any) -> None:
    """What SGLang's own loader does, and this one does not."""
    if type(get_model_loader(load_config, model_config)) is not DefaultModelLoader:
        engine_loading.refuse_quantization(ENGINE, str(model_config.quantization))
    if get_model().model_checksum is not None:
        raise ReshardError(
            "engine-checksum-unsupported",
            "--model-checksum compares files that SGLang's own loader reads, and reshard reads others",
            found=f"--model-checksum {get_model().model_checksum}",
            remedy="leave it out, or serve a Hugging Face folder without --load-format reshard",
        )


def _more_sources(model: torch.nn.Module, options: Mapping[str, Any]) -> list[str]:
    """What SGLang reads besides the checkpoint: other folders, folders inside it, the embedding of a draft model."""
    more = [str(each.model_or_path) for each in getattr(model, "secondary_weights", ())]
    inside = getattr(model, "allow_patterns_overrides", None) or ()
    is_reread = get_spec().speculative_algorithm and get_parallel().pp_size > 1 and options.get("source")
    return [*more, *inside, *([get_model().model_path] if is_reread else [])]
