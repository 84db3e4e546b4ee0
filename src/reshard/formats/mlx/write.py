"""Write MLX folders: the Hub's tensors as mlx-lm stores them, plain or with affine weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import PurePath
from typing import Any

from reshard.algebra.dtypes import dtype
from reshard.algebra.tensors import Tensor
from reshard.algebra.views import View
from reshard.base.errors import ReshardError, listed
from reshard.families.dialects import mlx
from reshard.families.renaming import Renaming
from reshard.formats import huggingface
from reshard.formats.contract import Request, Target
from reshard.formats.mlx.folder import FLOAT_DTYPES, NAME, unknown_model
from reshard.formats.mlx.quantization_modes import AFFINE, BITS, GROUPS, USUAL_GROUP, ModeSettings
from reshard.formats.mlx.quantized_weights import AffineItems, affine
from reshard.transfer.elements import castable
from reshard.transfer.memory_budget import NO_NEED, MemoryNeed
from reshard.transfer.plan import OutputCommand, OutputFile, Planned

METHODS = {
    f"{AFFINE}-{bits}{ending}": ModeSettings(group, bits)
    for bits in BITS
    for ending, group in {"": USUAL_GROUP, **{f"-{group}": group for group in GROUPS}}.items()
}
"""The values of `--quantize`."""
FINER_SETTINGS = ModeSettings(64, 8)
"""How mlx-lm stores routers and the like, whatever the others are in."""
NO_ENDING = ("\n",)
"""The end of no name."""


def fit(request: Request) -> Request:
    """The request. Raises ReshardError for a model whose names are not declared."""
    _naming(request)
    return request


def _naming(request: Request) -> mlx.MlxNaming:
    found = mlx.naming(request.config)
    if found is None:
        remedy = "pass --to huggingface, of which mlx_lm.convert makes an MLX folder if mlx-lm has the model"
        raise unknown_model(request.config, None, remedy)
    return found


def renames(config: Mapping[str, Any]) -> tuple[Renaming, ...] | None:
    """The rules that make MLX's names of the Hub's."""
    found = mlx.naming(config)
    return found.rules if found else None


def leaves_out(request: Request, name: str) -> str | None:
    """The rule for a tensor that mlx-lm removes."""
    return _naming(request).leaves_out(name, request.config)


def complete(request: Request) -> Request:
    """The request in one dtype, without the settings of what mlx-lm does not keep, and quantized, if requested."""
    naming = _naming(request)
    request = _in_one_dtype(naming, request)
    if mlx.REMOVED_VISION in naming.left:
        config = {key: value for key, value in request.config.items() if key != "vision_config"}
        request = replace(request, config=config)
    return _quantized(naming, request) if request.options.quantize else request


def _in_one_dtype(naming: mlx.MlxNaming, request: Request) -> Request:
    """The request with all tensors in the dtype of most, as mlx-lm casts them; `inside` are notes on it."""
    main = dtype(request.main_dtype)
    others = {
        tensor.name: tensor.dtype
        for tensor in request.tensors
        if castable(tensor.dtype)
        and tensor.dtype != main
        and not tensor.name.endswith(naming.exact or NO_ENDING)
    }
    tensors = [tensor._replace(dtype=main) if tensor.name in others else tensor for tensor in request.tensors]
    told = [
        f"{listed(list(others), 1)}: stored in {main} instead of "
        f"{', '.join(sorted({each.name for each in others.values()}))}, as mlx-lm casts them"
    ]
    return replace(request, tensors=tensors, inside=told if others else [])


def _quantized(naming: mlx.MlxNaming, request: Request) -> Request:
    """The request with quantized weights."""
    usual = METHODS[str(request.options.quantize)]
    chosen = {t.name: how for t in request.tensors if (how := _method(naming, usual, t))}
    if not chosen:
        raise _no_groups(naming, request)
    own = {
        name.removesuffix(".weight"): {"group_size": how.group, "bits": how.bits}
        for name, how in chosen.items()
        if how != usual
    }
    tensors = [
        part
        for tensor in request.tensors
        for part in (_parts(tensor, chosen[tensor.name]) if tensor.name in chosen else (tensor,))
    ]
    return replace(
        request,
        tensors=tensors,
        quantization={**usual.as_dict(), **own},
        config={**request.config, "dtype": request.main_dtype},
    )


def _no_groups(naming: mlx.MlxNaming, request: Request) -> ReshardError:
    """The error if no weight can be quantized."""
    asked = METHODS[str(request.options.quantize)]
    rows = sorted({tensor.shape[-1] for tensor in request.tensors if len(tensor.shape) > 1})
    fitting = [
        group
        for group in GROUPS
        if any(_method(naming, asked._replace(group=group), tensor) for tensor in request.tensors)
    ]
    return ReshardError(
        "mlx-groups-too-large" if fitting else "mlx-rows-without-groups",
        "no weight can be quantized in groups of this size",
        rule="the elements of a group share a scale, and groups divide the rows of a weight",
        expected=f"rows that {asked.group} divides",
        found=f"rows of {', '.join(map(str, rows[:5]))}",
        remedy=f"choose groups that divide some: --quantize {AFFINE}-{asked.bits}-{max(fitting)}"
        if fitting
        else f"leave out --quantize: none of MLX's groups ({', '.join(map(str, GROUPS))}) divides these rows",
    )


def _method(naming: mlx.MlxNaming, usual: ModeSettings, tensor: Planned) -> ModeSettings | None:
    """How mlx-lm quantizes a tensor: matrices whose rows the group divides, unless a model's class says otherwise."""
    module = tensor.name.removesuffix(".weight")
    is_matrix = module != tensor.name and len(tensor.shape) > 1 and tensor.dtype.name in FLOAT_DTYPES
    if not is_matrix or tensor.shape[-1] % usual.group or module.endswith(naming.kept or NO_ENDING):
        return None
    if not module.endswith(naming.finer or NO_ENDING):
        return usual
    return None if tensor.shape[-1] % FINER_SETTINGS.group else FINER_SETTINGS


def _parts(tensor: Planned, settings: ModeSettings) -> Iterator[Planned]:
    """The tensors stored instead of a weight; its view is compiled when one of them is written."""
    module = tensor.name.removesuffix(".weight")
    nothing = Tensor(tensor.dtype, View.of(None, *tensor.shape))
    for part, made in affine(tensor.name, nothing, settings).items():
        yield Planned(f"{module}.{part}", made.dtype, made.shape, partial(_compiled, tensor, settings, part))


def _compiled(tensor: Planned, settings: ModeSettings, part: str) -> View:
    return affine(tensor.name, Tensor(tensor.dtype, tensor.source()), settings)[part].view


def need(request: Request) -> MemoryNeed:
    """The memory that computing quantized weights takes."""
    if not request.options.quantize:
        return NO_NEED
    settings = METHODS[request.options.quantize]
    nothing = Tensor(request.tensors[0].dtype, View((0,), ()))
    sources = (AffineItems("", nothing, each) for each in (settings, FINER_SETTINGS))
    return MemoryNeed(max(source.room(source.few) for source in sources) + (1 << 20), None)


def notes(request: Request) -> list[str]:
    """What users should know."""
    naming, told = _naming(request), list(request.inside)
    if naming.is_rounded:
        told.append("zero-centred norms are stored plus one, rounded as mlx-lm rounds them")
    if request.quantization:
        count = sum(tensor.name.endswith(".scales") for tensor in request.tensors)
        own = sum(isinstance(each, Mapping) for each in request.quantization.values())
        finer = f", {own} of them in {FINER_SETTINGS.bits} bits, as mlx-lm does it" if own else ""
        told.append(f"{count} weights are quantized: {METHODS[str(request.options.quantize)]}{finer}")
    return told


def lay_out(request: Request) -> list[OutputFile]:
    """The weight files of a folder, with an index, as mlx-lm always writes one."""
    return huggingface.laid_out(request, {"format": "mlx"}, indexed=True)


def afterwards(request: Request) -> Iterator[OutputCommand]:
    """How to use the output."""
    words: tuple[Any, ...] = ("mlx_lm.generate", "--model", PurePath(), "--prompt", "Hello")
    yield OutputCommand("on Apple silicon", words)


TARGET = Target(
    lay_out,
    (NAME,),
    quantizes=tuple(METHODS),
    renames=renames,
    leaves_out=leaves_out,
    fit=fit,
    complete=complete,
    notes=notes,
    need=need,
    afterwards=afterwards,
)
