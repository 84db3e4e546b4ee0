"""The names of formats and of their files, by which a path is recognized.

The reader and the writer of a format are imported when a path is in it: nothing here imports one.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from reshard.base.errors import ReshardError
from reshard.containers.file_names import DCP_METADATA, ZARRAY
from reshard.containers.orbax_arrays import DATABASE, METADATA
from reshard.folders import iterations
from reshard.folders.allowed_paths import check_open, folders_in, is_here
from reshard.formats import huggingface, weight_files
from reshard.stores import open_file

TORCH_DIST, ZARR, LEGACY, NEMO = "megatron", "megatron-zarr", "megatron-legacy", "nemo"
FSDP_DTENSOR, DCP, FSDP_RANKS, DEEPSPEED = "megatron-fsdp", "dcp", "fsdp-ranks", "deepspeed"
INTERNLM, GGUF, ORBAX, ORBAX_UNSCANNED = "internlm", "gguf", "orbax", "orbax-unscanned"
MLX, MLX_ADAPTER = "mlx", "mlx-adapter"
"""MLX is also in the metadata of its files."""
MISTRAL, META, LITGPT, NANOTRON = "mistral", "meta", "litgpt", "nanotron"
DEEPSEEK, PADDLE, VLLM = "deepseek-inference", "paddle", "vllm-sharded-state"

# ----------------------------------------------------------------------------------------------- Megatron-Core

COMMON_FILE = "common.pt"
STATE_FILE = "model_optim_rng.pt"
NEMO_FILE = "model_weights.ckpt"
_OF_CORE = ("metadata.json", COMMON_FILE)
_NEMO_FOLDER = re.compile(r"(?:mp_rank|tp_rank)_(\d{2,})(?:_pp_rank_(\d{3,}))?")


def is_torch_dist(path: Path) -> bool:
    """Whether `path` is an iteration folder in torch_dist, or a folder with such iterations."""
    return any(
        is_dcp(folder) and (_is_of_core(folder) or iterations.is_iteration(folder))
        for folder in iterations.iteration_folders(path)
    )


def _is_of_core(folder: Path) -> bool:
    """Whether Megatron-Core wrote a folder, and not torch's DCP alone, by its other files."""
    return any((folder / name).is_file() for name in _OF_CORE)


def is_fsdp_dtensor(path: Path) -> bool:
    """Whether torch's DCP alone saved the iterations: names of files do not tell Megatron-FSDP from torch_dcp."""
    return is_torch_dist(path) and not any(map(_is_of_core, iterations.iteration_folders(path)))


def is_zarr(path: Path) -> bool:
    """Whether `path` is an iteration folder in zarr, or a folder with such iterations."""
    return any(map(_holds_zarr, iterations.iteration_folders(path)))


def _holds_zarr(folder: Path) -> bool:
    """Whether arrays are in a folder of Megatron-Core, or the chunks of some whose hidden files were not copied."""
    return _is_of_core(folder) and any(any(folder.glob(each)) for each in (f"*/{ZARRAY}", "*.weight/0*"))


def is_legacy(path: Path) -> bool:
    """Whether `path` is an iteration folder with `mp_rank_*`, or a folder with such iterations."""
    return any(any(folder.glob(f"mp_rank_*/{STATE_FILE}")) for folder in iterations.iteration_folders(path))


def is_nemo(path: Path) -> bool:
    """Whether files of ranks with NeMo's names are in a folder."""
    return path.is_dir() and any(nemo_files(path))


def nemo_files(folder: Path) -> Iterator[tuple[int, int, Path]]:
    """The files of ranks in a folder, each with its tensor-parallel rank and its stage."""
    if (folder / NEMO_FILE).is_file():
        yield 0, 0, folder / NEMO_FILE
        return
    found = ((child, _NEMO_FOLDER.fullmatch(child.name)) for child in folder.iterdir())
    for child, match in sorted((child, match.groups("0")) for child, match in found if match):
        check_open(child)
        if (child / NEMO_FILE).is_file():
            yield int(match[0]), int(match[1]), child / NEMO_FILE


# ------------------------------------------------------------------------- other trainers, and files of one tool

OF_FSDP_RANK = re.compile(
    r"(?P<save>(?:(?:pytorch_)?model|checkpoint|ckpt|weights|state_dict)?(?:[_-]\w+?)?)[_-]?rank[_-]?(?P<rank>\d+)"
    r"\.(?:pt|pth|bin)"
)
_GATHERED = re.compile(r"(?P<save>pytorch_model_fsdp(?:_\d+)?)\.bin")
INTERNLM_RANK = re.compile(r"model_(?:tp(\d+)(?:_wp(\d+))?|wp(\d+))_pp(\d+)\.pt")
INTERNLM_FSDP = re.compile(r"model_tp\d+_pp\d+_(?:dp|zo)\d+\.pt")
GGUF_MAGIC = b"GGUF"
OF_CHECKPOINT = "_CHECKPOINT_METADATA"
UNFINISHED_FOLDER = re.compile(r"(.+)\.orbax-checkpoint-tmp(-\d+)?")
MLX_ADAPTER_FILE = "adapters.safetensors"
"""Earlier steps are beside it, as `0000100_adapters.safetensors`."""


def is_dcp(path: Path) -> bool:
    """Whether `path` is a folder that dcp.save wrote, or began to write."""
    return path.is_dir() and ((path / DCP_METADATA).is_file() or any(path.glob("__*_*.distcp")))


def is_fsdp_ranks(path: Path) -> bool:
    """Whether `path` is a folder with files of FSDP ranks, or one of them."""
    if path.is_file():
        return _is_of_fsdp(path.name)
    return path.is_dir() and bool(fsdp_saves(path)) and not any(path.glob("*.safetensors"))


def fsdp_saves(folder: Path) -> dict[str, dict[int, Path]]:
    """The files of each save in a folder, by rank; a file with the gathered model counts as that of rank 0."""
    saves: dict[str, dict[int, Path]] = defaultdict(dict)
    for path in sorted(each for each in folder.iterdir() if _is_of_fsdp(each.name)):
        match = OF_FSDP_RANK.fullmatch(path.name)
        if match:
            saves[match["save"]][int(match["rank"])] = path
        elif whole := _GATHERED.fullmatch(path.name):
            saves[f"{whole['save']} in one file"][0] = path
    return dict(saves)


def _is_of_fsdp(name: str) -> bool:
    """Whether a file with this name has the model of a rank, or of all ranks."""
    return bool(OF_FSDP_RANK.fullmatch(name) or _GATHERED.fullmatch(name))


def is_internlm(path: Path) -> bool:
    """Whether `path` is a folder with the files of InternEvo's ranks."""
    return path.is_dir() and any(
        (INTERNLM_RANK.fullmatch(child.name) or INTERNLM_FSDP.fullmatch(child.name))
        for child in path.glob("model_*.pt")
    )


def is_gguf(path: Path) -> bool:
    """Whether `path` is a GGUF file, or a folder with one."""
    if path.is_file():
        return _begins_as_gguf(path)
    return any(path.glob("*.gguf")) and not huggingface.detect(path)


def _begins_as_gguf(path: Path) -> bool:
    """The names of files do not tell: those of Ollama have digests as names."""
    with suppress(OSError, ReshardError), open_file(path) as file:
        return file.read(0, len(GGUF_MAGIC)) == GGUF_MAGIC
    return False


def is_orbax(path: Path) -> bool:
    """Whether `path` is a folder of Orbax with arrays, or a save that did not finish, if there is no other."""
    if not path.is_dir():
        return False
    if (path / METADATA).is_file() or (path / DATABASE).is_file():
        return True
    if UNFINISHED_FOLDER.fullmatch(path.name):
        return not any(each.name.isdigit() for each in path.absolute().parent.iterdir())
    is_item = (path / OF_CHECKPOINT).is_file()
    return is_item and not any((child / METADATA).is_file() for child in path.iterdir() if child.is_dir())


def is_mlx_adapter(path: Path) -> bool:
    """Whether `path` is a folder of `mlx_lm.lora`, or the weights in one."""
    if path.is_file():
        return path.name.endswith(MLX_ADAPTER_FILE)
    return (path / MLX_ADAPTER_FILE).is_file() and weight_files.weights_in(path) is None


# --------------------------------------------------------------------------------------------------- DeepSpeed

TRACKERS = ("latest", "latest_universal")
MODEL_FILE = re.compile(
    r"(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<model_rank>\d+)(?:_\d+)?_model_states\.pt"
)
OPTIMIZER_FILE = re.compile(
    r"(?:bf16_|fp16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<model_rank>\d+)(?:_\d+)?_?optim_states\.pt"
)
PIPELINE_FILE = re.compile(r"layer_\d+-model_.*states\.pt")
_TAG = re.compile(r"global_step\d+\w*")


def is_deepspeed(path: Path) -> bool:
    """Whether `path` is the folder of a step, a folder with such folders, or one with only the tracker file left."""
    return path.is_dir() and (bool(deepspeed_steps(path)) or tracked_tag(path) is not None)


def deepspeed_steps(path: Path) -> dict[str, Path]:
    """The folders of steps at or below `path`, by name."""
    if _holds_step(path):
        return {path.name: path}
    return {child.name: child for child in folders_in(path) if _holds_step(child)}


def _holds_step(folder: Path) -> bool:
    """Whether `folder` is a step that DeepSpeed saved."""
    patterns = (MODEL_FILE, OPTIMIZER_FILE, PIPELINE_FILE)
    files = [each.name for each in folder.glob("*states.pt")]
    return any(each.fullmatch(name) for each in patterns for name in files) or is_universal(folder)


def is_universal(folder: Path) -> bool:
    """Whether `folder` is a universal checkpoint: a folder for each parameter."""
    return any((folder / "zero").glob("*/fp32.pt"))


def tracked_tag(path: Path) -> str | None:
    """The tag in a DeepSpeed tracker file."""
    for tracker in (path / name for name in TRACKERS):
        if tracker.is_file() and tracker.stat().st_size < 256:
            with open_file(tracker) as file:
                tag = file.read(0, 256).decode("utf-8", "replace").strip()
            *above, name = re.split(
                r"[/\\]", tag
            )  # a tag is a name; a tag that leads elsewhere is reported, but not followed
            if _TAG.fullmatch(name) or (
                not above and name not in ("", ".", "..") and is_here(str(path / name), ".")
            ):
                return tag
    return None


# ----------------------------------------------------------------------------------------- formats with a table

PARAMS_FILE = "params.json"
META_RANK = re.compile(r"consolidated\.(\d\d)\.pth")
_OF_TORCHTUNE = re.compile(r"model-00001-of-00001\.bin|meta_model_\d+\.pt")
MISTRAL_SINGLE, MISTRAL_INDEX = "consolidated.safetensors", "consolidated.safetensors.index.json"
MISTRAL_OLD = "consolidated.00.pth"
_CONSOLIDATED_FILE = re.compile(r"consolidated(-\d{1,6}-of-\d{1,6})?\.safetensors(\.index\.json)?")
_MISTRAL_KEY = b'"hidden_dim"'
"""A key of `params.json` that Meta's, whose files have the same names, does not have."""
LITGPT_FILE, LITGPT_SETTINGS = "lit_model.pth", "model_config.yaml"
NANOTRON_FOLDER, NANOTRON_LATEST = "model", "latest.txt"
DEEPSEEK_RANK = re.compile(r"model(\d{1,5})-mp(\d{1,5})\.safetensors")
PADDLE_MARKS = ("np", "pd")
VLLM_PART = re.compile(r"model-rank-(\d+)-part-\d+\.safetensors")


def is_meta(path: Path) -> bool:
    """Whether a folder has the files of ranks, and no other weights, or is one of these files."""
    if path.is_file():
        return bool(META_RANK.fullmatch(path.name)) or _is_of_torchtune(path)
    own = any(map(META_RANK.fullmatch, (each.name for each in path.glob("consolidated.*.pth"))))
    return (own or of_torchtune(path) is not None) and not huggingface.detect(path)


def _is_of_torchtune(file: Path) -> bool:
    return bool(_OF_TORCHTUNE.fullmatch(file.name)) and (file.parent / PARAMS_FILE).is_file()


def of_torchtune(folder: Path) -> Path | None:
    """The file with which torchtune replaces those of Meta; its names count epochs."""
    files = (each for pattern in ("model-*.bin", "meta_model_*.pt") for each in folder.glob(pattern))
    return max(filter(_is_of_torchtune, files), default=None)


def is_mistral(path: Path) -> bool:
    """Whether `path` is one of these files, or a folder with them whose weights are not there as on the Hub, too."""
    if path.is_file():
        return bool(_CONSOLIDATED_FILE.fullmatch(path.name)) or (
            path.name == MISTRAL_OLD and _is_of_mistral(path.parent)
        )
    weights = [*path.glob("*.safetensors"), *path.glob("pytorch_model*.bin")]
    if weight_files.weights_in(path) or not all(_CONSOLIDATED_FILE.fullmatch(each.name) for each in weights):
        return False
    return bool(weights) or ((path / MISTRAL_OLD).is_file() and _is_of_mistral(path))


def _is_of_mistral(folder: Path) -> bool:
    """Whether a folder with `consolidated.00.pth` is Mistral's, who have one such file, and not Meta's."""
    params = folder / PARAMS_FILE
    if not params.is_file() or (folder / "consolidated.01.pth").exists():
        return False
    with suppress(OSError, ReshardError), open_file(params) as file:
        return _MISTRAL_KEY in file.read(0, min(file.size, 1 << 16))
    return False


def is_litgpt(path: Path) -> bool:
    """Whether `path` is a folder with such a file, or the file itself."""
    return (path / LITGPT_FILE).is_file() or (path.name == LITGPT_FILE and path.is_file())


def is_nanotron(path: Path) -> bool:
    """Whether `path` is the folder of a step, or of all steps."""
    return nanotron_weights(path) is not None or bool(
        (path / NANOTRON_LATEST).is_file() and nanotron_steps(path)
    )


def nanotron_weights(path: Path) -> Path | None:
    """The folder of the modules of a step."""
    above = (path / NANOTRON_FOLDER, path)
    return next(
        (each for each in above if (each / NANOTRON_FOLDER / "token_position_embeddings").is_dir()), None
    )


def nanotron_steps(path: Path) -> dict[int, Path]:
    """The folders of all steps, in their order."""
    folders = {int(child.name): child for child in folders_in(path) if child.name.isdecimal()}
    return {step: folders[step] for step in sorted(folders) if nanotron_weights(folders[step])}


def all_are(pattern: re.Pattern[str], path: Path) -> bool:
    """Whether `path` is a folder whose only safetensors have such names, as those of ranks do, or is one of them."""
    files = [path] if path.is_file() else [*path.glob("*.safetensors")]
    return bool(files) and all(pattern.fullmatch(file.name) for file in files)
