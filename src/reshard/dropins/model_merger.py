"""`verl.model_merger` of verl: a checkpoint of its FSDP or Megatron workers as a Hugging Face folder, or compared."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from reshard.api.verification import verify
from reshard.base.errors import ReshardError, cause_of
from reshard.base.values import choice
from reshard.cli.console import Watch, handles_errors
from reshard.cli.options import LOCAL, ValueType
from reshard.cli.usage import Group
from reshard.cli.verify import print_comparison
from reshard.dropins.running import SETTINGS, convert_as_asked, debug_option, overwrite_option, run
from reshard.formats import open_checkpoint
from reshard.formats.fsdp_ranks.folder import NAME as FSDP_RANKS
from reshard.formats.options import ConversionOptions
from reshard.planning import IS_ADAPTER

UNUSED = "Accepted, and not needed."
WEIGHTS = ("dist_ckpt", "model/dist_ckpt")
"""Where Megatron workers save weights, below the folder of a step: in verl 0.8, and in 0.9."""
CONFIGS = ("huggingface", "model/huggingface")
"""Where workers save config and tokenizer."""


ARGUMENTS = (
    click.option(
        "--backend",
        type=ValueType(choice(("fsdp", "megatron"))),
        metavar="[fsdp|megatron]",
        required=True,
        help="Which workers saved it.",
    ),
    click.option("--local_dir", type=LOCAL, required=True, help="The checkpoint."),
    click.option("--tie-word-embedding", is_flag=True, help=f"{UNUSED} config.json says so."),
    click.option("--trust-remote-code", is_flag=True, help=f"{UNUSED} No code of the model is run."),
    click.option("--is-value-model", is_flag=True, help=f"{UNUSED} The head is that of the checkpoint."),
    click.option("--use_cpu_initialization", is_flag=True, help=UNUSED),
    debug_option,
)


def _of_both(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate an operation with the arguments that both have."""
    for decorate in reversed(ARGUMENTS):
        function = decorate(function)
    return function


@click.group("model_merger", cls=Group, context_settings=SETTINGS)
def command() -> None:
    """Merge a checkpoint of verl into a Hugging Face folder, or compare the two, as verl.model_merger does."""


@command.command()
@_of_both
@click.option("--target_dir", type=LOCAL, default="tmp", show_default=True, help="The output.")
@click.option("--hf_upload_path", metavar="ORG/NAME", help="Upload the output to this repository.")
@click.option("--private", is_flag=True, help="Create the repository as private.")
@overwrite_option
@handles_errors
def merge(
    backend: str,
    local_dir: Path,
    target_dir: Path,
    hf_upload_path: str | None,
    private: bool,
    overwrite: bool,
    **unused: bool,
) -> None:
    """Write the weights in bfloat16 to a Hugging Face folder, with config, generation config and tokenizer.

    An adapter is refused, with the command that keeps or merges it.
    """
    source, base = _source(local_dir), _base(local_dir)
    try:
        convert_as_asked(
            source,
            target_dir,
            ConversionOptions(to="huggingface", dtype="bfloat16", base=base),
            lambda plan: _check_format(backend, source, plan.source),
            push_to_hub=hf_upload_path,
            private=private and hf_upload_path is not None,
            overwrite=overwrite,
        )
    except ReshardError as error:
        if [problem.code for problem in error.problems] != [IS_ADAPTER]:
            raise
        raise _is_adapter(source, target_dir) from cause_of(error)


@command.command()
@_of_both
@click.option("--test_hf_dir", type=LOCAL, required=True, help="The Hugging Face folder to compare with.")
@handles_errors
def test(backend: str, local_dir: Path, test_hf_dir: Path, **unused: bool) -> None:
    """Compare the weights with those of a Hugging Face folder, bit for bit once both have the same dtype.

    Exit status: 0 equal, 1 not equal, 2 one of them cannot be read.
    """
    with Watch("verify", quiet=False) as watch:
        source = _source(local_dir)
        _check_format(backend, source, open_checkpoint(source).format)
        comparison = verify(
            source,
            test_hf_dir,
            base=_base(local_dir),
            on_step=watch.step,
            on_total=watch.begin,
            on_bytes=lambda count: watch.advance(count),
        )
    print_comparison(comparison)
    sys.exit(1 if comparison.different else 0)


def _source(local_dir: Path) -> Path:
    """The folder of the weights: Megatron workers save them below the folder that users pass."""
    return next((local_dir / name for name in WEIGHTS if (local_dir / name).is_dir()), local_dir)


def _base(local_dir: Path) -> Path | None:
    """The folder of config and tokenizer, if it is where verl saves it."""
    return next((local_dir / name for name in CONFIGS if (local_dir / name).is_dir()), None)


def _is_adapter(source: Path, target_dir: Path) -> ReshardError:
    command = shlex.join(["reshard", "convert", str(source), str(target_dir)])
    return ReshardError(
        "drop-in-adapter",
        "the checkpoint is an adapter, not a model",
        file=str(source),
        rule="one command writes one folder; verl.model_merger writes the base model and lora_adapter in it",
        remedy=f"{command} writes the adapter; {command} --merge --base DIR merges it into its base",
    )


def _check_format(backend: str, source: Path, found: str) -> None:
    """Raise ReshardError unless a checkpoint has a format of the workers that `--backend` names."""
    if (found == FSDP_RANKS) is not (backend == "fsdp"):
        right = "fsdp" if found == FSDP_RANKS else "megatron"
        raise ReshardError(
            "drop-in-backend-differs",
            "the checkpoint is not of the workers that --backend names",
            file=str(source),
            expected=f"a checkpoint of --backend {backend}",
            found=found,
            remedy=f"pass --backend {right}, or the folder of the worker (…/actor)",
        )


if __name__ == "__main__":
    run(command)
