"""Write InternEvo's files: the shards of each tensor-parallel rank of each stage, and the config that builds the model.

Source: the requirements of `load_model_checkpoint` of InternEvo 0.4.9, and `partition_uniform` in
`solver/pipeline_utils.py`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from reshard.algebra.dtypes import dtype
from reshard.algebra.layout import Layout
from reshard.base.errors import Problem, ReshardError, raise_all
from reshard.containers.torchfiles.write import NewTensor, image_bytes, layout_torch_file
from reshard.families.dims import Dims
from reshard.families.rope import rope_parameters
from reshard.formats.contract import Request, Writing
from reshard.formats.internlm.model_config import MODEL_CONFIG, engine_config, is_dynamic
from reshard.formats.internlm.tensor_names import EMBEDDINGS, HEAD_NAMES, place_of, split_of
from reshard.formats.sharding import Split, blocks_of, divided, misfits, shard_of
from reshard.transfer.plan import OutputFile, Planned

HEAD = "output.weight"
Splits = Callable[[str], Split | None]


def fit(request: Request) -> Request:
    """Refuse models that InternEvo does not have, and layouts that do not divide its sizes; all problems at once."""
    dims, layout = request.declared.dims, request.layout
    problems = [*shares(dims, layout)]
    if dims.experts:
        problems.append(
            _unknown(
                "internlm-experts-unsupported",
                "InternEvo keeps experts in files of their own, which are not written",
            )
        )
    if dims.head_dim * dims.heads != dims.hidden:
        problems.append(
            _unknown(
                "internlm-head-size-unsupported",
                "InternEvo does not support heads of this size",
                f"{dims.heads} heads of {dims.head_dim} in a width of {dims.hidden}",
            )
        )
    raise_all(problems)
    return request


def shares(dims: Dims, layout: Layout) -> Iterator[Problem]:
    """A problem for each size that tensor-parallel ranks cannot share."""
    sizes = ("attention heads", dims.heads), ("query groups", dims.groups), ("the MLP's width", dims.ffn)
    rows = ("the vocabulary", dims.vocab)
    yield from misfits("--tp", layout.tp, [divided(*size) for size in (*sizes, rows)])


def _unknown(code: str, message: str, found: str | None = None) -> Problem:
    return Problem(
        code,
        message,
        rule="InternEvo's model has the same tensors, and heads that together are as wide as the model",
        found=found,
        remedy="this model cannot be trained with InternEvo: choose another format with --to",
    )


class InternlmWriting(Writing):
    """A file for each rank, and the config that builds the model.

    A tied head is a separate tensor with the embedding's values: InternEvo does not tie weights.
    """

    def __init__(self, request: Request) -> None:
        super().__init__(_with_head(request) if request.tied else request)

    def files(self) -> list[OutputFile]:
        """The files of all ranks, and that of the config. Raises ReshardError if the layers do not divide."""
        layout, model = self.request.layout, self.request.declared
        places = stages(layout, model.dims.layers)
        config = engine_config(
            model.family.name, self.request.config, layout.vpp, dtype(self.request.main_dtype)
        )
        by_stage: dict[int, list[tuple[str, Planned]]] = {}
        for tensor in self.request.tensors:
            stage, key = _stage_and_key(tensor.name, places, layout)
            by_stage.setdefault(stage, []).append((key, tensor))
        files = [
            rank_file(f"model_tp{tp}_pp{stage}.pt", by_stage[stage], split_of_new, tp, layout.tp)
            for stage in range(layout.pp)
            for tp in range(layout.tp)
        ]
        return [*files, OutputFile.of_bytes(MODEL_CONFIG, image_bytes(layout_torch_file(config)))]

    def notes(self) -> list[str]:
        """Notes on where InternEvo's model computes something else than the config says."""
        name, config = self.request.declared.family.name, self.request.config
        kind = rope_parameters(config).get("rope_type", "default")
        if kind == "default" or (kind == "dynamic" and is_dynamic(config) and name != "llama"):
            return []
        return [f"rope_type is {kind!r}; InternEvo computes an unscaled rope for {name}"]


def _with_head(request: Request) -> Request:
    """The request of a model with tied weights, with both."""
    model = request.declared
    table = next(tensor for tensor in request.tensors if tensor.name in EMBEDDINGS)
    config = {**model.config, "tie_word_embeddings": False}
    head = table._replace(name=HEAD)
    return replace(
        request, model=replace(model, config=config), config=config, tensors=[*request.tensors, head]
    )


def stages(layout: Layout, layers: int) -> list[tuple[int, int, range]]:
    """The distribution of layers: (stage, chunk, layers). The last stages get the remainder.

    Raises ReshardError if the chunks are not equal, or if another distribution is requested: InternEvo only has this
    one.
    """
    each = layers // layout.vpp
    if layers % layout.vpp or each < layout.pp:
        raise ReshardError(
            "internlm-layers-not-divisible",
            f"{layers} layers cannot be divided among the pipeline stages",
            rule="the chunks of InternEvo (--vpp) have the same number of layers, and each stage has some of each",
            expected=f"a multiple of {layout.vpp}, and at least {layout.vpp * layout.pp}",
            found=f"{layers} layers, --pp {layout.pp} --vpp {layout.vpp}",
            remedy=f"choose --pp from 1 to {layers}" + ", and leave out --vpp" * (layout.vpp > 1)
            if layout.pp > layers
            else "leave out --vpp",
        )
    counts = [
        each // layout.pp + (stage >= layout.pp - each % layout.pp) for stage in range(layout.pp)
    ] * layout.vpp
    if layout.stages and list(layout.stages) != counts:
        raise ReshardError(
            "internevo-layout-fixed",
            "InternEvo distributes layers itself",
            rule="the remainder goes to the last stages",
            expected=",".join(map(str, counts)),
            found=f"--stages {','.join(map(str, layout.stages))}",
            remedy="leave out --stages",
        )
    result, first = [], 0
    for index, count in enumerate(counts):
        result.append((index % layout.pp, index // layout.pp, range(first, first + count)))
        first += count
    return result


def _stage_and_key(name: str, places: list[tuple[int, int, range]], layout: Layout) -> tuple[int, str]:
    """The stage of a tensor, and its key in that stage's files."""
    place = place_of(name)
    stage, chunk, key = layout.pp - 1, layout.vpp - 1, name
    if place.layer is not None:
        layer = place.layer
        stage, chunk, layers = next(part for part in places if layer in part[2])
        key = place.name(layer - layers.start)
    elif name in EMBEDDINGS:
        stage, chunk = 0, 0
    prefix = f"{chunk}." if layout.vpp > 1 else ""
    return stage, f"{prefix}model.{key}"


def split_of_new(name: str) -> Split | None:
    """How tensor parallelism cuts a tensor: the embedding by its columns (`embed_split_hidden`), the head by rows."""
    if name in EMBEDDINGS:
        return Split(1)
    return Split(0) if name in HEAD_NAMES else split_of(place_of(name).module, weight_parallel=False)


def rank_file(
    path: str, tensors: Iterable[tuple[str, Planned]], split_of: Splits, tp: int, ranks: int
) -> OutputFile:
    """The file of one of `ranks`, with its shards of the tensors in `tensors`, by their keys."""
    image = layout_torch_file(OrderedDict(_shards(tensors, split_of, tp, ranks)))
    blocks = list(blocks_of((slot.key, slot) for slot in image.slots))
    return OutputFile(path, image.size, blocks, lambda: iter(image.literals))


def _shards(
    tensors: Iterable[tuple[str, Planned]], split_of: Splits, tp: int, ranks: int
) -> Iterator[tuple[str, NewTensor]]:
    """One rank's shards of the tensors of its stage; the bias of a row-parallel linear is on the first rank only."""
    for key, tensor in tensors:
        split = split_of(tensor.name)
        if split or tp == 0 or not tensor.name.endswith("bias"):
            part = shard_of(tensor, split, tp, ranks)
            yield key, NewTensor(part, part.dtype, part.shape)
