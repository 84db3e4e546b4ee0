"""A model loader of vLLM: `vllm serve CKPT --load-format reshard`, for a checkpoint in any format that reshard reads.

vLLM finds it by an entry point and imports it in each of its processes. It uses only what vLLM documents for plugins:
a subclass of `BaseModelLoader`, and `get_all_weights`, which `reload_weights` calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import vllm
from vllm.config import get_current_vllm_config
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    weight_transfer,
)
from vllm.logger import init_logger
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from reshard.base.errors import ReshardError
from reshard.commands.weights import Weights
from reshard.exchange.engine_recording import EngineRecording
from reshard.live import engine_loading, vllm_companions, vllm_layers
from reshard.live.engine_loading import EngineModel, InferenceEngine, WeightsForModel
from reshard.live.loaded_parameters import LoadingNotes

TRANSFERS = {
    "WeightTransferEngineFactory": "ReshardTransferEngine",
    "WeightTransferTrainerFactory": "ReshardTrainerEngine",
}
# vLLM prints only the messages of its own loggers
ENGINE = InferenceEngine("vLLM", init_logger("vllm.reshard"), BaseKVCacheMethod)


@cache
def register() -> None:
    """Make reshard's load format, config format and tokenizer mode known to vLLM, which calls this in each process."""
    register_model_loader(engine_loading.LOAD_FORMAT)(VLLMLoader)
    vllm_companions.register(engine_loading.LOAD_FORMAT)
    for factory, kind in TRANSFERS.items():
        register_engine = getattr(weight_transfer, factory).register_engine
        register_engine(engine_loading.LOAD_FORMAT, "reshard.live.vllm_transfer", kind)


@dataclass
class LoadedModel:
    """What is in a model: the path that vLLM had for it at first and has now, and the shapes of the tensors it used.

    `recording` says where these are in its parameters, if that is asked for.
    """

    first: str
    path: str
    shapes: engine_loading.TensorShapes
    recording: EngineRecording | None


_LOADED: WeakKeyDictionary[torch.nn.Module, LoadedModel] = WeakKeyDictionary()


def recording_of(model: torch.nn.Module) -> EngineRecording:
    """What was recorded while a model was loaded. Raises ReshardError if nothing was."""
    loaded = _LOADED.get(model)
    if loaded is None or loaded.recording is None:
        raise ReshardError(
            "transfer-engine-not-recorded",
            "what the engine made of the tensors that it loaded was not recorded",
            rule="only the loader of reshard knows where each element is in the engine's parameters",
            remedy="start the engine with --load-format reshard",
        )
    return loaded.recording


class VLLMLoader(BaseModelLoader):  # type: ignore[misc]
    """Loads the weights of any checkpoint under their Hugging Face names, and of each tensor only what a rank uses."""

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        self._options = engine_loading.options_of(load_config.model_loader_extra_config)

    def download_model(self, model_config: Any) -> None:
        """Check that the checkpoint can be opened. Weights are read from where they are."""
        len(_open_weights(model_config, self._options))

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """Load a model. Raises ReshardError if a parameter is not in the checkpoint, or does not fit it."""
        _refuse_what_needs_another_loader(model, model_config)
        options = self._options_of(model_config)
        folder = options.get("record")
        record = bool(folder) or _transfers_weights()
        filling = WeightsForModel(ENGINE, _open_weights(model_config, options), record=record)
        with LoadingNotes(model) as loading:
            reported = model.load_weights(filling.tensors())
        shared = engine_loading.shared_by_draft(model) if model_config.runner_type == "draft" else ()
        filling.refuse_missing(model, loading, {*(reported or ()), *shared})
        filling.report(loading)
        rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        recording = filling.recording(model, rank, ranks, vllm.__version__)
        if recording and folder:
            recording.save(Path(folder))
        _LOADED[model] = LoadedModel(model_config.model, model_config.model, filling.shapes(), recording)

    def get_all_weights(
        self, model_config: Any, model: torch.nn.Module
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights that replace those of a loaded model: those at vLLM's new path, or at the same one.

        Raises ReshardError before any weight is replaced if they are not those of the same model.
        """
        loaded = _LOADED[model]
        try:
            weights = _open_weights(model_config, self._options_for(model_config, loaded.first))
            engine_loading.refuse_another_model(weights, loaded.shapes)
        except ReshardError:
            model_config.model = loaded.path  # which vLLM has already replaced
            raise
        loaded.path = model_config.model
        for layer in model.modules():
            vllm_layers.pack_anew(layer)
        return WeightsForModel(ENGINE, weights).tensors()

    def _options_for(self, model_config: Any, first: str) -> Mapping[str, Any]:
        """The options for the weights that replace others."""
        base = model_config.hf_config_path or first
        return self._options if model_config.model == first else engine_loading.elsewhere(self._options, base)

    def _options_of(self, model_config: Any) -> dict[str, Any]:
        """The options, unless a model is only the draft for another one, and in a folder of its own."""
        if model_config.runner_type == "draft":
            target = get_current_vllm_config().speculative_config.target_model_config
            return self._options if model_config.model == target.model else {}
        return self._options


def _transfers_weights() -> bool:
    """Whether the engine will get new weights through the backend of reshard."""
    transfer = getattr(get_current_vllm_config(), "weight_transfer_config", None)
    return transfer is not None and transfer.backend == engine_loading.LOAD_FORMAT


def _open_weights(model_config: Any, options: Mapping[str, Any]) -> Weights:
    return engine_loading.opened(ENGINE, _engine_model(model_config), options)


def _engine_model(model_config: Any) -> EngineModel:
    folder = engine_loading.with_revision(str(model_config.model), model_config.revision)
    return EngineModel(folder, model_config.quantization, model_config.hf_config_path)


def _refuse_what_needs_another_loader(model: torch.nn.Module, model_config: Any) -> None:
    """Models and quantizations for which vLLM's own loader does more than to iterate over one checkpoint."""
    engine_loading.refuse_several_sources(
        ENGINE, [str(each.model_or_path) for each in getattr(model, "secondary_weights", ())]
    )
    if model_config.quantization == "torchao":
        engine_loading.refuse_quantization(ENGINE, "torchao")
