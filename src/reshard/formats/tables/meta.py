"""The format of Meta's own Llama code: a file for each model-parallel rank, and `params.json`.

    consolidated.00.pth      rank 0's parts of the tensors, a plain state dict
    params.json              the sizes of the model

torchtune's FullModelMetaCheckpointer has `model-00001-of-00001.bin` (since 0.5), or `meta_model_<epoch>.pt`, with the
same content. Names are those that InternLM2 took over, and query and key rows are in pairs. Rows of the embedding are
divided over ranks, as in Llama 3, or columns, as in Llama 2. Sources: `models/llama3/{args,model}.py` and
`checkpoint.py` of llama-models 0.3, `llama/model.py` of Llama 2, torchtune 0.6 `training/checkpointing`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from reshard.algebra.layout import Layout, SavedLayout
from reshard.algebra.tensors import Replica, Tensor
from reshard.base.errors import Problem, ReshardError, raise_all
from reshard.base.plain_json import to_json
from reshard.families.dialects.internevo import dialect
from reshard.families.dims import Dims
from reshard.families.rope import rope_parameters
from reshard.folders import iterations
from reshard.folders.iterations import Iteration
from reshard.folders.json_objects import read_object
from reshard.formats import huggingface
from reshard.formats.checkpoint import Checkpoint, ModelDescription
from reshard.formats.contract import Naming, Ranks, Request, Target, Writing
from reshard.formats.copied_files import same_bytes
from reshard.formats.detection import META, META_RANK, PARAMS_FILE, of_torchtune
from reshard.formats.internlm.tensor_names import place_of, split_of
from reshard.formats.internlm.write import rank_file, shares
from reshard.formats.sharding import Split
from reshard.formats.tables.rank_files import COPY_AGAIN, JoinedRanks, files_of_ranks
from reshard.transfer.plan import OutputFile
from reshard.transfer.source_files import Sources

META_DIALECT = dialect("internlm2", interleaved=True)
EMBEDDING, HEAD, NORM = "tok_embeddings.weight", "output.weight", "norm.weight"
OUTPUT_PROJECTION = "layers.0.attention.wo.weight"
ROPE_TENSOR = "rope.freqs"
SIZE_PARAMS = ("dim", "n_layers", "n_heads")
LLAMA_3 = 128256
"""The size of Llama 3's vocabulary, which tells it from Llama 2."""
SCALED = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED |= {"original_max_position_embeddings": 8192}


def open_checkpoint(path: Path, sources: Sources, iteration: Iteration | None = None) -> Checkpoint:
    """Open the files of all ranks. Raises ReshardError for those that are missing or do not fit."""
    iterations.refuse(path, iteration, "a checkpoint in the format of Meta")
    folder = path if path.is_dir() else path.parent
    params = _params(folder, sources)
    files = _files(path, folder)
    contents = [huggingface.read_weights(file, sources) for file in files]
    dropped = Counter({"rotary buffers": sum(_without_frequencies(content) for content in contents)})
    _check_count(folder, params, contents)
    joined = JoinedRanks(contents, partial(_split_of, by_columns=_by_columns(contents[0])))
    tensors = joined.tensors()
    copies = [*_tied_replicas(tensors)]
    dropped["the tied head, stored twice"] = sum(each.second.nbytes for each in copies)
    config = _config(params, tensors, tied=HEAD not in tensors)
    return Checkpoint(
        path=path,
        format=META,
        dialect=META_DIALECT,
        tensors=tensors,
        description=ModelDescription(folder, config=config, recorded=_recorded_config(params, config)),
        layout=SavedLayout.of(Layout(tp=len(files))),
        dropped=+dropped,
        replicas=[*joined.replicas, *copies],
        problems=joined.problems,
        notes=list(_assumed(params, config)),
    )


def _tied_replicas(tensors: dict[str, Tensor]) -> Iterator[Replica]:
    """Removes a head that is a copy of the embedding, as in the releases of Llama 3.2, which tie them."""
    if HEAD in tensors and EMBEDDING in tensors and same_bytes(tensors[HEAD], tensors[EMBEDDING]):
        yield Replica(EMBEDDING, tensors[EMBEDDING], tensors.pop(HEAD), "a tied head equals the embedding")


def _files(path: Path, folder: Path) -> list[Path]:
    if path.is_file() and not META_RANK.fullmatch(path.name):
        return [path]
    other = of_torchtune(folder)
    is_own = any(folder.glob("consolidated.*.pth"))
    return [other] if other and not is_own else files_of_ranks(folder, META_RANK)


def _params(folder: Path, sources: Sources) -> Mapping[str, Any]:
    path = folder / PARAMS_FILE
    params = read_object(path, sources) if path.is_file() else {}
    wrong = [key for key in SIZE_PARAMS if type(params.get(key)) is not int or params[key] < 1]
    if wrong:
        raise ReshardError(
            "meta-params-unusable",
            "params.json does not have the sizes of the model",
            file=str(path),
            rule="it says how many heads share the rows of a projection",
            expected=f"{', '.join(SIZE_PARAMS)} as positive integers",
            found=f"{', '.join(f'{key} {params.get(key)!r}' for key in wrong)}" if params else "no such file",
            remedy="copy it from where the weights were saved or downloaded",
        )
    return params


def _without_frequencies(content: dict[str, Tensor]) -> int:
    """Remove Llama 2's buffer of rotary frequencies; returns its bytes."""
    return content.pop(ROPE_TENSOR).nbytes if ROPE_TENSOR in content else 0


def _check_count(folder: Path, params: Mapping[str, Any], contents: list[dict[str, Tensor]]) -> None:
    """Raise ReshardError if the last ranks are missing, which only the sizes tell."""
    part = contents[0].get(OUTPUT_PROJECTION)
    columns = part.shape[1] if part and len(part.shape) == 2 else 0
    ranks = params["dim"] // columns if columns else len(contents)
    if ranks > len(contents):
        raise ReshardError(
            "rank-file-missing",
            "the files of some ranks are missing",
            tensor=OUTPUT_PROJECTION,
            file=str(folder),
            rule=f"the parts of all ranks make up {params['dim']} columns, the dim of {PARAMS_FILE}",
            expected=f"{ranks} files consolidated.*.pth",
            found=f"{len(contents)}, with {columns} columns each",
            remedy=COPY_AGAIN,
        )


def _by_columns(content: Mapping[str, Tensor]) -> bool:
    """Whether the embedding is divided by its columns."""
    table, norm = content.get(EMBEDDING), content.get(NORM)
    return table is not None and norm is not None and table.shape[-1:] != norm.shape


def _split_of(name: str, *, by_columns: bool) -> Split | None:
    """How model parallelism divides a tensor."""
    if name == EMBEDDING:
        return Split(1) if by_columns else Split(0)
    return Split(0) if name == HEAD else split_of(place_of(name).module, weight_parallel=False)


def _config(params: Mapping[str, Any], tensors: Mapping[str, Tensor], *, tied: bool) -> dict[str, Any]:
    """The config.json of the model. What `params` do not record is that of the release with this vocabulary."""
    table = tensors.get(EMBEDDING)
    widths = (tensor.shape[0] for name, tensor in tensors.items() if name.endswith(".w1.weight"))
    vocab = table.shape[0] if table and table.shape else params.get("vocab_size")
    is_3 = vocab == LLAMA_3
    length, scaling = 8192 if is_3 else 4096, None
    if params.get("use_scaled_rope"):
        length, scaling = 131072, {**SCALED, "factor": 32.0 if tied else 8.0}
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab,
        "hidden_size": params["dim"],
        "intermediate_size": next(widths, None),
        "num_hidden_layers": params["n_layers"],
        "num_attention_heads": params["n_heads"],
        "num_key_value_heads": params.get("n_kv_heads") or params["n_heads"],
        "rms_norm_eps": params.get("norm_eps", 1e-5),
        "max_position_embeddings": length,
        "hidden_act": "silu",
        "rope_theta": params.get("rope_theta") or (500000.0 if is_3 else 10000.0),
        "rope_scaling": scaling,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
    }
    ids = {"bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009]} if is_3 else {}
    return config | ids


def _recorded_config(params: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of the config that `params` record."""
    has = {"rms_norm_eps": "norm_eps", "rope_theta": "rope_theta", "rope_scaling": "use_scaled_rope"}
    recorded = {key: value for key, value in config.items() if has.get(key, "dim") in params}
    if recorded.get("rope_scaling"):
        recorded["rope_scaling"] = {
            key: value for key, value in recorded["rope_scaling"].items() if key != "factor"
        }
    return recorded


def _assumed(params: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[str]:
    """What the config has that is not recorded."""
    longest, theta = config["max_position_embeddings"], config["rope_theta"]
    rope = "" if params.get("rope_theta") else f" and a rope_theta of {theta:g}"
    yield (
        f"{PARAMS_FILE} does not record all of the config: a longest context of {longest}{rope} is assumed, as in the "
        "releases of Llama (--base DIR has the model's own config)"
    )
    if scaling := config["rope_scaling"]:
        tied = "tied" if config["tie_word_embeddings"] else "of its own"
        yield (
            f"{PARAMS_FILE} does not record the factor of the scaled rope: {scaling['factor']:g} is assumed, as in the "
            f"releases of Llama 3 whose head is {tied}"
        )


# ---------------------------------------------------------------------------------------------- writing


def fit(request: Request) -> Request:
    """Refuse models that Meta's code does not build, and ranks that do not divide its sizes; all problems at once."""
    dims = request.declared.dims
    raise_all([*shares(dims, request.layout), *_unlike_problems(dims, request.config)])
    return request


def _unlike_problems(dims: Dims, config: Mapping[str, Any]) -> Iterator[Problem]:
    """Problems of what params.json cannot say."""
    scaling = rope_parameters(config)
    kind = scaling.get("rope_type", "default")
    odd = {}
    if dims.heads * dims.head_dim != dims.hidden:
        widths = f"{dims.heads} heads of {dims.head_dim} in a width of {dims.hidden}"
        odd["heads that together are as wide as the model"] = widths
    if kind != "default" and {**SCALED, **scaling} != {**scaling, **SCALED}:
        odd["a plain rope, or Llama 3's scaled one"] = f"rope_type {kind!r}"
    for expected, setting in odd.items():
        yield Problem(
            "meta-model-unsupported",
            "Meta's code does not build this model",
            rule=f"{PARAMS_FILE} has few settings, and the model must compute the same",
            expected=expected,
            found=setting,
            remedy="choose another format with --to",
        )


def _new_params(request: Request) -> dict[str, Any]:
    dims, config = request.declared.dims, request.config
    rope = rope_parameters(config)
    return {
        "dim": dims.hidden,
        "n_layers": dims.layers,
        "n_heads": dims.heads,
        "n_kv_heads": dims.groups,
        "vocab_size": dims.vocab,
        **settings_of_width(dims.hidden, dims.ffn),
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "rope_theta": float(rope.get("rope_theta", 10000.0)),
        "use_scaled_rope": rope.get("rope_type") == SCALED["rope_type"],
    }


def settings_of_width(hidden: int, width: int) -> dict[str, Any]:
    """The settings of which Meta's code computes the `width` of the MLP: those of a release, or others that fit."""
    usual = ((multiple, factor) for multiple in (256, 1024, 4096) for factor in (None, 1.0, 1.3, 1.5))
    step = width & -width
    fitted = step, (width - step // 2 + 0.25) / int(8 * hidden / 3)
    fitting = next(each for each in (*usual, fitted) if _width_of(hidden, *each) == width)
    return dict(zip(("multiple_of", "ffn_dim_multiplier"), fitting, strict=True))


def _width_of(hidden: int, multiple: int, factor: float | None) -> int:
    width = int(8 * hidden / 3)
    width = width if factor is None else int(factor * width)
    return multiple * -(-width // multiple)


class MetaWriting(Writing):
    """A file for each rank, and params.json. A tied head is a tensor of its own: Meta's code always has one."""

    def __init__(self, request: Request) -> None:
        table = next(tensor for tensor in request.tensors if tensor.name == EMBEDDING)
        head = [table._replace(name=HEAD)] if request.tied else []
        super().__init__(replace(request, tensors=[*request.tensors, *head]))

    def files(self) -> list[OutputFile]:
        """A file for each rank, and params.json."""
        ranks = self.request.layout.tp
        tensors = [(tensor.name, tensor) for tensor in self.request.tensors]
        is_llama_2 = self.request.declared.dims.vocab < LLAMA_3 and not self.request.tied
        split = partial(_split_of, by_columns=is_llama_2)
        files = [
            rank_file(f"consolidated.{rank:02d}.pth", tensors, split, rank, ranks) for rank in range(ranks)
        ]
        return [*files, OutputFile.of_bytes(PARAMS_FILE, to_json(_new_params(self.request)))]

    def notes(self) -> list[str]:
        """What users should know of what Meta's code computes."""
        factor = rope_parameters(self.request.config).get("factor", 8)
        return (
            [f"Meta's code scales the rope by 8, and not by the {factor:g} of config.json"]
            if factor != 8
            else []
        )


TARGET = Target(MetaWriting, Naming((META_DIALECT.name,)), Ranks(("tp",)), fit=fit)
