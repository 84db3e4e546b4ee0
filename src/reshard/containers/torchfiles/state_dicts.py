"""State dicts in files of torch.save, as `torch.load` and `load_state_dict` take them: `pytorch_model.bin`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from reshard.containers.torchfiles.write import NewTensor, layout_torch_file
from reshard.transfer.plan import Block, OutputFile, Planned


def output_file(path: str, tensors: Sequence[Planned]) -> OutputFile:
    """The file that `torch.save` makes of a dict of these tensors, by name."""
    named = {tensor.name: tensor for tensor in tensors}
    image = layout_torch_file(
        {name: NewTensor(name, tensor.dtype, tensor.shape) for name, tensor in named.items()}
    )
    blocks = [Block.whole(named[slot.key], slot.offset, slot.crc_at) for slot in image.slots]
    return OutputFile(path, image.size, blocks, partial(iter, image.literals))
