"""Write MLX folders: the Hub's tensors as mlx-lm stores them, plain or with affine weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import PurePath
from typing import Any

from reshard.algebra.dtypes import castable, dtype
from reshard.algebra.tensors import Tensor
from reshard.algebra.views import View
from reshard.base.errors import ReshardError, listed
from reshard.codecs.mlx_modes import AFFINE, BITS, GROUPS, USUAL_GROUP, ModeSettings
from reshard.codecs.mlx_weights import AffineItems, affine
from reshard.families.dialects import mlx
from reshard.families.renaming import Renaming
from reshard.formats import huggingface
from reshard.formats.contract import Naming, Request, StoredDtypes, Target, Writing
from reshard.formats.detection import MLX
from reshard.formats.mlx.folder import FLOAT_DTYPES, unknown_model
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
    naming = mlx.naming(request.config)
    if naming is None:
        raise unknown_model(
            request.config,
            None,
            "pass --to huggingface, of which mlx_lm.convert makes an MLX folder if mlx-lm has the model",
        )
    return naming


def renames(config: Mapping[str, Any]) -> tuple[Renaming, ...] | None:
    """The rules that make MLX's names of the Hub's."""
    naming = mlx.naming(config)
    return naming.rules if naming else None


def leaves_out(request: Request, name: str) -> str | None:
    """The rule for a tensor that mlx-lm removes."""
    return _naming(request).leaves_out(name, request.config)


class MlxWriting(Writing):
    """A folder of mlx-lm: in one dtype, without the settings of what it does not keep, quantized on request."""

    def __init__(self, request: Request) -> None:
        naming = self._naming = _naming(request)
        main = dtype(request.main_dtype)
        self._recast = {
            tensor.name: tensor.dtype
            for tensor in request.tensors
            if castable(tensor.dtype)
            and tensor.dtype != main
            and not tensor.name.endswith(naming.exact or NO_ENDING)
        }
        """The tensors in another dtype than most, in which mlx-lm casts them, by name."""
        tensors = [
            each._replace(dtype=main) if each.name in self._recast else each for each in request.tensors
        ]
        request = replace(request, tensors=tensors)
        if mlx.REMOVED_VISION in naming.left:
            config = {key: value for key, value in request.config.items() if key != "vision_config"}
            request = replace(request, config=config)
        super().__init__(_quantized_request(naming, request) if request.options.quantize else request)

    def files(self) -> list[OutputFile]:
        """The weight files of a folder, with an index, as mlx-lm always writes one."""
        return huggingface.laid_out(self.request, {"format": "mlx"}, indexed=True)

    @property
    def memory(self) -> MemoryNeed:
        """The memory that computing quantized weights takes."""
        if not self.request.options.quantize:
            return NO_NEED
        settings = METHODS[self.request.options.quantize]
        nothing = Tensor(self.request.tensors[0].dtype, View((0,), ()))
        sources = (AffineItems("", nothing, each) for each in (settings, FINER_SETTINGS))
        return MemoryNeed(max(source.memory_for(source.few) for source in sources) + (1 << 20), None)

    def notes(self) -> list[str]:
        """What mlx-lm casts, rounds and quantizes."""
        request, notes = self.request, []
        if self._recast:
            stored = ", ".join(sorted({each.name for each in self._recast.values()}))
            cast = f"stored in {request.main_dtype} instead of {stored}, as mlx-lm casts them"
            notes.append(f"{listed(list(self._recast), 1)}: {cast}")
        if self._naming.is_rounded:
            notes.append("zero-centred norms are stored plus one, rounded as mlx-lm rounds them")
        if request.quantization:
            count = sum(tensor.name.endswith(".scales") for tensor in request.tensors)
            own = sum(isinstance(each, Mapping) for each in request.quantization.values())
            finer = f", {own} of them in {FINER_SETTINGS.bits} bits, as mlx-lm does it" if own else ""
            notes.append(f"{count} weights are quantized: {METHODS[str(request.options.quantize)]}{finer}")
        return notes

    def afterwards(self) -> Iterator[OutputCommand]:
        """How to use the output."""
        command: tuple[Any, ...] = ("mlx_lm.generate", "--model", PurePath(), "--prompt", "Hello")
        yield OutputCommand("on Apple silicon", command)


def _quantized_request(naming: mlx.MlxNaming, request: Request) -> Request:
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
    method = METHODS[str(request.options.quantize)]
    rows = sorted({tensor.shape[-1] for tensor in request.tensors if len(tensor.shape) > 1})
    fitting = [
        group
        for group in GROUPS
        if any(_method(naming, method._replace(group=group), tensor) for tensor in request.tensors)
    ]
    return ReshardError(
        "mlx-groups-too-large" if fitting else "mlx-rows-without-groups",
        "no weight can be quantized in groups of this size",
        rule="the elements of a group share a scale, and groups divide the rows of a weight",
        expected=f"rows that {method.group} divides",
        found=f"rows of {', '.join(map(str, rows[:5]))}",
        remedy=f"choose groups that divide some: --quantize {AFFINE}-{method.bits}-{max(fitting)}"
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
    for part, stored in affine(tensor.name, nothing, settings).items():
        yield Planned(
            f"{module}.{part}", stored.dtype, stored.shape, partial(_compiled_view, tensor, settings, part)
        )


def _compiled_view(tensor: Planned, settings: ModeSettings, part: str) -> View:
    return affine(tensor.name, Tensor(tensor.dtype, tensor.source()), settings)[part].view


TARGET = Target(
    MlxWriting,
    Naming((MLX,), renames, leaves_out),
    dtypes=StoredDtypes(quantizes=tuple(METHODS)),
    fit=fit,
)
