"""`reshard.load_into` and `reshard.from_pretrained`: the weights of any checkpoint in a model of torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from reshard.api.weights import opened
from reshard.base.arguments import Arguments
from reshard.base.errors import ReshardError
from reshard.base.exceptions_to_problems import for_users
from reshard.base.shared_options import MemoryOption
from reshard.base.values import SWITCH, StrPath, count, dictionary, size
from reshard.commands.streaming import ReadOptions
from reshard.commands.weights import Weights
from reshard.live import megatron_chunks, pretrained, torch_modules
from reshard.live.fillable import is_module
from reshard.live.torch_modules import LoadedTensors

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


@for_users()
def load_into(
    module: torch.nn.Module | Sequence[torch.nn.Module],
    path: StrPath | Weights,
    *,
    memory: int | str = MemoryOption.memory,
    workers: int | None = None,
    verify: bool = True,
    **opening: Any,
) -> LoadedTensors:
    """Fill the parameters and persistent buffers of a torch module from a checkpoint of any format and layout.

    The names are the Hub's, or those that the model has in the memory of transformers, where experts are fused and
    modules have other names. Values are cast to the dtype of the module. Of a DTensor (FSDP2, tensor parallelism), each
    rank reads only its own part.

    Parameters
    ----------
    module : torch.nn.Module or sequence of torch.nn.Module
        The model, with memory: not on the meta device. For Megatron-Core, the chunks of this rank; the layout is that
        of its process groups.
    path : str or path-like or Weights
        Folder, file, URL or ``Org/Model``; or what `reshard.open` returned.
    memory : int or str
        Limit for what is used besides the module, in bytes or with a unit.
    workers : int, optional
        Threads, by default two per core.
    verify : bool
        Compare the CRC32s that the files record, and tensors that are stored more than once. Pass False where each
        rank shall read nothing but its own part.
    **opening : Any
        Other arguments of `reshard.open`: ``base``, ``iteration``, ``merge`` …

    Returns
    -------
    Loaded
        The number of tensors that were filled, their bytes on this rank, and the bytes that were read for them.

    Raises
    ------
    ReshardError
        Before anything is changed, naming all tensors that only one side has, or that have another shape. While it is
        read, for damage: the module is then filled in part and must not be used, as the problem
        ``live-module-overwritten`` says.

    Examples
    --------
    >>> from transformers import AutoConfig, AutoModelForCausalLM
    >>> model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("model"))
    >>> reshard.load_into(model, "run").tensors
    47
    """
    arguments = Arguments("load_into")
    chunks = list(module) if isinstance(module, (list, tuple)) else [module]
    if not chunks or not all(map(is_module, chunks)):
        arguments.reject("module", _kind(module), "a torch module, or the chunks of Megatron-Core")
    how, weights = _read(arguments, path, memory, workers, verify, opening)
    if all(map(megatron_chunks.is_chunk, chunks)):
        return megatron_chunks.load_chunks(chunks, weights, verify=verify)
    if len(chunks) != 1:
        raise ReshardError(
            "live-chunks-not-megatron",
            "several modules are loaded together only if they are chunks of Megatron-Core",
            found=", ".join(type(chunk).__name__ for chunk in chunks),
            remedy="pass one module",
        )
    return torch_modules.load_into(chunks[0], weights, how)


@for_users()
def from_pretrained(
    path: StrPath | Weights,
    auto: Any = None,
    *,
    memory: int | str = MemoryOption.memory,
    workers: int | None = None,
    verify: bool = True,
    trust_remote_code: bool = False,
    build: dict[str, Any] | None = None,
    **opening: Any,
) -> PreTrainedModel:
    """The transformers model of a checkpoint of any format and layout, in evaluation mode on the CPU.

    It is what ``from_pretrained`` returns for the folder that `convert` would write, but nothing is written, and the
    weights are read into the memory of the model itself.

    Parameters
    ----------
    path : str or path-like or Weights
        Folder, file, URL or ``Org/Model``; or what `reshard.open` returned.
    auto : class, optional
        The class of transformers to build, for example ``AutoModelForSequenceClassification``. By default the one that
        the config names.
    memory, workers, verify : int or str, int, bool
        As for `load_into`.
    trust_remote_code : bool
        Run the code of the model that is in its folder.
    build : dict, optional
        Arguments for ``from_config`` of transformers, for example ``{"attn_implementation": "eager"}``.
    **opening : Any
        Other arguments of `reshard.open`: ``dtype``, ``base``, ``iteration``, ``merge`` …

    Returns
    -------
    transformers.PreTrainedModel

    Raises
    ------
    ReshardError
        If there is no config, if transformers cannot build the model, or for tensors that only one side has.

    Examples
    --------
    >>> model = reshard.from_pretrained("run", dtype="bfloat16")
    >>> type(model).__name__, model.dtype
    ('Qwen3ForCausalLM', torch.bfloat16)
    """
    arguments = Arguments("from_pretrained")
    arguments.check("trust_remote_code", trust_remote_code, SWITCH)
    if not (auto is None or hasattr(auto, "from_config") or hasattr(auto, "_from_config")):
        arguments.reject("auto", auto, "a class of transformers, for example AutoModelForCausalLM")
    arguments.check_optional("build", build, dictionary('{"attn_implementation": "eager"}'))
    how, weights = _read(arguments, path, memory, workers, verify, opening)
    return pretrained.from_pretrained(
        weights, auto, how, trust_remote_code=trust_remote_code, **(build or {})
    )


def _read(
    arguments: Arguments,
    path: StrPath | Weights,
    memory: int | str,
    workers: int | None,
    verify: bool,
    opening: dict[str, Any],
) -> tuple[ReadOptions, Weights]:
    """How to read, and what. Raises ReshardError for wrong arguments."""
    allowed = arguments.check("memory", memory, size("--memory"))
    arguments.check_optional("workers", workers, count())
    arguments.check("verify", verify, SWITCH)
    weights = opened(arguments, path, opening)
    return ReadOptions(allowed, workers, verify), weights


def _kind(module: Any) -> str:
    """What was passed as a module, without its elements."""
    inner = ", ".join(type(each).__name__ for each in module) if isinstance(module, (list, tuple)) else ""
    return f"{type(module).__name__}({inner})" if inner else type(module).__name__
