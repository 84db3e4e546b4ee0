"""vLLM's sharded_state: what each rank has in memory, in `model-rank-{rank}-part-{part}.safetensors`.

Names are those of vLLM's modules, in which projections are fused; config.json of the model is beside. KV heads are
repeated where there are more ranks, vocabularies are padded with zeros, and of a tied embedding the head is stored.
Sources, in vllm 0.31 and 0.32: `save_model` in model_executor/model_loader/sharded_state_loader.py, and below
model_executor/layers `QKVParallelLinear`, `MergedColumnParallelLinear`, `VocabParallelEmbedding`,
`dispatch_cpu_unquantized_gemm` (CPUs keep no linear weights) and `convert_to_unquantized_kernel_format` (the default
kernels of Blackwell permute the weights of experts in place, which their shapes do not show).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from reshard.algebra.tensors import Cells, Replica, Tensor
from reshard.algebra.views import View
from reshard.base.errors import Problem, ReshardError, listed
from reshard.containers.safetensors import read_tensors
from reshard.families.dialect import HUB
from reshard.folders import iterations
from reshard.folders.companion_names import CONFIG
from reshard.folders.iterations import Iteration
from reshard.formats.checkpoint import Checkpoint, ModelDescription
from reshard.formats.detection import VLLM
from reshard.formats.json_beside import object_beside
from reshard.formats.sharding import Split
from reshard.formats.tables.rank_files import JoinedRanks, files_of_ranks
from reshard.stores import fetch_heads
from reshard.transfer.plan import ZERO
from reshard.transfer.source_files import Sources

FIRST_PART_FILE = re.compile(r"model-rank-(\d+)-part-0\.safetensors")
KNOWN_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""The types of models whose tensors are told by the names here."""
FLOAT_DTYPES = ("bfloat16", "float16", "float32")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ATTENTION_SCALE = re.compile(r".+\.attn\._(?:q|k|v|prob)_scale")
_LAYER = r"model\.layers\.\d+\."
CUT_BY_ROWS = re.compile(
    rf"{_LAYER}(?:self_attn\.(?:q|k|v)|mlp\.(?:gate|up))_proj\.(?:weight|bias)|{EMBEDDING}|{HEAD}"
)
CUT_BY_COLUMNS = re.compile(rf"{_LAYER}(?:self_attn\.o|mlp\.down)_proj\.weight")
REPLICATED = re.compile(
    rf"model\.norm\.weight|{_LAYER}(?:.+norm\.weight|(?:self_attn\.o|mlp\.down)_proj\.bias)"
)
CONVERT_ORIGINAL = "convert the Hugging Face folder that these files were made from"


def open_checkpoint(path: Path, sources: Sources, iteration: Iteration | None = None) -> Checkpoint:
    """Open a folder; of a file, the folder that it is in. Raises ReshardError."""
    iterations.refuse(path, iteration, "a sharded_state of vLLM")
    folder = path if path.is_dir() else path.parent
    config = _config(folder, sources)
    contents = [
        _content(folder, rank, sources) for rank in range(len(files_of_ranks(folder, FIRST_PART_FILE)))
    ]
    _refuse(contents, folder)
    ranks, dropped = len(contents), Counter[str]()
    for content in contents:
        scales = [name for name in content if ATTENTION_SCALE.fullmatch(name)]
        dropped["vLLM's scales of attention"] += sum(content.pop(name).nbytes for name in scales)
    sizes = _SharedSizes(config, ranks, folder)
    joined = JoinedRanks([dict(_unfused(content, sizes)) for content in contents], _split_of)
    tensors = joined.tensors()
    complete = _with_both_ends(tensors, config)
    heads = [replica for name in complete for replica in sizes.once(name, complete)]
    padding = [
        replica
        for name in (EMBEDDING, HEAD)
        if name in complete
        for replica in sizes.unpadded(name, complete)
    ]
    return Checkpoint(
        path=path,
        format=VLLM,
        dialect=HUB,
        tensors=complete,
        description=ModelDescription(folder),
        dropped=+dropped,
        replicas=[*joined.replicas, *heads, *padding],
        problems=joined.problems,
        variant=f"TP {ranks}",
    )


def _config(folder: Path, sources: Sources) -> Mapping[str, Any]:
    """The config beside the files. Raises ReshardError if the names of its model's tensors are not known."""
    config = object_beside(folder, CONFIG, sources) or {}
    if config.get("model_type") in KNOWN_TYPES and not config.get("quantization_config"):
        return config
    model = f"model_type {config.get('model_type')}" if config else f"no {CONFIG} beside the weights"
    raise ReshardError(
        "vllm-model-unsupported",
        "reshard does not know how vLLM arranges the weights of this model",
        file=str(folder / CONFIG),
        rule="vLLM packs quantized weights for its kernels, and permutes those of experts on some GPUs",
        expected=f"model_type {', '.join(KNOWN_TYPES)}, not quantized",
        found="quantization_config" if config.get("quantization_config") else model,
        remedy=CONVERT_ORIGINAL,
    )


def _content(folder: Path, rank: int, sources: Sources) -> dict[str, Tensor]:
    """The tensors of one rank, from all its parts."""
    files = sorted(folder.glob(f"model-rank-{rank}-part-*.safetensors"))
    fetch_heads(files)
    return {name: tensor for file in files for name, tensor in read_tensors(file, sources).items()}


def _refuse(contents: list[dict[str, Tensor]], folder: Path) -> None:
    """Raise ReshardError for weights that vLLM has arranged for its kernels, and for names that are not known."""
    names = {name: tensor for content in contents for name, tensor in content.items()}
    if not any(map(CUT_BY_COLUMNS.fullmatch, names)):
        raise ReshardError(
            "vllm-weights-packed",
            "the weights of linear layers are missing: vLLM has packed them for the kernels of a CPU",
            file=str(folder),
            rule="vLLM saves what a model has in memory, and on a CPU the packed weights are elsewhere",
            expected="model.layers.0.self_attn.o_proj.weight",
            found=listed(sorted(names), 3),
            remedy=f"save them on a GPU, or {CONVERT_ORIGINAL}",
        )
    wrong = [
        name
        for name, tensor in names.items()
        if tensor.dtype.name not in FLOAT_DTYPES
        or not (
            _fused_match(name)
            or any(
                known.fullmatch(name) for known in (CUT_BY_ROWS, CUT_BY_COLUMNS, REPLICATED, ATTENTION_SCALE)
            )
        )
    ]
    if wrong:
        _refuse_unknown(wrong, names)


def _refuse_unknown(wrong: list[str], names: Mapping[str, Tensor]) -> NoReturn:
    raise ReshardError(
        Problem(
            "vllm-tensor-unknown",
            "reshard does not know how vLLM arranges this tensor",
            tensor=name,
            file=names[name].file,
            rule="only plain weights of dense models are read: vLLM permutes others for its kernels",
            expected=f"a weight in {', '.join(FLOAT_DTYPES)}",
            found=f"{names[name].dtype} {list(names[name].shape)}",
            remedy=CONVERT_ORIGINAL,
        )
        for name in wrong
    )


def _fused_match(name: str) -> re.Match[str] | None:
    """Whether a tensor is of several projections: what is before, which they are, and what is after."""
    return re.fullmatch(rf"({_LAYER}(?:self_attn|mlp)\.)(qkv|gate_up)_proj(\.weight|\.bias)", name)


def _split_of(name: str) -> Split | None:
    if CUT_BY_ROWS.fullmatch(name):
        return Split(0)
    return Split(1) if CUT_BY_COLUMNS.fullmatch(name) else None


def _unfused(content: Mapping[str, Tensor], sizes: _SharedSizes) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a rank, its part of each projection under the name that the Hub has for it."""
    for name, tensor in content.items():
        fused = _fused_match(name)
        if not fused:
            yield name, tensor
            continue
        begin = 0
        for part, rows in sizes.rows(name, tensor, is_attention=fused[2] == "qkv").items():
            yield f"{fused[1]}{part}_proj{fused[3]}", Tensor(tensor.dtype, tensor.view[begin : begin + rows])
            begin += rows


def _with_both_ends(tensors: dict[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors with the embedding, of which vLLM stores only the head if both are the same."""
    if EMBEDDING in tensors or HEAD not in tensors:
        return tensors
    tensors = {**tensors, EMBEDDING: tensors[HEAD]}
    return {
        name: each for name, each in tensors.items() if name != HEAD or not config.get("tie_word_embeddings")
    }


class _SharedSizes:
    """The sizes in a config, and how ranks share them."""

    def __init__(self, config: Mapping[str, Any], ranks: int, folder: Path) -> None:
        self._ranks, self._folder = ranks, folder
        self._heads = self._stated_size(config, "num_attention_heads")
        self._groups = self._stated_size(
            {"num_key_value_heads": self._heads, **config}, "num_key_value_heads"
        )
        self._vocabulary = self._stated_size(config, "vocab_size")
        if self._heads % ranks:
            raise self._misfit_error(f"{ranks} ranks", f"a divisor of num_attention_heads {self._heads}")
        self._copies = max(ranks // self._groups, 1)
        """How many ranks have each KV head."""

    def _stated_size(self, config: Mapping[str, Any], key: str) -> int:
        size = config.get(key)
        if isinstance(size, int) and size > 0:
            return size
        raise self._misfit_error(f"{key} {size}", f"a number as {key} in {CONFIG}")

    def _misfit_error(self, found: str, expected: str, tensor: str = "") -> ReshardError:
        return ReshardError(
            "vllm-sizes-differ",
            "the files do not have the sizes that config.json tells",
            tensor=tensor or None,
            file=str(self._folder),
            expected=expected,
            found=found,
            remedy="pass the folder with the config.json of this model, and with the files of all ranks",
        )

    def rows(self, name: str, tensor: Tensor, *, is_attention: bool) -> dict[str, int]:
        """The rows of each projection in one rank's part of a fused one."""
        rows = tensor.shape[0]
        heads, groups = self._heads // self._ranks, max(self._groups // self._ranks, 1)
        of_part = {"q": heads, "k": groups, "v": groups} if is_attention else {"gate": 1, "up": 1}
        size, rest = divmod(rows, sum(of_part.values()))
        if rest:
            raise self._misfit_error(f"{rows} rows", f"a multiple of {sum(of_part.values())} rows", name)
        return {part: count * size for part, count in of_part.items()}

    def once(self, name: str, tensors: dict[str, Tensor]) -> Iterator[Replica]:
        """Keep each KV head of a projection once, and yield the others as replicas."""
        if self._copies == 1 or not re.search(r"\.[kv]_proj\.", name):
            return
        dtype, view = tensors[name]
        rows, rest = view.shape[0] // self._groups, view.shape[1:]
        by_copy = view.reshape(self._groups, self._copies, rows // self._copies, *rest)
        shape = (view.shape[0] // self._copies, *rest)
        first, *others = (Tensor(dtype, by_copy[:, copy].reshape(*shape)) for copy in range(self._copies))
        tensors[name] = first
        for other in others:
            yield Replica(name, first, other, "ranks that share a KV head have equal weights of it")

    def unpadded(self, name: str, tensors: dict[str, Tensor]) -> Iterator[Replica]:
        """Keep the rows of the vocabulary, and yield those after it as replicas of zeros."""
        dtype, view = tensors[name]
        if view.shape[0] < self._vocabulary:
            raise self._misfit_error(f"{view.shape[0]} rows", f"vocab_size {self._vocabulary}", name)
        tensors[name] = Tensor(dtype, view[: self._vocabulary])
        if padding := view.shape[0] - self._vocabulary:
            zeros = View.of(Cells(ZERO, dtype), padding * view.shape[1]).reshape(padding, view.shape[1])
            yield Replica(
                name,
                Tensor(dtype, zeros),
                Tensor(dtype, view[self._vocabulary :]),
                "vLLM pads a vocabulary with zeros",
            )
