"""Launchers: programs that start a script in several processes, after options of their own.

Options are read as the launchers' own argparse does, up to the script. Their names have underscores.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

_TRUE, _FALSE = ("true", "yes", "on", "1", "t", "y"), ("false", "no", "off", "0", "f", "n")
"""Words for true and false, as transformers, accelerate and YAML 1.1 know them."""

LauncherOptions = Mapping[str, str]
"""Options as they were typed, those without a value as "true"."""
GpuCount = Callable[[], int]
"""How many GPUs are visible: asked only if the command leaves the number of processes to that."""


@dataclass(frozen=True)
class Launcher:
    """A program that starts a script in several processes.

    `flags` are its options without a value, `nodes` and `node_rank` the names of those options. `processes` computes
    how many processes it starts on this node, `meeting` at which host and port they meet, if that is known ahead.
    """

    name: str
    programs: tuple[str, ...]
    modules: tuple[str, ...]
    flags: frozenset[str]
    nodes: str
    node_rank: str
    processes: Callable[[LauncherOptions, GpuCount], int]
    meeting: Callable[[LauncherOptions], tuple[str, int] | None]
    verb: str = ""
    ranks_one: bool = True
    """Whether a single process, too, gets a rank."""
    prefix: str | None = None
    """The prefix of environment variables that set options."""


def _number(word: str | None, otherwise: int) -> int:
    """The last number of a word such as 2 or 1:4."""
    last = (word or "").rpartition(":")[2]
    return int(last) if last.isdecimal() else otherwise


def _of_torchrun(options: LauncherOptions, gpus: GpuCount) -> int:
    word = options.get("nproc_per_node", "1")
    if word == "cpu" or (word == "auto" and not gpus()):
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return _number(word, gpus() or 1)


DISTRIBUTED_TYPES = ("multi_gpu", "use_deepspeed", "use_fsdp", "use_megatron_lm", "use_tp", "tpu")
SINGLE_PROCESS_TYPES = ("", "no", "none", "multi_cpu")
"""Values of accelerate's distributed_type with which it starts a single process, without mpirun."""


def truth(value: object) -> bool | None:
    """Whether a word or value of an option, a config or a variable is true; None if it is neither true nor false."""
    word = str(value).lower()
    return word in _TRUE if word in (*_TRUE, *_FALSE) else None


def _of_accelerate(options: LauncherOptions, gpus: GpuCount) -> int:
    """As `accelerate launch` decides in `_validate_launch_command` and `launch_command`."""
    chosen = any(truth(options.get(name)) for name in DISTRIBUTED_TYPES)
    in_config = options.get("distributed_type", "").lower() not in SINGLE_PROCESS_TYPES
    if options.get("cpu") or not (chosen or in_config or gpus() > 1):
        return 1
    total = _number(options.get("num_processes"), gpus() or 1)
    return max(1, total // max(1, _number(options.get("num_machines"), 1)))


def _of_deepspeed(options: LauncherOptions, gpus: GpuCount) -> int:
    given = options.get("num_gpus") or options.get("num_accelerators")
    included = options.get("include") or options.get("i") or ""
    slots = included.partition("@")[0].partition(":")[2]
    return _number(given, 0) or len(slots.split(",")) * bool(slots) or gpus() or 1


def _of_static(options: LauncherOptions) -> tuple[str, int] | None:
    """The endpoint, or torchrun's own rendezvous; with one node and no port, newer releases take a free port."""
    host, _, port = options.get("rdzv_endpoint", "").rpartition(":")
    if options.get("rdzv_backend", "static") == "static" and not host:
        default = "29500" if _number(options.get("nnodes"), 1) > 1 else "0"
        host, port = options.get("master_addr", "127.0.0.1"), options.get("master_port", default)
    return (host, int(port)) if port.isdecimal() and port != "0" and not options.get("standalone") else None


def _of_names(host: str, port: str) -> Callable[[LauncherOptions], tuple[str, int] | None]:
    def meeting(options: LauncherOptions) -> tuple[str, int] | None:
        number = _number(options.get(port), 29500)
        return (options.get(host) or "127.0.0.1", number) if number else None

    return meeting


LAUNCHERS = (
    Launcher(
        "torchrun",
        ("torchrun",),
        ("torch.distributed.run", "torch.distributed.launch"),
        frozenset(
            [
                "h",
                "help",
                "m",
                "module",
                "standalone",
                "no_python",
                "run_path",
                "virtual_local_rank",
                "use_env",
            ]
        ),
        "nnodes",
        "node_rank",
        _of_torchrun,
        _of_static,
        prefix="PET_",
    ),
    Launcher(
        "accelerate",
        ("accelerate-launch", "accelerate"),
        ("accelerate.commands.launch",),
        frozenset(
            [
                "h",
                "help",
                "q",
                "quiet",
                "cpu",
                "multi_gpu",
                "tpu",
                "ipex",
                "enable_cpu_affinity",
                "m",
                "module",
                "dynamo_use_fullgraph",
                "dynamo_use_dynamic",
                "dynamo_use_regional_compilation",
                "no_python",
                "use_deepspeed",
                "use_fsdp",
                "use_parallelism_config",
                "use_tp",
                "use_megatron_lm",
                "use_xpu",
                "debug",
                "same_network",
                "tpu_cluster",
                "no_tpu_cluster",
                "tpu_use_sudo",
                "downcast_bf16",
                "fp8_use_autocast_during_eval",
            ]
        ),
        "num_machines",
        "machine_rank",
        _of_accelerate,
        _of_names("main_process_ip", "main_process_port"),
        verb="launch",
        ranks_one=False,
    ),
    Launcher(
        "deepspeed",
        ("deepspeed", "ds"),
        ("deepspeed.launcher.runner",),
        frozenset(
            [
                "h",
                "help",
                "module",
                "no_python",
                "no_local_rank",
                "no_ssh",
                "no_ssh_check",
                "force_multi",
                "save_pid",
                "bind_cores_to_rank",
                "q",
                "quiet",
            ]
        ),
        "num_nodes",
        "node_rank",
        _of_deepspeed,
        _of_names("master_addr", "master_port"),
    ),
)
"""Options without a value: of torch 2.0 to 2.13, accelerate 0.21 to 1.15 and deepspeed 0.10 to 0.19."""


def options_of(
    launcher: Launcher, words: Sequence[str], environment: Mapping[str, str]
) -> tuple[dict[str, str], list[str]]:
    """The options before the script, and the words from the script on."""
    options: dict[str, str] = {}
    if launcher.prefix:
        size = len(launcher.prefix)
        options = {
            key[size:].lower(): value for key, value in environment.items() if key.startswith(launcher.prefix)
        }
    rest = list(words)
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        if word == "--":
            break
        for name, value in _option(launcher, word, rest):
            options[name] = value
    return options, rest


def _option(launcher: Launcher, word: str, rest: list[str]) -> Iterator[tuple[str, str]]:
    """An option, with its value from the same word or the next one."""
    name, given, value = word.lstrip("-").replace("-", "_").partition("=")
    if not word.startswith("--") and len(name) > 1:  # -m, and a value without a space: -r3
        name, given, value = word[1], "=", word[2:]
    elif given:
        value = word.partition("=")[2]
    if name in launcher.flags:
        yield name, "true"
    elif given:
        yield name, value
    elif rest:
        yield name, rest.pop(0)
