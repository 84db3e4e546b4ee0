"""Weight files of other tools that are not in one of the formats: what they are, and how to convert them.

They are recognized by their content (`SIGNS`). By their names only: Flax's msgpack files, which have no magic, those
that are packed for one program, and ordinary files of torch and of safetensors (`SIGNS_OF_NAMES`). Where neither tells,
the names of their tensors do (`SIGNS_OF_TENSORS`):

- NeMo 1: a tar archive, gzipped before NeMo 1.7 (nemo/core/connectors/save_restore_connector.py). Plain ones are read.
- torch.save: a zip archive whose first member is `…/data.pkl`; the dict of a Lightning checkpoint has the key
  `pytorch-lightning_version` before its weights (lightning/pytorch/trainer/connectors/checkpoint_connector.py), and
  TorchScript has members below `code/`. Before torch 1.6 the file was a sequence of pickles.
- numpy's `.npz`: a zip archive whose first member ends in `.npy`.
- CTranslate2: its version, then the name of its class of models (ctranslate2/specs/model_spec.py).
- GGML: one of three magics, of llama.cpp before August 2023.
- ONNX: a protobuf message without a magic, whose first field is `ir_version` (onnx/onnx.proto): byte 08.
- Orbax: containers with MaxText's names are read (`orbax/`), which finds those of others.
"""

from __future__ import annotations

import gzip
import re
import shlex
import zlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from reshard.base.errors import Problem, ReshardError
from reshard.base.later_imports import imported_later
from reshard.stores import archive_folder, is_remote, open_file
from reshard.stores.tar_members import BLOCK_BYTES, is_tar

with imported_later(__name__):
    from reshard.families.in_memory import renamings


EDGE_BYTES = 1 << 16
"""Bytes read from either end of a file."""

MAX_FILES = 64
"""Number of files of a folder that are examined."""


class ForeignKind(NamedTuple):
    """A kind of file, and what to do with it.

    Braces in `remedy` are placeholders for shell words (`file`, `absolute`, `folder`: a new folder) and for Python
    strings (`its_path`, `its_folder`, `its_name`, `new_folder`).
    """

    code: str
    what: str
    remedy: str


class FileSign(NamedTuple):
    """How files of a kind are recognized, by all that it has. `name` and `begin` are regular expressions."""

    kind: ForeignKind
    name: str = r"(?s).*"
    begin: bytes = rb""
    contains: bytes = b""
    """What the first bytes contain."""
    member: bytes = b""
    """How the name of the first member of a zip archive ends."""
    directory: bytes = b""
    """What the directory of a zip archive contains."""
    tar: bool = False
    """Whether it is a tar archive, plain or gzipped."""


_OF_THE_HUB = "convert the model's Hugging Face folder instead: "

_LINK = (
    "give it Hugging Face's name for such a file: "
    "mkdir {folder} && ln -s {absolute} {folder}/pytorch_model.bin; "
    "copy config.json and the tokenizer of the model there, then run: reshard inspect {folder}"
)

NEMO = ForeignKind(
    "foreign-nemo",
    "this is a .nemo archive of NeMo",
    "pass the archive itself: reshard inspect {file}; one in a store must be downloaded first",
)
COMPRESSED_NEMO = ForeignKind(
    "foreign-nemo-compressed",
    "this is a compressed .nemo archive, whose files cannot be read where they are",
    "decompress it: gzip -dc {file} > {folder}-plain.nemo, then run: reshard inspect {folder}-plain.nemo",
)
NEMO_RANK = ForeignKind(
    "foreign-nemo-weights",
    "these weights have the names of NeMo 1, in a file that it does not call so",
    "give it NeMo's name for such a file: mkdir {folder} && ln -s {absolute} {folder}/model_weights.ckpt, "
    "then run: reshard inspect {folder}",
)
LIGHTNING = ForeignKind("foreign-lightning", "this is a checkpoint of PyTorch Lightning", _LINK)
TORCH_FILE = ForeignKind(
    "foreign-torch-file",
    "the only weights here are in a torch.save file with a name that no format uses",
    "pass the file itself, and the model's Hugging Face folder with --base: reshard inspect {file}",
)
OLD_TORCH = ForeignKind(
    "foreign-torch-legacy",
    "this is a torch.save file in the format of torch before 1.6",
    "rewrite it: torch.save(torch.load({its_path}, weights_only=True), {new_folder} + '/pytorch_model.bin'), "
    "then run: reshard inspect {folder}",
)
TORCHSCRIPT = ForeignKind(
    "foreign-torchscript",
    "this is a TorchScript program",
    "save its weights: torch.save(torch.jit.load({its_path}).state_dict(), {new_folder} + '/pytorch_model.bin'), "
    "then run: reshard inspect {folder}",
)
TORCH_MODULE = ForeignKind(
    "foreign-torch-module",
    "this is a pickled model, not its weights",
    "load it where its code is installed, and call model.save_pretrained({new_folder}); loading runs code in the file, "
    "so do it only with a file that you trust",
)
ONNX = ForeignKind(
    "foreign-onnx",
    "this is an ONNX program",
    "convert the model that it was exported from: an export keeps neither the config nor all weight names",
)
ORBAX = ForeignKind(
    "foreign-orbax",
    "this Orbax checkpoint does not have MaxText's names, the only ones that are read",
    "export it with its trainer (EasyDeL: model.to_torch(); Levanter: python -m levanter.main.export_lm_to_hf; T5X: "
    "convert_t5x_checkpoint_to_pytorch.py of transformers 4), or restore it with orbax.checkpoint and save the arrays "
    "as {folder}/model.safetensors under their Hugging Face names",
)
FLAX = ForeignKind(
    "foreign-flax",
    "these are Flax weights",
    "load them with transformers 4: "
    "AutoModelForCausalLM.from_pretrained({its_folder}, from_flax=True).save_pretrained({new_folder})",
)
HDF5 = ForeignKind(
    "foreign-hdf5",
    "these are weights of TensorFlow or Keras, in HDF5",
    "load them with transformers 4: "
    "AutoModelForCausalLM.from_pretrained({its_folder}, from_tf=True).save_pretrained({new_folder})",
)
GGML = ForeignKind(
    "foreign-ggml",
    "this is a file of llama.cpp from before GGUF",
    "convert the model that it was made from: llama.cpp does not load such files any more",
)


def _packed(program: str) -> ForeignKind:
    """The kind of what was made of a model for one program alone, which also names what reads it."""
    return ForeignKind(
        "foreign-packed",
        f"only {program} reads this file",
        "convert the model that it was made from: weights are packed for this program, and nothing unpacks them",
    )


NUMPY_ARRAYS = ForeignKind(
    "foreign-numpy",
    "this is an archive of numpy arrays, as older versions of MLX wrote weights",
    "save the arrays as {folder}/model.safetensors under their Hugging Face names",
)
MISTRAL = ForeignKind(
    "foreign-mistral",
    "these weights have the names of Mistral's own code, in a file that it does not call so",
    "name it as Mistral does, consolidated.safetensors (consolidated.00.pth if torch.save wrote it), in a folder with "
    "the model's params.json or config.json, and pass that folder",
)
LITGPT = ForeignKind(
    "foreign-litgpt",
    "these weights have the names of LitGPT, in a file that it does not call so",
    "name it as LitGPT does, lit_model.pth, in a folder with the model's model_config.yaml, and pass that folder",
)
LITGPT_LORA = ForeignKind(
    "foreign-litgpt-lora",
    "these are weights of LoRA that LitGPT has not merged into those of the model",
    "merge them with it: litgpt merge_lora {its_folder}, then run: reshard inspect {its_folder}",
)
OLMO = ForeignKind(
    "foreign-olmo-core",
    "these weights have the names of OLMo-core",
    "pass the folder of the step that they were taken from, with model_and_optim and config.json in it; "
    "if only these are left, its src/examples/huggingface/convert_checkpoint_to_hf.py converts them",
)
TENSORRT = ForeignKind(
    "foreign-tensorrt-llm",
    "these files are a checkpoint of TensorRT-LLM, which divides a model over its ranks",
    _OF_THE_HUB + "they were made from it; only trtllm-build of TensorRT-LLM reads these files",
)
PADDLE = ForeignKind(
    "foreign-paddle",
    "this file of Paddle is a pickle of its arrays",
    "save the model as safetensors where PaddleNLP is installed: AutoModelForCausalLM.from_pretrained({its_folder})"
    ".save_pretrained({new_folder}, safe_serialization=True), then run: reshard inspect {folder}",
)
PADDLE_RANK = ForeignKind(
    "foreign-paddle-rank",
    "these files of Paddle are the parts of a model that its ranks have",
    "save it complete where it was trained: model.save_pretrained({new_folder}, safe_serialization=True, "
    "merge_tensor_parallel=True), then run: reshard inspect {folder}",
)
SIGNS_OF_NAMES = (
    (re.compile(r"rank\d+\.safetensors"), TENSORRT),
    (re.compile(r"model\.(tp|pp|moe)\d\d\w*\.safetensors"), PADDLE_RANK),
)
"""Files of safetensors with the names that a tool gives them, beside a model's own (`model*.safetensors`)."""
NEMO_ARCHIVE = r"(?s).+\.nemo"
_ZIP = b"PK\x03\x04"
_PICKLE = b"/data.pkl"
SIGNS = (
    FileSign(LITGPT_LORA, name=r"lit_model\.pth\.lora", begin=rb"(?s)."),
    FileSign(PADDLE_RANK, name=r"model_state\.(tp|pp|moe)\d\d\w*\.pdparams", begin=rb"\x80"),
    FileSign(PADDLE, name=r"(?s).+\.pdparams", begin=rb"\x80"),
    FileSign(_packed("CTranslate2"), name=r"model\.bin", contains=b"DecoderSpec"),
    FileSign(_packed("OpenVINO"), name=r"openvino_\w*model\.xml", begin=rb"<"),
    FileSign(_packed("MLC-LLM"), name=r"params_shard_\d+\.bin", begin=rb"(?s)."),
    FileSign(_packed("TensorRT"), name=r"(?s).+\.engine", begin=rb"(?s)."),
    FileSign(HDF5, name=r"(?s).+\.(h5|hdf5|keras)", begin=rb"\x89HDF\r\n\x1a\n"),
    FileSign(GGML, begin=rb"tjgg|fmgg|lmgg"),
    FileSign(NUMPY_ARRAYS, member=b".npy"),
    FileSign(TORCHSCRIPT, directory=b"/code/__torch__"),
    FileSign(LIGHTNING, member=_PICKLE, contains=b"pytorch-lightning_version"),
    FileSign(TORCH_MODULE, member=_PICKLE, contains=b"torch.nn.modules"),
    FileSign(TORCH_FILE, member=_PICKLE),
    # MAGIC_NUMBER of torch/serialization.py
    FileSign(OLD_TORCH, begin=re.escape(b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.")),
    FileSign(ONNX, name=r"(?s).+\.onnx", begin=rb"\x08"),
    FileSign(FLAX, name=r"flax_model\.msgpack", begin=rb"(?!PK\x03\x04)"),
    FileSign(COMPRESSED_NEMO, name=NEMO_ARCHIVE, begin=rb"\x1f\x8b", tar=True),
    FileSign(NEMO, name=NEMO_ARCHIVE, begin=rb"(?!PK\x03\x04)", tar=True),
)
"""The first that fits counts; `(?s).` fits all but empty files."""
SIGNS_OF_TENSORS = (
    (
        re.compile(
            r"(_forward_module\.|model\.)*transformer\.h\.\d+\."
            r"(attn\.(attn|qkv)|mlp\.(experts\.\d+\.|shared_experts\.)?fc_1)\.((linear\.)?weight|lora_A)"
        ),
        LITGPT,
    ),
    (re.compile(r"(model\.)?blocks\.\d+\.attention\.w_(q|qkv)\.weight"), OLMO),
    (re.compile(r"layers\.\d+\.attention\.wq(_a)?\.weight"), MISTRAL),
    (re.compile(r"(model\.)?decoder\.layers\.\d+\.self_attention\.linear_qkv\.weight"), NEMO_RANK),
    (
        re.compile(r"model\.language_model\.encoder\.layers\.\d+\.self_attention\.query_key_value\.weight"),
        NEMO_RANK,
    ),
)
"""Names of tensors that only one tool has, and that are not the Hub's."""
_ANY_TENSOR = re.compile("|".join(f"(?:{pattern.pattern})" for pattern, _ in SIGNS_OF_TENSORS))
_KINDS_BY_NAME = {kind for _, kind in (*SIGNS_OF_NAMES, *SIGNS_OF_TENSORS)}
CODES = {kind.code for kind in (ORBAX, *(sign.kind for sign in SIGNS), *_KINDS_BY_NAME)}


def recognized(path: Path) -> Problem | None:
    """The problem of a foreign file, or of a folder with such a file; None if it is not recognized."""
    if not path.is_dir():
        kind = _kind_of(path) if path.is_file() else None
        return problem(kind, path) if kind else None
    children = sorted(path.iterdir())[:MAX_FILES]
    foreign_files = ((kind, child) for child in children if child.is_file() and (kind := _kind_of(child)))
    return next((problem(kind, child) for kind, child in foreign_files), None)


def in_archive(path: Path) -> Path:
    """The contents of a `.nemo` archive on a disk that is not compressed, as a folder; any other path as it is."""
    is_archive = not is_remote(path) and re.fullmatch(NEMO_ARCHIVE, path.name) and path.is_file()
    return archive_folder(path) if is_archive and is_tar(_begin(path)) else path


def is_state_dict(path: Path) -> bool:
    """Whether a file is one that torch.save wrote, whose tensors have names."""
    return path.is_file() and _kind_of(path) is TORCH_FILE


def named_by_a_tool(path: Path) -> Problem | None:
    """The problem of safetensors whose names, all of them, are those of one tool; None if a model's own are there."""
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    kinds = [
        next((kind for name, kind in SIGNS_OF_NAMES if name.fullmatch(file.name)), None) for file in files
    ]
    return problem(kinds[0], files[0]) if kinds and kinds[0] and len(set(kinds)) == 1 else None


def with_names_of_a_tool(
    path: Path, tensors: Iterable[str], config: Mapping[str, Any] | None
) -> Problem | None:
    """The problem of a checkpoint some of whose tensors have names that only one tool uses.

    The Hub has Mistral Large 4 under such names: those that transformers renames, for the model of `config`, are its.
    """
    those = filter(_ANY_TENSOR.fullmatch, tensors)
    signs = [
        (tensor, kind) for tensor in those for pattern, kind in SIGNS_OF_TENSORS if pattern.fullmatch(tensor)
    ]
    rules = renamings(config) if signs and config else ()
    others = (kind for name, kind in signs if all(rule.applied(name).name == name for rule in rules))
    return next((problem(kind, path) for kind in others), None)


def problem(kind: ForeignKind, path: Path) -> Problem:
    """The problem of a file of this kind, with commands that can be pasted."""
    folder = path.name.removesuffix(path.suffix) if path.suffix else f"{path.name}-hf"
    if not path.is_dir() and (path.parent / folder).exists():
        folder += "-hf"
    remedy = kind.remedy.format(
        file=shlex.quote(str(path)),
        absolute=shlex.quote(str(path.absolute())),
        folder=shlex.quote(folder),
        its_path=repr(str(path)),
        its_folder=repr(str(path.parent)),
        its_name=repr(path.name),
        new_folder=repr(folder),
    )
    return Problem(kind.code, kind.what, file=str(path), remedy=remedy)


def _begin(path: Path) -> bytes:
    """The first bytes of a file; none if it cannot be read."""
    with suppress(OSError, ReshardError), open_file(path) as file:
        return file.read(0, EDGE_BYTES)
    return b""


def _end(path: Path) -> bytes:
    """The last bytes of a file; a zip archive has its directory there."""
    with suppress(OSError, ReshardError), open_file(path) as file:
        return file.read(max(file.size - EDGE_BYTES, 0), EDGE_BYTES)
    return b""


def _kind_of(path: Path) -> ForeignKind | None:
    """The kind of a file, by its name and content."""
    begin = _begin(path)
    is_zip = begin.startswith(_ZIP)
    member = begin[30 : 30 + int.from_bytes(begin[26:28], "little")] if is_zip else b""
    end = _end(path) if is_zip else b""
    kinds = (
        sign.kind
        for sign in SIGNS
        if re.fullmatch(sign.name, path.name)
        and re.match(sign.begin, begin)
        and sign.contains in begin
        and member.endswith(sign.member)
        and sign.directory in end
        and (not sign.tar or _is_tar(begin))
    )
    return next(kinds, None)


def _is_tar(begin: bytes) -> bool:
    """Whether these bytes begin a tar archive, plain or gzipped."""
    if begin.startswith(b"\x1f\x8b"):
        with suppress(EOFError, zlib.error, gzip.BadGzipFile):
            begin = zlib.decompressobj(wbits=31).decompress(begin, BLOCK_BYTES)
    return is_tar(begin)
