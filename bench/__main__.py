"""`python -m bench [--data DIR] [--rounds N] [--only WORD]`: the tables of docs/performance.md and docs/scale.md."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import click

from bench import costs, guard, live, rows, scale, serve, start, sync, transfers
from bench.models import QWEN2_5_3B, QWEN3_MOE, REAL_SIZES, make
from bench.race import HEADER, Contender, race

RESHARD = [str(Path(sys.executable).with_name("reshard")), "convert"]
QUIET = ["--no-tokenizer", "--quiet"]
LAYOUTS = {
    "dense": ["--tp", "2", "--pp", "2"],
    "moe": ["--tp", "4", "--ep", "4"],
    "large": ["--tp", "2", "--pp", "2", "--ep", "2"],
}
SMALL = {**QWEN2_5_3B, "num_hidden_layers": 4, "vocab_size": 65536}  # about 1 GB with the same tensor shapes
LARGE = {**QWEN3_MOE, "num_hidden_layers": 16}  # 20.5 GB
BASE = {**QWEN2_5_3B, "num_hidden_layers": 6, "vocab_size": 65536, "max_position_embeddings": 4096}  # 1.3 GB


class Peer(NamedTuple):
    """A tool that people use to read one engine's checkpoints. Both it and reshard's reader need `package`.

    An environment variable such as RESHARD_BENCH_DEEPSPEED can set the interpreter that has the package.
    """

    road: str
    peer: str
    package: str
    flags: tuple[str, ...] = ()
    processes: int = 2

    @property
    def python(self) -> str:
        """The Python interpreter for the engine."""
        return os.environ.get(f"RESHARD_BENCH_{self.package.upper()}", sys.executable)

    @property
    def is_installed(self) -> bool:
        """Whether that interpreter can import the engine."""
        return not subprocess.run(
            [self.python, "-c", f"import {self.package}"], capture_output=True
        ).returncode


PEERS = (
    Peer("dcp", "merge_weights", "accelerate"),
    Peer("dcp", "dcp_to_torch_save", "torch"),
    Peer("verl", "verl_merger", "verl"),
    Peer("zero2", "zero_to_fp32", "deepspeed"),
    Peer("zero3", "zero_to_fp32", "deepspeed"),
    Peer("peft", "merge_and_unload", "peft", ("--merge",), processes=1),
)


@click.command()
@click.option("--data", type=click.Path(path_type=Path), default=Path("bench/data"), show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--only", default="", help="Run the races whose name has this word.")
def main(data: Path, rounds: int, only: str) -> None:
    """Compare reshard with cp and torch, in alternating runs, with a warm page cache."""
    print("\n".join(HEADER), flush=True)
    for name, config in (("small", SMALL), ("dense", QWEN2_5_3B), ("moe", QWEN3_MOE)):
        if only in f"{name} cp":
            _against_cp(name, make(data / name, config), data, rounds)
    if only and only in "large cp":  # which needs 45 GB of disk
        _against_cp("large", make(data / "large", LARGE), data, rounds)
        shutil.rmtree(data / "kept")
    if only in "peers":
        _against_peers(make(data / "dense", QWEN2_5_3B), data, rounds)
    for peer in PEERS:
        if only in f"engines {peer.road}":
            _against_engine(peer, make(data / "base", BASE), data, rounds)
    if only in "fp8":
        _quantized(make(data / "base", BASE), data, rounds)
    if only in "sync":
        _show(["", *sync.HEADER])
        for row in sync.rows(data, rounds):
            _show([row])
    if only in "start":
        _show(["", *start.HEADER])
        for row in start.rows(data, rounds):
            _show([row])
    if only in "guard":
        _show(guard.rows(data, rounds))
    if only in "rows":
        _show(["", *rows.HEADER])
        for row in rows.rows(data, rounds):
            _show([row])
    if only in "live":
        _show(["", *live.HEADER])
        for row in live.rows(data, rounds):
            _show([row])
        _show(["", *live.LOADED, *live.loading(data, rounds)])
        _show(["", *live.SERVED, *live.serving(data, rounds), "", *live.opening(data, rounds)])
    if only in "serve":
        _show(["", *serve.HEADER])
        for row in serve.rows(data, rounds):
            _show([row])
    if only and only in "transfers":  # which makes environments of gigabytes
        _show(["", *transfers.rows(data)])
    if only in "costs":
        _show(list(costs.rows(data, rounds)))
    if only in "scale":
        _show(list(scale.rows(data)))
    for name, config in REAL_SIZES.items():
        if only in f"plan {name}":
            _plans(name, make(data / name.replace(" ", "-"), config, sparse=True), data, rounds)


def _plans(name: str, model: Path, data: Path, rounds: int) -> None:
    """The cost of planning a model of real size: nothing is written."""
    out, has_delta_nets = data / "out", name.startswith("Qwen3.5")
    layout = ["--tp", "2" if has_delta_nets else "8", "--pp", "8", "--ep", "32", "--etp", "1"]
    flags = {"megatron": layout, "megatron-legacy": layout, "huggingface": ["--dtype", "bfloat16"]}
    if has_delta_nets:  # which have no rank files
        del flags["megatron-legacy"]
    for target, given in flags.items():
        command = [*RESHARD, str(model), str(out), "--to", target, *given, "--dry-run", *QUIET]
        _show(race(f"plan {name} → {target}", [Contender("reshard --dry-run", command, out)], rounds))


def _against_cp(name: str, model: Path, data: Path, rounds: int) -> None:
    layout = LAYOUTS.get(name, LAYOUTS["dense"])
    out, kept = data / "out", data / "kept"
    there = [*RESHARD, str(model), str(out), "--to", "megatron", *layout, *QUIET]
    _show(
        race(
            f"{name}: huggingface → megatron {' '.join(layout)}",
            [*_copies(model, out), Contender("reshard", there, out)],
            rounds,
        )
    )
    subprocess.run(
        [*RESHARD, str(model), str(kept), "--to", "megatron", *layout, *QUIET, "--overwrite"], check=True
    )
    if name == "large":
        shutil.rmtree(model)
    back = [*RESHARD, str(kept), str(out), *QUIET]
    _show(
        race(
            f"{name}: megatron → huggingface",
            [*_copies(kept, out), Contender("reshard", back, out)],
            rounds,
        )
    )


def _copies(source: Path, copy: Path) -> list[Contender]:
    """`cp -r`, the same until the copy is on the disk, as with reshard, and a writer without a conversion."""
    durable = 'cp -r "$0" "$1" && find "$1" -type f -exec sync {} +'
    return [
        Contender("cp -r", ["cp", "-r", str(source), str(copy)], copy),
        Contender("cp -r, then sync", ["sh", "-c", durable, str(source), str(copy)], copy),
        Contender("plain writer", [sys.executable, "-m", "bench.plain_writer", str(source), str(copy)], copy),
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


def _against_engine(peer: Peer, model: Path, data: Path, rounds: int) -> None:
    if not peer.is_installed:
        print(f"| {peer.road} | {peer.peer} | not installed: pip install {peer.package} | | | |")
        return
    saved, out = data / f"saved-{peer.road}", data / "out"
    here = {"PYTHONPATH": str(Path.cwd()), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    if not saved.exists():
        launch = [peer.python, "-m", "torch.distributed.run", "--nproc-per-node", str(peer.processes)]
        make_it = [*launch, "-m", "bench.engines", peer.road, str(model.resolve()), str(saved)]
        subprocess.run(make_it, check=True, env={**os.environ, **here})
    reshard = [*RESHARD, str(saved), str(out), "--base", str(model), *peer.flags, *QUIET]
    source = saved / "pytorch_model_fsdp_0" if peer.peer == "dcp_to_torch_save" else saved
    theirs = [peer.python, "-m", "bench.peers", peer.peer, str(source), str(out)]
    contenders = [Contender("reshard", reshard, out), Contender(peer.peer, theirs, out, here)]
    _show(race(f"{peer.road} → huggingface", contenders, rounds))


def _quantized(plain: Path, data: Path, rounds: int) -> None:
    """Block FP8 dequantized and back, against a copy of the plain model and the publisher's formula in torch."""
    fp8, out = data / "fp8", data / "out"
    peer = [sys.executable, "-m", "bench.peers"]
    subprocess.run([*RESHARD, str(plain), str(fp8), "--quantize", "fp8", *QUIET, "--overwrite"], check=True)
    here = {"PYTHONPATH": str(Path.cwd()), "OMP_NUM_THREADS": str(os.cpu_count())}
    roads = {
        "fp8 → bfloat16": (fp8, ["--to", "huggingface", "--dtype", "bfloat16"], "fp8_cast_bf16"),
        "fp8 → megatron, TP2·PP2": (fp8, ["--to", "megatron", *LAYOUTS["dense"]], ""),
        "bfloat16 → fp8": (plain, ["--quantize", "fp8"], "bf16_cast_fp8"),
    }
    for road, (source, flags, theirs) in roads.items():
        command = [*RESHARD, str(source), str(out), *flags, *QUIET]
        contenders = [*_copies(plain, data / "cp"), Contender("reshard", command, out)]
        if theirs:
            command = [*peer, theirs, str(source), str(out)]
            contenders.append(Contender(f"{theirs} in torch", command, out, here))
        _show(race(road, contenders, rounds))


def _show(rows: list[str]) -> None:
    print("\n".join(rows), flush=True)


if __name__ == "__main__":
    main()
