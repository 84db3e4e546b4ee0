"""LoRA of NeMo's own modules, in a model of megatron-core: saved as NeMo 1 and 2 do, and merged by their own forward.

`ParallelLinearAdapter` of NeMo 1 (`nlp`) and NeMo 2 (`llm`), and NeMo 2's `AdapterWrapper`, are taken from the source
of nemo_toolkit 2.3, which has both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

from reshard.algebra.layout import Layout

NEMO_1 = "collections/nlp/modules/common/megatron/adapters/parallel_adapters.py"
NEMO_2 = "collections/llm/peft/utils.py"
WRAPPER = "lightning/pytorch/callbacks/peft.py"
RELEASE = "nemo-2"
DIM, ALPHA = 4, 12
Taken = Callable[..., dict[str, Any]]


class Linear(NamedTuple):
    """A linear of a layer: its module, what NeMo 1 calls its adapter, and the sizes of the complete weight."""

    parent: Any
    name: str
    adapter: str
    outputs: int
    inputs: int
    input_is_parallel: bool

    @property
    def module(self) -> Any:
        return getattr(self.parent, self.name)


def linears(chunk: Any) -> Iterator[Linear]:
    """All linears, with the sizes that `LoraPEFTConfig` computes."""
    c = chunk.config
    heads, groups = c.kv_channels * c.num_attention_heads, c.kv_channels * c.num_query_groups
    for layer in chunk.decoder.layers:
        attention, mlp = layer.self_attention, layer.mlp
        yield Linear(attention, "linear_qkv", "lora_kqv_adapter", heads + 2 * groups, c.hidden_size, False)
        yield Linear(attention, "linear_proj", "lora_dense_attention_adapter", c.hidden_size, heads, True)
        yield Linear(mlp, "linear_fc1", "lora_hto4h_adapter", 2 * c.ffn_hidden_size, c.hidden_size, False)
        yield Linear(mlp, "linear_fc2", "lora_4htoh_adapter", c.hidden_size, c.ffn_hidden_size, True)


def known() -> dict[str, Any]:
    """What NeMo's classes use of other modules."""
    import torch
    from megatron.core import ModelParallelConfig
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import apply_swiglu_sharded_factory

    class AdapterModuleUtil:
        def setup_adapter_strategy(self, strategy: Any) -> None:
            pass

    return {
        "torch": torch,
        "nn": torch.nn,
        "init": torch.nn.init,
        "math": math,
        "HAVE_APEX": True,
        "HAVE_MEGATRON_CORE": True,
        "AdapterModuleUtil": AdapterModuleUtil,
        "ModelParallelConfig": ModelParallelConfig,
        "activation_registry": {"identity": torch.nn.Identity},
        "ColumnParallelLinear": ColumnParallelLinear,
        "RowParallelLinear": RowParallelLinear,
        "adapter_mixin_strategies": SimpleNamespace(ReturnResultAdapterStrategy=object),
        "init_method_const": lambda value: partial(torch.nn.init.constant_, val=value),
        "apply_swiglu_sharded_factory": apply_swiglu_sharded_factory,
    }


def adapters(chunk: Any, layout: Layout, file: str, taken: Taken) -> list[tuple[Linear, Any]]:
    """A new adapter for each linear, with random weights."""
    import torch
    from megatron.core import ModelParallelConfig

    kind = taken(file, ["ParallelLinearAdapter"], known(), RELEASE)["ParallelLinearAdapter"]
    config = ModelParallelConfig(tensor_model_parallel_size=layout.tp, use_cpu_initialization=True)
    torch.manual_seed(torch.distributed.get_rank())
    found = []
    for linear in linears(chunk):
        adapter = kind(
            *(linear.inputs, linear.outputs, DIM),
            base_linear_name=linear.name,
            activation="identity",
            norm_position=None,
            norm_type=None,
            gather_output=False,
            input_is_parallel=linear.input_is_parallel,
            model_parallel_config=config,
            alpha=ALPHA,
        )
        for parameter in adapter.parameters():
            torch.nn.init.normal_(parameter, std=0.05)
        found.append((linear, adapter))
    return found


def canonical(found: list[tuple[Linear, Any]], taken: Taken) -> list[tuple[Linear, Any]]:
    """The same with an adapter for each projection, as NeMo 1's variant of this name has them."""
    import torch

    names = ["ParallelLinearAdapter", "LoraUnfusedKQVAdapter", "LoraUnfusedHto4HAdapter"]
    kinds = taken(NEMO_1, names, known(), RELEASE)
    told = {"activation": "identity", "norm_position": None, "norm_type": None, "gather_output": False}
    of_projections = []
    for linear, fused in found:
        made = {**told, "alpha": ALPHA, "model_parallel_config": fused.config, "dim": DIM}
        adapter, name = fused, linear.adapter
        if linear.name == "linear_qkv":
            c = linear.module.config
            sizes = {"num_query_groups": c.num_query_groups, "kv_channels": c.kv_channels}
            adapter = kinds["LoraUnfusedKQVAdapter"](linear.inputs, **sizes, **made)
            name = "lora_unfused_kqv_adapter"
        elif linear.name == "linear_fc1":
            adapter = kinds["LoraUnfusedHto4HAdapter"](linear.inputs, linear.outputs, **made)
            name = "lora_unfused_hto4h_adapter"
        for parameter in adapter.parameters():
            torch.nn.init.normal_(parameter, std=0.05)
        of_projections.append((linear._replace(adapter=name), adapter))
    return of_projections


def _computed(linear: Linear, adapter: Any, unit: Any) -> Any:
    """What an adapter adds for each unit vector: [out, in]."""
    import torch

    result = adapter(unit)
    if not isinstance(result, tuple):
        return result.squeeze(1).T
    groups = linear.module.config.num_query_groups
    parts = [part.squeeze(1).permute(1, 2, 0) for part in result]  # [heads, kv_channels, in]
    grouped = [part.reshape(groups, -1, *part.shape[1:]) for part in parts]
    return torch.cat(grouped, 1).reshape(-1, unit.shape[0])


def add_as_nemo_1(found: list[tuple[Linear, Any]]) -> Callable[[], None]:
    """Put adapters where NeMo 1's mixins have them. Returns a function that removes them."""
    import torch

    parents = {id(linear.parent): linear.parent for linear, _ in found}.values()
    for parent in parents:
        parent.adapter_layer = torch.nn.ModuleDict()
    for linear, adapter in found:
        linear.parent.adapter_layer[linear.adapter] = adapter
    return lambda: [delattr(parent, "adapter_layer") for parent in parents] and None


def add_as_nemo_2(found: list[tuple[Linear, Any]], taken: Taken) -> Callable[[], None]:
    """Wrap linears and adapters as NeMo 2 does. Returns a function that unwraps them."""
    wrapper = taken(WRAPPER, ["AdapterWrapper"], known(), RELEASE)["AdapterWrapper"]
    for linear, adapter in found:
        setattr(linear.parent, linear.name, wrapper(linear.module, adapter))
    return lambda: [setattr(each.parent, each.name, each.module.to_wrap) for each, _ in found] and None


def merge(found: list[tuple[Linear, Any]], layout: Layout, rank: int) -> None:
    """Add to each weight what its adapter computes for the unit vectors, as its shards are on this rank."""
    import torch

    with torch.no_grad():
        for linear, adapter in found:
            share = linear.inputs // layout.tp if linear.input_is_parallel else linear.inputs
            unit = torch.eye(share).unsqueeze(1)
            if not linear.input_is_parallel:
                linear.module.weight += _computed(linear, adapter, unit)
                continue
            for turn in range(layout.tp):  # the ranks' inputs are parts of one
                changed = adapter(unit if turn == rank else torch.zeros_like(unit)).squeeze(1).T
                linear.module.weight += changed if turn == rank else 0
