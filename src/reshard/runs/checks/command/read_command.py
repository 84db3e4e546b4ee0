"""A training command as its words and files describe it. Nothing is executed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from reshard.runs.checks.command.command_settings import CommandSettings, merged, of_file, output_of, typed
from reshard.runs.checks.command.interpreters import PYTHON, interpreter_of, is_of_shell, program, shebang
from reshard.runs.checks.command.launchers import LAUNCHERS, GpuCount, Launcher, options_of
from reshard.runs.checks.command.shells import the_launch
from reshard.runs.checks.command.tools import LAUNCHER_TOOLS, PYTHON_LAUNCHERS, Tool
from reshard.runs.checks.command.wrapper_programs import Wrapper, before_python, in_python, unwrapped

MAX_DEPTH = 10
"""How many programs of a command may start each other."""


@dataclass
class TrainingCommand:
    """A command that trains, as far as it can be told without executing it."""

    words: tuple[str, ...]
    folder: Path
    """Where the script runs; a launch script may go there first."""
    environment: dict[str, str]
    """With the variables that the command sets itself."""
    launcher: str = ""
    """torchrun, accelerate, deepspeed, swift, megatron, llamafactory, axolotl, trl, verl or python; "" if unknown."""
    interpreter: tuple[str, ...] | None = None
    """Words that start the command's Python. None if they are unknown."""
    script: Path | None = None
    module: str = ""
    """What `-m` names instead of a script."""
    arguments: tuple[str, ...] = ()
    configs: tuple[Path, ...] = ()
    settings: CommandSettings = field(default_factory=dict)
    """Of the launcher's config and options, then of the script's configs and arguments; the later one wins."""
    processes: int = 1
    """On this node."""
    has_ranks: bool = False
    """Whether the launcher sets WORLD_SIZE and the like, even for a single process."""
    nodes: int = 1
    node_rank: int = 0
    rendezvous: tuple[str, int] | None = None
    """Host and port at which the ranks meet. None if a free port is chosen."""
    output: Path | None = None

    def setting(self, *names: str) -> object:
        """The value of the first of these settings that is set, or None."""
        return next((self.settings[name][0] for name in names if name in self.settings), None)


@dataclass(frozen=True)
class StartedProgram:
    """A command as it was typed, and what it starts: a script or a module, whose file is `script` if it is known.

    `versions` are those of packages in its environment.
    """

    words: tuple[str, ...]
    script: Path | None = None
    module: str = ""
    versions: Mapping[str, str] | None = None


def visible_gpus(environment: Mapping[str, str]) -> int:
    """The number of GPUs that a process with this environment sees."""
    from reshard.runs.checks.environment import find_gpus

    listed = environment.get("CUDA_VISIBLE_DEVICES")
    names = [each for each in (listed or "").split(",") if each.strip() and not each.strip().startswith("-")]
    return len(find_gpus()[0]) if listed is None else len(names)


def read_command(words: Sequence[str], environment: Mapping[str, str], folder: Path) -> TrainingCommand:
    """What a command starts, with which settings. Unknown parts keep the defaults of `TrainingCommand`."""
    reading = _Reading(tuple(words), folder, dict(environment))
    rest = list(words)
    for _ in range(MAX_DEPTH):
        if not rest or (following := reading.step(rest)) is None:
            break
        rest = following
    reading.end()
    return reading


_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_VALUED = ("-W", "-X", "--check-hash-based-pycs")
"""Options of Python with a value in the next word."""
SHELL_PROGRAMS = ("bash", "sh", "dash", "zsh")
LAUNCHER_MODULES = {name for each in (*LAUNCHERS, *LAUNCHER_TOOLS) for name in each.modules}
LAUNCHER_PROGRAMS: dict[str, Launcher | Tool] = {
    name: each for each in (*LAUNCHERS, *LAUNCHER_TOOLS) for name in each.programs
}


@dataclass
class _Reading(TrainingCommand):
    """What has been read of a command so far. Each step replaces the command by the one that it starts."""

    prefix: tuple[str, ...] | None = None
    """The words of wrappers that bring their own Python."""
    defaults: Mapping[str, str] = field(default_factory=dict)
    """Settings that a tool chooses itself."""
    place: tuple[str, int | None] = ("command line", None)
    python_is_known: bool = True
    """Whether the next program shows which Python it is: False after that, and after `conda activate` in a script."""

    @property
    def gpus(self) -> GpuCount:
        return lambda: visible_gpus(self.environment)

    def step(self, words: list[str]) -> list[str] | None:
        """The command that `words` start; None if they start the script itself, or something unknown."""
        if match := _ASSIGNMENT.fullmatch(words[0]):
            self.environment[match[1]] = match[2]
            return words[1:]
        if words[0] == "env":
            return self._of_env(words[1:])
        if inner := unwrapped(words):
            return self._of_wrapper(*inner)
        name = Path(words[0]).name
        if name in SHELL_PROGRAMS:
            return self._of_shell(words[1:])
        if PYTHON.fullmatch(name):
            return self._of_python(words)
        return self._of_program(words, name)

    def _of_env(self, words: list[str]) -> list[str] | None:
        while words and words[0].startswith("-"):
            option = words.pop(0)
            if option in ("-i", "-", "--ignore-environment"):
                self.environment.clear()
            elif option in ("-u", "--unset") and words:
                self.environment.pop(words.pop(0), None)
            elif option in ("-C", "--chdir") and words:
                self.folder /= words.pop(0)
        return words

    def _of_wrapper(self, wrapper: Wrapper, own: list[str], inner: list[str]) -> list[str]:
        """The command in a wrapper, which may go to another folder, and bring its own Python."""
        own = [part for word in own for part in (word.split("=", 1) if word.startswith("--") else [word])]
        for at, word in enumerate(own[:-1]):
            if word in wrapper.moving:
                self.folder /= own[at + 1]
                own[at + 1] = str(self.folder)
        if wrapper.quietly is not None:
            prefix = before_python(wrapper, own, self.folder / (inner or ["."])[0])
            self.prefix = (*(self.prefix or ()), *prefix)
        return in_python(wrapper, own, inner)

    def _of_shell(self, words: list[str]) -> list[str] | None:
        """The launch of a shell script, or of `bash -c`."""
        while words and words[0].startswith("-") and "c" not in words[0]:
            words = words[1:]
        if words[:1] == ["-c"] or not words:
            path, text = None, "".join(words[1:2])
        else:
            path = self.folder / words[0]
            text = path.read_text("utf-8", "replace") if path.is_file() else ""
        launch = the_launch(
            text, path.parent if path else self.folder, words[1:], self.environment, self.folder, worth
        )
        if launch is None:
            return None
        self.environment, self.folder = launch.environment, launch.folder
        self.place = (str(path), launch.line) if path else self.place
        self.python_is_known = self.python_is_known and not launch.other_python
        return launch.words

    def _note_interpreter(self, word: str) -> None:
        """Remember which Python the first program starts that shows it."""
        if not self.python_is_known:
            return
        self.python_is_known = False  # what it starts in turn is in the same Python
        if self.prefix is not None:
            self.interpreter = (*self.prefix, word if PYTHON.fullmatch(Path(word).name) else "python")
        else:
            self.interpreter = interpreter_of(word, self.environment, self.folder)

    # ------------------------------------------------------------------------------------------------- Python

    def _of_python(self, words: list[str]) -> list[str] | None:
        """`python script`, `python -m module`; a module or script may be a launcher."""
        self._note_interpreter(words[0])
        self.launcher = self.launcher or "python"
        at = 1
        while at < len(words) and words[at].startswith("-") and words[at] != "-":
            word = words[at]
            if not word.startswith("--") and word[-1] in "mc" and word[1] not in "WX":
                return (
                    self._of_module(words[at + 1], words[at + 2 :])
                    if word[-1] == "m" and words[at + 1 :]
                    else None
                )
            at += 2 if word in _VALUED else 1
        return self._of_script(words[at], words[at + 1 :]) if at < len(words) else None

    def _of_module(self, module: str, arguments: list[str]) -> list[str] | None:
        for each in (*LAUNCHERS, *LAUNCHER_TOOLS):
            if module in each.modules:
                self.launcher = "" if self.launcher == "python" else self.launcher
                return [each.programs[0], *arguments]
        known = (
            (name, defaults) for name, modules, defaults in PYTHON_LAUNCHERS if re.match(modules, module)
        )
        name, defaults = next(known, ("", {}))
        self.launcher = name if name and self.launcher == "python" else self.launcher
        self.module, self.arguments, self.defaults = module, tuple(arguments), self.defaults or defaults
        return None

    def _of_script(self, script: str, arguments: list[str]) -> list[str] | None:
        if Path(script).name in LAUNCHER_PROGRAMS:
            self.launcher = "" if self.launcher == "python" else self.launcher
            return [script, *arguments]
        self.script, self.arguments = self.folder / script, tuple(arguments)
        return None

    # ---------------------------------------------------------------------------------------------- programs

    def _of_program(self, words: list[str], name: str) -> list[str] | None:
        """A launcher, a tool, or a script with a shebang."""
        known = LAUNCHER_PROGRAMS.get(name)
        if isinstance(known, Tool) and words[1:2] and words[1].replace("_", "-") in known.verbs:
            self._note_interpreter(words[0])
            self.launcher, self.defaults = self.launcher or known.name, known.defaults
            return known.becomes(words[1:], self.environment, self.gpus)
        if isinstance(known, Launcher):
            return self._of_launcher(known, words)
        path = program(words[0], self.environment, self.folder)
        first = shebang(path) if path else []
        if path and is_of_shell(path):
            return ["bash", str(path), *words[1:]]
        if first and PYTHON.fullmatch(Path(first[0]).name):
            self._note_interpreter(words[0])
            self.launcher = self.launcher or "python"
            return self._of_script(str(path), words[1:])
        return [first[0], str(path), *words[1:]] if first and Path(first[0]).name in SHELL_PROGRAMS else None

    def _of_launcher(self, launcher: Launcher, words: list[str]) -> list[str] | None:
        has_verb = launcher.verb and Path(words[0]).name == launcher.name
        if has_verb and words[1:2] != [launcher.verb]:
            return None
        self._note_interpreter(words[0])
        self.launcher = self.launcher or launcher.name
        given, rest = options_of(launcher, words[2 if has_verb else 1 :], self.environment)
        config = self._config(launcher, given)
        options = {key: str(value) for key, (value, _) in config.items()} | given
        self.settings |= config | typed([f"--{key}={value}" for key, value in given.items()], *self.place)
        self.processes = launcher.processes(options, self.gpus)
        self.has_ranks = launcher.ranks_one or self.processes > 1
        for name in (launcher.nodes, launcher.node_rank):
            word = options.get(name, "").rpartition(":")[2]
            number = int(word) if word.isdecimal() else None
            self.nodes = number or 1 if name == launcher.nodes else self.nodes
            self.node_rank = number or 0 if name == launcher.node_rank else self.node_rank
        self.rendezvous = launcher.meeting(options)
        if not rest or "no_python" in given:
            return rest or None
        return (
            self._of_module(rest[0], rest[1:])
            if {"m", "module"} & given.keys()
            else self._of_script(rest[0], rest[1:])
        )

    def _config(self, launcher: Launcher, given: Mapping[str, str]) -> CommandSettings:
        """The config of `accelerate launch`: the given one, or the default one, which it reads silently."""
        if launcher.name != "accelerate":
            return {}
        home = Path(self.environment.get("HOME", "~")).expanduser()
        cache = Path(self.environment.get("HF_HOME") or home / ".cache/huggingface")
        path = self.folder / (given.get("config_file") or cache / "accelerate/default_config.yaml")
        if not path.is_file() or ("config_file" not in given and "cpu" in given):
            return {}
        self.configs = (*self.configs, path)
        return of_file(path)

    # ------------------------------------------------------------------------------------------------- result

    def end(self) -> None:
        """Add the settings of the script, now that all is read."""
        if self.script is None and not self.module:
            self.launcher = ""
        settings, configs = merged(self.arguments, self.folder, *self.place)
        self.settings |= {name: each for name, each in settings.items() if "$" not in str(each[0])}
        self.configs = tuple(dict.fromkeys([*self.configs, *configs]))
        self.output = output_of(self.settings, self.script, self.defaults, self.folder)


def worth(words: list[str]) -> int:
    """How surely words start a training: 2 for launchers and tools, 1 for other scripts, 0 for anything else."""
    while words and (_ASSIGNMENT.fullmatch(words[0]) or words[0] == "env" or unwrapped(words)):
        inner = unwrapped(words)
        words = inner[2] if inner else words[1:]
    if not words:
        return 0
    known = LAUNCHER_PROGRAMS.get(Path(words[0]).name)
    if isinstance(known, Tool):
        return 2 * (words[1:2] != [] and words[1].replace("_", "-") in known.verbs)
    if known is not None:
        return 2 * (words[1:2] == [known.verb] if known.verb and words[0].endswith(known.name) else True)
    if PYTHON.fullmatch(Path(words[0]).name):
        named = [word for word in words[1:] if word in LAUNCHER_MODULES]
        return 2 if named else 1 * any(word == "-m" or word.endswith(".py") for word in words[1:])
    return 1 * (Path(words[0]).name in SHELL_PROGRAMS and any(word.endswith(".sh") for word in words[1:]))
