"""Write Orbax containers with MaxText's names, as `to_maxtext` of MaxText makes them.

The output is `<step>/items`, with an array of zarr 2 in a folder of its own: not in a database, and not compressed, so
that every byte is planned. Orbax recognizes all of this by the files. A chunk has one layer, and at most
`MAX_CHUNK_BYTES` bytes if its first axis can be divided.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from math import prod
from typing import Any, NamedTuple

from reshard.algebra.views import View
from reshard.base.plain_json import to_json
from reshard.families.dialects.maxtext import HEAD, MAXTEXT
from reshard.formats.contract import Naming, Request, Target, Writing
from reshard.formats.detection import ORBAX_UNSCANNED
from reshard.formats.megatron.mcore import padded_vocabulary
from reshard.formats.orbax.layer_names import LayerPosition, place_of
from reshard.transfer.plan import Block, OutputFile, Planned

ITEM = "items"
MAX_CHUNK_BYTES = 256 << 20
"""Bytes of a chunk above which it is divided: to read a part of a chunk, Orbax reads all of it."""

HANDLER = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"
DICT_KEY = 2
"""The type of the keys of a dictionary in Orbax's metadata."""


class OutputArray(NamedTuple):
    """An array of the output. `tensors` are those of its layers along `axis`, or only one, which is all of it."""

    name: str
    tensors: Sequence[Planned]
    axis: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        shape = self.tensors[0].shape
        return shape if self.axis is None else (*shape[: self.axis], len(self.tensors), *shape[self.axis :])


def fit(request: Request) -> Request:
    """The request, with as many rows of the embedding as users ask for, and only the language model."""
    model = request.declared
    unit = request.options.vocab_divisible_by or 1
    rows = padded_vocabulary(model.dims.vocab, unit, 1)
    return replace(request, model=replace(model.padded(rows), carried={}))


def leaves_out(request: Request, name: str) -> str | None:
    """The rule for a tensor that MaxText's conversion leaves out."""
    layer = name.removeprefix("model.layers.").partition(".")[0]
    is_beyond = layer.isdigit() and int(layer) >= request.declared.dims.layers
    return "layers for multi-token prediction" if is_beyond else None


class OrbaxWriting(Writing):
    """The container of a step; `scanned` says that all layers are in one array."""

    def __init__(self, request: Request, *, scanned: bool) -> None:
        super().__init__(request)
        self._scanned = scanned

    def files(self) -> list[OutputFile]:
        """The files of the container, in the folder of its step."""
        step = self.request.step
        arrays = list(_arrays(self.request, scanned=self._scanned))
        folder = f"{step}/{ITEM}"
        files = [file for array in arrays for file in _files(folder, array)]
        marks = {"item_handlers": HANDLER, "metrics": {}, "performance_metrics": {}, "custom_metadata": {}}
        times = {"init_timestamp_nsecs": 0, "commit_timestamp_nsecs": 0}
        of_step = {**marks, **times, "item_handlers": {ITEM: HANDLER}}
        return [
            OutputFile.of_bytes(f"{step}/_CHECKPOINT_METADATA", to_json(of_step)),
            OutputFile.of_bytes(f"{folder}/_CHECKPOINT_METADATA", to_json({**marks, **times})),
            OutputFile.of_bytes(f"{folder}/_METADATA", to_json(_metadata(arrays))),
            *files,
        ]

    def notes(self) -> list[str]:
        """What users should know."""
        settings = (
            f"scan_layers={str(self._scanned).lower()} vocab_size={self.request.declared.dims.padded_vocab}"
        )
        notes = [f"MaxText loads it with load_parameters_path=OUTPUT/{self.request.step}/{ITEM} {settings}"]
        if self._scanned:
            notes.append(
                f"all layers are in one array, MaxText's default; --to {ORBAX_UNSCANNED} writes one for each"
            )
        divided = ("llama", "mixtral", "gemma2", "gemma3_text")
        if self.request.declared.family.name in divided:
            notes.append(
                "MaxText stores some weights multiplied: they are rounded as its to_maxtext rounds them"
            )
        return notes


def _arrays(request: Request, *, scanned: bool) -> Iterator[OutputArray]:
    """The arrays, in the order of the tensors that come first in each."""
    by_array: dict[str, list[tuple[int, Planned]]] = {}
    places: dict[str, LayerPosition | None] = {}
    for tensor in request.tensors:
        place = place_of(tensor.name, request.declared, scanned=scanned)
        name = place.name if place else _unlayered_name(tensor.name)
        places[name] = place
        by_array.setdefault(name, []).append((place.number if place else 0, _transposed_head(tensor)))
    for name, parts in by_array.items():
        place = places[name]
        tensors = [tensor for _, tensor in sorted(parts, key=lambda part: part[0])]
        yield OutputArray(
            f"params.params.{name}", tensors, place.axis if place and place.is_scanned else None
        )


def _unlayered_name(name: str) -> str:
    return name if name.startswith("token_embedder.") else f"decoder.{name}"


def _transposed_head(tensor: Planned) -> Planned:
    """The head as MaxText has it: [hidden size, rows]."""
    if tensor.name != HEAD:
        return tensor
    return tensor._replace(shape=tensor.shape[::-1], source=lambda: tensor.source().permute(1, 0))


SCANNED = Target(
    partial(OrbaxWriting, scanned=True),
    Naming((MAXTEXT.name,), leaves_out=leaves_out),
    fit=fit,
    judges_model=False,
)
UNSCANNED = replace(SCANNED, begin=partial(OrbaxWriting, scanned=False))
"""How it is written: with one array for all layers, or one for each."""


def _files(folder: str, array: OutputArray) -> Iterator[OutputFile]:
    """The description of an array, and a file for each chunk."""
    shape, dtype = array.shape, array.tensors[0].dtype
    grid = _grid(array)
    description = {
        "chunks": grid,
        "compressor": None,
        "dimension_separator": ".",
        "dtype": "bfloat16" if dtype.name == "bfloat16" else f"<{dtype.name[0]}{dtype.itemsize}",
        "fill_value": None,
        "filters": None,
        "order": "C",
        "shape": shape,
        "zarr_format": 2,
    }
    yield OutputFile.of_bytes(f"{folder}/{array.name}/.zarray", to_json(description))
    for at in product(*(range(size // step) for size, step in zip(shape, grid, strict=True))):
        index = at[array.axis] if array.axis is not None else 0
        tensor = array.tensors[index]
        first = at[0] * grid[0]
        source = partial(_rows, tensor, first, first + grid[0]) if array.axis != 0 else tensor.source
        block = Block(tensor.name, dtype, grid, source, 0)
        yield OutputFile(f"{folder}/{array.name}/{'.'.join(map(str, at))}", block.nbytes, [block])


def _rows(tensor: Planned, begin: int, end: int) -> View:
    return tensor.source()[begin:end]


def _grid(array: OutputArray) -> tuple[int, ...]:
    """The shape of a chunk: one layer, and a part of the first axis if that is large."""
    shape = list(array.shape)
    if array.axis is not None:
        shape[array.axis] = 1
    nbytes = prod(shape) * array.tensors[0].dtype.itemsize
    rows = shape[0]
    parts = next(
        n for n in range(1, rows + 1) if rows % n == 0 and (nbytes // n <= MAX_CHUNK_BYTES or n == rows)
    )
    return (rows // parts, *shape[1:])


def _metadata(arrays: Iterable[OutputArray]) -> Mapping[str, Any]:
    """What `_METADATA` says of the tree."""
    tree = {}
    for array in arrays:
        keys = array.name.split(".")
        tree[str(tuple(keys))] = {
            "key_metadata": [{"key": key, "key_type": DICT_KEY} for key in keys],
            "value_metadata": {
                "value_type": "np.ndarray",
                "skip_deserialize": False,
                "write_shape": _grid(array),
            },
        }
    return {
        "tree_metadata": tree,
        "use_ocdbt": False,
        "use_zarr3": False,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }
