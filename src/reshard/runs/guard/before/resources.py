"""What a command needs of this machine: a free port, and disk space for checkpoints."""

from __future__ import annotations

import errno
import re
import shutil
import socket
from collections.abc import Iterator

from reshard.base.errors import Problem
from reshard.base.quantities import memory_size
from reshard.runs.checks.command.command_settings import plain_source
from reshard.runs.checks.command.read_command import TrainingCommand
from reshard.runs.checks.environment import Environment

MODEL_OPTIONS = (
    *("model_name_or_path", "model", "base_model", "model_id", "model_path", "actor_rollout_ref.model.path"),
    "model.partial_pretrain",
)
"""Settings that name the model."""
WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")
PARTIAL_TRAINING = re.compile(r"\blora|\bpeft|adapter|LoraConfig|tuner_type|freeze", re.IGNORECASE)
"""Shows that not all weights are trained and saved."""
RANDOM_PORT_TORCH = "<2.7"
"""Releases of torch whose torchrun takes port 29500 for a run of one node; newer ones take a free port."""


def port(command: TrainingCommand, environment: Environment | None) -> Iterator[Problem]:
    """A problem if the port at which this node's ranks meet is taken."""
    meeting = command.rendezvous or _default(command, environment)
    if meeting is None or command.node_rank or _finds_another(command, environment):
        return
    host, number = meeting
    if number >= 1 << 16 or not _is_taken(number):
        return
    option = "--main_process_port" if command.launcher in ("accelerate", "trl") else "--master_port"
    yield Problem(
        "guard-port-in-use",
        f"port {number} is in use",
        expected=f"a free port on {host}, where the ranks meet",
        found="another process listens there: often a run that has not ended",
        remedy=f"end that process (`ss -ltnp 'sport = :{number}'` shows it), or pass "
        f"another port: {option} {number + 1}",
    )


def _default(command: TrainingCommand, environment: Environment | None) -> tuple[str, int] | None:
    fixed = environment is not None and environment.has("torch", RANDOM_PORT_TORCH)
    static = command.setting("nproc_per_node") and not command.setting(
        "standalone", "rdzv_endpoint", "rdzv_backend"
    )
    return ("127.0.0.1", 29500) if fixed and static and command.setting("master_port") is None else None


def _finds_another(command: TrainingCommand, environment: Environment | None) -> bool:
    """Whether the launcher takes a free port instead, or starts a single process that needs none."""
    if command.launcher not in ("accelerate", "trl", "axolotl"):
        return False
    newer = environment is None or environment.has("accelerate", ">=1.7")
    return command.nodes == 1 and (newer or command.processes == 1)


def _is_taken(number: int) -> bool:
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("", number))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def weights_of(command: TrainingCommand) -> int:
    """Bytes of the model's weights, if it is a local folder; else 0."""
    for name in models_of(command):
        folder = command.folder / name
        sizes = [[path.stat().st_size for path in folder.glob(pattern)] for pattern in WEIGHT_PATTERNS]
        if total := next((sum(each) for each in sizes if each), 0):
            return total
    return 0


def models_of(command: TrainingCommand) -> list[str]:
    """The model that the settings name, or else those that the script names in plain texts."""
    named = command.setting(*MODEL_OPTIONS)
    return [named] if isinstance(named, str) else list(dict.fromkeys(_loaded(command)))


def _loaded(command: TrainingCommand) -> Iterator[str]:
    """What a script passes to from_pretrained, or to a trainer as `model`."""
    source = plain_source(command.script)
    for call in source.calls if source else ():
        value = call.constant("model") if call.last.endswith("Trainer") else None
        if call.last == "from_pretrained" and call.node.args:
            value = getattr(call.node.args[0], "value", None)
        if isinstance(value, str):
            yield value


WEIGHTS_PER_CHECKPOINT = 3
"""A checkpoint of full training has the weights and two states of Adam, at least in the type of the weights."""


def disk(command: TrainingCommand, weights: int, text: str) -> Iterator[Problem]:
    """A warning if there is no room for one checkpoint of full training."""
    if command.output is None or not weights or PARTIAL_TRAINING.search(text):
        return
    folder = next(path for path in (command.output, *command.output.parents) if path.exists())
    free, needed = shutil.disk_usage(folder).free, WEIGHTS_PER_CHECKPOINT * weights
    if needed > free:
        yield Problem(
            "disk-too-small-for-checkpoint",
            "the disk may be too small for a checkpoint",
            file=str(command.output),
            expected=f"at least {memory_size(needed)}: the weights, and two states of the optimizer",
            found=f"{memory_size(free)} free",
            remedy="free space, choose a folder on another disk, or save without the optimizer (save_only_model)",
            severity="warning",
        )
