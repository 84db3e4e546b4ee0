"""Plan an InternEvo checkpoint, for any tensor- and pipeline-parallel layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from reshard.algebra.dtypes import dtype
from reshard.algebra.layout import Layout
from reshard.errors import Problem, ReshardError
from reshard.families.model import Model
from reshard.families.rope import rope_parameters
from reshard.formats import internlm
from reshard.formats.internlm.config import engine_config, is_dynamic
from reshard.formats.internlm.internevo import EMBEDDINGS
from reshard.model.logical import LogicalTensors, logical_tensors
from reshard.planning.common import Source, Types, companion_files, finished, main_dtype, native_tensors
from reshard.planning.megatron import lost_padding
from reshard.transfer.plan import Plan, Planned

DIALECTS = {"llama": "internlm2", "internlm2": "internlm2", "internlm": "internlm"}
"""How InternEvo names the tensors of each family that it can be given; experts would need files of their own."""

HEAD = "output.weight"


def plan(source: Source) -> Plan:
    """Logical tensors under InternEvo's names, sharded for its ranks, with the config that builds the model."""
    checkpoint, model, options = source.checkpoint, source.model, source.options
    assert model is not None
    logical = logical_tensors(source.resolved)
    _check(model, options.layout, logical)
    dialect = DIALECTS[model.family.name]
    binding = model.binding(dialect)
    tensors = list(native_tensors(logical, binding.native, Types(options.dtype)))
    source, tensors = _head_of_its_own(source, tensors)
    main = main_dtype(tensors)
    config = engine_config(model.family.name, model.config, options.layout.vpp, dtype(main))
    files = internlm.lay_out(tensors, config, options.layout, model.dims.layers)
    files += companion_files(source, tensors)
    dropped = Counter(checkpoint.dropped) + lost_padding(checkpoint, model, model.dims.vocab)
    result = finished(source, internlm.NAME, files, tensors, dropped, logical, options.layout)
    result.notes += _notices(model)
    return result


def _head_of_its_own(source: Source, tensors: list[Planned]) -> tuple[Source, list[Planned]]:
    """InternEvo ties no weights: a tied head becomes a tensor of its own, with the embedding's values."""
    model = source.model
    assert model is not None
    if not model.dims.tied:
        return source, tensors
    table = next(tensor for tensor in tensors if tensor.name in EMBEDDINGS)
    config = {**model.config, "tie_word_embeddings": False}
    return source.of(replace(model, config=config)), [*tensors, replace(table, name=HEAD)]


def _notices(model: Model) -> list[str]:
    """Where the model that InternEvo builds computes something else than the config says."""
    kind = rope_parameters(model.config).get("rope_type", "default")
    if kind == "default" or (kind == "dynamic" and is_dynamic(model.config) and model.family.name != "llama"):
        return []
    return [f"rope_type is {kind!r}; InternEvo computes an unscaled rope for {model.family.name}"]


def _check(model: Model, layout: Layout, logical: LogicalTensors) -> None:
    """Refuse what InternEvo has no model for, and a layout that its sizes do not divide into; all of it at once."""
    name = model.family.name
    if name not in DIALECTS:
        raise ReshardError(
            f"InternEvo's files cannot be written for the family {name}",
            expected=", ".join(DIALECTS),
            found=name,
            remedy="choose another format with --to",
        )
    held = model.binding(DIALECTS[name]).hf
    homeless = [tensor for tensor in logical.tensors if tensor not in held]
    problems = [
        *_layout_problems(model, layout),
        *(_unknown("InternEvo has no place for a tensor", tensor, "such a tensor") for tensor in homeless),
    ]
    d = model.dims
    if d.head_dim * d.heads != d.hidden:
        size = f"{d.heads} heads of {d.head_dim} in a width of {d.hidden}"
        problems.append(_unknown("InternEvo has no heads of this size", None, size))
    if problems:
        raise ReshardError(problems)


def _layout_problems(model: Model, layout: Layout) -> Iterator[Problem]:
    d = model.dims
    for what, size in (
        ("attention heads", d.heads),
        ("query groups", d.groups),
        ("the columns of the MLP", d.ffn),
        ("the tokens of the vocabulary", d.vocab),
    ):
        if size % layout.tp:
            yield Problem(
                f"{what} do not divide over --tp {layout.tp}",
                rule="every rank holds an equal share",
                expected=f"a divisor of {size}",
                found=f"--tp {layout.tp}",
                remedy="choose another --tp",
            )
    if layout.ep > 1:
        yield Problem("the model has no experts", found=f"--ep {layout.ep}", remedy="leave out --ep")


def _unknown(message: str, tensor: str | None, found: str) -> Problem:
    return Problem(
        message,
        tensor=tensor,
        rule="InternEvo's model has the same tensors, and heads that together are as wide as the model",
        found=found,
        remedy="this model cannot be trained with InternEvo: choose another format with --to",
    )
