"""FSDP with one file per rank: `torch.save` of sharded state dicts, as verl and accelerate write them.

Files contain `DTensor`s (FSDP2, FSDP1 with a mesh, tensor parallelism) or `ShardedTensor`s (FSDP1 without a mesh), each
with the shard of one rank; or views of flat parameters (`flat`: LOCAL_STATE_DICT of FSDP1). If FSDP gathered the model,
one file has plain tensors. Sources: verl 0.9 `utils/checkpoint/fsdp_checkpoint_manager.py`, accelerate 1.15
`utils/fsdp_utils.py`, torch 2.13 `distributed/fsdp/_state_dict_utils.py`, and files that they wrote.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reshard.base.errors import listed
from reshard.containers.torchfiles.read import read_dict
from reshard.families.dialect import HUB
from reshard.folders import iterations
from reshard.folders.iterations import Iteration
from reshard.formats import flat_parameters
from reshard.formats.checkpoint import Checkpoint, ModelDescription
from reshard.formats.detection import FSDP_RANKS
from reshard.formats.fsdp_ranks.optimizer_states import RankFileData, find_optimizer
from reshard.formats.fsdp_ranks.rank_files import RankFiles, check_names, choose
from reshard.formats.fsdp_ranks.tensor_parts import FLAT, CollectedParts, Parts, find_parts, joined, writers
from reshard.formats.optimizer import OPTIMIZER_STATES, OptimizerContents
from reshard.formats.state_dict_names import without_buffers
from reshard.transfer.source_files import Sources

_LEFT_BEHIND = {"optim": OPTIMIZER_STATES, "extra_state": "training state"}
_NESTED = ("state_dict", "model", "module")

_FLAT_NOTE = (
    "FSDP1 flattened the parameters (LOCAL_STATE_DICT), and their shapes come from config.json; pass "
    "the Hugging Face folder that training started from: --base DIR"
)


def open_checkpoint(path: Path, sources: Sources, iteration: Iteration | None = None) -> Checkpoint:
    """Open the files of all ranks. Raises ReshardError naming every rank and every shard that is missing."""
    iterations.refuse(path, iteration, "a folder of FSDP ranks")
    files = choose(path)
    check_names(files)
    nested: Counter[str] = Counter()
    collected = find_parts(files, lambda file: _state_dict(file, sources, nested))
    return _checkpoint(path, files, collected, nested + collected.others, sources)


def _checkpoint(
    path: Path, files: RankFiles, collected: CollectedParts, entries: Counter[str], sources: Sources
) -> Checkpoint:
    parts = collected.parts
    tensors, replicas = joined(parts)
    flats = [tensors.pop(name) for name in list(tensors) if name.endswith(FLAT)]
    dropped = _left_behind(files.folder)
    dropped["rotary buffers"] = without_buffers(tensors)
    notes = _notes(files, parts, entries)
    names = _parameters(parts)
    optimizer = find_optimizer(files, names, sources)
    if isinstance(optimizer, str):
        notes.append(f"the {OPTIMIZER_STATES} cannot be converted: {optimizer}")
        optimizer = None
    elif optimizer:
        dropped[OPTIMIZER_STATES] = optimizer.nbytes
    whole = frozenset(name for name, pairs in parts.items() if pairs[0][1].kind == "plain")
    return Checkpoint(
        path=path,
        format=FSDP_RANKS,
        dialect=HUB,
        tensors=tensors,
        description=ModelDescription(files.folder),
        dropped=+dropped,
        replicas=[replica for replica in replicas if replica.tensor in tensors],
        notes=notes,
        variant=", ".join(sorted({part.kind for pairs in parts.values() for _, part in pairs})),
        optimizer=optimizer.contents if optimizer else OptimizerContents(),
        native=RankFileData(not flats, mesh=collected.mesh, whole=whole, names=names, optimizer=optimizer),
    )


def _parameters(parts: Mapping[str, Parts]) -> tuple[str, ...]:
    """The sharded tensors in the order of the model, which is that of its optimizer; one with two names counts once."""
    names: dict[Any, str] = {}
    for name, pairs in parts.items():
        _, part = pairs[0]
        if part.kind != "plain":
            cells = [(piece.source, piece.start) for box in part.boxes for piece in box.view.pieces]
            names.setdefault(tuple(cells) or name, name)
    return tuple(names.values())


def _state_dict(file: Path, sources: Sources, others: Counter[str]) -> dict[Any, Any]:
    """The model's state dict. If it is nested in another dict, the keys of that dict's other entries go to `others`."""
    content = read_dict(
        file,
        sources,
        "fsdp-not-a-state-dict",
        "not a state dict",
        "save the model's state_dict() on every rank",
    )
    for key in _NESTED:
        if isinstance(content.get(key), dict):
            others.update(str(other) for other in content if other != key)
            content = content[key]
    return content


def _left_behind(folder: Path) -> Counter[str]:
    dropped: Counter[str] = Counter()
    for file in folder.iterdir():
        for prefix, what in _LEFT_BEHIND.items():
            if file.name.startswith(prefix) and file.suffix in (".pt", ".pth", ".bin"):
                dropped[what] += file.stat().st_size
    return dropped


def _notes(files: RankFiles, parts: Mapping[str, Parts], entries: Counter[str]) -> list[str]:
    every = [part for pairs in parts.values() for _, part in pairs]
    spreads = sorted({part.spread for part in every if part.kind not in ("plain", flat_parameters.KIND)})
    whole = [name for name, pairs in parts.items() if pairs[0][1].kind == "plain"]
    notes = [f"{len(files.ranks)} ranks; tensors are placed as {'; '.join(spreads)}"] if spreads else []
    if whole and len(files.ranks) > 1:
        notes.append(f"replicated on every rank, not sharded: {listed(whole, 1)}")
    if renamed := [rank for rank, wrote in writers(files, parts).items() if wrote != rank]:
        which = ", ".join(files.ranks[rank].name for rank in renamed)
        notes.append(f"renamed, but read correctly, because the tensors record their position: {which}")
    if any(name.endswith(FLAT) for name in parts):
        notes.append(_FLAT_NOTE)
    if entries:
        notes.append(f"skipped, because they are not weights: {', '.join(sorted(entries))}")
    return notes
