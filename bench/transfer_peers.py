"""What peers of a transfer do, on ranks of gloo, as commands: `python -m bench.transfer_peers NAME MODEL OUT …`.

Each runs in the environment of its peer and writes what it found to the file or folder OUT. TransformerEngine, where a
peer needs it, is the stand-in of `tests.genuine.fake_te`.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import pickle
import sys
import time
import types
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench.collectives import Counter

Sizes = tuple[int, int, int]
"""TP, PP and EP of a trainer. Experts are not split by tensor parallelism."""
ENGINE_TP = 2
LAST = "m2n.json"
"""What the engine's ranks write last: for each tensor of the Hub, the bytes that a rank gets, and if directly."""


def world(sizes: Sizes) -> int:
    """The number of ranks of a trainer without further data parallelism."""
    tp, pp, ep = sizes
    return max(tp, ep) * pp


def _counted(pairs: Iterable[Any], counter: Counter) -> dict[str, Any]:
    """What a rank moved while it iterated over all tensors, and how many bytes of tensors it got."""
    whole: dict[str, int] = {}
    with counter.counting():
        for name, tensor in pairs:
            whole[name] = tensor.numel() * tensor.element_size()
    return {**counter.moved._asdict(), "tensors": len(whole), "whole": sum(whole.values())}


# ------------------------------------------------------------------------------------------------ trainers


def weight_source(model: str, out: str, *sizes: str) -> None:
    """One round of `reshard.weight_source`."""
    _on_ranks(_weight_source, model, out, sizes)


def mcore_bridge(model: str, out: str, *sizes: str) -> None:
    """One export of mcore-bridge, as ms-swift does it for each step."""
    fake_te = importlib.import_module("tests.genuine.fake_te")
    fake_te.install()
    for module in (
        "mcore_bridge",
        "swift.megatron.arguments",
        "swift.megatron.model",
        "swift.megatron.utils",
    ):
        importlib.import_module(module)  # once, and not in each of the ranks
    _on_ranks(_mcore_bridge, model, out, sizes)


def megatron_bridge(model: str, out: str, *sizes: str) -> None:
    """One `export_hf_weights` of Megatron-Bridge."""
    made = importlib.import_module("tests.genuine.make_megatron_bridge")
    made.fake_te.install()
    made.import_what_is_there()
    made.replace_gated_norm()
    importlib.import_module("megatron.bridge")
    _on_ranks(_megatron_bridge, model, out, sizes)


def awex_trainer(model: str, out: str, *sizes: str) -> None:
    """What awex knows of the parameters of all ranks of a trainer, once all have told each other."""
    importlib.import_module(
        "tests.genuine.fake_te"
    ).install()  # whose names of norms are the ones that it knows
    _on_ranks(_awex_trainer, model, out, sizes, put=_pickle_first)


def _on_ranks(function: Any, model: str, out: str, sizes: tuple[str, ...], put: Any = None) -> None:
    from tests.genuine.mcore.ranks import run_ranks

    tp, pp, ep = map(int, sizes)
    found = run_ranks(world((tp, pp, ep)), function, model, (tp, pp, ep))
    (put or _json)(found, Path(out))


def _json(found: Any, out: Path) -> None:
    out.write_text(json.dumps(found))


def _pickle_first(found: Any, out: Path) -> None:
    out.write_bytes(pickle.dumps(found[0]))


def _megatron_chunks(model: str, sizes: Sizes, spec: Any = "local") -> list[Any]:
    """The chunks of this rank, as megatron-core builds them, in bfloat16."""
    import torch

    from reshard.algebra.layout import Layout
    from reshard.exchange.megatron_trainer import sized_model
    from tests.genuine.mcore import models

    tp, pp, ep = sizes
    sized = sized_model(Path(model))
    experts = bool(sized.args.get("num_experts"))
    layout = Layout(tp=tp, pp=pp, ep=ep, etp=1 if experts else tp, dp=1)
    models.initialize(layout, seed=1)
    args = {**sized.args, "padded_vocab_size": _padded(sized.dims.vocab, tp)}
    args["moe_grouped_gemm"] = experts and spec == "te"  # megatron-core's own need kernels for GPUs
    # As Float16Module does, since the norms of megatron-core's own modules are float32.
    return [chunk.bfloat16() for chunk in models.build_model(args, layout, spec=spec, dtype=torch.bfloat16)]


def _padded(vocabulary: int, tp: int) -> int:
    return -(-vocabulary // (128 * tp)) * 128 * tp


def _weight_source(model: str, sizes: Sizes) -> dict[str, Any]:
    import reshard

    source = reshard.weight_source(_megatron_chunks(model, sizes), base=model)
    return _counted(source, Counter())


def _mcore_bridge(model: str, sizes: Sizes) -> dict[str, Any]:
    made = importlib.import_module("tests.genuine.make_mcore_bridge")
    made.let_it_run_without_gpu()
    hf_config = made._config(model)
    args = made._arguments(model, "unused", sizes, None, hf_config)
    importlib.import_module("swift.megatron.utils.megatron_lm_utils")._initialize_mpu(args)
    importlib.import_module("megatron.core.tensor_parallel").model_parallel_cuda_manual_seed(1)
    models = importlib.import_module("swift.megatron.model").get_mcore_model(args, hf_config)
    for each in models:
        made.as_in_training(each)
    bridge = models[0].config.bridge
    return _counted(bridge.export_weights(models, target_device="cpu"), Counter())


def _megatron_bridge(model: str, sizes: Sizes) -> dict[str, Any]:
    import torch

    made = importlib.import_module("tests.genuine.make_megatron_bridge")
    made.let_it_run_without_gpu()
    bridge = importlib.import_module("megatron.bridge").AutoBridge.from_hf_pretrained(
        model, torch_dtype=torch.bfloat16
    )
    provider = bridge.to_megatron_provider(load_weights=True)
    tp, pp, ep = sizes
    provider.tensor_model_parallel_size = tp
    provider.pipeline_model_parallel_size = pp
    provider.expert_model_parallel_size = ep if provider.num_moe_experts else 1
    provider.expert_tensor_parallel_size = 1
    provider.sequence_parallel = tp > 1
    provider.params_dtype = provider.pipeline_dtype = torch.bfloat16
    for kernel in made.KERNELS:
        setattr(provider, kernel, False)
    provider.finalize()
    provider.initialize_model_parallel(seed=0)
    models = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True, bf16=True)
    return _counted(bridge.export_hf_weights(models, cpu=True, show_progress=False), Counter())


def _awex_trainer(model: str, sizes: Sizes) -> Any:
    from transformers import AutoConfig

    resolver = importlib.import_module("awex.meta.train_meta_resolver").McoreParamMetaResolver
    # awex divides by it, for a number that its plan does not use
    importlib.import_module("awex.util.device").device_count = lambda: 1
    hf_config = AutoConfig.from_pretrained(model)
    engine = SimpleNamespace(
        model=_megatron_chunks(model, sizes, "te"), engine_name="mcore", enable_debug_mode=False
    )
    infer_conf = {"hf_config": hf_config, "infer_atten_tp_size": ENGINE_TP, "device_backend": "cpu"}
    return resolver(engine, hf_config, infer_conf).get_parameters_meta()


# ------------------------------------------------------------------------------------------------ engines


def vllm(model: str, last: str, tp: str) -> None:
    """Load a model into vLLM, which records it, and ask its backend `nccl_m2n` and awex for their destinations."""
    from vllm import LLM

    folder = Path(last).parent

    engine = LLM(
        model=model,
        load_format="reshard",
        model_loader_extra_config={"record": str(folder)},
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=4,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        tensor_parallel_size=int(tp),
        gpu_memory_utilization=0.5,
    )
    _awex_engine(engine, Path(model), folder)
    (folder / LAST).write_text(json.dumps(engine.collective_rpc(_m2n_destinations, args=(model, int(tp)))))


def _m2n_destinations(worker: Any, model: str, tp: int) -> dict[str, list[Any]]:
    """For each tensor of the Hub, the bytes that vLLM's planner sends to this worker, and whether it is direct."""
    import torch
    from safetensors import safe_open
    from vllm.distributed.weight_transfer.m2n_layout import resolve_parameter_destinations

    names, dtypes, shapes = [], [], []
    for file in sorted(Path(model).glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                names.append(name)
                dtypes.append(torch.bfloat16)
                shapes.append(tuple(opened.get_slice(name).get_shape()))
    found = resolve_parameter_destinations(
        _as_on_gpus(worker), names, dtypes, shapes, num_workers=tp, shard_axis_size=tp, allow_direct=True
    )
    told = {}
    for each, dtype, shape in zip(found, dtypes, shapes, strict=True):
        whole = math.prod(shape) * dtype.itemsize
        own = each.tensor.numel() * dtype.itemsize if each.tensor is not None else whole
        told[each.name] = [own, each.direct]
    return told


def _as_on_gpus(worker: Any) -> Any:
    """The model of a worker before it is prepared for a CPU, which replaces parameters with others of their values."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model

    config = worker.vllm_config
    layers = config.compilation_config.static_forward_context
    kept = dict(layers)
    layers.clear()  # a model refuses names that are there already
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with set_current_vllm_config(config), torch.device("meta"):
            return initialize_model(config)
    finally:
        torch.set_default_dtype(before)
        layers.clear()
        layers.update(kept)


def _awex_engine(engine: Any, model: Path, out: Path) -> None:
    """Keep awex's description of the workers."""
    resolver = importlib.import_module("awex.meta.infer_meta_resolver").InferParamMetaResolver
    config = importlib.import_module("awex.config").InferenceConfig
    hf_config = importlib.import_module("transformers").AutoConfig.from_pretrained(model)
    tp = engine.llm_engine.vllm_config.parallel_config.tensor_parallel_size
    settings = config(
        tp_size=tp, pp_size=1, dp_size=1, ep_size=1, enable_dp_attention=False, enable_dp_lm_head=False
    )

    def execute(task: Any, **options: Any) -> list[Any]:
        return engine.collective_rpc(_in_worker, args=(task.__module__, task.__qualname__, options))

    adapter = SimpleNamespace(
        hf_config=hf_config, config=settings, engine_name="vllm", execute_task_in_model_worker=execute
    )
    found = resolver(adapter, convert_params=True).get_parameters_meta()
    (out / "awex.pickle").write_bytes(pickle.dumps(found))


def _in_worker(worker: Any, module: str, name: str, options: dict[str, Any]) -> Any:
    """awex's own plugin does the task on the model of a worker.

    The plugin imports the base of vLLM's requests, for its routes, from where vLLM 0.32 has it no longer.
    """
    moved = types.ModuleType("vllm.entrypoints.openai.protocol")
    moved.OpenAIBaseModel = importlib.import_module("pydantic").BaseModel  # type: ignore[attr-defined]
    sys.modules.setdefault(moved.__name__, moved)
    importlib.import_module("awex.vllm_plugin")._patch_awex_worker()
    return worker.awex_execute(module, name, options)


# ------------------------------------------------------------------------------------------------ awex's plan


def awex_plan(model: str, out: str, trainer: str, vllm_engine: str) -> None:
    """The plan of awex's builder to SGLang: bytes by rank, and its seconds; and its answer about vLLM.

    SGLang's ranks are described: awex only asks for the names and the shapes of their parameters.
    """
    builder = importlib.import_module("awex.transfer.transfer_plan").TransferPlanBuilder
    training = pickle.loads(Path(trainer).read_bytes())
    ranks = training[0].shards[0].world_size
    try:
        builder(ENGINE_TP, ranks).build_weights_mapping_operations(
            pickle.loads(Path(vllm_engine).read_bytes()), training
        )
        answer = "planned"
    except ValueError as error:
        answer = str(error).partition(" missing_on_infer")[0]
    engine = _awex_sglang(model)
    began = time.perf_counter()
    operations = builder(ENGINE_TP, ranks).build_weights_mapping_operations(engine, training)
    seconds = time.perf_counter() - began
    sent, received = [0] * ranks, [0] * ENGINE_TP
    for each in operations:
        nbytes = math.prod(each.overlap_shape) * each.send_shard_meta.dtype.itemsize
        sent[each.send_rank - ENGINE_TP] += nbytes
        received[each.recv_rank] += nbytes
    found = {"sent": sent, "received": received, "seconds": seconds, "operations": len(operations)}
    _json({**found, "vllm": answer}, Path(out))


def _awex_sglang(model: str) -> Any:
    """awex's description of SGLang's ranks, by its own resolver."""
    torch = importlib.import_module("torch")
    hf_config = importlib.import_module("transformers").AutoConfig.from_pretrained(model)
    settings = importlib.import_module("awex.config").InferenceConfig(
        tp_size=ENGINE_TP, dp_size=1, ep_size=1, enable_dp_attention=False, enable_dp_lm_head=False
    )

    class Qwen3MoeForCausalLM(torch.nn.Module):  # awex goes by this name
        config = hf_config

        def named_parameters(self) -> Any:
            for name, shape in _sglang_shapes(hf_config).items():
                yield name, torch.empty(shape, dtype=torch.bfloat16, device="meta")

    def execute(task: Any, **options: Any) -> list[Any]:
        found = []
        for rank in range(ENGINE_TP):
            ranks = dict.fromkeys(("tp_rank", "attn_tp_rank", "global_rank", "local_rank"), rank)
            sizes = dict.fromkeys(("tp_size", "attn_tp_size", "world_size"), ENGINE_TP)
            alone = {"pp_rank": 0, "pp_size": 1, "dp_size": 1, "attn_dp_rank": 0}
            context = {**ranks, **sizes, **alone, "scheduler": SimpleNamespace(server_args=settings)}
            found.append(task(model=Qwen3MoeForCausalLM(), model_context=context, **options))
        return found

    adapter = SimpleNamespace(
        hf_config=hf_config, config=settings, engine_name="sglang", execute_task_in_model_worker=execute
    )
    resolver = importlib.import_module("awex.meta.infer_meta_resolver").InferParamMetaResolver
    return resolver(adapter, convert_params=True).get_parameters_meta()


def _sglang_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Parameters of a rank of SGLang 0.5.23, as srt/models/qwen3_moe.py builds them."""
    hidden, head = config.hidden_size, config.head_dim
    queries = config.num_attention_heads // ENGINE_TP * head
    keys = config.num_key_value_heads // ENGINE_TP * head
    experts, inner = config.num_experts, config.moe_intermediate_size // ENGINE_TP
    layer = {
        "self_attn.qkv_proj.weight": (queries + 2 * keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "self_attn.q_norm.weight": (head,),
        "self_attn.k_norm.weight": (head,),
        "mlp.gate.weight": (experts, hidden),
        "mlp.experts.w13_weight": (experts, 2 * inner, hidden),
        "mlp.experts.w2_weight": (experts, hidden, inner),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    vocabulary = (config.vocab_size // ENGINE_TP, hidden)
    layers = range(config.num_hidden_layers)
    return {
        "model.embed_tokens.weight": vocabulary,
        **{f"model.layers.{number}.{name}": shape for number in layers for name, shape in layer.items()},
        "model.norm.weight": (hidden,),
        "lm_head.weight": vocabulary,
    }


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    globals()[sys.argv[1]](*sys.argv[2:])
