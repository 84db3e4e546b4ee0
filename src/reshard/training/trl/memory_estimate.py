"""GPU memory while TRL trains: sizes from the model on the meta device, sharded as by DDP, FSDP2, ZeRO or TP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from reshard.algebra.layout import Layout
from reshard.base.errors import ReshardError
from reshard.training.engine import MemoryParts, StateBytes, StepCounts
from reshard.training.memory import activations
from reshard.training.memory.activations import KeptBytes, LayerWidths
from reshard.training.methods import generates, is_rewarded
from reshard.training.run import Run, config_of
from reshard.training.trl import adapter_checks, quantized
from reshard.training.trl.batches import DTYPE_BYTES
from reshard.training.trl.config_fields import LORA_OPTIONS, options_of
from reshard.training.trl.trl_methods import TRL_METHODS

HEAD_TOKENS, HEAD_COLUMNS = 4096, 32768
"""The tile of logits that TRL 1.16 computes at once: `trl.kernels.chunked_logprob`, `trl.trainer.utils`."""
BUCKET_ELEMENTS = 500_000_000
"""Maximum elements of DeepSpeed's reduce bucket."""


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers of parameters. Tied ones count once."""

    frozen: int
    trained: int
    layer: int
    """In the largest decoder layer."""
    layer_trained: int
    ends: int
    """Outside of the layers: embedding, last norm, head."""
    ends_trained: int
    split: int
    """Those that tensor parallelism shards."""
    split_trained: int
    experts: int
    """In a layer's experts, if adapters are merged into them in each forward pass."""
    linear: int = 0
    """Weights of linear layers except the head: those that are quantized."""

    @property
    def all(self) -> int:
        """In the model, adapters included."""
        return self.frozen + self.trained


def sizes_of(run: Run, options: Mapping[str, Any]) -> ParameterCounts:
    """The parameters of a run's model, adapters included. Takes seconds, as torch and transformers are imported.

    Raises ReshardError if transformers does not know the model.
    """
    named = ((name, options.get(name)) for name in LORA_OPTIONS)
    hashable = tuple((name, tuple(value) if isinstance(value, list) else value) for name, value in named)
    trusted = bool(options.get("trust_remote_code"))
    return _sizes(run.model, trusted, run.lora, hashable if run.lora else (), run.method)


@lru_cache(maxsize=8)
def _sizes(
    folder: Path, trusted: bool, lora: bool, options: tuple[tuple[str, Any], ...], method: str = "sft"
) -> ParameterCounts:
    way = TRL_METHODS[method]
    model = on_meta(folder, trusted=trusted, classifies=way.classifies)
    linear = _linear(model)
    plan = dict(getattr(model, "tp_plan", None) or {})
    if lora:
        model = adapter_checks.adapted(model, dict(options), way)
    layers = max(_stacks(model), key=lambda stack: sum(map(_numel, stack)), default=[])
    inside = {id(p) for layer in layers for p in layer.parameters()}
    every = dict(model.named_parameters())
    trained = {name for name, p in every.items() if p.requires_grad}
    split = {name for name in every if _is_split(name, plan)}
    ends = {name for name, p in every.items() if id(p) not in inside}
    largest = max(layers, key=_numel, default=None)

    def count(names: set[str]) -> int:
        return sum(every[name].numel() for name in names)

    return ParameterCounts(
        frozen=count(every.keys() - trained),
        trained=count(trained),
        layer=_numel(largest),
        layer_trained=_numel(largest, trained_only=True),
        ends=count(ends),
        ends_trained=count(ends & trained),
        split=count(split),
        split_trained=count(split & trained),
        experts=_merged_experts(largest) if lora else 0,
        linear=linear,
    )


def on_meta(folder: Path, *, trusted: bool, classifies: bool = False) -> Any:
    """The model of a folder without its weights. Code from the folder is run only if it is trusted."""
    import torch
    from transformers import AutoConfig

    way = TRL_METHODS["reward" if classifies else "sft"]
    kind, labels = way.model_class(folder), way.model_arguments
    try:
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=trusted, **labels)
        with torch.device("meta"):
            return kind.from_config(config, trust_remote_code=trusted)
    except Exception as error:  # whatever transformers raises for a config
        raise ReshardError(
            "transformers-cannot-build",
            "transformers cannot build the model",
            file=str(folder),
            found=f"{type(error).__name__}: {error}".split("\n")[0],
            remedy="update transformers; a folder with its own code needs --trust_remote_code, if you trust it",
        ) from None


def _linear(model: Any) -> int:
    from torch.nn import Linear

    head = model.get_output_embeddings()
    return sum(m.weight.numel() for m in model.modules() if isinstance(m, Linear) and m is not head)


def _stacks(model: Any) -> Iterator[list[Any]]:
    """Lists of modules; the largest contains the decoder layers."""
    from torch.nn import ModuleList

    for name, module in model.named_modules():
        if isinstance(module, ModuleList) and name.rsplit(".", 1)[-1] != "experts":
            yield list(module)


def _numel(module: Any, *, trained_only: bool = False) -> int:
    if module is None:
        return 0
    return sum(p.numel() for p in module.parameters() if p.requires_grad or not trained_only)


def _is_split(name: str, plan: Mapping[str, str]) -> bool:
    """Whether transformers' plan shards a parameter; its patterns have a star for the layer's number."""
    plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
    module = plain.rsplit(".", 1)[0]
    styles = (style for key, style in plan.items() if fnmatch(module, key) or fnmatch(plain, key))
    return any("colwise" in style or "rowwise" in style for style in styles)


def _merged_experts(layer: Any) -> int:
    """Elements of stacked experts with adapters: PEFT merges them before each use, in a tensor of equal size."""
    names = {name for name, p in layer.named_parameters() if p.requires_grad and ".experts." in f".{name}"}
    stacked = (p.numel() for name, p in layer.named_parameters() if ".experts." in f".{name}" and p.ndim == 3)
    return sum(stacked) if names else 0


@dataclass(frozen=True)
class _Case:
    """A run with everything on which its memory depends. `base` is the bytes per untrained weight."""

    run: Run
    options: Mapping[str, Any]
    sizes: ParameterCounts
    widths: LayerWidths
    batches: StepCounts
    precision: StateBytes
    world_size: int
    gpu: bool
    base: int

    @property
    def kind(self) -> str:
        return self.run.parallel

    @property
    def tp(self) -> int:
        return self.run.layout.tp if self.kind == "tp" else 1

    @property
    def shared(self) -> int:
        """The number of ranks over which FSDP2 or ZeRO-3 shards each parameter; with tensor parallelism, FSDP2 does."""
        return self.world_size // self.tp if self.kind in ("fsdp2", "zero3", "tp") else 1


def parts(
    run: Run, batches: StepCounts, precision: StateBytes, world_size: int, *, gpu: bool
) -> tuple[MemoryParts, MemoryParts, MemoryParts]:
    """Bytes that are always allocated, that a training step adds, and that generation adds instead."""
    options = options_of(run)
    case = _Case(
        run=run,
        options=options,
        sizes=sizes_of(run, options),
        widths=LayerWidths.of(config_of(run.model)),
        batches=batches,
        precision=precision,
        world_size=world_size,
        gpu=gpu,
        base=DTYPE_BYTES.get(str(options.get("dtype")), 4) if run.lora else precision.weights,
    )
    always, step = _states(case), _step(case)
    return _there(always), _there(step), _there(_generation(case) if generates(run.method) else {})


def _there(parts: MemoryParts) -> MemoryParts:
    return {name: size for name, size in parts.items() if size}


def _states(case: _Case) -> dict[str, int]:
    sizes, precision, kind = case.sizes, case.precision, case.kind
    all_split = case.shared
    states_split = case.world_size if kind == "zero2" else all_split
    trained = sizes.trained - sizes.split_trained + sizes.split_trained // case.tp
    split = sizes.split - sizes.split_trained
    frozen = sizes.frozen - split + split // case.tp
    saved = int(sizes.linear * quantized.saved(case.options, case.base))
    return {
        "weights": (frozen * case.base + trained * precision.weights - saved) // all_split,
        "reference model": _reference(case) // all_split,
        "teacher": _teacher(case) // all_split,
        "gradients": trained * precision.gradients // states_split,
        "optimizer": trained * precision.optimizer // states_split,
        "gathered layers": _gathered(case) // case.tp if all_split > 1 or kind in ("fsdp2", "zero3") else 0,
        "buckets": _buckets(kind, trained, precision) if case.world_size > 1 else 0,
    }


def _reference(case: _Case) -> int:
    """The reference model of DPO, and of GRPO and RLOO with a beta; with LoRA it is the base without its adapters."""
    compared = TRL_METHODS[case.run.method].reference(case.options)
    before = case.options.get("precompute_ref_log_probs") and case.kind != "fsdp2"
    if case.run.lora or not compared or before:
        return 0
    split = case.sizes.split // case.tp
    return (case.sizes.all - case.sizes.split + split) * case.precision.weights


def _teacher(case: _Case) -> int:
    """The teacher, which is not tensor-parallel; TRL loads it in its own dtype unless told otherwise."""
    way = TRL_METHODS[case.run.method]
    if not way.teacher:
        return 0
    folder = Path(str(case.options.get(way.teacher) or case.run.model))
    config = config_of(folder)
    given = (case.options.get("teacher_model_init_kwargs") or {}).get("dtype", "auto")
    own = config.get("dtype") or config.get("torch_dtype") or "float32"
    dtype = str(own if given == "auto" else given)
    return _sizes(folder, bool(case.options.get("trust_remote_code")), False, ()).all * DTYPE_BYTES.get(
        dtype, 4
    )


def _gathered(case: _Case) -> int:
    """The current layer and the prefetched next one; the ends; gradients of one layer and of the ends."""
    sizes = case.sizes
    weights = sizes.ends + 2 * sizes.layer
    return (weights + sizes.ends_trained + sizes.layer_trained) * case.precision.activations


def _buckets(kind: str, trained: int, precision: StateBytes) -> int:
    """Gradients are reduced in buckets: DDP copies all of them, ZeRO-2 has one bucket to fill and one in flight."""
    if kind == "zero2":
        return 2 * min(trained, BUCKET_ELEMENTS) * precision.activations
    return trained * precision.gradients if kind == "ddp" else 0


def _step(case: _Case) -> dict[str, int]:
    """Activations, a tile of logits, and weights cast to 16 bits, which autocast keeps for the backward pass."""
    batches, precision, widths = case.batches, case.precision, case.widths
    sequences = batches.per_device * TRL_METHODS[case.run.method].sequences
    tokens = sequences * batches.length
    kept = KeptBytes(
        computed=precision.activations,
        residual=max(case.base, precision.activations),
        frozen=case.run.lora,
        repeated=sequences > 1 and not case.options.get("packing"),
        tp=case.tp,
        scores=precision.activations + 4 if case.options.get("attn_implementation") == "eager" else 0,
    )
    if precision.recomputation:
        layers = widths.layers * activations.between_layers(widths, kept)
        layers += activations.of_one_layer(widths, kept, batches.length)
    else:
        layers = activations.of_layers(widths, kept, batches.length)
    merged = 2 if precision.recomputation else widths.sparse + 1
    return {
        "activations": tokens * (layers + activations.of_ends(widths, kept)),
        "logits": _logits(case, tokens),
        "weights in 16 bits": _casts(case),
        "merged experts": case.sizes.experts * precision.activations * merged,
    }


def _casts(case: _Case) -> int:
    """Autocast keeps a 16-bit copy of each 32-bit weight until the backward pass has used it.

    FSDP2 and ZeRO cast what they gather instead. Copies of frozen weights are not shared between uses, so with
    recomputation only one layer's copies exist at once.
    """
    sizes, precision = case.sizes, case.precision
    if case.base <= precision.activations or case.kind not in ("ddp", "tp"):
        return 0
    cast = sizes.layer if case.run.lora and precision.recomputation else sizes.all
    return cast * precision.activations // case.tp


def _logits(case: _Case, tokens: int) -> int:
    """One tile of logits and the columns of the head for it; gradients of the hidden states and of the head.

    Both gradients are summed in float32. On a GPU, a kernel works in the tile; on a CPU six more tiles in float32 are
    made. A teacher has a tile as well, both are in float32, and nine more are made (`trl.kernels.chunked_divergence`).
    """
    widths, computed, way = case.widths, case.precision.activations, TRL_METHODS[case.run.method]
    if way.classifies:
        return 0
    rows, columns = min(tokens, HEAD_TOKENS), min(widths.vocab, HEAD_COLUMNS)
    width, more = (2 * 4, 9) if way.teacher else (computed, 6)
    tile = rows * HEAD_COLUMNS * width + (0 if case.gpu else more * rows * columns * 4)
    cast = columns * widths.hidden * computed if case.precision.weights != computed else 0
    head = widths.vocab * widths.hidden * 4 if case.sizes.ends_trained else 0
    return tile + cast + tokens * widths.hidden * 4 + head


def _generation(case: _Case) -> dict[str, int]:
    """Keys and values of all completions that a rank samples at once."""
    batches, widths = case.batches, case.widths
    if case.options.get("use_vllm"):
        return {}  # they are in vLLM's share of the GPU
    rounds = int(case.options.get("steps_per_generation") or batches.accumulation)
    tokens = batches.per_device * rounds * batches.length
    width = widths.layers * (widths.key + widths.value)
    return {"keys and values": tokens * width * case.precision.activations // case.tp}


def parallelisms(run: Run, world_size: int) -> Iterator[tuple[tuple[str, ...], Run]]:
    """Other parallelism over the same ranks, cheapest first."""
    later = {"ddp": ("fsdp2", "zero2", "zero3"), "zero2": ("fsdp2", "zero3"), "tp": ("fsdp2",)}
    for kind in later.get(run.parallel, ()) if world_size > 1 else ():
        if not kind.startswith("zero") or find_spec("deepspeed"):
            yield (f"--parallel {kind}",), replace(run, parallel=kind, layout=Layout())
    if run.parallel == "ddp":
        for size in (2, 4, 8):
            if world_size % size == 0:
                yield (f"--parallel tp --tp {size}",), replace(run, parallel="tp", layout=Layout(tp=size))


def savings(run: Run) -> Iterator[dict[str, object]]:
    """Options that reduce memory for the same steps, cheapest first."""
    yield {}
    if not options_of(run).get("gradient_checkpointing"):
        yield {"gradient_checkpointing": "true"}


def smaller_batch(run: Run) -> dict[str, object]:
    """One sample at a time with the same samples per step; groups of completions are not changed."""
    options = options_of(run)
    size, steps = int(options["per_device_train_batch_size"]), int(options["gradient_accumulation_steps"])
    if size == 1 or is_rewarded(run.method):
        return {}
    return {"per_device_train_batch_size": 1, "gradient_accumulation_steps": size * steps}
