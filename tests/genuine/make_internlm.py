"""Checkpoints of the real InternEvo, and its logits for any checkpoint: needs InternEvo 0.4.9 and einops.

    pip install --no-deps InternEvo==0.4.9 && pip install einops
    python -m tests.genuine.make_internlm make OUT NAME...            checkpoints of VARIANTS, with their logits
    python -m tests.genuine.make_internlm judge FOLDER LOGITS.npz           load strictly, write logits

InternEvo's own code builds, saves, loads and runs the model; only its accelerator, which has no CPU version, is
replaced before the first import. (0.5.1 and 0.5.2 on PyPI lack a module and cannot be imported.) Weights are
randomized after the model is built: otherwise norms and biases would be ones and zeros, which hide mistakes.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import multiprocessing
import shutil
import socket
import sys
import types
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

TOKENS = np.random.default_rng(0).integers(0, 96, (1, 16))
"""One sequence, as InternEvo packs them; sequence parallelism splits its tokens."""

BASE: dict[str, Any] = {
    "checkpoint": False,
    "num_chunks": 1,
    "num_attention_heads": 4,
    "embed_split_hidden": True,
    "vocab_size": 96,
    "embed_grad_scale": 1,
    "parallel_output": False,
    "hidden_size": 32,
    "num_layers": 4,
    "mlp_ratio": 1.5,
    "multiple_of": 16,
    "apply_post_layer_norm": False,
    "dtype": "torch.bfloat16",
    "norm_type": "rmsnorm",
    "layer_norm_epsilon": 1e-5,
    "use_flash_attn": False,
}
GROUPED = {**BASE, "num_kv_attention_heads": 2, "no_bias": True}


@dataclass(frozen=True)
class Variant:
    """A model type of InternEvo, its `model` config, and a layout."""

    model_type: str
    model: dict[str, Any]
    tp: int = 1
    pp: int = 1
    wp: int = 1
    mode: str = "mtp"
    moe: dict[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """With weight parallelism, a rank has both a tensor and a weight coordinate."""
        return max(self.tp, self.wp) * self.pp


V2, V1, LLAMA = "INTERNLM2_PUBLIC", "INTERNLM", "LLAMA2"
VARIANTS = {
    "internlm2-tp2pp2": Variant(V2, {**GROUPED, "num_layers": 5, "adapt_hf": True}, 2, 2),
    "internlm2-interleaved": Variant(V2, {**GROUPED, "num_layers": 2, "adapt_hf": False, "rope_base": 1000000}, 2),
    "internlm2-biases": Variant(V2, {**GROUPED, "num_layers": 1, "no_bias": False, "adapt_hf": False}, 2),
    "internlm2-chunks": Variant(V2, {**GROUPED, "num_chunks": 2}, 1, 2),
    "internlm2-isp": Variant(V2, {**GROUPED, "num_layers": 2}, 1, 1, 2, "isp"),
    "internlm2-isp-tp2wp2pp2": Variant(V2, GROUPED, 2, 2, 2, "isp"),
    "internlm1-tp2": Variant(V1, {**BASE, "num_layers": 2}, 2),
    "internlm1-isp": Variant(V1, {**BASE, "num_layers": 2}, 1, 1, 2, "isp"),
    "llama-tp2": Variant(LLAMA, {**GROUPED, "num_layers": 2}, 2),
    "llama-tp16": Variant(
        LLAMA,
        {**GROUPED, "num_layers": 1, "hidden_size": 64, "num_attention_heads": 16, "num_kv_attention_heads": 16}
        | {"adapt_hf": True},
        16,
    ),
    "moe-tp2": Variant(
        "INTERNLM_MoE",
        {**BASE, "num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "num_experts": 4}
        | {"moe_use_residual": False, "moe_type": "GShard"},
        2,
        moe={"top_k": 2, "eval_capacity_factor": 8.0, "min_capacity": 64, "use_rts": False},
    ),
}  # fmt: skip


# ---------------------------------------------------------------------------------------- a CPU for InternEvo


class _Amp:
    """A stand-in for `torch.cuda.amp`: decorators without effect."""

    @staticmethod
    def custom_fwd(function: Any = None, **options: Any) -> Any:
        return function or (lambda inner: inner)

    custom_bwd = custom_fwd


class _Nothing:
    """A stream or an event, without effect on a CPU."""

    def __init__(self, *args: Any, **options: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: None


class _Cpu:
    """A CPU with the interface of InternEvo's `Accelerator`. Other attributes do nothing."""

    amp = _Amp()
    memory = None
    Stream = Event = current_stream = default_stream = _Nothing
    FloatTensor, HalfTensor, BFloat16Tensor = torch.FloatTensor, torch.HalfTensor, torch.BFloat16Tensor

    def __init__(self, kind: Any) -> None:
        self._answers = {
            **dict.fromkeys(("get_backend_name", "device_name", "current_device_name"), "cpu"),
            "get_accelerator_backend": kind,
            "communication_backend_name": "gloo",
            "get_device_id": 0,
            "device_count": 64,
            "is_available": True,
        }

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: self._answers.get(name)

    def get_rng_state(self, *args: Any) -> Any:
        return torch.get_rng_state()

    def set_rng_state(self, state: Any, *args: Any) -> None:
        torch.set_rng_state(state)

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def return_custom_fwd(self) -> Any:
        return lambda function: function

    return_custom_bwd = return_custom_fwd

    def stream(self, stream: Any) -> Any:
        return contextlib.nullcontext()


def import_internevo() -> None:
    """Import InternEvo with a CPU as its accelerator. Raises ImportError if it is not installed."""
    if "internlm" in sys.modules:
        return
    spec = importlib.util.find_spec("internlm")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("InternEvo is not installed: pip install --no-deps InternEvo==0.4.9 einops")
    folder = Path(spec.submodule_search_locations[0]) / "accelerator"
    package = types.ModuleType("internlm.accelerator")
    package.__path__ = [str(folder)]
    sys.modules["internlm.accelerator"] = package
    name = "internlm.accelerator.abstract_accelerator"
    source = importlib.util.spec_from_file_location(name, folder / "abstract_accelerator.py")
    assert source and source.loader
    abstract = sys.modules[name] = importlib.util.module_from_spec(source)
    source.loader.exec_module(abstract)
    cpu = abstract.internlm_accelerator = _Cpu(abstract.AcceleratorType.CPU)
    abstract.get_accelerator = package.get_accelerator = lambda: cpu  # type: ignore[attr-defined]
    package.AcceleratorType = abstract.AcceleratorType  # type: ignore[attr-defined]
    import internlm  # noqa: F401


def _training_config(variant: Variant) -> dict[str, Any]:
    """All settings that InternEvo reads from a config file; only `model`, `parallel` and `moe` matter here."""
    config: dict[str, Any] = {
        "parallel": {
            "zero1": {"size": -1, "fsdp": False},
            "tensor": {"size": variant.tp, "mode": variant.mode},
            "pipeline": {"size": variant.pp, "interleaved_overlap": True},
            "weight": {"size": variant.wp, "overlap": False, "memory_pool": False},
        },
        "data": {"seq_len": 64, "micro_num": 4, "micro_bsz": 1, "gradient_accumulation": 4}
        | {"use_packed_dataset": False, "pack_sample_into_one": False, "rampup_batch_size": None},
        "model": dict(variant.model),
        "model_type": variant.model_type,
        "hybrid_zero_optimizer": {"clip_grad_norm": 1.0},
        "grad_scaler": {},
        "adam": {},
        "beta2_scheduler": {},
        "ckpt": {"enable_save_ckpt": False},
        "loss": {},
        "use_fp32_norm": False,
    }
    if variant.moe:
        config["moe"] = dict(variant.moe)
    return config


# ------------------------------------------------------------------------------------------- what a rank does


def _launched(variant: Variant, rank: int, port: int) -> Any:
    """The model of one rank, as InternEvo's `train.py` builds it."""
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=variant.ranks)
    dist.init_process_group = lambda *args, **options: None  # InternEvo asks for the address "[localhost]"
    gather = dist.all_gather_into_tensor
    # NCCL counts elements where gloo compares shapes.
    dist.all_gather_into_tensor = lambda out, own, **options: gather(out.view(-1), own.view(-1), **options)
    from internlm.core.context import global_context as gpc
    from internlm.initialize.launch import args_sanity_check, launch
    from internlm.train.pipeline import initialize_isp_communicator, initialize_model
    from internlm.utils.storage_manager import init_storage_manager

    launch(_training_config(variant), rank, variant.ranks, "localhost", port, "gloo", rank, seed=1024)
    args_sanity_check()
    gpc.get_cpu_group = gpc.get_group  # InternEvo makes no CPU groups beside those of its accelerator
    init_storage_manager(False, None, None)
    model = initialize_model()
    initialize_isp_communicator(model)
    _without_noise()
    _mend_rotary()
    model.eval()
    return model


def _mend_rotary() -> None:
    """Fix two rotary-embedding problems that occur only here, in float32 without packed data.

    InternEvo's substitute for the CUDA kernel writes one half of a row before it reads it for the other, unless
    `.float()` has made a copy. And each rank numbers the tokens of its sequence-parallel part from zero,
    whereas in training the batch contains their positions.
    """
    from internlm.core.context import ParallelMode
    from internlm.core.context import global_context as gpc
    from internlm.model.modules import embedding

    rotate, positions = embedding.apply_rotary_func, embedding.RotaryEmbedding._single_eval_forward

    def copied(x1: Any, x2: Any, *rest: Any) -> Any:
        return rotate(x1.clone(), x2.clone(), *rest)

    def numbered(self: Any, x: Any, seqlen_offset: int = 0) -> Any:
        rank = gpc.get_local_rank(ParallelMode.TENSOR) if gpc.config.parallel.sequence_parallel else 0
        return positions(self, x, seqlen_offset + rank * x.shape[1])

    embedding.apply_rotary_func = copied
    embedding.RotaryEmbedding._single_eval_forward = numbered


def _without_noise() -> None:
    """Choose the best two experts: InternEvo adds noise to the choice of the second one, even in evaluation."""
    from internlm.model.moe import gshard_layer

    gshard_layer.gumbel_rsample = lambda shape, device: torch.zeros(shape, device=device)


def _draw_weights(model: Any) -> None:
    """Weights that are all different, but identical on ranks that share them."""
    from internlm.core.context import ParallelMode
    from internlm.core.context import global_context as gpc
    from internlm.utils.parallel import is_using_isp

    cut_by = ParallelMode.WEIGHT if is_using_isp() else ParallelMode.TENSOR
    stage, tensor, inner = (
        gpc.get_local_rank(m) for m in (ParallelMode.PIPELINE, ParallelMode.TENSOR, cut_by)
    )
    own, ends, shared = (
        np.random.default_rng(seed) for seed in ([stage, inner, 0], [stage, tensor, 1], [stage, 2])
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or ".gate." in name:
                drawn = shared
            else:
                drawn = own if any(stack in name for stack in ("layers.", "blocks.")) else ends
            values = drawn.normal(1.0 if "norm" in name else 0.0, 0.2, parameter.shape)
            parameter.copy_(torch.from_numpy(values))


def _stage_of(model: Any, chunk: int) -> Any:
    return model[chunk] if isinstance(model, torch.nn.ModuleList) else model


def _logits(model: Any, variant: Variant) -> Any:
    """The logits of the complete model: each stage in turn, passing on the hidden states."""
    from internlm.core.context import ParallelMode
    from internlm.core.context import global_context as gpc

    place = [gpc.get_local_rank(m) for m in (ParallelMode.TENSOR, ParallelMode.PIPELINE, ParallelMode.WEIGHT)]
    for part in model if isinstance(model, torch.nn.ModuleList) else [model]:
        part.float().dtype = torch.float32  # weights of bfloat16, computed with in float32
    hidden: Any = None
    for chunk in range(variant.model["num_chunks"]):
        for stage in range(variant.pp):
            if place[1] == stage:
                given = (
                    {"input_ids": torch.from_numpy(TOKENS)} if hidden is None else {"hidden_states": hidden}
                )
                with torch.no_grad():
                    hidden = _stage_of(model, chunk)(**given)
                hidden = hidden[0] if isinstance(hidden, tuple | list) else hidden
            everybody: list[Any] = [None] * variant.ranks
            dist.all_gather_object(everybody, (place, hidden))
            hidden = next(state for at, state in everybody if at[0] == place[0] and at[1] == stage)
    return hidden.float().numpy()


def _make_rank(rank: int, variant: Variant, port: int, out: str) -> None:
    model = _launched(variant, rank, port)
    from internlm.checkpoint.components import save_model_checkpoint
    from internlm.core.context import global_context as gpc
    from internlm.utils.storage_manager import llm_save

    _draw_weights(model)
    save_model_checkpoint(out, model)
    logits = _logits(model, variant)
    if rank == 0:
        llm_save(f"{out}/model_config.pt", saved_obj=gpc.config.model)  # as CheckpointManager does
        np.savez(f"{out}/logits.npz", tokens=TOKENS, logits=logits)
    dist.barrier()


def _judge_rank(rank: int, variant: Variant, port: int, folder: str, logits: str) -> None:
    model = _launched(variant, rank, port)
    from internlm.checkpoint.components import load_model_checkpoint

    _draw_weights(model)
    load = model.load_state_dict
    model.load_state_dict = lambda states, strict=True: load(states, strict=True)  # InternEvo itself warns
    load_model_checkpoint(folder, model)
    found = _logits(model, variant)
    if rank == 0:
        np.savez(logits, tokens=TOKENS, logits=found)
    dist.barrier()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _run(target: Any, variant: Variant, *args: str) -> None:
    """Fork the ranks, so that torch and InternEvo are imported once."""
    import_internevo()
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    port = _free_port()
    ranks = [
        context.Process(target=target, args=(rank, variant, port, *args)) for rank in range(variant.ranks)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(300)
    if any(rank.exitcode for rank in ranks):
        raise RuntimeError(f"InternEvo failed: exit codes {[rank.exitcode for rank in ranks]}")


def make(name: str, out: Path) -> Path:
    """Make the checkpoint `name` of `VARIANTS` in `out`, with `logits.npz` and `variant.json` next to it."""
    folder = out / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    _run(_make_rank, VARIANTS[name], str(folder))
    for topology in folder.glob("topo_*"):
        topology.unlink()  # an empty dict in each
    (folder / "variant.json").write_text(json.dumps(asdict(VARIANTS[name]), indent=1) + "\n")
    return folder


def judge(folder: Path, logits: Path) -> None:
    """Build the model that `model_config.pt` describes, load `folder` strictly, and write InternEvo's logits."""
    model = dict(torch.load(folder / "model_config.pt", weights_only=True))
    model |= {"dtype": str(model["dtype"]), "use_flash_attn": False}  # a CPU has no flash attention
    model_type = json.loads((folder / "config.json").read_text())["model_type"]
    names = {"internlm": V1, "internlm2": V2, "llama": LLAMA}
    ranks = [path.stem.split("_")[1:] for path in folder.glob("model_tp*_pp*.pt")]
    tp, pp = (1 + max(int(rank[i][2:]) for rank in ranks) for i in (0, 1))
    _run(_judge_rank, Variant(names[model_type], model, tp, pp), str(folder), str(logits))


if __name__ == "__main__":
    command, target, *rest = sys.argv[1:]
    if command == "make":
        for wanted in rest or VARIANTS:
            print(make(wanted, Path(target)))
    else:
        judge(Path(target), Path(rest[0]))
