"""InternEvo's checkpoints: one `model_tp{T}_pp{P}.pt` for each rank.

Under weight parallelism (ISP) it is `model_tp{T}_wp{W}_pp{P}.pt`, later `model_wp{W}_pp{P}.pt`. Experts are in separate
files. This module joins tensors over ranks; `families/dialects/internevo.py` maps their names to the Hub's. Source:
`checkpoint/components.py` of InternEvo 0.4.9, and files that it wrote.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from reshard.algebra.layout import Layout, SavedLayout
from reshard.algebra.storage import StoredTensor
from reshard.algebra.tensors import Tensor
from reshard.base.errors import Problem, ReshardError, raise_all
from reshard.base.merged_problems import one_for_each_file
from reshard.containers.torchfiles.read import read_torch_file
from reshard.families.dialects.internevo import dialect
from reshard.folders.companion_names import CONFIG as HUB_CONFIG
from reshard.folders.iterations import Iteration
from reshard.folders.json_objects import read_object
from reshard.formats.checkpoint import Checkpoint, ModelDescription
from reshard.formats.detection import INTERNLM, INTERNLM_RANK, is_internlm
from reshard.formats.internlm.join_shards import COPY_AGAIN, InternEvoRank, ShardCollector, another_rank
from reshard.formats.internlm.model_config import (
    ASSUMED,
    EXPERTS_PER_TOKEN,
    MODEL_CONFIG,
    QK_INTERLEAVED,
    SINCE_0_4,
    TRAINING_CONFIG,
    hub_config,
    read_model_config,
    rows_are_interleaved,
    stated_type,
    unlike_the_hub,
)
from reshard.formats.internlm.tensor_names import (
    in_new_order,
    is_old_order,
    mlp_shapes,
    place_of,
    with_fused_attention,
)
from reshard.formats.optimizer import OPTIMIZER_STATES
from reshard.formats.state_dict_names import without_buffers
from reshard.transfer.source_files import Sources

_EXPERT = re.compile(r"model_moe_layer(\d+)_expert(\d+)_(tp|wp)(\d+)\.pt")


def open_checkpoint(path: Path, sources: Sources, iteration: Iteration | None = None) -> Checkpoint:
    """Open the checkpoint in a folder. Raises ReshardError naming every rank that is missing or does not fit."""
    folder = _step(path, iteration)
    files = _ranks(folder)
    config = read_model_config(folder, sources)
    contents, dropped = _read(files, sources)
    kind = _kind(folder, sources, contents)
    unsettled = [*_unsettled(folder, sources, config, contents)]
    if kind == "internlm2":
        contents = {rank: with_fused_attention(content) for rank, content in contents.items()}
    shards = _collected(folder, sources, contents, _is_old(contents))
    tensors = shards.tensors(folder, config)
    derived = hub_config(kind, config, tensors, shards.layers) if config else None
    interleaved, note = rows_are_interleaved(kind, config or {})
    notes = [note] if note and config else []
    if kind == "internlm_moe":
        notes.append(
            f"{MODEL_CONFIG} does not record the number of experts per token: {EXPERTS_PER_TOKEN} are assumed"
        )
    dropped[OPTIMIZER_STATES] = sum(file.stat().st_size for file in folder.glob("optimizer_*.pt"))
    recorded = derived and {key: value for key, value in derived.items() if key != ASSUMED}
    return Checkpoint(
        path=folder,
        format=INTERNLM,
        dialect=dialect(
            "internlm2" if kind in ("internlm2", "llama") else "internlm", interleaved=interleaved
        ),
        tensors=tensors,
        description=ModelDescription(folder, config=derived, recorded=recorded),
        layout=SavedLayout.of(Layout(shards.tensor_ranks, shards.stages, shards.chunks)),
        iteration=int(step) if (step := folder.resolve().name).isdecimal() else None,
        dropped=+dropped,
        replicas=shards.collected.replicas,
        problems=[
            *(shards.collected.copies.problems() or one_for_each_file(shards.misplaced)),
            *unsettled,
            *unlike_the_hub(config or {}, folder),
        ],
        notes=notes,
        variant=kind + (f", weight-parallel over {shards.weight_ranks}" if shards.weight_ranks > 1 else ""),
    )


def _step(path: Path, iteration: Iteration | None) -> Path:
    """The folder of the requested step: InternEvo names folders by their steps."""
    if iteration is None or path.resolve().name == str(iteration):
        return path
    folder = path.resolve().parent / str(iteration)
    if path.resolve().name.isdecimal() and is_internlm(folder):
        return folder
    raise ReshardError(
        "internlm-iteration-not-found",
        "this iteration does not exist",
        file=str(folder),
        expected=f"the folder {iteration} with model_tp*_pp*.pt",
        found=str(path),
        remedy="pass the folder of the step, or leave out --iteration",
    )


def _ranks(folder: Path) -> dict[InternEvoRank, Path]:
    """The file of each rank. Raises ReshardError for missing ones, as far as the names of the others imply them."""
    files = {}
    for path in folder.glob("model_*.pt"):
        if match := INTERNLM_RANK.fullmatch(path.name):
            tp, wp, only_wp, pp = match.groups()
            files[InternEvoRank(_number(tp), _number(wp or only_wp), int(pp))] = path
    if not files:
        raise ReshardError(
            "internlm-fsdp-unsupported",
            "the weights are sharded by FSDP",
            file=str(folder),
            expected="model_tp*_pp*.pt, one file per tensor-parallel rank",
            found=", ".join(sorted(child.name for child in folder.glob("model_*.pt"))[:4]),
            remedy="load it with InternEvo and save it with zero1=dict(fsdp=False)",
        )
    raise_all(_missing(files))
    return dict(sorted(files.items(), key=lambda item: _order_of(item[0])))


def _number(digits: str | None) -> int | None:
    return None if digits is None else int(digits)


def _order_of(rank: InternEvoRank) -> tuple[int, int, int]:
    return rank.pp, rank.tp or 0, rank.wp or 0


def _missing(files: Mapping[InternEvoRank, Path]) -> list[Problem]:
    """Problems of missing files. Under weight parallelism a rank has both coordinates: only some pairs have a file."""
    tp, wp, pp = (1 + max(number or 0 for number in numbers) for numbers in zip(*files, strict=True))
    example, path = next(iter(files.items()))
    pairs = {(r % tp, r % wp) for r in range(max(tp, wp))}
    wanted = {
        InternEvoRank(None if example.tp is None else t, None if example.wp is None else w, p)
        for t, w in pairs
        for p in range(pp)
    }
    return [
        Problem(
            "internlm-rank-missing",
            "the file of a rank is missing",
            file=str(path.with_name(_name(rank, path.name))),
            rule=f"{len(wanted)} ranks have a file each",
            found=f"{len(files)} files",
            remedy=COPY_AGAIN,
        )
        for rank in sorted(wanted - files.keys(), key=_order_of)
    ]


def _name(rank: InternEvoRank, like: str) -> str:
    """The name of a rank's file, in the pattern of another name."""
    values = {"tp": rank.tp, "wp": rank.wp, "pp": rank.pp}
    return re.sub(r"(tp|wp|pp)\d+", lambda match: f"{match[1]}{values[match[1]]}", like)


def _read(
    files: Mapping[InternEvoRank, Path], sources: Sources
) -> tuple[dict[InternEvoRank, dict[str, Tensor]], Counter[str]]:
    """The tensors of each rank's file, and the bytes that are dropped."""
    dropped: Counter[str] = Counter()
    contents = {}
    for rank, path in files.items():
        contents[rank] = _tensors(path, sources)
        dropped["rotary buffers"] += without_buffers(contents[rank])
    return contents, dropped


def _tensors(path: Path, sources: Sources) -> dict[str, Tensor]:
    content = read_torch_file(path, sources)
    if not isinstance(content, dict) or not all(isinstance(each, StoredTensor) for each in content.values()):
        raise ReshardError(
            "internlm-file-without-weights",
            "not the weights of a rank",
            file=str(path),
            expected="a dict of tensors",
            found=type(content).__name__,
            remedy="InternEvo saves a state dict here: copy the file again, or save the model once more",
        )
    return {key: Tensor.stored(stored) for key, stored in content.items()}


def _kind(folder: Path, sources: Sources, contents: Mapping[InternEvoRank, Mapping[str, Tensor]]) -> str:
    """The Hub's model type. Llama, and InternLM2 of newer versions, have the same names (see `_unsettled`)."""
    names = [name for content in contents.values() for name in content]
    if any(".blocks." in f".{name}" for name in names):
        return "internlm_moe" if any(".moe_layer." in name for name in names) else "internlm"
    if any(name.endswith("attention.wqkv.weight") for name in names):
        return "internlm2"
    return _stated_model_type(folder, sources) or "llama"


def _stated_model_type(folder: Path, sources: Sources) -> str | None:
    """Llama or InternLM2, according to the training config or a config.json in the folder; None if neither says."""
    stated = stated_type(folder, sources)
    if stated is None and (folder / HUB_CONFIG).is_file():
        stated = read_object(folder / HUB_CONFIG, sources).get("model_type")
    return stated if stated in ("llama", "internlm2") else None


def _is_old(contents: Mapping[InternEvoRank, Mapping[str, Tensor]]) -> bool | None:
    """Whether w2 and w3 are swapped, as before InternEvo 0.3.0; None if the shapes are ambiguous."""
    orders = {is_old_order(shapes) for content in contents.values() for shapes in mlp_shapes(content)}
    return None if orders == {None} else True in orders


def _unsettled(
    folder: Path,
    sources: Sources,
    config: Mapping[str, Any] | None,
    contents: Mapping[InternEvoRank, Mapping[str, Tensor]],
) -> Iterator[Problem]:
    """Problems of settings that no file records, but the weights depend on. Some keys imply a newer version."""
    if config is None:
        yield Problem(
            "internlm-model-config-missing",
            f"there is no {MODEL_CONFIG}",
            file=str(folder / MODEL_CONFIG),
            rule="it records the order of the query and key rows, and what the model computes",
            remedy="copy it from where the step was saved, or from another step of the same run; or save the `model` "
            f"section of the training config: torch.save(model, '{MODEL_CONFIG}')",
        )
        return
    names = [name for content in contents.values() for name in content]
    sliced = any(name.endswith("attention.wq.weight") for name in names)
    if sliced and QK_INTERLEAVED in config and _stated_model_type(folder, sources) is None:
        yield Problem(
            "internlm-attention-ambiguous",
            "wq, wk and wv may be Llama's, or slices of InternLM2's wqkv",
            file=str(folder),
            rule=f"versions of InternEvo with {QK_INTERLEAVED} save both alike",
            expected=f"{TRAINING_CONFIG} with model_type, or a config.json",
            remedy=f"copy {TRAINING_CONFIG} from where the step was saved, or put the model's config.json there",
        )
    is_new = QK_INTERLEAVED in config or SINCE_0_4 in config or any(".wqkv." in name for name in names)
    if _is_old(contents) is None and not is_new:
        yield Problem(
            "internlm-feed-forward-ambiguous",
            "w2 and w3 have the same shape, and nothing says which of them is the down projection",
            file=str(folder),
            rule="w2 since InternEvo 0.3.0, w3 before",
            found=f"a {MODEL_CONFIG} without {SINCE_0_4}, which InternEvo 0.4 and later add",
            remedy=f"if w2 is the down projection, add {SINCE_0_4}=False to {MODEL_CONFIG}; "
            "else swap their names first",
        )


def _collected(
    folder: Path, sources: Sources, contents: Mapping[InternEvoRank, Mapping[str, Tensor]], old: bool | None
) -> ShardCollector:
    """The tensors of all ranks and experts, under the names of the complete model."""
    shards = ShardCollector()
    for rank, content in contents.items():
        shards.count(rank, content)
    for rank, content in contents.items():
        shards.add(rank, {in_new_order(key): tensor for key, tensor in content.items()} if old else content)
    _add_experts(folder, sources, shards, old)
    return shards


def _add_experts(folder: Path, sources: Sources, shards: ShardCollector, old: bool | None) -> None:
    """Add the files of experts; each contains one shard of one expert of one layer."""
    for path in sorted(folder.glob("model_moe_layer*.pt")):
        match = _EXPERT.fullmatch(path.name)
        if match is None:
            continue
        tensors = _tensors(path, sources)
        if old or any(is_old_order(shapes) for shapes in mlp_shapes(tensors)):
            tensors = {in_new_order(key): tensor for key, tensor in tensors.items()}
        layer, expert, index = int(match[1]), int(match[2]), int(match[4])
        stage = shards.stage_of_experts(layer, path)
        own = layer - stage * (shards.layers // shards.stages), f".experts.{expert}."
        for key in tensors:
            place = place_of(key)
            if shards.chunks == 1 and (place.layer != own[0] or own[1] not in place.module):
                shards.misplaced.append(another_rank(key, str(path), f"expert {expert} of layer {layer}"))
        rank = InternEvoRank(None, index, stage) if match[3] == "wp" else InternEvoRank(index, None, stage)
        shards.add(rank, tensors)
