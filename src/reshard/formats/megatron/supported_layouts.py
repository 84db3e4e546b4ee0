"""The layouts that Megatron-Core supports for the sizes of a model."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from reshard.algebra.layout import Layout
from reshard.base.errors import Problem, raise_all
from reshard.families.dims import Dims
from reshard.families.sized_family import Model
from reshard.formats.sharding import SharedSize, divided, misfits

SHARED_GROUPS = ">=0.16"
"""Versions of megatron-core that support more tensor-parallel ranks than query groups; 0.15.3 refuses them."""

SHARED_GATES = ">0.16.1"
"""The same for gated attention: 0.16.1 gives each rank the gates of all ranks that share a group, and fails."""


def check_layout(model: Model, layout: Layout) -> None:
    """Refuse a layout that the model cannot have. Raises ReshardError with all problems at once."""
    dims = model.dims
    problems = list(_undivided_problems(dims, layout))
    if layout.vpp > 1 and layout.pp == 1:
        problems.append(
            Problem(
                "virtual-stages-without-pipeline",
                "virtual stages need several pipeline stages",
                rule="Megatron-Core interleaves the chunks of its stages",
                found=f"--vpp {layout.vpp} and one stage",
                remedy="leave out --vpp, or choose a greater --pp",
            )
        )
    if dims.experts and dims.bias and layout.etp > 1:
        problems.append(
            Problem(
                "expert-biases-tensor-parallel",
                "experts with biases cannot be tensor-parallel",
                rule="Megatron-Core would add the bias of an expert on each of its ranks, and refuses to",
                found=f"--etp {layout.etp}"
                if layout.etp != layout.tp
                else f"--tp {layout.tp}, which also applies to experts unless you pass --etp",
                remedy="pass --etp 1",
            )
        )
    if not dims.experts and layout.ep > 1:
        problems.append(
            Problem(
                "megatron-model-without-experts",
                "the model has no experts",
                found=f"--ep {layout.ep}",
                remedy="leave out --ep",
            )
        )
    raise_all(problems)
    layout.chunks(dims.layers)


def _undivided_problems(dims: Dims, layout: Layout) -> Iterator[Problem]:
    """Problems of sizes that cannot be divided equally among the ranks."""
    tensor_parallel = [
        divided("attention heads", dims.heads),
        *([] if dims.kv_lora else [_query_groups(dims)]),
        divided("the MLP's width", dims.ffn if len(dims.sparse) < dims.layers else 0),
        divided("the shared experts' width", dims.shared_ffn),
        divided("key heads of linear attention", dims.key_heads),
        *([SharedSize("compressed attention", lambda ranks: ranks == 1, "1")] if dims.ratios else []),
    ]
    of_experts = divided("an expert's width", dims.expert_ffn if dims.experts else 0)
    if layout.etp == layout.tp:  # as --tp sets it, unless users set --etp
        yield from misfits("--tp", layout.tp, [*tensor_parallel, of_experts])
    else:
        yield from misfits("--tp", layout.tp, tensor_parallel)
        yield from misfits("--etp", layout.etp, [of_experts])
    yield from misfits("--ep", layout.ep, [divided("experts", dims.experts)])


def _query_groups(dims: Dims) -> SharedSize:
    """Ranks have complete groups, or several ranks share one.

    Each rank then has an equal share of the rows of `linear_qkv`, wherever the cuts are, and the ranks gather their
    outputs. Source: `TransformerConfig.__post_init__` and `SelfAttention` of megatron-core 0.16.1.
    """
    if dims.window_groups:  # Megatron-Bridge 0.6.2 lets no ranks share a group of such layers
        return divided("query groups", gcd(dims.groups, dims.window_groups))
    rows = dims.qkv_rows
    return SharedSize(
        "query groups",
        lambda ranks: dims.groups % ranks == 0 or (ranks % dims.groups == 0 and rows % ranks == 0),
        f"a divisor of {dims.groups}, or a multiple that divides the {rows} rows of linear_qkv",
    )


def layout_notes(model: Model, layout: Layout) -> Iterator[str]:
    """Notes on the megatron-core version that a layout needs, as it does if several ranks share a query group."""
    if not model.dims.kv_lora and layout.tp > model.dims.groups:
        needed = SHARED_GATES if model.dims.output_gate else SHARED_GROUPS
        groups = f"--tp {layout.tp} is larger than the {model.dims.groups} query groups"
        yield f"{groups}: this needs megatron-core{needed}"
