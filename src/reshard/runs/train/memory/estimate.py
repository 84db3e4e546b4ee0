"""GPU memory while TRL trains, in bytes on each GPU: weights, states and activations, sharded as the plan says.

Sizes of states follow from torch's AdamW and from accelerate's plans; those of a step from the operations of a layer
(`activations.py`), and of logits from TRL's tiles (`trl.trainer.utils`, TRL 1.16).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from reshard.base.errors import Problem
from reshard.base.quantities import GIB, memory_size
from reshard.runs.train.memory import activations
from reshard.runs.train.memory.activations import KeptBytes, LayerWidths
from reshard.runs.train.memory.gpu_models import PlannedGpus
from reshard.runs.train.memory.parameter_counts import ParameterCounts

OVERHEAD_BYTES = GIB
"""What CUDA, cuBLAS and NCCL allocate, roughly."""
USABLE_SHARE = 0.95
"""The part of a GPU's memory that can be filled before fragmentation makes allocations fail."""
HEAD_TOKENS, HEAD_COLUMNS = 4096, 32768
"""The tile of logits that TRL computes at once."""
BUCKET_ELEMENTS = 500_000_000
"""Maximum elements of DeepSpeed's reduce bucket."""
QUANTIZED_BYTES = 0.52
"""Bytes per weight in bitsandbytes' NF4: four bits, and the scales of its blocks."""
OPTIMIZER_BYTES = 8
"""Two float32 states of AdamW per trained weight."""


@dataclass(frozen=True)
class TrainingSetup:
    """A run, as far as its memory depends on it. Sizes are in bytes per element.

    A step on each GPU has a `batch` of records, which are `sequences` of `length` tokens. `weights` is the size of the
    model's weights, `computed` that of products. A `reference` is another model of the same size beside the trained
    one, without gradients.
    """

    counts: ParameterCounts
    widths: LayerWidths
    parallel: str
    gpus: int
    batch: int
    sequences: int
    length: int
    weights: int = 4
    computed: int = 2
    recomputed: bool = True
    reference: bool = False
    lora: bool = False
    quantized: bool = False
    generated: int = 0
    """Sequences that are generated at once on each GPU."""
    eager: bool = False

    @property
    def shared(self) -> int:
        """The number of GPUs over which each parameter is sharded."""
        return self.gpus if self.parallel in ("fsdp2", "zero3") else 1


def memory_parts(setup: TrainingSetup) -> dict[str, int]:
    """Bytes on each GPU by what they are for. Generation and training alternate: the larger of the two counts."""
    step, generation = _step(setup), _generation(setup)
    parts = {"CUDA and NCCL": OVERHEAD_BYTES, **_states(setup)}
    parts |= step if sum(step.values()) >= sum(generation.values()) else generation
    return {name: size for name, size in parts.items() if size}


def memory_problem(setup: TrainingSetup, gpus: PlannedGpus) -> Problem | None:
    """The problem of a run that does not fit, with the smallest change that makes it fit."""
    room = int(gpus.bytes * USABLE_SHARE)
    parts = memory_parts(setup)
    if sum(parts.values()) <= room:
        return None
    largest = sorted(parts.items(), key=lambda part: -part[1])[:4]
    fitting = next(
        (flags for flags, other in changes(setup) if sum(memory_parts(other).values()) <= room), None
    )
    return Problem(
        "run-exceeds-gpu-memory",
        "the run does not fit into the memory of the GPUs",
        rule="weights, gradients, optimizer and activations are in memory at the same time",
        expected=f"at most {memory_size(room)} on each of {gpus}",
        found=f"about {memory_size(sum(parts.values()))}: "
        + ", ".join(f"{name} {memory_size(size)}" for name, size in largest),
        remedy=f"add {fitting}"
        if fitting
        else "use more or larger GPUs, a smaller model, or shorter sequences",
    )


def changes(setup: TrainingSetup) -> Iterator[tuple[str, TrainingSetup]]:
    """Changes of options with the setup that they make, the cheapest first."""
    plans = [("", setup)]
    if setup.gpus > 1 and setup.parallel in ("ddp", "zero2"):
        plans.append(("--parallel fsdp2", replace(setup, parallel="fsdp2")))
    one = {"sequences": max(setup.sequences // setup.batch, 1), "batch": 1}
    savings: list[tuple[str, dict[str, Any]]] = [
        ("", {}),
        ("--gradient_checkpointing true", {"recomputed": True}),
        ("--per_device_train_batch_size 1 --gradient_checkpointing true", {"recomputed": True, **one}),
        ("--dtype bfloat16", {"weights": 2, "recomputed": True, **one}),
        ("--dtype bfloat16 --load_in_4bit true", {"weights": 2, "quantized": True, **one}),
    ]
    for more, fields in savings[: None if setup.lora else 3]:
        for change, plan in plans:
            yield f"{change} {more}".strip(), replace(plan, **fields)


def _states(setup: TrainingSetup) -> dict[str, int]:
    counts, trained = setup.counts, setup.counts.trained
    base = counts.frozen * setup.weights
    if setup.quantized:
        base -= int(counts.linear * (setup.weights - QUANTIZED_BYTES))
    states_shared = setup.gpus if setup.parallel == "zero2" else setup.shared
    adapter = 4 if setup.lora else setup.weights
    return {
        "weights": (base + trained * adapter) // setup.shared,
        "reference model": counts.all * setup.weights // setup.shared if setup.reference else 0,
        "gradients": trained * adapter // states_shared,
        "optimizer": trained * OPTIMIZER_BYTES // states_shared,
        "gathered layers": _gathered(setup) if setup.shared > 1 else 0,
        "buckets": _buckets(setup) if setup.gpus > 1 else 0,
    }


def _gathered(setup: TrainingSetup) -> int:
    """The current layer and the prefetched next one; the ends; gradients of one layer and of the ends."""
    counts = setup.counts
    weights = counts.ends + 2 * counts.layer
    return (weights + counts.ends_trained + counts.layer_trained) * setup.computed


def _buckets(setup: TrainingSetup) -> int:
    """Gradients are reduced in buckets: DDP copies all of them, ZeRO-2 has one bucket to fill and one in flight."""
    if setup.parallel == "zero2":
        return 2 * min(setup.counts.trained, BUCKET_ELEMENTS) * setup.computed
    return setup.counts.trained * setup.weights if setup.parallel == "ddp" else 0


def _step(setup: TrainingSetup) -> dict[str, int]:
    """Activations, a tile of logits, and weights cast to 16 bits, which autocast keeps for the backward pass."""
    widths, tokens = setup.widths, setup.sequences * setup.length
    kept = KeptBytes(
        computed=setup.computed,
        residual=max(setup.weights, setup.computed),
        frozen=setup.lora,
        repeated=setup.sequences > 1,
        scores=setup.computed + 4 if setup.eager else 0,
    )
    if setup.recomputed:
        layers = widths.layers * activations.between_layers(widths, kept)
        layers += activations.of_one_layer(widths, kept, setup.length)
    else:
        layers = activations.of_layers(widths, kept, setup.length)
    return {
        "activations": tokens * (layers + activations.of_ends(widths, kept)),
        "logits": _logits(setup, tokens),
        "weights in 16 bits": _casts(setup),
    }


def _casts(setup: TrainingSetup) -> int:
    """Autocast keeps a 16-bit copy of each 32-bit weight until the backward pass has used it.

    FSDP2 and ZeRO cast what they gather instead. Copies of frozen weights are not shared between uses, so with
    recomputation only one layer's copies exist at once.
    """
    if setup.weights <= setup.computed or setup.parallel != "ddp":
        return 0
    cast = setup.counts.layer if setup.lora and setup.recomputed else setup.counts.all
    return cast * setup.computed


def _logits(setup: TrainingSetup, tokens: int) -> int:
    """A tile of logits and the columns of the head for it; gradients of the hidden states and of the head."""
    widths = setup.widths
    tile = min(tokens, HEAD_TOKENS) * HEAD_COLUMNS * setup.computed
    columns = min(widths.vocab, HEAD_COLUMNS)
    cast = columns * widths.hidden * setup.computed if setup.weights != setup.computed else 0
    head = widths.vocab * widths.hidden * 4 if setup.counts.ends_trained else 0
    return tile + cast + tokens * widths.hidden * 4 + head


def _generation(setup: TrainingSetup) -> dict[str, int]:
    """Keys and values of all completions that a GPU samples at once."""
    widths = setup.widths
    tokens = setup.generated * setup.length
    return {"keys and values": tokens * widths.layers * (widths.key + widths.value) * setup.computed}
