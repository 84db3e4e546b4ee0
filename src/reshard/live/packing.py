"""The bytes of a message, and the elements of a tensor that it has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from reshard.exchange.messages import Message
from reshard.exchange.transfer_plan import Transfer

TensorKey = tuple[str, str]
"""A chunk, and a key of its state dict."""


def packed(message: Message, held: Mapping[TensorKey, torch.Tensor], device: torch.device) -> torch.Tensor:
    """The bytes of a message, of the tensors of a rank of the trainer."""
    buffer = torch.empty(message.nbytes, dtype=torch.uint8, device=device)
    for transfer, part in _parts(message, buffer):
        source, piece = held[transfer.tensor], transfer.piece
        found = _elements(source, piece.start, [(count, step) for count, step, _ in piece.axes])
        # As a conversion writes it: added to in double precision, and rounded to the dtype in which it is stored.
        part.copy_((found.double() + transfer.added).to(found.dtype) if transfer.added else found)
    return buffer


def unpack(message: Message, buffer: torch.Tensor, parameters: Mapping[str, torch.Tensor]) -> None:
    """Write the elements of a message to their places in parameters."""
    for transfer, part in _parts(message, buffer):
        target, piece = parameters[transfer.parameter], transfer.piece
        _elements(target, piece.at, [(count, step) for count, _, step in piece.axes]).copy_(part)


def _parts(message: Message, buffer: torch.Tensor) -> Iterator[tuple[Transfer, torch.Tensor]]:
    sizes = [each.nbytes for each in message.transfers]
    for transfer, part in zip(message.transfers, buffer.split(sizes), strict=True):
        counts = [count for count, _, _ in transfer.piece.axes]
        yield transfer, part.view(getattr(torch, transfer.sent.name)).view(counts)


def _elements(tensor: torch.Tensor, first: int, axes: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Elements of a tensor, counted in row-major order: axes of (count, step)."""
    rest = tensor.detach().reshape(-1)[first:]
    return rest.as_strided([count for count, _ in axes], [step for _, step in axes])
