"""Fine-tuning and continued pre-training with megatron-core, from and to Hugging Face folders.

`options.py` lists the options, `checks.py`, `batches.py` and `memory_estimate.py` are used before launch;
`sharded_weights.py` plans the shards of each rank, `engines/megatron/fill_model.py` reads them; `packed_rows.py` makes
sequences from data; `rank_setup.py`, `training_step.py`, `run_checkpoints.py`, `lora.py` and `assertions.py` are the
parts of `training_loop.py`, which trains. Importing this package imports neither torch nor megatron-core.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from reshard.base.errors import Problem
from reshard.folders import iterations
from reshard.training.data.tokens import LossCoverage, RecordLengths
from reshard.training.engine import (
    Checkpoints,
    Engine,
    EngineChecks,
    Estimates,
    SequenceReading,
    Trained,
    sizes_in_words,
)
from reshard.training.megatron import checks, memory_estimate, step_cost
from reshard.training.megatron.batches import batches, precision
from reshard.training.megatron.options import known_options, read
from reshard.training.run import Run
from reshard.training.show.metrics import MetricsWriter

_CHATTER: tuple[dict[str, Any], ...] = (
    {"module": r"megatron\.core"},
    {"message": r".*torch\.distributed\.\w+` is deprecated"},
    {"message": r"The \.grad attribute of a Tensor"},
)
"""Warnings about megatron-core's own code, which each rank would repeat before every run."""


def _plan(run: Run, world_size: int) -> list[str]:
    """The parallelism in words: TP2, PP2, DP4."""
    return [*sizes_in_words(run.layout), f"DP{max(run.layout.replicas(world_size), 1)}"]


def _reading(run: Run, options: Mapping[str, Any], record: Mapping[str, Any]) -> SequenceReading:
    """Long text continues in the next sequence; other samples are packed or padded."""
    limit = None if "text" in record else options["seq_length"] or None
    packed = bool(options["pack"])
    return SequenceReading(
        "seq_length",
        limit,
        LossCoverage(bool(options["assistant_only_loss"])),
        packed=packed,
        full=True,
        mixed=True,
    )


def _evaluation(run: Run) -> str:
    found = read(run)
    often = f"every {found.eval_interval} steps" if found.eval_interval else "once an epoch"
    part = f", at most {found.eval_iters} steps' worth of sequences" if found.eval_iters else ""
    return f"{often} and after the last step{part}"


def _indexed(run: Run) -> RecordLengths:
    from reshard.training.megatron.indexed_datasets import look

    return look(run, read(run))


def _warm(run: Run) -> bool:
    """Import what megatron-core imports; on a CPU, megatron-core itself has to wait until torch has been adapted."""
    for name in (
        "torch._dynamo",
        "torch.distributed.checkpoint",
        "transformers.tokenization_utils_tokenizers",
    ):
        import_module(name)
    return True


def _train(run: Run, monitor: MetricsWriter) -> Trained:
    for chatter in _CHATTER:
        warnings.filterwarnings("ignore", **chatter)
    from reshard.training.megatron import training_loop

    return training_loop.train(run, monitor)


def _check(run: Run, trained: Trained, final: Path) -> list[Problem]:
    from reshard.training.megatron.final_check import check

    return check(run, trained, final)


ENGINE = Engine(
    name="megatron",
    title="Megatron-Core",
    methods=("sft",),
    packages=(
        *("torch", "transformers", "tokenizers", "safetensors"),
        *("megatron-core", "transformer-engine", "flash-attn"),
    ),
    requires=lambda run: {"torch": ">=2.6", "transformers": ">=5", "megatron-core": ">=0.12.3"},
    known_options=known_options,
    options=lambda run: read(run).as_dict(),
    looks=EngineChecks(checks.asked, checks.machine, checks.model),
    reading=_reading,
    batches=batches,
    precision=precision,
    dtypes=("bf16", "fp16", "fp32"),
    evaluation=_evaluation,
    plan=_plan,
    estimates=Estimates(
        memory_estimate.parts,
        memory_estimate.parallelisms,
        memory_estimate.savings,
        memory_estimate.smaller_batch,
        step_cost.work_of,
    ),
    checkpoints=Checkpoints(
        pattern="iter_*",
        name=iterations.name_of,
        saved=checks.saved,
        expected="iter_*",
        interval=lambda options: options.get("save_interval"),
        shares=lambda run, world_size: (run.layout.tp * run.layout.pp, world_size),
        fewer=lambda run: "save less often with --save_interval",
    ),
    warm=_warm,
    train=_train,
    check=_check,
    indexed=_indexed,
    leaves=(iterations.TRACKER, ".rows"),
    dequantizes=True,
    note="the Megatron-Core engine is experimental: it has run on one GPU, but on several ranks only on CPUs",
)
