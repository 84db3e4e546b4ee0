"""`reshard.load_into` and `reshard.from_pretrained`: the weights of any checkpoint in a model of torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, ParamSpec, Protocol

from reshard.api.weights import OpenOptions, opened
from reshard.base.argument_checks import Arguments, StrPath
from reshard.base.errors import ReshardError
from reshard.base.exceptions_to_problems import for_users
from reshard.base.options import About, with_options
from reshard.base.shared_options import MemoryOption, WorkersOption
from reshard.commands.names import NAMES
from reshard.commands.streaming import How
from reshard.commands.weights import Weights
from reshard.live import megatron_chunks, pretrained, torch_modules
from reshard.live.fillable import is_module
from reshard.live.torch_modules import LoadedTensors

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


P = ParamSpec("P")


@dataclass(frozen=True, kw_only=True)
class Filling(WorkersOption, MemoryOption):
    """How a model is filled."""

    HELP: ClassVar = {"memory": "Limit for what is used besides the model."}

    verify: Annotated[
        bool,
        About(
            "Compare the CRC32s that the files record, and tensors that are stored more than once. Pass False where "
            "each rank shall read nothing but its own part."
        ),
    ] = True

    @property
    def how(self) -> How:
        """How tensors are read."""
        return How(self.limit, self.workers, self.verify)


@dataclass(frozen=True, kw_only=True)
class LoadOptions(OpenOptions, Filling):
    """All options of `load_into`."""


@dataclass(frozen=True, kw_only=True)
class PretrainedOptions(LoadOptions):
    """All options of `from_pretrained`."""

    trust_remote_code: Annotated[bool, About("Run the code of the model that is in its folder.")] = False
    build: Annotated[
        Mapping[str, Any] | None,
        About(
            'Arguments for ``from_config`` of transformers, for example ``{"attn_implementation": "eager"}``.',
            '{"attn_implementation": "eager"}',
        ),
    ] = None


class LoadInto(Protocol[P]):
    """`load_into`, as type checkers see it."""

    def __call__(
        self,
        module: torch.nn.Module | Sequence[torch.nn.Module],
        path: StrPath | Weights,
        *args: P.args,
        **options: P.kwargs,
    ) -> LoadedTensors: ...


class FromPretrained(Protocol[P]):
    """`from_pretrained`, as type checkers see it."""

    def __call__(
        self, path: StrPath | Weights, auto: Any = None, *args: P.args, **options: P.kwargs
    ) -> PreTrainedModel: ...


def _loads(record: Callable[P, object]) -> Callable[[Callable[..., LoadedTensors]], LoadInto[P]]:
    return with_options(record)


def _builds(record: Callable[P, object]) -> Callable[[Callable[..., PreTrainedModel]], FromPretrained[P]]:
    return with_options(record)


@for_users()
@_loads(LoadOptions)
def load_into(
    module: torch.nn.Module | Sequence[torch.nn.Module], path: StrPath | Weights, **given: Any
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

    Returns
    -------
    Loaded
        The number of tensors that were filled, their bytes on this rank, and the bytes that were read for them.

    Raises
    ------
    ReshardError
        Before anything is changed, naming all tensors that only one side has, or that have another shape. While it is
        read, for damage: the module is then filled in part, and must not be used.

    Examples
    --------
    >>> from transformers import AutoConfig, AutoModelForCausalLM
    >>> model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("model"))
    >>> reshard.load_into(model, "run").tensors
    47
    """
    arguments = Arguments("load_into", NAMES)
    chunks = list(module) if isinstance(module, (list, tuple)) else [module]
    if not chunks or not all(map(is_module, chunks)):
        arguments.wrong("module", _kind(module), "a torch module, or the chunks of Megatron-Core")
    asked = LoadOptions(**arguments.options(LoadOptions, given))
    weights = opened(arguments, path, given)
    if all(map(megatron_chunks.is_chunk, chunks)):
        return megatron_chunks.load_chunks(chunks, weights, verify=asked.verify)
    if len(chunks) != 1:
        raise ReshardError(
            "live-chunks-not-megatron",
            "several modules are loaded together only if they are chunks of Megatron-Core",
            found=", ".join(type(chunk).__name__ for chunk in chunks),
            remedy="pass one module",
        )
    return torch_modules.load_into(chunks[0], weights, asked.how)


@for_users()
@_builds(PretrainedOptions)
def from_pretrained(path: StrPath | Weights, auto: Any = None, **given: Any) -> PreTrainedModel:
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
    arguments = Arguments("from_pretrained", NAMES)
    if not (auto is None or hasattr(auto, "from_config") or hasattr(auto, "_from_config")):
        arguments.wrong("auto", auto, "a class of transformers, for example AutoModelForCausalLM")
    asked = PretrainedOptions(**arguments.options(PretrainedOptions, given))
    weights = opened(arguments, path, given)
    return pretrained.from_pretrained(
        weights, auto, asked.how, trust_remote_code=asked.trust_remote_code, **(asked.build or {})
    )


def _kind(module: Any) -> str:
    """What was passed as a module, without its elements."""
    inner = ", ".join(type(each).__name__ for each in module) if isinstance(module, (list, tuple)) else ""
    return f"{type(module).__name__}({inner})" if inner else type(module).__name__
