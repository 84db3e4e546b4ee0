"""The weights of a model in training, complete and one by one, under the Hub's names.

Under any plan, each tensor is gathered by all ranks and kept by the first one, whose memory holds only one tensor in
addition to the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from isal.isal_zlib import crc32
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from reshard.training.trl.rank_device import rank

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module.")


def tensors_of(model: Any, only: set[str] | None = None) -> Iterator[tuple[str, Any]]:
    """Every tensor of the model's folder on the first rank, or `only` some; nothing on others. All ranks must iterate.

    An adapter's tensors have the names under which PEFT saves them.
    """
    adapted = is_adapter(model)
    for name, tensor in adapter_parameters(model).items() if adapted else _live(model):
        whole = gathered(tensor) if only is None or name in only else None
        if whole is not None:
            yield from ({name: whole.contiguous()} if adapted else _hub(model, _clean(name), whole)).items()


def digests_of(model: Any, dtype: str | None = None) -> dict[str, int]:
    """The CRC32 of each trained tensor's bytes, rounded to `dtype`, on the first rank. All ranks must call it."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    tensors = tensors_of(model, None if is_adapter(model) else trained)
    return {
        name: _crc32(tensor if dtype is None else tensor.to(getattr(torch, dtype)))
        for name, tensor in tensors
    }


def is_adapter(model: Any) -> bool:
    """Whether PEFT wraps the model."""
    return hasattr(model, "peft_config") and hasattr(model, "base_model")


def _crc32(tensor: Any) -> int:
    return int(crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()))


def _live(model: Any) -> Iterator[tuple[str, Any]]:
    """Parameters, tied ones only once, and the buffers that are saved."""
    reshard(model)
    yield from model.named_parameters()
    saved = model.state_dict().keys()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in saved)


def reshard(model: Any) -> None:
    """Shard the weights again: FSDP2 leaves the outermost group gathered until a backward pass.

    What is saved right after an evaluation would be full tensors, in memory that is reused, and not those of the
    optimizer.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def adapter_parameters(model: Any) -> dict[str, Any]:
    """The trained parameters of an adapter, as sharded, by the names under which PEFT saves them.

    PEFT renames numbers here: it would gather some of the parameters themselves.
    """
    from peft import get_peft_model_state_dict

    trained = [(_clean(name), each) for name, each in model.named_parameters() if each.requires_grad]
    numbers = {name: torch.tensor(number) for number, (name, _) in enumerate(trained)}
    saved = get_peft_model_state_dict(model, state_dict=numbers, save_embedding_layers=False)
    return {name: trained[int(number)][1] for name, number in saved.items()}


def gathered(tensor: Any) -> Any:
    """A complete tensor in host memory on the first rank, None on others. All ranks must call it."""
    if isinstance(tensor, DTensor):
        whole = tensor.detach().full_tensor()
        return whole.cpu() if rank() == 0 else None
    if hasattr(tensor, "ds_id"):
        import deepspeed  # type: ignore[import-not-found]

        with deepspeed.zero.GatheredParameters([tensor]):
            return tensor.detach().cpu().clone() if rank() == 0 else None
    return tensor.detach().cpu() if rank() == 0 else None


def _hub(model: Any, name: str, tensor: Any) -> dict[str, Any]:
    """A tensor in the Hub's form: transformers stacks some tensors that are separate there, such as experts."""
    from transformers.core_model_loading import revert_weight_conversion

    return {key: value.contiguous() for key, value in revert_weight_conversion(model, {name: tensor}).items()}


def _clean(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
