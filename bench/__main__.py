"""`python -m bench [--data DIR] [--rounds N] [--only WORD]`: the tables of docs/performance.md."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click

from bench.models import DEEPSEEK_V3, QWEN2_5_3B, QWEN3_MOE, make
from bench.race import HEADER, Contender, race

RESHARD = [str(Path(sys.executable).with_name("reshard")), "convert"]
QUIET = ["--no-tokenizer", "--quiet"]
LAYOUTS = {"dense": ["--tp", "2", "--pp", "2"], "moe": ["--tp", "4", "--ep", "4"]}
SMALL = {**QWEN2_5_3B, "num_hidden_layers": 4, "vocab_size": 65536}  # about 1 GB of the same shape


@click.command()
@click.option("--data", type=click.Path(path_type=Path), default=Path("bench/data"), show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--only", default="", help="Run the races whose name has this word.")
def main(data: Path, rounds: int, only: str) -> None:
    """Measure reshard beside cp and beside torch, in alternation, on a warm page cache."""
    models = {
        "small": make(data / "small", SMALL),
        "dense": make(data / "dense", QWEN2_5_3B),
        "moe": make(data / "moe", QWEN3_MOE),
        "v3": make(data / "v3", DEEPSEEK_V3, sparse=True),
    }
    print("\n".join(HEADER), flush=True)
    for name in ("small", "dense", "moe"):
        if only in f"{name} cp":
            _against_cp(name, models[name], data, rounds)
    if only in "peers":
        _against_peers(models["dense"], data, rounds)
    if only in "plan":
        plan = [*RESHARD, str(models["v3"]), str(data / "out"), "--to", "megatron", "--dry-run", *QUIET]
        plan += ["--tp", "8", "--pp", "16", "--ep", "64"]
        _show(race("plan DeepSeek-V3 671B", [Contender("reshard --dry-run", plan, data / "out")], rounds))


def _against_cp(name: str, model: Path, data: Path, rounds: int) -> None:
    layout = LAYOUTS.get(name, LAYOUTS["dense"])
    copy, out, kept = data / "cp", data / "out", data / "kept"
    there = [*RESHARD, str(model), str(out), "--to", "megatron", *layout, *QUIET]
    _show(
        race(
            f"{name}: huggingface → megatron {' '.join(layout)}",
            [*_copies(model, copy), Contender("reshard", there, out)],
            rounds,
        )
    )
    subprocess.run(
        [*RESHARD, str(model), str(kept), "--to", "megatron", *layout, *QUIET, "--overwrite"], check=True
    )
    back = [*RESHARD, str(kept), str(out), *QUIET]
    _show(
        race(
            f"{name}: megatron → huggingface",
            [*_copies(kept, copy), Contender("reshard", back, out)],
            rounds,
        )
    )


def _copies(source: Path, copy: Path) -> list[Contender]:
    """`cp -r`, and the same until the copy is on the disk, which is when reshard ends."""
    durable = 'cp -r "$0" "$1" && find "$1" -type f -exec sync {} +'
    return [
        Contender("cp -r", ["cp", "-r", str(source), str(copy)], copy),
        Contender("cp -r, then sync", ["sh", "-c", durable, str(source), str(copy)], copy),
    ]


def _against_peers(model: Path, data: Path, rounds: int) -> None:
    out, kept = data / "out", data / "kept"
    subprocess.run(
        [
            *RESHARD,
            str(model),
            str(kept),
            "--to",
            "megatron",
            "--tp",
            "2",
            "--pp",
            "2",
            *QUIET,
            "--overwrite",
        ],
        check=True,
    )
    checkpoint = str(kept / "release")
    peer = [sys.executable, "-m", "bench.peers"]
    contenders = [
        Contender("reshard", [*RESHARD, str(kept), str(out), *QUIET], out),
        Contender("dcp.load all, save_file", [*peer, "dcp_load_all", checkpoint, str(out)], out),
        Contender("dcp_to_torch_save", [*peer, "dcp_to_torch_save", checkpoint, str(out)], out),
    ]
    _show(race("dense: read megatron torch_dist", contenders, rounds))


def _show(rows: list[str]) -> None:
    print("\n".join(rows), flush=True)


if __name__ == "__main__":
    main()
