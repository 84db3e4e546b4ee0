"""InternEvo's checkpoints: one `model_tp{T}_pp{P}.pt` for each rank.

Under weight parallelism (ISP) it is `model_tp{T}_wp{W}_pp{P}.pt`, later `model_wp{W}_pp{P}.pt`. Experts lie in files of
their own. Tensors are joined over ranks here; how their names relate to the hub's is in `families/internlm.py`.
Source: `checkpoint/components.py` of InternEvo 0.4.9, and files that it wrote.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from reshard.checkpoint import Checkpoint, Iteration, Tensor
from reshard.errors import Problem, ReshardError
from reshard.formats.companions import CONFIG as HUB_CONFIG
from reshard.formats.companions import read_object
from reshard.formats.internlm.config import (
    CONFIG,
    EXPERTS_PER_TOKEN,
    INTERLEAVED,
    hub_config,
    read_model_config,
    rows_are_interleaved,
    stated_type,
    unlike_the_hub,
)
from reshard.formats.internlm.names import in_new_order, is_old_order, mlp_shapes, with_fused_attention
from reshard.formats.internlm.shards import COPY, Rank, Shards
from reshard.formats.names import without_buffers
from reshard.formats.torchfiles.read import read_torch_file
from reshard.layout import Layout, SavedLayout
from reshard.storage import StoredTensor

NAME = "internlm"
WHAT = "InternEvo checkpoint, a file for each rank (model_tp*_pp*.pt)"

_RANK = re.compile(r"model_(?:tp(\d+)(?:_wp(\d+))?|wp(\d+))_pp(\d+)\.pt")
_EXPERT = re.compile(r"model_moe_layer(\d+)_expert(\d+)_(tp|wp)(\d+)\.pt")
_FSDP = re.compile(r"model_tp\d+_pp\d+_(?:dp|zo)\d+\.pt")


def detect(path: Path) -> bool:
    """Whether `path` is a folder with the files of ranks."""
    return path.is_dir() and any(
        (_RANK.fullmatch(child.name) or _FSDP.fullmatch(child.name)) for child in path.glob("model_*.pt")
    )


def open_checkpoint(path: Path, iteration: Iteration | None = None) -> Checkpoint:
    """Open the checkpoint in a folder. Raises ReshardError naming every rank that is missing or does not fit."""
    folder = _step(path, iteration)
    files = _ranks(folder)
    config = read_model_config(folder)
    contents, dropped = _read(files)
    kind, notes = _kind(folder, contents)
    if kind == "internlm2":
        contents = {rank: with_fused_attention(content) for rank, content in contents.items()}
    old, unknown = _order(contents)
    notes += unknown
    shards = _collected(folder, contents, old)
    tensors = shards.tensors(folder, config)
    interleaved, note = rows_are_interleaved(kind, config)
    notes += [note] if note else []
    if kind == "internlm_moe":
        notes.append(f"{CONFIG} does not say how many experts see a token: {EXPERTS_PER_TOKEN} are assumed")
    dropped["optimizer states"] = sum(file.stat().st_size for file in folder.glob("optimizer_*.pt"))
    return Checkpoint(
        path=folder,
        format=NAME,
        dialect=("internlm2" if kind in ("internlm2", "llama") else "internlm")
        + (INTERLEAVED if interleaved else ""),
        tensors=tensors,
        root=folder,
        layout=SavedLayout.of(Layout(shards.tensor_ranks, shards.stages, shards.chunks)),
        iteration=int(step) if (step := folder.resolve().name).isdecimal() else None,
        config=hub_config(kind, config, tensors, shards.layers) if config else None,
        dropped=+dropped,
        replicas=shards.replicas,
        problems=[*shards.copies.problems(), *unlike_the_hub(config or {}, folder)],
        notes=notes,
        variant=kind + (f", weight-parallel over {shards.weight_ranks}" if shards.weight_ranks > 1 else ""),
    )


def _step(path: Path, iteration: Iteration | None) -> Path:
    """The folder of the step that was asked for: InternEvo names folders by their steps."""
    if iteration is None or path.resolve().name == str(iteration):
        return path
    asked = path.resolve().parent / str(iteration)
    if path.resolve().name.isdecimal() and detect(asked):
        return asked
    raise ReshardError(
        "there is no such iteration",
        file=str(asked),
        expected=f"the folder {iteration} with model_tp*_pp*.pt",
        found=str(path),
        remedy="name the folder of the step, or leave out --iteration",
    )


def _ranks(folder: Path) -> dict[Rank, Path]:
    """The file of each rank. Raises ReshardError for those that must be there by the others, and are not."""
    found = {}
    for path in folder.glob("model_*.pt"):
        if match := _RANK.fullmatch(path.name):
            tp, wp, only_wp, pp = match.groups()
            found[Rank(_number(tp), _number(wp or only_wp), int(pp))] = path
    if not found:
        raise ReshardError(
            "the weights are sharded by FSDP",
            file=str(folder),
            expected="model_tp*_pp*.pt, a file for each tensor-parallel rank",
            found=", ".join(sorted(child.name for child in folder.glob("model_*.pt"))[:4]),
            remedy="load it with InternEvo and save it with zero1=dict(fsdp=False)",
        )
    if problems := _missing(found):
        raise ReshardError(problems)
    return dict(sorted(found.items(), key=lambda item: _order_of(item[0])))


def _number(digits: str | None) -> int | None:
    return None if digits is None else int(digits)


def _order_of(rank: Rank) -> tuple[int, int, int]:
    return rank.pp, rank.tp or 0, rank.wp or 0


def _missing(found: Mapping[Rank, Path]) -> list[Problem]:
    """Under weight parallelism a rank has both coordinates at once, so only some pairs of them have a file."""
    tp, wp, pp = (1 + max(number or 0 for number in numbers) for numbers in zip(*found, strict=True))
    example, path = next(iter(found.items()))
    pairs = {(r % tp, r % wp) for r in range(max(tp, wp))}
    wanted = {
        Rank(None if example.tp is None else t, None if example.wp is None else w, p)
        for t, w in pairs
        for p in range(pp)
    }
    return [
        Problem(
            "the file of a rank is missing",
            file=str(path.with_name(_name(rank, path.name))),
            rule=f"{len(wanted)} ranks have a file each",
            found=f"{len(found)} files",
            remedy=COPY,
        )
        for rank in sorted(wanted - found.keys(), key=_order_of)
    ]


def _name(rank: Rank, like: str) -> str:
    """The name of a rank's file, in the pattern of another's."""
    values = {"tp": rank.tp, "wp": rank.wp, "pp": rank.pp}
    return re.sub(r"(tp|wp|pp)\d+", lambda match: f"{match[1]}{values[match[1]]}", like)


def _read(files: Mapping[Rank, Path]) -> tuple[dict[Rank, dict[str, Tensor]], Counter[str]]:
    """The tensors of each rank's file, and what is left out of them."""
    dropped: Counter[str] = Counter()
    contents = {}
    for rank, path in files.items():
        contents[rank] = _tensors(path)
        dropped["rotary buffers"] += without_buffers(contents[rank])
    return contents, dropped


def _tensors(path: Path) -> dict[str, Tensor]:
    content = read_torch_file(path)
    if not isinstance(content, dict) or not all(isinstance(each, StoredTensor) for each in content.values()):
        raise ReshardError(
            "not the weights of a rank",
            file=str(path),
            expected="a dict of tensors",
            found=type(content).__name__,
            remedy="InternEvo saves a state dict here: copy the file again, or save the model once more",
        )
    return {key: Tensor.stored(stored) for key, stored in content.items()}


def _kind(folder: Path, contents: Mapping[Rank, Mapping[str, Tensor]]) -> tuple[str, list[str]]:
    """The hub's model type, and what was assumed to find it.

    Llama and InternLM2 as newer versions save it have the same names, and only a config tells them apart.
    """
    names = [name for content in contents.values() for name in content]
    if any(".blocks." in f".{name}" for name in names):
        return ("internlm_moe" if any(".moe_layer." in name for name in names) else "internlm"), []
    if any(name.endswith("attention.wqkv.weight") for name in names):
        return "internlm2", []
    stated = stated_type(folder)
    if stated is None and (folder / HUB_CONFIG).is_file():
        stated = read_object(folder / HUB_CONFIG).get("model_type")
    if stated in ("llama", "internlm2"):
        return stated, []
    note = (
        "wq, wk and wv are taken for Llama's; if the model is InternLM2, put its config.json beside the files"
    )
    return "llama", [note]


def _order(contents: Mapping[Rank, Mapping[str, Tensor]]) -> tuple[bool, list[str]]:
    """Whether w2 and w3 are swapped, as before InternEvo 0.3.0, and a note if that cannot be seen."""
    groups = [shapes for content in contents.values() for shapes in mlp_shapes(content)]
    orders = {order for shapes in groups if (order := is_old_order(shapes)) is not None}
    if orders or not groups:
        return True in orders, []
    shape = list(groups[0]["w2"])
    return False, [
        f"w2 and w3 are both {shape}: taken in the order of InternEvo 0.3.0 and later (w3 is up, w2 down)"
    ]


def _collected(folder: Path, contents: Mapping[Rank, Mapping[str, Tensor]], old: bool) -> Shards:
    """The tensors of all ranks and experts, under the names of the whole model."""
    shards = Shards()
    for rank, content in contents.items():
        shards.count(rank, content)
    for rank, content in contents.items():
        shards.add(rank, {in_new_order(key): tensor for key, tensor in content.items()} if old else content)
    _add_experts(folder, shards, old)
    return shards


def _add_experts(folder: Path, shards: Shards, old: bool) -> None:
    """Add the files of experts, each of which is one shard of one expert of one layer."""
    for path in sorted(folder.glob("model_moe_layer*.pt")):
        match = _EXPERT.fullmatch(path.name)
        if match is None:
            continue
        tensors = _tensors(path)
        if old or any(is_old_order(shapes) for shapes in mlp_shapes(tensors)):
            tensors = {in_new_order(key): tensor for key, tensor in tensors.items()}
        stage = shards.stage_of_experts(int(match[1]), path)
        index = int(match[4])
        rank = Rank(None, index, stage) if match[3] == "wp" else Rank(index, None, stage)
        shards.add(rank, tensors)
