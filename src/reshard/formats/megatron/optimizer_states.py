"""The optimizer in Megatron-Core's torch_dist: one tensor of each state for each weight, cut like the weight.

`optimizer.state.exp_avg.<key of the weight>` and so on, in float32; all other data are in `common.pt`. The distributed
optimizer saves this with `--dist-ckpt-optim-fully-reshardable`; its default is flat buffers (`buffers.py`). Source:
megatron-core 0.16.1, `optimizer/optimizer.py`, `optimizer/distrib_optimizer.py`, `dist_checkpointing/optimizer.py`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reshard.algebra.dtypes import castable
from reshard.algebra.storage import StoredTensor
from reshard.algebra.tensors import Replica, Tensor
from reshard.base.errors import UNUSABLE
from reshard.containers.dcp_metadata import DcpChunk, DcpTensor
from reshard.containers.torchfiles.read import read_torch_file, scalar
from reshard.containers.torchfiles.untrusted import number_of
from reshard.containers.torchfiles.write import NewTensor, layout_torch_file
from reshard.formats.optimizer import MASTER_STATE, MOMENTS, MOMENTUM, Adam, settings_of
from reshard.transfer.plan import Block, OutputFile, Planned
from reshard.transfer.source_files import Sources

_STATES = {
    **{state: state for state in (*MOMENTS, MOMENTUM)},
    **dict.fromkeys(("fp32_param", "param"), MASTER_STATE),
}
_KEY = re.compile(rf"((?:chained_\d+\.)?optimizer\.state\.({'|'.join(_STATES)})\.)(.+)")
_SHARDING = "distrib_optim_sharding_type"
_MEM_EFFICIENT = "distrib_optim_fully_reshardable_mem_efficient"
_PORTABLE = "fully_reshardable"

NOT_PORTABLE = (
    "the optimizer states are bound to the layout that saved them; "
    "Megatron-LM saves portable ones with --dist-ckpt-optim-fully-reshardable"
)


NUMBERED_STATES = (
    "the optimizer states of torch_dcp have numbers instead of the names of weights, and are left out; "
    "Megatron-LM saves named ones with --ckpt-format torch_dist"
)


def portable_states(tensors: Mapping[str, DcpTensor]) -> dict[str, dict[str, DcpTensor]]:
    """The states that have the shapes of their weights, by state ("exp_avg" …) and key of the weight.

    Older versions of the distributed optimizer flatten their states, which are therefore left out.
    """
    states: dict[str, dict[str, DcpTensor]] = {}
    for key, tensor in tensors.items():
        match = _KEY.fullmatch(key)
        weight = tensors.get(match[3]) if match else None
        if match and weight and weight.shape == tensor.shape:
            states.setdefault(_STATES[match[2]], {})[match[3]] = tensor
    return states


def rounding(name: str, weight: Tensor, masters: Tensor, remedy: str) -> Replica:
    """The comparison of a weight with its masters, which Megatron rounds into it after each step."""
    return Replica(
        name,
        weight,
        Tensor(weight.dtype, masters.view),
        "masters, rounded, are the weights: this proves which states belong to which weight",
        remedy,
        "optimizer-masters-differ",
        "an optimizer state does not belong to its weight",
    )


def roundings(weights: Mapping[str, Tensor], states: Mapping[str, Mapping[str, Tensor]]) -> list[Replica]:
    """The comparisons of all weights with their masters, if there are any."""
    return [
        rounding(name, weights[name], masters, _NOT_ROUNDED)
        for name, masters in states.get("fp32", {}).items()
        if name in weights and weights[name].shape == masters.shape
        if castable(weights[name].dtype) and castable(masters.dtype)
    ]


_NOT_ROUNDED = (
    "leave out --with-optimizer to convert the weights alone; megatron-core 0.16 saves wrong states with "
    "dist_ckpt_optim_fully_reshardable if it pads several buckets: save again without that option"
)


def split_key(key: str) -> tuple[str, str]:
    """The beginning of the key of a state, such as "optimizer.state.exp_avg.", and the key of its weight.

    The beginning is empty for the key of a weight.
    """
    match = _KEY.fullmatch(key)
    return (match[1], match[3]) if match else ("", key)


def with_groups(
    common: Mapping[str, Any], objects: Mapping[str, DcpChunk], sources: Sources
) -> Mapping[str, Any]:
    """`common.pt` of a run whose optimizers are bound to a layout, as if it had saved portable ones.

    Each rank of such a run stores the parameter groups of its optimizers as objects, which have the same settings.
    """
    links: dict[int, dict[str, Any]] = {}
    for key in sorted(objects, key=_group_of):
        match = _GROUPS.fullmatch(key)
        if match and match[3] not in (link := links.setdefault(int(match[1] or 0), {})):
            content = read_torch_file(objects[key].file, sources, objects[key].offset, objects[key].length)
            link[match[3]] = content[0] if isinstance(content, list) and content else content
    chain = [{**links[index], "param_state_sharding_type": _PORTABLE} for index in sorted(links)]
    if not chain:
        return common
    of_muon = _chain(common.get("optimizer") or {})[: min(links)]  # which is not bound to a layout
    chain = [*of_muon, *chain]
    content = {**(common.get("content_metadata") or {}), _SHARDING: _PORTABLE, _MEM_EFFICIENT: False}
    optimizer = dict(enumerate(chain)) if len(chain) > 1 else chain[0]
    return {**common, "optimizer": optimizer, "content_metadata": content}


_GROUPS = re.compile(
    r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.(optimizer|grad_scaler)/shard_0_1"
)


def _group_of(key: str) -> int:
    match = _GROUPS.fullmatch(key)
    return int(match[2]) if match else 0


def read_optimizer(common: Mapping[str, Any]) -> Adam | None:
    """The optimizer data in `common.pt`; None if no other layout could use them."""
    try:
        chain = _chain(common["optimizer"])
        groups = _torch_state(chain[0])["param_groups"]
        step = next((step for link in chain if (step := _step_of(link)) is not None), None)
        steps = scalar(step) if isinstance(step, StoredTensor) else step
        content = common.get("content_metadata") or {}
        native = {
            "chain": chain,
            "entries": {key: common[key] for key in _BESIDE if key in common},
            "content": {key: content[key] for key in (_SHARDING, _MEM_EFFICIENT) if key in content},
        }
        if number_of(native, MAX_VALUES) > MAX_VALUES:
            return None
        return Adam(None if steps is None else int(steps), settings_of(groups[0]), native)
    except UNUSABLE:
        return None


def _step_of(link: Mapping[str, Any]) -> Any:
    """The step that an optimizer counts. Muon counts none."""
    state = _torch_state(link)
    return state["param_groups"][0].get("step", state.get("state", {}).get("common_step"))


MAX_VALUES = 1 << 20
"""Maximum number of values in the optimizer's part of `common.pt`, which is written again unchanged."""
_BESIDE = ("opt_param_scheduler", "num_floating_point_operations_so_far")
_WRAPPED = ("grad_scaler", "param_state_sharding_type")


def _chain(entry: Any) -> list[dict[str, Any]]:
    """The optimizers of a run, by number: one, or two with expert parallelism, the second for experts."""
    if entry and all(type(key) is int for key in entry):
        return [entry[index] for index in sorted(entry)]
    return [entry]


def _torch_state(link: Mapping[str, Any]) -> dict[str, Any]:
    """torch's own state dict, which mixed precision and the distributed optimizer wrap in another dict."""
    return dict(link.get("optimizer", link))


def is_megatrons(optimizer: Adam) -> bool:
    """Whether Megatron saved it. Another engine's becomes a distributed optimizer; see `_adopted`."""
    return "chain" in optimizer.native


def is_distributed(optimizer: Adam) -> bool:
    """Whether it is Megatron's distributed optimizer, which needs `--use-distributed-optimizer`."""
    return not is_megatrons(optimizer) or bool(optimizer.native["content"].get(_SHARDING))


def _adopted(optimizer: Adam) -> Adam:
    """Another engine's optimizer as Megatron's distributed one, with a new schedule.

    The distributed one stores the step in its groups, whichever Adam it wraps. Groups have the settings of torch's Adam
    and of Transformer Engine's; Megatron adds the rest.
    """
    lr, decay = optimizer.settings.get("lr", 0.0), optimizer.settings.get("weight_decay", 0.0)
    group = {
        **dict.fromkeys(("is_expert_parallel", "is_decoupled_lr"), False),
        **dict.fromkeys(("lr", "max_lr", "min_lr"), lr),
        "lr_mult": 1.0,
        "bias_correction": True,
        "betas": optimizer.settings.get("betas", (0.9, 0.999)),
        "eps": optimizer.settings.get("eps", 1e-8),
    }
    groups = [{**group, "wd_mult": factor, "weight_decay": decay * factor} for factor in (1.0, 0.0)]
    schedule = {"max_lr": lr, "min_lr": lr, "lr_decay_style": "constant", "wd_incr_style": "constant"}
    schedule |= {"start_wd": decay, "end_wd": decay, "lr_warmup_steps": 0, "num_steps": 0}
    schedule |= {"lr_decay_steps": 1, "wd_incr_steps": 1}
    return distributed_of(optimizer.step, groups, {"opt_param_scheduler": schedule}, optimizer.settings)


def distributed_of(
    step: int | None,
    groups: list[dict[str, Any]],
    entries: Mapping[str, Any],
    settings: Mapping[str, Any] | None = None,
) -> Adam:
    """A distributed optimizer with these parameter groups; those of parallel experts are an optimizer of their own."""
    groups = [{**group, "step": step or 0} for group in groups]
    chains = (
        [group for group in groups if bool(group.get("is_expert_parallel")) is own] for own in (False, True)
    )
    native = {
        "chain": [
            {"optimizer": {"param_groups": chain}, "param_state_sharding_type": _PORTABLE}
            for chain in chains
            if chain
        ],
        "entries": {**entries},
        "content": {_SHARDING: _PORTABLE, _MEM_EFFICIENT: False},
    }
    return Adam(step, settings_of(groups[0]) if settings is None else settings, native)


@dataclass(frozen=True)
class MegatronOptimizer:
    """An optimizer to write: `states` by state and name of the weight, and values for `common` and `content_metadata`.

    `load_with` are the flags to load it with Megatron-LM.
    """

    states: Mapping[str, Mapping[str, Planned]]
    common: Mapping[str, Any]
    content_metadata: Mapping[str, Any]
    load_with: tuple[str, ...] = ()

    @property
    def is_distributed(self) -> bool:
        """Whether a run loads it with `--use-distributed-optimizer`."""
        return bool(self.content_metadata.get(_SHARDING))

    @property
    def groups(self) -> list[dict[str, Any]]:
        """All parameter groups."""
        return [
            group for link in _chain(self.common["optimizer"]) for group in _torch_state(link)["param_groups"]
        ]

    def keyed(self) -> dict[str, Mapping[str, Planned]]:
        """The states by the prefix of their keys."""
        keyed: dict[str, dict[str, Planned]] = defaultdict(dict)
        of_muon = self.states.get(MOMENTUM, {})
        for state, planned in self.states.items():
            for name, tensor in planned.items():
                distributed = self.is_distributed and name not in of_muon
                masters = "param" if distributed else "fp32_param"
                keyed[f"optimizer.state.{masters if state == MASTER_STATE else state}."][name] = tensor
        return dict(keyed)


def new_optimizer(
    optimizer: Adam,
    states: Mapping[str, Mapping[str, Planned]],
    *,
    mixed_precision: bool,
    expert_parallel: bool,
) -> MegatronOptimizer:
    """The optimizer as a run would save it, with or without 16-bit weights, and with or without expert parallelism.

    Muon is an optimizer before Adam. With `--use-distributed-optimizer` it is not distributed itself, but keeps whole
    matrices on each rank, those of experts among them (`layer_wise_optimizer.py` of megatron-core 0.19.2).
    """
    distributed = is_distributed(optimizer)
    flags = ["--no-load-rng", *(["--use-distributed-optimizer"] if distributed else [])]
    if not is_megatrons(optimizer):
        optimizer = _adopted(optimizer)
        flags.append("--override-opt_param-scheduler")
    if MOMENTUM in states:
        flags.append("--optimizer muon")
    chain = [_with_groups(link, [*_groups_of([link])]) for link in optimizer.native["chain"]]
    if not expert_parallel:
        chain = _without_experts(chain)
    elif not any(map(_is_of_experts, _groups_of(chain))):
        biased = any(".experts." in name and name.endswith(".bias") for name in states["exp_avg"])
        chain = _with_experts(chain, biased, layer_wise=distributed and MOMENTUM in states)
    if not (distributed or mixed_precision):
        chain = [_torch_state(link) for link in chain]
    return MegatronOptimizer(
        states,
        {"optimizer": dict(enumerate(chain)) if len(chain) > 1 else chain[0], **optimizer.native["entries"]},
        optimizer.native["content"],
        tuple(flags),
    )


def _groups_of(chain: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for link in chain:
        yield from _torch_state(link)["param_groups"]


def _is_of_experts(group: Mapping[str, Any]) -> bool:
    return bool(group.get("is_expert_parallel"))


def _with_groups(link: Mapping[str, Any], groups: list[Any]) -> dict[str, Any]:
    """The same optimizer with other parameter groups, in the dict of mixed precision."""
    beside = {key: value for key, value in link.items() if key in _WRAPPED}
    return {"optimizer": {**_torch_state(link), "param_groups": groups}, **beside}


def _without_experts(chain: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The optimizers of a run without expert parallelism, in which experts are ordinary weights."""
    groups = [[group for group in _groups_of([link]) if not _is_of_experts(group)] for link in chain]
    return [_with_groups(link, own) for link, own in zip(chain, groups, strict=True) if own]


def _with_experts(
    chain: Sequence[Mapping[str, Any]], biased: bool, *, layer_wise: bool
) -> list[dict[str, Any]]:
    """The same with the groups of parallel experts: in the first optimizer if it is `layer_wise`, else in the next.

    Experts are in no group of embedding and head, and in that without weight decay only if `biased`.
    """
    first, *others = map(dict, chain)
    own = [*_groups_of([first])]
    experts = [
        {**group, "is_expert_parallel": True}
        for group in own
        if not group.get("is_decoupled_lr") and (biased or group.get("wd_mult"))
    ]
    if layer_wise:
        return [_with_groups(first, own + experts), *others]
    return [first, _with_groups(first, experts), *others]


def torch_file(path: str, content: dict[str, Any]) -> OutputFile:
    """The file of `torch.save(content)`; each StoredTensor in it is copied from its file."""
    image = layout_torch_file(_renewed(content))
    blocks = [
        Block(
            f"{path}: {index}",
            slot.dtype,
            slot.shape,
            lambda stored=slot.key: Tensor.stored(stored).view,  # type: ignore[misc]
            slot.offset,
            slot.crc_at,
        )
        for index, slot in enumerate(image.slots)
    ]
    return OutputFile(path, image.size, blocks, lambda: iter(image.literals))


def _renewed(value: Any) -> Any:
    if isinstance(value, StoredTensor):
        return NewTensor(value, value.dtype, value.shape)
    if type(value) is dict:
        return {key: _renewed(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_renewed, value))
    return value
