"""Read Orbax containers that have MaxText's names.

`<run>/checkpoints/<step>/items` has `_METADATA`, JSON with the keys of every leaf of the saved tree, and the arrays
(`containers/orbax_arrays.py`). The tree is Linen's, `params.params.decoder…`, or NNX's, `decoder….value`, also below
`base`.
Sources: orbax-checkpoint 0.12.8, and `checkpoint_conversion` of MaxText as of August 2026; folders that both wrote.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from reshard.algebra.dtypes import BY_NAME
from reshard.algebra.storage import Storage
from reshard.algebra.tensors import Cells, Tensor
from reshard.algebra.views import View, assemble
from reshard.base.errors import Problem, ReshardError, listed, raise_all
from reshard.base.plain_json import json_of
from reshard.containers import zarr_arrays
from reshard.containers.orbax_arrays import DATABASE, METADATA, ArrayShape, chunk_url, open_arrays
from reshard.containers.zarr_arrays import ZarrArray, places
from reshard.families.dialects.maxtext import MAXTEXT
from reshard.folders.iterations import Iteration, refuse
from reshard.formats import foreign
from reshard.formats.checkpoint import Checkpoint, FormatData, ModelDescription
from reshard.formats.detection import ORBAX, ORBAX_UNSCANNED, UNFINISHED_FOLDER
from reshard.formats.dropped import PROGRESS, RANDOM_STATES, rule_of
from reshard.formats.optimizer import OPTIMIZER_STATES
from reshard.formats.orbax.layer_names import normal
from reshard.formats.unique_names import under_new_names
from reshard.stores import is_remote
from reshard.transfer.source_files import Sources

PARAMETER_PATHS = (("params", "params"), ("params",), ("base",), ())
"""Where the model is in the tree: of Linen, of Linen without its collection, of NNX with LoRA, and of NNX."""
NOT_WEIGHTS = (
    (re.compile(r"(opt|opt_state|optimizer)(\..*)?"), OPTIMIZER_STATES),
    (re.compile(r"step|global_step|grad_step"), PROGRESS),
    (re.compile(r"(.*\.)?(rngs?|dropout)(\..*)?"), RANDOM_STATES),
)
_LORA = re.compile(r"(.*[._])?(w_)?lora_[ab](\..*)?")
_ORDERED = re.compile(r"query_norm|query\.bias|wkv_a|MoeBlock_0|pre_ffw_norm")
"""In the names of models that are not Llama."""
METADATA_MOST = 16 << 20
"""Most bytes of the description of a tree: that of the largest models without scanned layers has a few millions."""
COPY_AGAIN = "copy the checkpoint again from where it was saved, or use another step of the run"


def open_checkpoint(path: Path, sources: Sources, iteration: Iteration | None = None) -> Checkpoint:
    """Open a folder. Raises ReshardError naming all that is missing, damaged, or of another trainer."""
    step = _step_of(path)
    refuse(path, None if iteration == step else iteration, "the folder of one step")
    _check_finished(path)
    leaves = _leaves(path, sources)
    _refuse_adapters(leaves, path)
    root = _root(leaves, path)
    weights, others = _sorted_leaves(leaves, root)
    reader = _ArrayReader(path, sources)
    tensors = normal({name: reader.tensor(name, stored) for name, stored in weights.items()})
    dropped = Counter[str]()
    for stored, rule in others.items():
        dropped[rule] += reader.nbytes(stored)
    reader.finish()
    return Checkpoint(
        path=path,
        format=ORBAX if _is_scanned(weights) else ORBAX_UNSCANNED,
        dialect=MAXTEXT,
        tensors=tensors,
        description=ModelDescription(path),
        iteration=step,
        dropped=dropped,
        notes=[*_notes(path, dropped), *_order_note(weights)],
        variant=f"{reader.variant}; {'Linen' if root.startswith('params.') else 'NNX'}",
        native=FormatData(is_part=True),
    )


def _step_of(path: Path) -> int | None:
    folder = path.resolve()
    named = (part for part in (folder.name, folder.parent.name) if part.isascii() and part.isdigit())
    return next(map(int, named), None)


def _check_finished(path: Path) -> None:
    folder = path.absolute()
    if named := next(
        (each for each in (folder, *folder.parents) if UNFINISHED_FOLDER.fullmatch(each.name)), None
    ):
        raise ReshardError(
            "orbax-unfinished",
            "this save of Orbax did not finish",
            file=str(named),
            rule="Orbax renames the folder when all files are complete",
            remedy="pass an earlier step of the run; nothing in this folder is reliable",
        )
    if is_remote(path):
        raise ReshardError(
            "orbax-in-store",
            "an Orbax checkpoint can only be read on a disk",
            file=str(path),
            rule="its arrays are decoded by tensorstore, which opens them itself",
            remedy="copy the step to a disk, for example: gcloud storage cp -r gs://BUCKET/RUN/checkpoints/STEP .",
        )


# ------------------------------------------------------------------------------------------ the tree


def _leaves(path: Path, sources: Sources) -> dict[str, str]:
    """The names of arrays without NNX's `value`, each with its name in the container.

    Raises ReshardError if two arrays have the same name.
    """
    try:
        content = sources.read(path / METADATA)
        if len(content) > METADATA_MOST:
            raise ValueError(f"{len(content):,} bytes, of at most {METADATA_MOST:,}")
        description = json_of(content)
        tree = description["tree_metadata"]
        keys = [
            _keys(entry) for entry in tree.values() if not entry["value_metadata"].get("skip_deserialize")
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ReshardError(
            "orbax-metadata-unreadable",
            "the description of an Orbax checkpoint cannot be read",
            file=str(path / METADATA),
            expected="JSON with the keys of each array (tree_metadata)",
            found="no such file" if isinstance(error, OSError) else f"{type(error).__name__}: {error}",
            remedy=COPY_AGAIN,
        ) from error
    names = ((".".join(each), each[:-1] if each[-1:] == ["value"] else each) for each in keys)
    return under_new_names(((stored, ".".join(parts), stored) for stored, parts in names), path / METADATA)


def _keys(entry: Mapping[str, Any]) -> list[str]:
    keys = [str(each["key"]) for each in entry["key_metadata"]]
    if not keys or any("/" in key or "\0" in key or key in ("", ".", "..") for key in keys):
        raise ValueError(f"the keys {keys}")
    return keys


def _root(leaves: Mapping[str, str], path: Path) -> str:
    """The prefix of the model's arrays. Raises ReshardError if no tree of MaxText is there."""
    for root in PARAMETER_PATHS:
        prefix = "".join(f"{part}." for part in root)
        if any(name.startswith(f"{prefix}token_embedder.") for name in leaves):
            return prefix
    problem = foreign.problem(foreign.ORBAX, path)
    names = listed(sorted(leaves), 3)
    arrays = f"arrays called {names}" if leaves else "no arrays"
    raise ReshardError(
        replace(problem, expected="params.params.token_embedder.embedding, as of MaxText", found=arrays)
    )


def _sorted_leaves(leaves: Mapping[str, str], root: str) -> tuple[dict[str, str], dict[str, str]]:
    """The model's arrays by name, as they are stored, and the others, with the rule for each."""
    weights: list[tuple[str, str, str]] = []
    others: dict[str, str] = {}
    for name, stored in leaves.items():
        rule = rule_of(name, NOT_WEIGHTS) or rule_of(name.removeprefix(root), NOT_WEIGHTS)
        if rule:
            others[stored] = rule
        else:
            weights.append((name, name.removeprefix(root), stored))
    return under_new_names(weights), others


def _refuse_adapters(names: Iterable[str], path: Path) -> None:
    adapters = [name for name in names if _LORA.fullmatch(name) and not rule_of(name, NOT_WEIGHTS)]
    if adapters:
        raise ReshardError(
            "orbax-with-lora",
            "the checkpoint contains LoRA adapters",
            tensor=listed(sorted(adapters), 3),
            file=str(path),
            rule="the model is the sum of its weights and their adapters, which reshard does not compute for MaxText",
            remedy="merge them with MaxText's to_huggingface (lora.lora_restore_path=…), then convert what it writes",
        )


def _is_scanned(names: Iterable[str]) -> bool:
    return any(re.match(r"decoder\.\w*layers\.(?!\d)", name) for name in names)


def _order_note(names: Iterable[str]) -> Iterator[str]:
    """A note if nothing in the arrays tells the order of rotary rows."""
    names_text = "\n".join(names)
    if "self_attention.query.kernel" in names_text and not _ORDERED.search(names_text):
        yield (
            "MaxText interleaves the rotary rows of llama3.1 alone, and nothing here says which model this is: "
            "they are read so if rope_type is llama3 in config.json"
        )


def _notes(path: Path, dropped: Mapping[str, int]) -> Iterator[str]:
    if OPTIMIZER_STATES in dropped:
        yield "the optimizer states are left out: only the weights of MaxText's checkpoints are converted"
    steps = path.resolve().parent.parent
    unfinished = sorted(each.name for each in steps.iterdir() if UNFINISHED_FOLDER.fullmatch(each.name))
    if unfinished:
        yield f"these saves did not finish, and are ignored: {listed(unfinished, 3)}"


# ---------------------------------------------------------------------------------------- the arrays


class _ArrayReader:
    """Makes tensors of arrays, and collects problems."""

    def __init__(self, folder: Path, sources: Sources) -> None:
        self._folder, self._sources = folder, sources
        self._container = open_arrays(folder)
        if self._container.is_database and not (folder / DATABASE).is_file():
            raise ReshardError(
                "orbax-database-missing",
                "the file that leads to all arrays of an Orbax checkpoint is missing",
                file=str(folder / DATABASE),
                rule=f"use_ocdbt in {METADATA}: the arrays are in a database",
                remedy=COPY_AGAIN,
            )
        self._problems: list[Problem] = []
        self._largest = 0
        for file in sorted(folder.rglob("*")):  # tensorstore opens them unseen
            if file.is_file():
                sources.open(file).close()

    @property
    def variant(self) -> str:
        """The variant of the container."""
        kind = "zarr 3" if self._container.is_zarr3 else "zarr 2"
        return f"{kind} in OCDBT" if self._container.is_database else kind

    def tensor(self, name: str, stored: str) -> Tensor:
        """A complete tensor as a view over the chunks of an array."""
        if self._container.is_plain(stored):
            return self._uncompressed_tensor(
                name, zarr_arrays.read_array(self._folder / stored, self._sources)
            )
        array = self._container.array(stored)
        dtype = BY_NAME.get(array.dtype)
        if dtype is None:
            raise ReshardError(
                "orbax-dtype-unsupported",
                "an array has a dtype that reshard does not know",
                tensor=name,
                file=str(self._folder),
                expected=", ".join(BY_NAME),
                found=array.dtype,
                remedy="convert a checkpoint whose weights are not quantized",
            )
        if missing := self._container.missing_chunks(stored):
            self._problems.append(self._incomplete_problem(name, array, missing))
        parts = []
        for at in places(array.counts):
            low, size = array.box(at)
            storage = Storage(chunk_url(self._folder, stored, at), 0, prod(size) * dtype.itemsize)
            self._sources.open(storage.path).close()
            self._largest = max(self._largest, storage.nbytes)
            parts.append((low, View.of(Cells(storage, dtype), *size)))
        return Tensor(dtype, assemble(array.shape, parts))

    def _uncompressed_tensor(self, name: str, array: ZarrArray) -> Tensor:
        """A tensor whose chunks are not compressed, as reshard writes them."""
        lacking = zarr_arrays.missing_chunks_problem(name, array)
        self._problems += [lacking] if lacking else zarr_arrays.size_problems(array, self._sources)
        parts = [
            (chunk.offsets, Tensor.stored(zarr_arrays.read_chunk(array, chunk)).view)
            for chunk in array.chunks
        ]
        return Tensor(array.dtype, assemble(array.shape, parts))

    def nbytes(self, stored: str) -> int:
        """The bytes of an array that is left out."""
        array = self._container.array(stored)
        dtype = BY_NAME.get(array.dtype)
        return prod(array.shape) * (dtype.itemsize if dtype else 1)

    def finish(self) -> None:
        """Raise ReshardError listing the arrays that are incomplete, or if memory for a chunk is lacking."""
        raise_all(self._problems)
        if self._sources.meter:
            self._sources.meter.set_aside(3 * self._largest, str(self._folder))

    def _incomplete_problem(self, name: str, array: ArrayShape, missing: list[str]) -> Problem:
        return Problem(
            "orbax-chunks-missing",
            "chunks of an array are missing",
            tensor=name,
            file=str(self._folder),
            rule="Orbax stores every chunk of an array",
            expected=f"{list(array.shape)} in chunks of {list(array.chunk)}",
            found=f"without {listed(missing, 3)}",
            remedy=COPY_AGAIN,
        )
