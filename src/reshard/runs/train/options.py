"""Options of `train`: the record from which command line, Python signature and docs are made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from reshard.base.options import ADAPTERS, DATA, PARALLEL, About
from reshard.base.values import StrPath

ENGINES = ("trl", "ms-swift")
PARALLEL_PLANS = ("ddp", "fsdp2", "zero2", "zero3")
"""How TRL's runs shard a model, by accelerate."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Options of a recipe. Each field is a flag and an argument of `train`; all others belong to the engine."""

    model: Annotated[
        StrPath | None, About("Hugging Face folder, or model of the Hub, to start from.", "MODEL")
    ] = None
    data: Annotated[
        StrPath | Sequence[StrPath] | None,
        About("JSONL, JSON or Parquet file, a folder of them, or a dataset of the Hub.", "DATA"),
    ] = None
    output: Annotated[
        StrPath | None,
        About(
            "Output folder: recipe, log and checkpoints; the trained model is in its folder final.",
            "DIR",
            also="-o",
        ),
    ] = None
    eval_data: Annotated[
        StrPath | Sequence[StrPath] | None, About("Data to evaluate on during training.", "DATA", group=DATA)
    ] = None
    reward: Annotated[
        Sequence[str] | None,
        About("Reward function for GRPO and RLOO.", "FILE.py:NAME", group=DATA),
    ] = None
    engine: Annotated[
        str, About("trl, or ms-swift for tensor, pipeline and expert parallelism.", choices=ENGINES)
    ] = "trl"
    lora: Annotated[bool, About("Train a LoRA adapter instead of all weights.", group=ADAPTERS)] = False
    merge: Annotated[bool, About("With --lora, merge the adapter into the final model.", group=ADAPTERS)] = (
        True
    )
    parallel: Annotated[
        str, About("How the model is sharded over processes (trl).", choices=PARALLEL_PLANS, group=PARALLEL)
    ] = "ddp"
    nproc: Annotated[
        int | None, About("Processes per node. [default: one per GPU]", "N", least=1, group=PARALLEL)
    ] = None
    nnodes: Annotated[int, About("Number of nodes; start run.sh on each.", "N", least=1, group=PARALLEL)] = 1
    tp: Annotated[int, About("Tensor-parallel size (ms-swift).", "N", least=1, group=PARALLEL)] = 1
    pp: Annotated[int, About("Pipeline-parallel size (ms-swift).", "N", least=1, group=PARALLEL)] = 1
    ep: Annotated[int, About("Expert-parallel size (ms-swift).", "N", least=1, group=PARALLEL)] = 1
    write_only: Annotated[bool, About("Write the recipe, and do not start it.")] = False
    resume: Annotated[bool, About("Continue the recipe in --output from its last complete checkpoint.")] = (
        False
    )
    overwrite: Annotated[bool, About("Replace an earlier recipe and its final folder.")] = False
