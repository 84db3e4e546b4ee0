"""Archives that the saving code of NeMo 1 made: a model of megatron-core, and adapters of NeMo's own modules.

NeMo 1 no longer installs beside current releases of its packages, so its modules cannot be imported. The classes that
save are taken from its source, and run with megatron-core 0.12 on the ranks of a gloo group: `SaveRestoreConnector` and
`NLPSaveRestoreConnector` of nemo_toolkit 1.23. What they ask of a model is answered here, as MegatronGPTModel does.

    python -m tests.genuine.make_nemo_1 tests/data/nemo
"""

from __future__ import annotations

import ast
import itertools
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import uuid
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from reshard.algebra.layout import Layout
from tests.environments import CACHE, python
from tests.genuine import make_zarr
from tests.genuine.make_zarr import MEGATRON
from tests.genuine.megatron import REPOSITORY, mcore_site
from tests.genuine.nemo_adapters import ALPHA, DIM

CORE = "core/connectors/save_restore_connector.py"
NLP = "collections/nlp/parts/nlp_overrides.py"
UTILS = "utils/model_utils.py"


def make(
    checkpoint: Path, out: Path, layout: Layout, how: str, config: Mapping[str, Any], *beside: Path
) -> Path:
    """The archive `out` with the weights of an iteration folder of torch_dist, saved by the ranks of `layout`.

    `how` is "ranks", "torch_dist" or "zarr"; or, for adapters and no weights, one of `ADAPTED`.
    `config` is the content of `model_config.yaml`, and `beside` are artifacts: the files of a tokenizer.
    """
    paths = [mcore_site(MEGATRON), REPOSITORY / "src", REPOSITORY]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    if how in ADAPTED:
        python("nemo-2")
    told = [checkpoint, out, json.dumps([layout.tp, layout.pp]), how, json.dumps(config), *beside]
    command = [python("nemo"), "-m", "tests.genuine.make_nemo_1", *map(str, told)]
    done = subprocess.run(
        command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        raise RuntimeError(f"making {out.name} with the code of NeMo:\n{done.stderr}")
    return out


CONFIG: dict[str, Any] = {
    "mcore_gpt": True,
    "megatron_amp_O2": True,
    "encoder_seq_length": 64,
    "max_position_embeddings": 64,
    "num_layers": 4,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": None,
    "normalization": "rmsnorm",
    "layernorm_epsilon": 1e-6,
    "bias": False,
    "activation": "fast-swiglu",
    "position_embedding_type": "rope",
    "rotary_percentage": 1.0,
    "share_embeddings_and_output_weights": False,
    "make_vocab_size_divisible_by": 64,
}
"""The keys of NeMo's `megatron_llama_config.yaml` for the model `VARIANTS[SOURCE]`."""
SOURCE = "plain-grouped-tp2"
ADAPTED = ("nemo-1", "nemo-1-canonical", "nemo-2")
"""The releases and variants as which adapters are saved."""
KEPT = {
    "ranks-tp2-pp2.nemo": (Layout(tp=2, pp=2), "ranks"),
    "torch_dist-tp2.nemo": (Layout(tp=2), "torch_dist"),
    "zarr-tp2-pp2.nemo": (Layout(tp=2, pp=2), "zarr"),
}
"""The archives in `tests/data/nemo`, beside the model that they contain."""
LORA = {
    "adapter_dim": DIM,
    "alpha": ALPHA,
    "adapter_dropout": 0.1,
    "target_modules": ["all"],
    "variant": "nemo",
}
LORA_2 = {"_target_": "nemo.collections.llm.peft.lora.LoRA", "dim": DIM, "alpha": ALPHA, "dropout": 0.1}
KEPT_ADAPTERS = {"lora-1.nemo": "nemo-1", "lora-2": "nemo-2"}
"""The same adapter of that model, beside the model into which NeMo's own modules merge it."""


def make_kept(out: Path) -> None:
    """Make all of `tests/data/nemo` again."""
    from tests.genuine.huggingface import make_tokenizer

    shutil.rmtree(out, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = json.loads(make_tokenizer().backend_tokenizer.to_str())["model"]
        vocabulary, merges = Path(folder, "gpt2-vocab.json"), Path(folder, "gpt2-merges.txt")
        vocabulary.write_text(json.dumps(tokenizer["vocab"]))
        merges.write_text("\n".join(" ".join(pair) for pair in tokenizer["merges"]) + "\n")
        source = make_zarr.make(SOURCE, Path(folder), optimizer=False).iteration("torch_dist")
        kept = shutil.copytree(source, out / source.name)
        for name, (layout, how) in KEPT.items():
            sizes = {"tensor_model_parallel_size": layout.tp, "pipeline_model_parallel_size": layout.pp}
            make(kept, out / name, layout, how, {**CONFIG, **sizes}, vocabulary, merges)
    peft = {"peft": {"peft_scheme": "lora", "lora_tuning": LORA}}
    for name, how in KEPT_ADAPTERS.items():
        make(kept, out / name, Layout(tp=2, pp=2), how, {**CONFIG, **peft})
    shutil.rmtree(out / "lora-2-merged")  # the same as that of NeMo 1
    (out / "lora-2/context").mkdir()
    (out / "lora-2/context/model.yaml").write_text(yaml.safe_dump({"model_transform": LORA_2}))
    (out / "lora-2/weights/adapter_metadata.json").write_text('{"model_ckpt_path": "/base/weights"}')


def taken(file: str, names: Iterable[str], known: dict[str, Any], release: str = "nemo") -> dict[str, Any]:
    """The classes and functions of these names in a file of NeMo, which find what else they use in `known`.

    `release` names the environment that has it.
    """
    (package,) = (CACHE / release).glob("lib/python*/site-packages/nemo")
    source = package / file
    tree = ast.parse(source.read_text())
    wanted = {each.name: each for each in tree.body if isinstance(each, ast.ClassDef | ast.FunctionDef)}
    future = ast.parse("from __future__ import annotations").body
    body = [*future, *(wanted[name] for name in names)]
    exec(compile(ast.Module(body, []), str(source), "exec"), known)
    return known


def connector(app_state: Any, backend: str) -> Any:
    """NeMo's NLPSaveRestoreConnector, for ranks that `app_state` describes."""
    import torch
    from megatron.core import dist_checkpointing, parallel_state
    from omegaconf import OmegaConf

    state = SimpleNamespace(**{name: getattr(parallel_state, name) for name in dir(parallel_state)})
    state.is_unitialized = lambda: False
    plain = SimpleNamespace(info=print, warning=print)
    disk = SimpleNamespace(isdir=os.path.isdir, makedirs=os.makedirs)
    known: dict[str, Any] = {
        "os": os,
        "shutil": shutil,
        "tarfile": tarfile,
        "tempfile": tempfile,
        "uuid": uuid,
        "torch": torch,
        "itertools": itertools,
        "OmegaConf": OmegaConf,
        "logging": plain,
        "Path": Path,
        "parallel_state": state,
        "AppState": lambda: app_state,
        "nemo_classes": SimpleNamespace(ModelPT=Model),
        "is_global_rank_zero": lambda: torch.distributed.get_rank() == 0,
        "get_filesystem": lambda path: disk,
        "dist_checkpointing": SimpleNamespace(
            save=partial(dist_checkpointing.save, sharded_strategy=(backend, 1)),
            check_is_distributed_checkpoint=dist_checkpointing.check_is_distributed_checkpoint,
        ),
        "HAVE_APEX": True,
        "HAVE_MEGATRON_CORE": True,
    }
    taken(UTILS, ["ckpt_to_dir"], known)
    known["model_utils"] = SimpleNamespace(ArtifactPathType=SimpleNamespace(LOCAL_PATH=0, TAR_PATH=1))
    taken(CORE, ["SaveRestoreConnector"], known)
    return taken(NLP, ["NLPSaveRestoreConnector"], known)["NLPSaveRestoreConnector"]()


class Model:
    """What the connector asks of a MegatronGPTModel around `chunk`, which is saved with `model.` in front of names."""

    def __init__(
        self, chunk: Any, config: Mapping[str, Any], beside: Iterable[Path], *, sharded: bool
    ) -> None:
        self.chunk, self.config, self._sharded = chunk, config, sharded
        keys = {".model": "model", "vocab.json": "vocab_file", "merges.txt": "merge_file"}
        self.artifacts = {
            f"tokenizer.{next(key for end, key in keys.items() if path.name.endswith(end))}": SimpleNamespace(
                path=str(path), path_type=0, hashed_path=None
            )
            for path in beside
        }
        self.model_guid = ""

    def state_dict(self) -> Any:
        return self.chunk.state_dict(prefix="model.")

    def sharded_state_dict(self) -> Any:
        return self.chunk.sharded_state_dict(prefix="model.") if self._sharded else None

    def to_config_file(self, path2yaml_file: str) -> None:
        Path(path2yaml_file).write_text(yaml.safe_dump({**self.config, "tokenizer": {"library": "megatron"}}))

    def named_nemo_modules(self) -> Any:
        return [("", "", self)]

    def has_artifacts(self) -> bool:
        return bool(self.artifacts)

    has_native_or_submodules_artifacts = has_artifacts

    def has_nemo_submodules(self) -> bool:
        return False

    def modules(self) -> Any:
        return []


class Adapters(Model):
    """The same with adapters, which alone are saved."""

    def state_dict(self) -> Any:
        return {key: value for key, value in super().state_dict().items() if ".adapter_layer." in key}


def _save_rank(told: tuple[Path, Path, Layout, str, Mapping[str, Any], list[Path]]) -> None:
    import torch
    from megatron.core import parallel_state as ps

    from reshard.oracle.megatron.load_weights import load_weights
    from tests.genuine.mcore import models
    from tests.genuine.mcore.models import build_model

    checkpoint, out, layout, how, config, beside = told
    models.initialize(layout, seed=1)
    args = torch.load(checkpoint / "common.pt", weights_only=False)["args"]
    dtype = torch.float32 if how in ADAPTED else torch.bfloat16
    (chunk,) = build_model(args, layout, dtype=dtype)
    load_weights([chunk.to(dtype)], checkpoint)
    app_state = SimpleNamespace(
        model_parallel_size=layout.tp * layout.pp,
        data_parallel_rank=0,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        tensor_model_parallel_rank=ps.get_tensor_model_parallel_rank(),
        pipeline_model_parallel_rank=ps.get_pipeline_model_parallel_rank(),
        get_model_metadata_from_guid=lambda guid: SimpleNamespace(restoration_path=None),
    )
    if how in ADAPTED:
        _save_adapters(chunk, args, layout, how, config, app_state, out)
        return
    model = Model(chunk, config, beside, sharded=how in ("torch_dist", "zarr"))
    connector(app_state, how if how == "zarr" else "torch_dist").save_to(model, str(out))


def _save_adapters(
    chunk: Any, args: Any, layout: Layout, how: str, config: Mapping[str, Any], app_state: Any, out: Path
) -> None:
    """Save adapters as NeMo 1 or 2 does, and the model into which they are merged beside them: `NAME-merged`."""
    import torch
    from megatron.core import dist_checkpointing

    from tests.genuine import nemo_adapters

    rank = torch.distributed.get_rank()
    file = nemo_adapters.NEMO_2 if how == "nemo-2" else nemo_adapters.NEMO_1
    found = nemo_adapters.adapters(chunk, layout, file, taken)
    if how == "nemo-1-canonical":
        found = nemo_adapters.canonical(found, taken)
    if how != "nemo-2":
        remove = nemo_adapters.add_as_nemo_1(found)
        connector(app_state, "torch_dist").save_to(Adapters(chunk, config, (), sharded=False), str(out))
    else:
        remove = nemo_adapters.add_as_nemo_2(found, taken)
        state = {
            key: each
            for key, each in chunk.sharded_state_dict(prefix="module.").items()
            if ".adapter." in key
        }
        if rank == 0:
            (out / "weights").mkdir(parents=True)
        torch.distributed.barrier()
        dist_checkpointing.save({"sharded_state_dict": state, "global_step": 3}, str(out / "weights"))
    remove()
    if how == "nemo-1-canonical" and layout.tp > 1:
        return
    nemo_adapters.merge(found, layout, app_state.tensor_model_parallel_rank)
    args.params_dtype, args.bf16 = torch.float32, False
    merged = out.with_name(f"{out.stem}-merged")
    if rank == 0:
        merged.mkdir()
    torch.distributed.barrier()
    dist_checkpointing.save({"model": chunk.sharded_state_dict(), "args": args, "iteration": 3}, str(merged))


def _main() -> None:
    from tests.genuine.mcore.ranks import run_ranks

    if len(sys.argv) == 2:
        make_kept(Path(sys.argv[1]))
        return
    checkpoint, out, sizes, how, config, *beside = sys.argv[1:]
    tp, pp = json.loads(sizes)
    layout = Layout(tp=tp, pp=pp, etp=tp)
    recipe = (Path(checkpoint), Path(out), layout, how, json.loads(config), [Path(each) for each in beside])
    run_ranks(layout.world_size, _save_rank, recipe)


if __name__ == "__main__":
    _main()
