"""`tools/convert_torch_dist_to_hf.py` of slime: a Megatron checkpoint as a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import click

from reshard.base.errors import ReshardError, listed
from reshard.cli.console import handles_errors
from reshard.cli.options import LOCAL
from reshard.cli.usage import Command
from reshard.dropins.running import SETTINGS, convert_as_asked, debug_option, refuse, run
from reshard.folders.companion_names import RECORD
from reshard.formats import huggingface, open_checkpoint
from reshard.formats.contract import EMBEDDING
from reshard.formats.options import ConversionOptions
from reshard.transfer.plan import Plan


@click.command("convert_torch_dist_to_hf", cls=Command, context_settings=SETTINGS)
@click.option("--model-name", help="Accepted, and not needed: config.json names the model.")
@click.option("--input-dir", type=LOCAL, required=True, help="The checkpoint, or its iter_ folder.")
@click.option("--output-dir", type=LOCAL, required=True, help="The output.")
@click.option("--origin-hf-dir", type=LOCAL, help="Folder whose config, tokenizer and other files to copy.")
@click.option(
    "-f", "--force", "--overwrite", "force", is_flag=True, help="Replace the checkpoint in the output folder."
)
@click.option(
    "-a",
    "--add-missing-from-origin-hf",
    is_flag=True,
    help="Accepted if nothing is missing: weights of another checkpoint are not added.",
)
@click.option(
    "--chunk-size", type=int, default=5 << 30, show_default=True, help="Maximum size of a file in bytes."
)
@click.option("--vocab-size", type=int, help="Checked: the vocabulary is that of config.json.")
@debug_option
@handles_errors
def command(
    model_name: str | None,
    input_dir: Path,
    output_dir: Path,
    origin_hf_dir: Path | None,
    force: bool,
    add_missing_from_origin_hf: bool,
    chunk_size: int,
    vocab_size: int | None,
) -> None:
    """Write the Megatron checkpoint to a Hugging Face folder, as slime's convert_torch_dist_to_hf.py does.

    The files of --origin-hf-dir are copied, except weights. The configs are written for transformers 4 and 5. Files of
    weights are numbered from 1, and a single one is model.safetensors.
    """
    origin = origin_hf_dir if origin_hf_dir and add_missing_from_origin_hf else None
    options = ConversionOptions(
        to=huggingface.NAME,
        base=origin_hf_dir,
        max_shard_size=chunk_size,
        beside=_copied_files(origin_hf_dir) if origin_hf_dir else {},
    )
    convert_as_asked(
        input_dir, output_dir, options, partial(_check, origin=origin, vocabulary=vocab_size), overwrite=force
    )


def _copied_files(folder: Path) -> Mapping[str, Path]:
    """The files of a folder that are copied: all that are no weights, in any format."""
    weights = [*huggingface.FOR_OTHER_PROGRAMS, "*.safetensors", "*.index.json", RECORD]
    return {
        path.name: path
        for path in (folder.iterdir() if folder.is_dir() else ())
        if path.is_file() and not any(path.match(pattern) for pattern in weights)
    }


def _weights_in(folder: Path) -> set[str]:
    """The names of the weights in a Hugging Face folder, which may have none."""
    return {*open_checkpoint(folder).tensors} if any(folder.glob("*.safetensors")) else set()


def _check(plan: Plan, origin: Path | None, vocabulary: int | None) -> None:
    """Raise ReshardError if the output has not the weights or the vocabulary that the script would write."""
    shapes = {tensor.name: tensor.shape for tensor in plan.outputs}
    rows = next((shape[0] for name, shape in shapes.items() if name.endswith(EMBEDDING)), None)
    if vocabulary is not None and rows not in (None, vocabulary):
        raise ReshardError(
            "drop-in-vocabulary-differs",
            "--vocab-size differs from the vocabulary of config.json, to which the embedding is cut",
            tensor=EMBEDDING,
            expected=f"{rows} rows",
            found=f"--vocab-size {vocabulary}",
            remedy="leave out --vocab-size, or correct vocab_size in the config.json of --origin-hf-dir",
        )
    lacking = sorted(_weights_in(origin) - shapes.keys()) if origin else []
    if lacking:
        raise refuse(
            "--add-missing-from-origin-hf",
            f"the checkpoint lacks {listed(lacking, 3)}, and weights of two checkpoints are not mixed",
            "leave it out, and add these weights afterwards",
        )


if __name__ == "__main__":
    run(command)
