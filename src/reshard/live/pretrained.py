"""A transformers model with the weights of any checkpoint, which are read into its own memory."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from reshard.base.errors import ReshardError
from reshard.commands.streaming import ReadOptions
from reshard.commands.weights import Weights
from reshard.live.torch_modules import load_into

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GENERATION_CONFIG = "generation_config.json"


def from_pretrained(
    weights: Weights, auto: Any, how: ReadOptions, *, trust_remote_code: bool, **build: Any
) -> PreTrainedModel:
    """The model of a checkpoint, in evaluation mode. Raises ReshardError.

    `auto` is the class of transformers to build; by default the one that the config names. `build` are further
    arguments of its `from_config`.
    """
    with TemporaryDirectory(prefix="reshard-") as place:
        folder = Path(place)
        weights.write_companions(folder)
        with without_initializing():
            model = _build_model(auto, folder, trust_remote_code, build)
        generation = _generation(folder)
    _keep_in_float32(model)
    model.tie_weights()
    if kept := load_into(model, weights, how).kept:
        _initialize(model, kept)
        load_into(model, weights, how)  # again: older transformers initialize complete modules
    _mark_initialized(model)
    model.config.name_or_path = model.name_or_path = str(weights.checkpoint.path)  # the other is deleted
    if generation is not None and model.can_generate():
        model.generation_config = generation
    return model.eval()


def _build_model(auto: Any, folder: Path, trusted: bool, build: Mapping[str, Any]) -> Any:
    """The model with memory for its weights, in which there is nothing yet."""
    transformers = _transformers()
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=trusted)
        kind = auto or _class_of(config)
        if hasattr(kind, "from_config"):
            return kind.from_config(config, trust_remote_code=trusted, **build)
        return kind._from_config(config, **build)
    except (ValueError, ImportError, KeyError, TypeError) as error:
        raise ReshardError(
            "live-model-not-built",
            "transformers cannot build this model",
            found=f"{str(error).partition(chr(10))[0]} (transformers {transformers.__version__})",
            remedy="install a newer transformers, or pass trust_remote_code=True if you trust the code of the model"
            + (", or correct `build`" if build else ""),
        ) from error


def _transformers() -> Any:
    """The package transformers. Raises ReshardError if it is not installed."""
    try:
        import transformers
    except ImportError as error:
        raise ReshardError(
            "transformers-not-installed",
            "this needs transformers, which is not installed",
            found=str(error),
            remedy="pip install transformers, or use reshard.open",
        ) from None
    return transformers


def _class_of(config: Any) -> Any:
    """The class that the config names; if it is not one of transformers, the one for causal language models."""
    import transformers

    names = config.architectures or [""]
    return getattr(transformers, str(names[0]), None) or transformers.AutoModelForCausalLM


def _keep_in_float32(model: Any) -> None:
    """Widen the weights that `from_pretrained` of transformers keeps in float32 whatever the dtype of the model."""
    import torch

    kept = [*(getattr(model, "_keep_in_fp32_modules_strict", None) or ())]
    if model.dtype == torch.float16:
        kept += getattr(model, "_keep_in_fp32_modules", None) or ()
    pattern = re.compile(rf"(?:^|\.)(?:{'|'.join(kept)})(?:\.|$)") if kept else None
    for name, parameter in model.named_parameters():
        if pattern and pattern.search(name) and parameter.dtype in (torch.float16, torch.bfloat16):
            parameter.data = parameter.data.float()


def _initialize(model: Any, names: Collection[str]) -> None:
    """Initialize tensors that checkpoints may lack, as transformers does, with all others of the same modules."""
    _mark_initialized(model)
    for owner in {name.rpartition(".")[0] for name in names}:
        model.get_submodule(owner)._is_hf_initialized = False
    if hasattr(model, "initialize_weights"):
        model.initialize_weights()
    else:  # before transformers 4.52
        model.apply(model._initialize_weights)


def _mark_initialized(model: Any) -> None:
    """Prevent transformers from initializing the modules if a larger model contains them."""
    for module in model.modules():
        module._is_hf_initialized = True


def _generation(folder: Path) -> Any:
    from transformers import GenerationConfig

    return GenerationConfig.from_pretrained(folder) if (folder / GENERATION_CONFIG).is_file() else None


@contextmanager
def without_initializing() -> Iterator[None]:
    """Let transformers build a model without filling its weights with random numbers."""
    try:
        from transformers.initialization import no_init_weights
    except ImportError:  # before transformers 5
        from transformers.modeling_utils import no_init_weights
    with no_init_weights():
        yield
