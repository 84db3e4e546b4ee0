"""Tools that start a launcher themselves: `swift sft` starts torchrun, `axolotl train` starts `accelerate launch`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from reshard.runs.checks.command.launchers import LAUNCHERS, GpuCount, truth


@dataclass(frozen=True)
class Tool:
    """A program that starts a launcher itself. `becomes` is that command, from its words and environment."""

    name: str
    programs: tuple[str, ...]
    verbs: tuple[str, ...]
    becomes: Callable[[Sequence[str], Mapping[str, str], GpuCount], list[str]]
    modules: tuple[str, ...] = ()
    defaults: Mapping[str, str] = field(default_factory=dict)
    """Settings that it chooses itself; braces stand for other settings."""


def _torchrun(environment: Mapping[str, str], names: Sequence[str]) -> list[str]:
    given = [(name, environment.get(name)) for name in names]
    return ["torchrun", *(word for name, value in given if value for word in (f"--{name.lower()}", value))]


TORCHRUN_VARIABLES = ("NPROC_PER_NODE", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")


def _swift(package: str) -> Callable[[Sequence[str], Mapping[str, str], GpuCount], list[str]]:
    def becomes(words: Sequence[str], environment: Mapping[str, str], gpus: GpuCount) -> list[str]:
        script = ["-m", f"{package}.{words[0].replace('-', '_')}", *words[1:]]
        several = environment.keys() & {"NPROC_PER_NODE", "NNODES"}
        return [*(_torchrun(environment, TORCHRUN_VARIABLES) if several else ["python"]), *script]

    return becomes


def _llamafactory(words: Sequence[str], environment: Mapping[str, str], gpus: GpuCount) -> list[str]:
    """As `llamafactory.launcher.launch` does. It finds a free port unless MASTER_PORT is set."""
    script = ["-m", "llamafactory.launcher", *words[1:]]
    forced = any(truth(environment.get(name)) for name in ("FORCE_TORCHRUN", "USE_MCA"))
    alone = any(truth(environment.get(name)) for name in ("USE_RAY", "USE_KT"))
    if not forced and (alone or gpus() < 2):
        return ["python", *script]
    here = {"MASTER_PORT": "0", "NPROC_PER_NODE": str(gpus() or 1), **environment}
    return [*_torchrun(here, TORCHRUN_VARIABLES), *script]


ACCELERATE_OPTIONS = (
    *("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port", "config_file"),
)
LAUNCHER_OPTIONS = (
    *ACCELERATE_OPTIONS,
    *(name.lower() for name in TORCHRUN_VARIABLES),
    "rdzv_endpoint",
    "rdzv_backend",
)


def _divided(
    words: Sequence[str], valued: Collection[str], flags: Collection[str] = ()
) -> tuple[dict[str, str], list[str]]:
    """The options of a launcher among the words of a tool, wherever they are typed, and the other words.

    `valued` are those with a value, `flags` those without one, whose value is "".
    """
    options, rest = dict[str, str](), list[str]()
    given = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    while given:
        word = given.pop(0)
        name = word.lstrip("-").replace("-", "_")
        if name in valued and given:
            options[name] = given.pop(0)
        elif word.startswith("--") and name in flags:
            options[name] = ""
        else:
            rest.append(word)
    return options, rest


def _typed(options: Mapping[str, str]) -> list[str]:
    return [f"--{name}={value}" if value else f"--{name}" for name, value in options.items()]


def _axolotl(words: Sequence[str], environment: Mapping[str, str], gpus: GpuCount) -> list[str]:
    """As `axolotl.cli.utils.train.launch_training` does: options that axolotl does not know are the launcher's."""
    at = words.index("--") if "--" in words else len(words)
    options, rest = _divided(words[1:at], ("launcher", *LAUNCHER_OPTIONS), ("cloud",))
    if "cloud" in options:
        return []  # it runs on another machine
    launcher = "python" if "--use-ray" in rest else options.pop("launcher", "accelerate")
    starts = {"accelerate": ["accelerate", "launch"], "torchrun": ["torchrun"]}
    start = [*starts[launcher], *words[at + 1 :], *_typed(options)] if launcher in starts else ["python"]
    return [*start, "-m", "axolotl.cli.train", *rest]


def _trl(words: Sequence[str], environment: Mapping[str, str], gpus: GpuCount) -> list[str]:
    """As `trl.cli` does: options of accelerate are wherever they are typed, the rest is the script's."""
    options, rest = _divided(
        words[1:], ("accelerate_config", *ACCELERATE_OPTIONS), LAUNCHERS[1].flags - {"debug"}
    )
    if "accelerate_config" in options:
        options["config_file"] = options.pop("accelerate_config")
    return ["accelerate", "launch", *_typed(options), "-m", f"trl.scripts.{words[0]}", *rest]


VERL_DEFAULTS = {
    "trainer.default_local_dir": "checkpoints/{trainer.project_name}/{trainer.experiment_name}",
    "trainer.project_name": "verl_examples",
    "trainer.experiment_name": "gsm8k",
}
"""What verl's config/ppo_trainer.yaml says, if the command says nothing else."""
VERL_SFT_DEFAULTS = {**VERL_DEFAULTS, "trainer.project_name": "gsm8k-sft", "trainer.experiment_name": "test"}
"""The same of its config/sft_trainer_engine.yaml."""
LAUNCHER_TOOLS = (
    Tool(
        "swift",
        ("swift",),
        ("pt", "sft", "rlhf"),
        _swift("swift.cli"),
        ("swift.cli.main",),
        {"output_dir": "output"},
    ),
    Tool(
        "megatron",
        ("megatron",),
        ("pt", "sft", "rlhf"),
        _swift("swift.cli._megatron"),
        ("swift.cli._megatron.main",),
        {"output_dir": "megatron_output"},
    ),
    Tool(
        "llamafactory",
        ("llamafactory-cli", "lmf"),
        ("train",),
        _llamafactory,
        ("llamafactory.cli",),
    ),
    Tool("axolotl", ("axolotl",), ("train",), _axolotl, ("axolotl.cli.main",), {"output_dir": "./model-out"}),
    Tool("trl", ("trl",), ("sft", "dpo", "kto", "grpo", "rloo", "reward"), _trl, ("trl.cli",)),
)
PYTHON_LAUNCHERS = (
    ("verl", r"verl\.trainer\.\w*sft_trainer", VERL_SFT_DEFAULTS),
    ("verl", r"verl\.", VERL_DEFAULTS),
    ("axolotl", r"axolotl\.", LAUNCHER_TOOLS[3].defaults),
)
"""Tools whose modules Python runs directly: their name, an expression for these modules, and their settings."""
