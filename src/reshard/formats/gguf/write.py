"""Write GGUF files: tensors in the types that llama.cpp's converter gives them; config and tokenizer as metadata."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np

from reshard.algebra.dtypes import DType, dtype
from reshard.algebra.tensors import Tensor
from reshard.algebra.views import View
from reshard.base.errors import Problem, ReshardError, raise_all
from reshard.base.plain_json import json_of
from reshard.codecs.gguf_blocks import UINT8, BlockBytes, gguf_package, repacked
from reshard.codecs.gguf_types import BF16, F16, F32, MXFP4, Q8_0, QUANTIZED, TensorType, written
from reshard.families.dialects.gguf import GGUF
from reshard.families.rope import rope_parameters
from reshard.folders.companion_names import CONFIG
from reshard.formats.contract import Naming, Request, StoredDtypes, Target, Writing
from reshard.formats.gguf import container
from reshard.formats.gguf.folder import SPLIT_COUNT, SPLIT_NUMBER, SPLIT_TENSORS
from reshard.formats.gguf.hyperparameters import model_type
from reshard.formats.gguf.llama_cpp_differences import not_loaded
from reshard.formats.gguf.metadata import ARCHITECTURES, ModelFacts, metadata
from reshard.formats.gguf.value_types import Metadata, Value, ValueType
from reshard.transfer.memory_budget import NO_NEED, MemoryNeed
from reshard.transfer.plan import Block, OutputCommand, OutputFile, Planned

DTYPES = {F32: dtype("float32"), F16: dtype("float16"), BF16: dtype("bfloat16")}
PLAIN_TYPES = {each.name: kind for kind, each in DTYPES.items()}
STEM, SUFFIX = "model", ".gguf"
QUANTIZATION_VERSION = 2
"""GGML_QUANT_VERSION: the layout of blocks."""
ROPE_TENSOR = "rope_freqs.weight"


class GgufTensor(NamedTuple):
    """A tensor of a file: its type and shape, and its data, planned or known."""

    kind: TensorType
    shape: tuple[int, ...]
    data: Planned | bytes


def tensor_type(name: str, shape: tuple[int, ...], wanted: TensorType) -> TensorType:
    """The type of a tensor in a file of `wanted`, as `ModelBase.prepare_tensors` of llama.cpp's converter chooses it.

    In MXFP4 are experts only, and everything else in Q8_0, as llama-quantize chooses it.
    """
    if (
        len(shape) <= 1
        or name.endswith(("_norm.weight", "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight"))
        or not name.endswith(".weight")
    ):
        return F32
    if wanted == MXFP4 and not name.endswith("_exps.weight"):
        wanted = Q8_0
    if wanted.name.startswith("TQ") and name in ("token_embd.weight", "output.weight"):
        return F16
    return wanted if wanted.divides(shape) else F16


def typed(request: Request, main: DType) -> Callable[[str, tuple[int, ...]], DType]:
    """The dtype in which each tensor is planned; blocks are computed from float32."""
    wanted = _wanted(request, main)

    def of(name: str, shape: tuple[int, ...]) -> DType:
        return DTYPES.get(tensor_type(name, shape, wanted), DTYPES[F32])

    return of


def _wanted(request: Request, main: DType) -> TensorType:
    """The type that users choose, or else that of most weights."""
    if request.options.quantize:
        return written(request.options.quantize)
    return PLAIN_TYPES.get(main.name, F32)


def check_config(config: Mapping[str, Any]) -> None:
    """Raise ReshardError for a model that the metadata cannot describe."""
    if (kind := model_type(config)) not in ARCHITECTURES:
        raise ReshardError(
            "gguf-model-unsupported",
            "reshard cannot write this model as GGUF",
            rule="config and tokenizer become metadata of llama.cpp, which differ by model",
            expected=f"model_type {', '.join(sorted(ARCHITECTURES))}",
            found=f"model_type {kind}",
            remedy="write a Hugging Face folder (--to huggingface), and convert that with convert_hf_to_gguf.py of"
            " llama.cpp, if llama.cpp has the model",
        )


def fit(request: Request) -> Request:
    """The request. Raises ReshardError for options that exclude each other, and for a model that is not loaded."""
    if request.options.quantize and request.options.dtype:
        raise ReshardError(
            "gguf-dtype-and-quantize",
            "--dtype and --quantize both choose the type of the weights",
            found=f"--dtype {request.options.dtype} --quantize {request.options.quantize}",
            remedy="pass one of them",
        )
    kind = written(request.options.quantize) if request.options.quantize else F32
    if kind == MXFP4 and not request.declared.dims.experts:
        raise ReshardError(
            "gguf-mxfp4-without-experts",
            "only experts are stored in MXFP4, and the model has none",
            found=f"--quantize {request.options.quantize}, model_type {model_type(request.config)}",
            remedy="pass --quantize q8_0",
        )
    if kind not in DTYPES:
        gguf_package()
    raise_all(not_loaded(request.config, request.declared.dims))
    return replace(request, model=replace(request.declared, carried={}))


_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def leaves_out(request: Request, name: str) -> str | None:
    """The rule for a tensor that llama.cpp's converter leaves out of the file of a language model."""
    model = request.declared
    family = model.family
    if family.carried([name], native=False):
        return "the parts of a multimodal model besides its language model"
    numbered = _LAYER.match(family.plain_name(name))
    is_beyond = numbered and int(numbered[1]) >= model.dims.layers
    return "layers for multi-token prediction" if is_beyond else None


def _stored(request: Request, arch: str, tensor: Planned) -> GgufTensor:
    """A tensor in the type that it gets."""
    if arch == "gpt-oss" and tensor.name.endswith("_exps.weight") and (view := repacked(tensor.source())):
        return GgufTensor(
            MXFP4, tensor.shape, tensor._replace(dtype=UINT8, shape=view.shape, source=lambda: view)
        )
    kind = PLAIN_TYPES[tensor.dtype.name]
    if request.options.quantize:
        kind = tensor_type(tensor.name, tensor.shape, written(request.options.quantize))
    if kind in DTYPES:
        return GgufTensor(kind, tensor.shape, tensor)
    shape = (*tensor.shape[:-1], tensor.shape[-1] // kind.elements * kind.nbytes)
    blocks = partial(_blocks, tensor, kind, shape)
    return GgufTensor(kind, tensor.shape, Planned(tensor.name, UINT8, shape, blocks))


def _blocks(tensor: Planned, kind: TensorType, shape: tuple[int, ...]) -> View:
    return View.of(BlockBytes(tensor.name, Tensor(tensor.dtype, tensor.source()), kind), *shape)


def _facts(request: Request, tensors: Mapping[str, GgufTensor]) -> ModelFacts:
    """The numbers of parameters, counted as `GGUFWriter.get_total_parameter_count` counts them."""
    total = shared = of_expert = experts = stacks = 0
    for name, stored in tensors.items():
        size, shape = math.prod(stored.shape), stored.shape
        total += size
        if "_exps." in name and len(shape) >= 3:
            count = shape[-2 if ".bias" in name else -3]
            of_expert, experts, stacks = of_expert + size // count, experts + count, stacks + 1
        else:
            shared += size
    each = experts // stacks if stacks else 0
    rows = tensors[GGUF.embeddings[0]].shape[0]
    return ModelFacts(request.name, (total, shared, of_expert, each), rows)


def _file_type(request: Request, tensors: Mapping[str, GgufTensor]) -> int:
    """The number of the type of most weights, as llama.cpp's converter names it."""
    if request.options.quantize:
        wanted = written(request.options.quantize)
    else:
        sizes: Counter[TensorType] = Counter()
        for name, stored in tensors.items():
            if name.endswith(".weight") and len(stored.shape) > 1:
                sizes[stored.kind] += math.prod(stored.shape)
        wanted = next(kind for kind, _ in sizes.most_common() if kind != MXFP4)
    if wanted in DTYPES and any(stored.kind == MXFP4 for stored in tensors.values()):
        wanted = MXFP4
    assert wanted.file_type is not None
    return wanted.file_type


def rotary_divisors(config: Mapping[str, Any]) -> list[float]:
    """What llama3 scaling divides each rotary frequency by (`LlamaModel.generate_extra_tensors`); none for others.

    Mistral and Mixtral are of llama.cpp's architecture `llama`, too.

    torch divides a number by a tensor by multiplying with the reciprocal. It may round a power differently by one bit.
    """
    rope = rope_parameters(config)
    if rope.get("rope_type") != "llama3" or ARCHITECTURES[config["model_type"]] != "llama":
        return []
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    powers = (np.arange(0, size, 2, dtype=np.float32) / np.float32(size)).astype(np.float64)
    frequencies = 1 / np.power(float(rope.get("rope_theta", 10000.0)), powers).astype(np.float32)
    waves = (1 / frequencies) * np.float32(2 * math.pi)
    factor, low, high = (
        float(rope.get(key, default))
        for key, default in (("factor", 8.0), ("low_freq_factor", 1.0), ("high_freq_factor", 4.0))
    )
    length = rope.get("original_max_position_embeddings", 8192)
    smooth = ((1 / waves) * np.float32(length) - np.float32(low)) / np.float32(high - low)
    between = 1 / ((1 - smooth) / np.float32(factor) + smooth)
    divisors = np.where(waves < length / high, 1, np.where(waves > length / low, factor, between))
    factors: list[float] = divisors.astype(np.float32).tolist()
    return factors


class GgufWriting(Writing):
    """One file or several, with the tensors as they are stored and everything else as metadata.

    `tensors` are those of the files by name, `metadata` that of the first file.
    """

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        arch = ARCHITECTURES[request.declared.text["model_type"]]
        self.tensors: dict[str, GgufTensor] = {}
        if frequencies := rotary_divisors(request.declared.text):
            content = np.asarray(frequencies, "<f4").tobytes()
            self.tensors[ROPE_TENSOR] = GgufTensor(F32, (len(frequencies),), content)
        self.tensors |= {each.name: _stored(request, arch, each) for each in request.tensors}
        config = json_of(request.companions[CONFIG])
        described = metadata(config, request.companions, arch, _facts(request, self.tensors))
        self._differences = described.warnings
        self.metadata: Metadata = {
            **described.values,
            "general.file_type": Value(ValueType.UINT32, _file_type(request, self.tensors)),
            "general.quantization_version": Value(ValueType.UINT32, QUANTIZATION_VERSION),
        }
        planned = [each.data for each in self.tensors.values() if isinstance(each.data, Planned)]
        self.request = replace(request, tensors=planned)

    @property
    def memory(self) -> MemoryNeed:
        """The memory that computing blocks takes."""
        kinds = {each.kind for each in self.tensors.values() if each.kind not in DTYPES}
        nothing = Tensor(DTYPES[F32], View((0,), ()))
        needs = [(source := BlockBytes("", nothing, kind)).memory_for(source.few) for kind in kinds]
        return MemoryNeed(max(needs), None) if needs else NO_NEED

    def files(self) -> list[OutputFile]:
        """One file, or several of at most the size that users ask for, as `GGUFWriter` divides them."""
        parts: list[dict[str, GgufTensor]] = [{}]
        options = self.request.options
        size, most = 0, options.shard_size if options.max_shard_size else math.inf
        for name, stored in self.tensors.items():
            nbytes = stored.kind.size(stored.shape)
            if parts[-1] and size + nbytes > most:
                parts.append({})
                size = 0
            parts[-1][name] = stored
            size += nbytes
        if len(parts) == 1:
            return [_file(f"{STEM}.gguf", self.metadata, parts[0])]
        files = []
        for number, part in enumerate(parts):
            values = {
                **(self.metadata if number == 0 else {}),
                SPLIT_NUMBER: Value(ValueType.UINT16, number),
                SPLIT_COUNT: Value(ValueType.UINT16, len(parts)),
                SPLIT_TENSORS: Value(ValueType.INT32, len(self.tensors)),
            }
            files.append(_file(f"{STEM}-{number + 1:05d}-of-{len(parts):05d}.gguf", values, part))
        return files

    def warnings(self) -> list[Problem]:
        """What llama.cpp computes differently from the config."""
        return [*self._differences]

    def notes(self) -> list[str]:
        """Which types the tensors have, and why."""
        counted = Counter(stored.kind.name for stored in self.tensors.values())
        notes = [f"types: {', '.join(f'{kind} × {count}' for kind, count in counted.most_common())}"]
        if not self.request.options.quantize:
            return notes
        wanted = written(self.request.options.quantize)
        if narrow := [name for name, each in self.tensors.items() if _fell_back(name, each, wanted)]:
            notes.append(
                f"{len(narrow)} tensors are in F16, because {wanted.elements} does not divide their rows: {narrow[0]}"
            )
        return notes

    def afterwards(self) -> Iterator[OutputCommand]:
        """How to quantize the output further, with the program of llama.cpp."""
        if all(stored.kind in DTYPES for stored in self.tensors.values()):
            first, smaller = PurePath(self.files()[0].path), PurePath(f"{STEM}-Q4_K_M{SUFFIX}")
            yield OutputCommand("for K-quants", ("llama-quantize", first, smaller, "Q4_K_M"))


def _file(path: str, values: Metadata, tensors: Mapping[str, GgufTensor]) -> OutputFile:
    content, offsets = container.header(values, [(n, each.kind, each.shape) for n, each in tensors.items()])
    placed = list(zip(tensors.values(), offsets, strict=True))
    end = len(content)
    literals = [(0, content)]
    for stored, offset in placed:
        last = offset + stored.kind.size(stored.shape)
        end = container.padded(last)
        if isinstance(stored.data, bytes):
            literals.append((offset, stored.data))
        if end > last:
            literals.append((last, bytes(end - last)))
    blocks = [Block.whole(stored.data, at) for stored, at in placed if isinstance(stored.data, Planned)]
    return OutputFile(path, end, blocks, lambda: iter(literals))


def _fell_back(name: str, stored: GgufTensor, wanted: TensorType) -> bool:
    return stored.kind == F16 and not wanted.divides(stored.shape) and name.endswith(".weight")


TARGET = Target(
    GgufWriting,
    Naming((GGUF.name,), leaves_out=leaves_out),
    dtypes=StoredDtypes(of_tensors=typed, quantizes=QUANTIZED),
    embeds=SUFFIX,
    judges_model=False,
    fit=fit,
    check_config=check_config,
)
