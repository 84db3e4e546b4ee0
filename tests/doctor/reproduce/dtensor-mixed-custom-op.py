"""A custom kernel gets DTensors and plain tensors."""

# processes: 2

import torch
from small import CURED, join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor


@torch.library.custom_op("kernels::flash_attention", mutates_args=())
def flash_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return q @ k.transpose(-1, -2) @ v


join()
query = distribute_tensor(torch.randn(4, 4), init_device_mesh("cpu", (2,)), [Replicate()])
flash_attention(query.to_local() if CURED else query, torch.randn(4, 4), torch.randn(4, 4))
