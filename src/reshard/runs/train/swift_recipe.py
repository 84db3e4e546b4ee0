"""A recipe for ms-swift: `megatron sft`, which trains with tensor, pipeline and expert parallelism on Megatron-Core.

The options are those of ms-swift 4.6 (swift/megatron/arguments, swift/arguments/base_args). `megatron` reads the number
of processes and nodes from the environment (swift/cli/main.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from reshard.base.errors import Problem, ReshardError, raise_all
from reshard.runs.guard.data.records import CHAT_SHAPES
from reshard.runs.train.options import TrainOptions
from reshard.runs.train.recipe import Problems, Recipe, given_options, gpus_here, model_word
from reshard.runs.train.run_data import HUB, RecipeData, checked_data

ALWAYS = {
    "use_hf": "true",  # names are of the Hugging Face Hub, not of ModelScope
    "output_dir": ".",
    "add_version": "false",  # checkpoints are in the folder itself, so that a run can continue
    # Every record trains. By default, ms-swift leaves out what it cannot read, and what is too long.
    "strict": "true",
    "truncation_strategy": "right",
}
EPOCHS = "3"
"""The Trainer's default, and so TRL's; `megatron sft` has none."""


def swift_recipe(method: str, options: TrainOptions, rest: list[str]) -> Recipe:
    """A recipe for `megatron sft`. `rest` are options of ms-swift, as words.

    Raises ReshardError with every problem of data and machine.
    """
    problems = Problems()
    data = problems.of(lambda: _chats(options.data, method))
    eval_data = problems.of(lambda: _chats(options.eval_data, method) if options.eval_data else None)
    nproc = problems.of(lambda: _processes(options))
    problems.settle()
    command = [
        *("megatron", method),
        *("--model", model_word(options)),
        *("--dataset", *data.names),
        *(("--val_dataset", *eval_data.names) if eval_data else ()),
        *_swift_arguments(options, given_options(rest)),
        *rest,
    ]
    return Recipe(
        tuple(command), environment=_environment(options, nproc), merge=options.lora and options.merge
    )


def _swift_arguments(options: TrainOptions, given: dict[str, str]) -> Iterator[str]:
    """Parallel sizes, adapters, and what `megatron sft` needs or does unwisely by default."""
    chosen = {
        "tensor_model_parallel_size": str(options.tp),
        "pipeline_model_parallel_size": str(options.pp),
        "expert_model_parallel_size": str(options.ep),
        **ALWAYS,
    }
    if options.tp > 1:
        chosen["sequence_parallel"] = "true"  # mixtures of experts need it; others take less memory
    if options.lora:
        chosen |= {"tuner_type": "lora", "merge_lora": "false"}  # the guard merges the last one
    if not given.keys() & {"train_iters", "num_train_epochs"}:
        chosen["num_train_epochs"] = EPOCHS
    for name, value in chosen.items():
        if name not in given:
            yield from (f"--{name}", value)


def _environment(options: TrainOptions, nproc: int) -> dict[str, str]:
    """What `megatron` starts torchrun with."""
    if options.nnodes == 1:
        return {"NPROC_PER_NODE": str(nproc)}
    return {
        "NPROC_PER_NODE": str(nproc),
        "NNODES": str(options.nnodes),
        "NODE_RANK": "${NODE_RANK:-${SLURM_NODEID:-0}}",
        "MASTER_ADDR": "${MASTER_ADDR:?set it to the first node}",
        "MASTER_PORT": "${MASTER_PORT:-29500}",
    }


def _chats(given: object, method: str) -> RecipeData:
    """Data that are chats. Raises ReshardError for others, on which ms-swift trains in another way than TRL."""
    data = checked_data(given, method)
    if data.format != HUB and data.shape not in CHAT_SHAPES:
        raise ReshardError(
            "data-not-chats",
            "recipes for ms-swift train on chats",
            file=data.names[0],
            expected="messages, conversations, or instruction and output",
            found=data.shape,
            remedy="write each record as messages, or leave out --engine to train with TRL",
        )
    if packed := [name for name in data.names if name.endswith(".gz")]:
        raise ReshardError(
            "data-compressed",
            "ms-swift does not read compressed data",
            file=packed[0],
            remedy=f"gunzip --keep {packed[0]}, and pass the file that it writes",
        )
    return data


def _processes(options: TrainOptions) -> int:
    """Processes on a node: as requested, one for each GPU of this machine, or the fewest on which the sizes fit."""
    gpus = gpus_here(needed=not options.write_only)
    fewest = -(-options.pp * max(options.tp, options.ep) // options.nnodes)
    nproc = options.nproc or gpus or fewest
    ranks = nproc * options.nnodes
    raise_all(
        Problem(
            "parallel-sizes-unfit",
            f"--pp {options.pp} and --{name} {size} do not divide the processes",
            expected=f"a multiple of {options.pp * size}",
            found=f"{ranks} processes",
            remedy="change --nproc or the sizes",
        )
        for name, size in (("tp", options.tp), ("ep", options.ep))
        if ranks % (options.pp * size)
    )
    return nproc
