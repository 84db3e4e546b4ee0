"""Write checkpoints of Megatron-FSDP: one folder that any number of ranks loads; see `fsdp_dtensor.py` for the names.

A run asks for the names of its own layer spec and version, and leaves what it does not find at random values, unless it
loads strictly. A tensor therefore has every name that a run may ask for, all for the same bytes:

    self_attention.linear_qkv.layer_norm_weight     Transformer Engine's; input_layernorm.weight of the local spec
    mlp.experts.linear_fc2.weight3                  grouped experts; local_experts.3.linear_fc2.weight in sequence
    mtp.layers.0.mtp_model_layer.                   megatron-core 0.17 to 0.19; transformer_layer before and after

Groups have what torch's Adam, Apex's and Transformer Engine's ask for.
"""

from __future__ import annotations

from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from reshard.algebra.dtypes import dtype
from reshard.algebra.layout import Layout
from reshard.base.errors import ReshardError
from reshard.containers.dcp_chunks import ChunkFolder
from reshard.containers.dcp_metadata import DcpChunk, DcpTensor
from reshard.containers.torchfiles.write import image_bytes, layout_torch_file
from reshard.families.dims import layer_pattern
from reshard.families.family import MCORE_BRIDGE
from reshard.folders import iterations
from reshard.formats.contract import Request
from reshard.formats.dcp.optimizer_states import DcpOptimizer as TorchOptimizer
from reshard.formats.dcp.optimizer_states import step_tensor
from reshard.formats.megatron.fsdp_dtensor import VARIANT
from reshard.formats.megatron.mcore import place_of, split_of, stored_args
from reshard.formats.megatron.megatron_request import NO_OPTIMIZER, MegatronWriting
from reshard.formats.megatron.megatron_request import fit as fit_to_megatron
from reshard.formats.megatron.optimizer_states import MegatronOptimizer
from reshard.formats.megatron.rank_states import MegatronRank, RankStates
from reshard.formats.optimizer import Adam
from reshard.transfer.plan import OutputFile, Planned

_WRAPPED = "module."
"""Of the model in what Megatron-Core's adapter of Megatron-FSDP saves: the adapter itself unwraps."""

_IN_OPTIMIZER = "module.module.module."
"""Of parameters in the optimizer, which names them below the adapter, Megatron-FSDP, and mixed precision."""

SHARDED = {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"}
_GROUP = {
    "is_expert_parallel": False,
    "is_decoupled_lr": False,
    "default_config": True,
    "wd_mult": 1.0,
    "lr_mult": 1.0,
    "bias_correction": True,
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}
"""Fields of the groups of Megatron-Core 0.16 and of the three Adams that other groups may lack."""


def fit(request: Request) -> Request:
    """The request with a padded vocabulary. Raises ReshardError if Megatron-FSDP does not train such a model."""
    layout = request.options.layout
    staged = {"--pp": layout.pp, "--vpp": layout.vpp}
    flags = [flag for flag, count in staged.items() if count > 1]
    if flags:
        raise ReshardError(
            "megatron-fsdp-without-stages",
            "Megatron-FSDP has no pipeline stages",
            rule="it shards every layer over all data-parallel ranks",
            found=" ".join(f"{flag} {staged[flag]}" for flag in flags),
            remedy=f"leave out {' and '.join(flags)}",
        )
    fitted = fit_to_megatron(request)
    _refuse_unsaved(fitted)
    return fitted


def _refuse_unsaved(request: Request) -> None:
    """Raise ReshardError for a model whose tensors Megatron-FSDP stores in a way that reshard does not write."""
    model = request.declared
    what = None
    if request.dialect == MCORE_BRIDGE:
        what = "modules of mcore-bridge (ms-swift), which saves torch_dist with Megatron-FSDP too"
    elif model.family.within and model.family.within.carried:
        what = "modules besides the language model"
    elif layer_pattern(model.args) or model.dims.delta:
        what = "layers with a state (Mamba, gated delta nets), which Megatron-FSDP stores fused"
    if what:
        raise ReshardError(
            "megatron-fsdp-model-unsupported",
            f"reshard does not write a checkpoint of Megatron-FSDP for the family {model.family.name}",
            expected="a language model of megatron-core or Megatron-Bridge that consists of attention and MLPs",
            found=what,
            remedy="pass --to megatron, and train without Megatron-FSDP",
            values={"family": model.family.name},
        )


class FsdpDtensorWriting(MegatronWriting):
    """One iteration of Megatron-FSDP, and the tracker that names it."""

    def files(self) -> list[OutputFile]:
        """The files of one iteration, and the tracker that names it."""
        args, iteration = self._stored_arguments(), self.iteration
        writer = _FolderWriter(self.request, args, self.prefix)
        for tensor in self.request.tensors:
            for rows, keys in writer.keys(tensor, tensor.name):
                writer.add(tensor, rows, [("model", _WRAPPED + key) for key in keys])
        for name, content in {
            "args": Namespace(**args),
            "checkpoint_version": 3.0,
            "iteration": 0 if iteration == "release" else iteration,
        }.items():
            writer.folder.name((name,), writer.object(content))
        if optimizer := self.optimizer:
            writer.add_optimizer(optimizer, self.request)
        tracker = OutputFile.of_bytes(iterations.TRACKER, str(iteration).encode())
        return [*writer.folder.finished(iterations.name_of(iteration)), tracker]

    def _stored_arguments(self) -> dict[str, Any]:
        """The arguments of a run that trains with mixed precision, as Megatron-LM requires of a SwiGLU."""
        config, args = self.request.config, self.request.declared.args
        half = bool(args.get("fp16")) or (config.get("dtype") or config.get("torch_dtype")) == "float16"
        return {
            **stored_args(self.arguments, self.request.layout, VARIANT),
            **SHARDED,
            "no_save_optim": not self.request.states,
            "use_distributed_optimizer": True,
            "params_dtype": dtype("float16" if half else "bfloat16"),
            "bf16": not half,
            "fp16": half,
        }

    def notes(self) -> list[str]:
        """How Megatron-LM and Megatron-Bridge find the checkpoint, besides the notes of all Megatron targets."""
        return [*super().notes(), LOADED]

    def load_with(self) -> list[str]:
        """The flags to load the checkpoint with Megatron-LM, in addition to `--load`."""
        flags = super().load_with()
        strategy = str(SHARDED["data_parallel_sharding_strategy"])
        fsdp = [
            "--use-megatron-fsdp",
            "--data-parallel-sharding-strategy",
            strategy,
            "--ckpt-format",
            VARIANT,
        ]
        return [*fsdp, *flags] if flags else []

    @property
    def _without_optimizer(self) -> Sequence[str]:
        """Megatron-FSDP looks for an optimizer in a release, too."""
        return NO_OPTIMIZER


Rows = range | None


class _FolderWriter:
    """Names tensors and objects, and adds them to the folder."""

    def __init__(self, request: Request, args: Mapping[str, Any], prefix: str) -> None:
        self.folder = ChunkFolder(request.options.shard_size)
        self._swiglu = bool(args.get("swiglu"))
        self._keys: dict[str, list[str]] = defaultdict(list)
        for transformer_engine in (True, False):
            states = RankStates(request.tensors, args, Layout(), transformer_engine, below=prefix)
            for key, shard in states.state(MegatronRank(0), 0, 0).items():
                known = self._keys[shard.tensor.name]
                spelled = (key, key.replace("transformer_layer.", "mtp_model_layer."))
                known += [each for each in dict.fromkeys(spelled) if each not in known]

    def keys(self, tensor: Planned, name: str) -> Iterator[tuple[Rows, list[str]]]:
        """The parts of a tensor, a weight or a state of the weight `name`, as rows, and the keys of each."""
        split = split_of(name)
        if not self._swiglu or not split or split.parts == 1:
            yield None, self._keys[name]
            return
        half = tensor.shape[0] // 2
        yield range(half), [f"{key}_w" for key in self._keys[name]]
        yield range(half, 2 * half), [f"{key}_v" for key in self._keys[name]]

    def add(self, tensor: Planned, rows: Rows, paths: list[tuple[str, ...]]) -> None:
        entry = self.folder.add(tensor, rows)
        self._name(entry, paths)

    def object(self, content: Any) -> DcpChunk:
        return self.folder.append(image_bytes(layout_torch_file(content)))

    def _name(self, entry: DcpTensor | DcpChunk, paths: list[tuple[str, ...]]) -> None:
        for path in paths:
            self.folder.name(path, entry)

    def add_optimizer(self, optimizer: MegatronOptimizer, request: Request) -> None:
        """Add the states, the group of each parameter and the schedule."""
        step = step_tensor(self.folder.append(TorchOptimizer(adam=request.optimizer or Adam()).step()))
        stateful: dict[str, Planned] = {}
        for kind, states in request.states.items():
            for name, state in states.items():
                stateful[name] = state
                for rows, keys in self.keys(state, name):
                    paths = [("optimizer", "state", _IN_OPTIMIZER + key) for key in keys]
                    self.add(state, rows, [(*path, kind) for path in paths])
                    self._name(step, [(*path, "step") for path in paths])
        groups = _GroupFinder(optimizer, request)
        stored: dict[int, dict[str, DcpChunk]] = {}
        for name, state in stateful.items():
            number, group = groups.of(name, state)
            fields = stored.get(number) or {field: self.object(value) for field, value in group.items()}
            stored[number] = fields
            for key in self._keys[name]:
                path = ("optimizer", "param_to_group_meta", _IN_OPTIMIZER + key)
                for field, chunk in fields.items():
                    self.folder.name((*path, field), chunk)
        for field, value in _plain_fields(optimizer.common.get("opt_param_scheduler")).items():
            self.folder.name(("opt_param_scheduler", field), self.object(value))


class _GroupFinder:
    """Finds the group of each parameter, as Megatron-Core sorts them."""

    def __init__(self, optimizer: MegatronOptimizer, request: Request) -> None:
        step, lr = request.optimizer.step if request.optimizer else None, 0.0
        self._groups = []
        for group in optimizer.groups:
            lr = group.get("lr", lr)
            settings = {key: value for key, value in _plain_fields(group).items() if key != "params"}
            self._groups.append({**_GROUP, "max_lr": lr, "min_lr": lr, **settings, "step": step or 0})
        self._parallel_experts = request.layout.ep > 1

    def of(self, name: str, state: Planned) -> tuple[int, dict[str, Any]]:
        """The number of the group that a parameter belongs to, and the group.

        Vectors have no weight decay. Only parallel experts, and only tables with a learning rate of their own, are
        apart.
        """
        decays = len(state.shape) > 1
        expert = self._parallel_experts and place_of(name).expert is not None
        table = name.endswith(("word_embeddings.weight", "output_layer.weight"))

        def fits(number: int) -> tuple[bool, bool, bool]:
            group = self._groups[number]
            return (
                bool(group["wd_mult"]) == decays,
                bool(group["is_expert_parallel"]) == expert,
                bool(group["is_decoupled_lr"]) == table,
            )

        best = max(range(len(self._groups)), key=fits)
        return best, self._groups[best]


def _plain_fields(fields: Any) -> dict[str, Any]:
    """The fields of a group or a schedule that are numbers, texts, or lists of these; the others are tensors."""
    known = fields if isinstance(fields, Mapping) else {}
    return {key: value for key, value in known.items() if isinstance(key, str) and _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


LOADED = (
    "Megatron-Bridge loads it with CheckpointConfig(load=FOLDER, ckpt_format='fsdp_dtensor'); "
    "pass --strict-fsdp-dtensor-load to Megatron-LM to have it check that nothing is missing"
)
