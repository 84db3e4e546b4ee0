"""`zero_to_fp32.py` of DeepSpeed: a ZeRO checkpoint as a state dict in float32."""

from __future__ import annotations

from pathlib import Path

import click

from reshard.cli.console import handles_errors
from reshard.cli.options import LOCAL
from reshard.cli.usage import Command
from reshard.dropins.running import SETTINGS, convert_as_asked, overwrite_option, refuse, run
from reshard.formats.options import ConversionOptions


@click.command("zero_to_fp32", cls=Command, context_settings=SETTINGS)
@click.argument("checkpoint_dir", type=LOCAL)
@click.argument("output_dir", type=LOCAL)
@click.option("--max_shard_size", default="5GB", show_default=True, help="Maximum size of a file.")
@click.option("--safe_serialization", is_flag=True, help="Write safetensors instead of pytorch_model.bin.")
@click.option("-t", "--tag", help="Folder of the step. [default: the one that `latest` names]")
@click.option("--exclude_frozen_parameters", is_flag=True, help="Refused: use `reshard convert --to peft`.")
@click.option("-d", "--debug", is_flag=True, help="Show the traceback of errors.")
@overwrite_option
@handles_errors
def command(
    checkpoint_dir: Path,
    output_dir: Path,
    max_shard_size: str,
    safe_serialization: bool,
    tag: str | None,
    exclude_frozen_parameters: bool,
    overwrite: bool,
) -> None:
    """Write the weights of the DeepSpeed checkpoint in CHECKPOINT_DIR to OUTPUT_DIR, as zero_to_fp32.py does.

    OUTPUT_DIR gets pytorch_model.bin (or model.safetensors), or shards with an index, and reshard.json. Names are those
    of the trained module, without the prefix of a wrapper.
    """
    if exclude_frozen_parameters:
        raise refuse(
            "--exclude_frozen_parameters",
            "the output has all weights",
            f"for an adapter: reshard convert {checkpoint_dir} {output_dir} --to peft; else leave it out",
        )
    kind = "safetensors" if safe_serialization else "bin"
    options = ConversionOptions(max_shard_size=max_shard_size, dtype="float32", state_dict=kind)
    convert_as_asked(
        checkpoint_dir / tag if tag else checkpoint_dir, output_dir, options, overwrite=overwrite
    )


if __name__ == "__main__":
    run(command)
