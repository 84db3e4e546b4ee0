"""Every command of the READMEs, the pages and the help texts is run, on a small checkpoint of the kind that it is for.

For a row of the README's table, the row says which kinds: the command is run once for each of them. Other sources are
found by their names (`BY_NAME`). A URL, or an id on the Hub, is a folder with the name in its last part. Commands that
train, distribute their work or upload are parsed by the real command line (`PARSED`). Any other command fails.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
import torch.distributed.checkpoint as dcp
from transformers import AutoModelForCausalLM

import reshard as api
from tests.commandline import reshard
from tests.genuine import quantized
from tests.genuine.huggingface import make_model, make_tokenizer
from tests.genuine.make_nemo import nemo2
from tests.test_docs import CHINESE, ENGLISH, PAGES, REPOSITORY, check_parses, commands, name, tables
from tests.test_tutorials import adapter_of

DATA = Path(__file__).parent / "data"
ALL_ROWS = REPOSITORY / "docs" / "tutorials" / "index.md"
ELSEWHERE = ("docs/demo.md", "docs/tutorials")
"""Pages whose commands need each other's output: tests/test_demo.py and tests/test_tutorials.py run them."""
PARSED = {
    "train": "tests/train runs it",
    "guard": "tests/guard runs it",
    "serve": "serves until it is stopped: tests/serve runs it",
    "watch": "tests/watch runs it",
    "mcp": "waits for a client: tests/test_mcp.py runs it",
    "--on": "needs Slurm: tests/test_many_machines.py runs it",
    "--push-to-hub": "uploads: tests/stores/test_hub.py runs it",
    "--python": "needs another environment",
    "-": "reads a pipe",
}
EXAMPLES = re.compile(
    r"^ +(?:.*\| )?reshard +(\w+(?: {1,5}\S+)?(?: {1,2}\S+)*?)(?: {3,}\S.*|(?<=-o OUT) +[^- ].*| +\(.*\))?$",
    re.M,
)
"""A command in a help text, before what it does."""


class Command(NamedTuple):
    """A documented command: its page, the row of the README's table that it is in, and its words after `reshard`."""

    page: str
    row: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}: {' '.join(self.words)}"


def rows_of(page: Path) -> list[list[str]]:
    """What to type, and for what."""
    (rows,) = (table[1:] for table in tables(page) if table[0] == ["You have", "Type"])
    return rows


def typed() -> Iterator[Command]:
    """All documented commands. The Chinese README has those of the English one."""
    rows = [(page, *row) for page in (ENGLISH, ALL_ROWS) for row in rows_of(page)]
    for page, row, command in rows:
        yield Command(name(page), row, tuple(command.strip("`").split()[1:]))
    inside = {
        command.words for command in [Command("", "", tuple(c.strip("`").split()[1:])) for *_, c in rows]
    }
    for page in PAGES:
        for words in commands(page):
            again = page in (ENGLISH, CHINESE) and tuple(words[1:]) in inside
            if words[:1] == ["reshard"] and not again and not name(page).startswith(ELSEWHERE):
                yield Command(name(page), "", tuple(words[1:]))
    for command in (
        "",
        "inspect",
        "convert",
        "verify",
        "doctor",
        "guard",
        "serve",
        "watch",
        "mcp",
        "train",
        "support",
    ):
        text = reshard(*filter(None, [command]), "--help").out
        for line in EXAMPLES.findall(text):
            yield Command(f"reshard {command} --help", "", tuple(line.split()))


# ---------------------------------------------------------------------------------------------- sources

Make = Callable[[Path, Path], object]
"""Makes a checkpoint at the first path, and at the second one the model that it was trained from, if it has one."""


def hub(folder: Path, base: Path) -> None:
    """A mixture of experts that every documented layout divides."""
    sizes = {"num_experts": 8, "num_hidden_layers": 8, "num_key_value_heads": 8}
    make_model("qwen3_moe", folder, dtype="bfloat16", **sizes)


def converted(folder: Path, base: Path) -> None:
    hub(base, base)
    api.convert(base, folder, to="megatron", tp=2)


def megatron_lm(folder: Path, base: Path) -> None:
    """As Megatron-LM leaves it: without config and tokenizer."""
    converted(folder, base)
    for file in ("config.json", "generation_config.json", *(path.name for path in folder.glob("*token*"))):
        (folder / file).unlink(missing_ok=True)


def fsdp(folder: Path, base: Path) -> None:
    """As accelerate and Trainer save FSDP with SHARDED_STATE_DICT."""
    make_model("qwen3", base, dtype="bfloat16")
    weights = AutoModelForCausalLM.from_pretrained(base, dtype="auto").state_dict()
    dcp.save({"model": weights}, checkpoint_id=folder / "pytorch_model_fsdp_0", no_dist=True)


def without_mtp(folder: Path, base: Path) -> None:
    """As transformers saves a model: without the layers that it leaves out."""
    make_model("deepseek_v3_mtp", base, dtype="bfloat16")
    AutoModelForCausalLM.from_pretrained(base, dtype="auto").save_pretrained(folder)


def lora(folder: Path, base: Path) -> None:
    adapter_of(make_model("qwen3", base, dtype="bfloat16"), folder)


def fp8(folder: Path, base: Path) -> None:
    quantized.fp8(make_model("deepseek_v3", base, dtype="bfloat16"), folder)


def mxfp4(folder: Path, base: Path) -> None:
    quantized.mxfp4(make_model("gpt_oss", base, dtype="bfloat16"), folder)


def stored(source: str, config: str = "", *, beside: bool = False) -> Make:
    """A checkpoint in tests/data. Its config, and a tokenizer, are those of the base, or are `beside` its files."""

    def make(folder: Path, base: Path) -> None:
        shutil.copytree(DATA / source, folder)
        home = folder if beside else base
        if config:
            make_tokenizer().save_pretrained(home)
            shutil.copy(DATA / config, home / "config.json")

    return make


def internevo(folder: Path, base: Path) -> None:
    """As InternEvo leaves it: its own config, which determines that of the Hub, and no tokenizer."""
    shutil.copytree(DATA / "internlm" / "llama-tp2", folder)
    make_tokenizer().save_pretrained(base)
    (base / "config.json").write_text(json.dumps(api.open(folder).checkpoint.description.config))


def nemo(folder: Path, base: Path) -> None:
    run = folder / "llama--val_loss=1.2300-step=10-consumed_samples=80.0-last"
    nemo2(make_model("llama", base, dtype="bfloat16", head_dim=8), run)


def example(folder: Path, base: Path) -> None:
    shutil.copytree(REPOSITORY / "examples" / "megatron-run", folder)


def archive(file: Path, base: Path) -> None:
    file.parent.mkdir(parents=True)
    shutil.copy(DATA / "nemo/ranks-tp2-pp2.nemo", file)


BY_ROW: dict[str, Make] = {
    "any checkpoint": converted,
    "Megatron-LM": megatron_lm,
    "ms-swift": stored("peers/swift/qwen3/checkpoint-3"),
    "Megatron-Bridge": stored("peers/bridge/mistral", "peers/bridge/base-mistral/config.json"),
    "NeMo": nemo,
    "archive": archive,
    "verl": stored("verl/fsdp2/global_step_3/actor"),
    "FSDP": fsdp,
    "torchtitan": stored("torchtitan/llama/checkpoint/step-1", "torchtitan/llama/config.json"),
    "MaxText": stored("maxtext/llama", "maxtext/llama/config.json"),
    "OLMo-core": stored("olmo_core/llama/step1", "torchtitan/llama/config.json"),
    "DeepSpeed": stored("deepspeed/z2", "deepspeed/z2/config.json", beside=True),
    "InternEvo": internevo,
    "LoRA": lora,
    "FP8": fp8,
    "4-bit": mxfp4,
    "for Megatron-Core": hub,
    "mlx-lm": hub,
    "llama.cpp": hub,
    "two checkpoints": converted,
    "bucket": converted,
    "on the Hub": hub,
    "that failed": converted,
}
"""What each row of the README's table is for, by words of its first cell."""
BY_NAME: dict[str, Make] = {
    **dict.fromkeys(("model", "MODEL", "Qwen3-8B", "base"), hub),
    **dict.fromkeys(("CKPT", "ckpt", "run", "SRC", "DST", "CHECKPOINT", "qwen3"), converted),
    "megatron-run": example,
    **dict.fromkeys(("run-a", "run-b"), converted),
    "merged": hub,
    "bridge": stored("peers/bridge/mistral", "peers/bridge/base-mistral/config.json"),
    "mcore": stored("peers/swift/qwen3/checkpoint-3", "peers/swift/qwen3/checkpoint-3/config.json"),
    "actor": stored("verl/fsdp2/global_step_3/actor"),
    "zero": stored("deepspeed/z2", "deepspeed/z2/config.json"),
    "checkpoint-2": converted,  # of ms-swift
    "checkpoint-20": fsdp,
    **dict.fromkeys(("lora", "checkpoint-30"), lora),
    "checkpoint-500": without_mtp,
}
"""What the sources of all other commands are, by the last part of their paths."""
LOG = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"


def why_parsed(command: Command) -> str | None:
    """Why a command is only parsed, if it is."""
    return next((why for word, why in PARSED.items() if word in command.words), None)


def makers(command: Command) -> list[Make | None]:
    """What to make at the first path of a command, once for each kind that its row names."""
    if not command.row or why_parsed(command):
        return [None]
    return [make for words, make in BY_ROW.items() if words in command.row]


def local(word: str) -> str:
    """A path for a URL or an id on the Hub; any other word as it is."""
    address = re.fullmatch(r"(?:\w+://)?(?:[\w.-]+/)*([\w.-]+?)(?:@\w+)?/?", word)
    remote = "://" in word or re.fullmatch(r"[A-Z]\w+/[\w.-]+", word)
    return address[1] if address and remote else word


@cache
def _made(make: Make, folder: Path) -> Path:
    """The folder in which a checkpoint, "source", and its base, "base", were made, once for all commands."""
    make(folder / "source", folder / "base")
    return folder


class Place:
    """A working folder in which the paths of one command exist."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self._folder, self._cache = folder, cache

    def put(self, make: Make, path: str, base: str) -> None:
        """Put a checkpoint at a path, and its base at another one."""
        made = _made(make, self._cache / getattr(make, "__qualname__", "made") / str(id(make)))
        if (made / "source").is_file():
            shutil.copy(made / "source", self._folder / path)
        else:
            shutil.copytree(made / "source", self._folder / path, dirs_exist_ok=True)
        if (made / "base").exists():
            shutil.copytree(made / "base", self._folder / base, dirs_exist_ok=True)

    def prepare(self, words: list[str], make: Make | None) -> list[str]:
        """Make what a command reads. Returns its words, with a base if `inspect` says that the source needs one."""
        paths = [word for word in words[1:] if not word.startswith("-") and self._is_path(words, word)]
        if words[0] == "doctor":
            for path in paths:
                self._put_for_doctor(path)
            return words
        bases = [value for flag, value in pairwise(words) if flag in ("--base", "--fill-from")]
        base = bases[0] if bases else "BASE"
        self.put(make or BY_NAME[Path(paths[0]).name], paths[0], base)
        if words[0] == "verify" and len(paths) == 2:
            there = base if Path(base).exists() else None
            complete = base if "--fill-from" in words else None
            api.convert(paths[0], paths[1], to="huggingface", base=there, fill_from=complete)
        if words[0] == "convert" and not bases and "--to" not in words:
            proposed = reshard("inspect", paths[0], "--json").json["next"]
            return [*words, *(["--base", "BASE"] if "--base" in str(proposed) else [])]
        return words

    def _is_path(self, words: list[str], word: str) -> bool:
        return not words[words.index(word) - 1].startswith("--") or word == words[1]

    def _put_for_doctor(self, path: str) -> None:
        if path.endswith(".log"):
            (self._folder / path).write_text(
                f'Traceback (most recent call last):\n  File "train.py", line 1\n{LOG}'
            )
        elif path.endswith(".py"):
            (self._folder / path).write_text("model = AutoModelForCausalLM.from_pretrained('m')\n")
        elif path.endswith(".yaml"):
            (self._folder / path).write_text("distributed_type: FSDP\nnum_processes: 2\n")
        else:
            self.put(BY_NAME[Path(path).name], path, "BASE")


CASES = [(command, make) for command in dict.fromkeys(typed()) for make in makers(command)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("made")


def test_every_row_has_a_source() -> None:
    placed = {command.row for command, _ in CASES}
    assert [row for page in (ENGLISH, ALL_ROWS) for row, _ in rows_of(page) if row not in placed] == []


@pytest.mark.core("README.md:*", "reshard  --help:*")
@pytest.mark.parametrize(
    ("command", "make"), CASES, ids=lambda each: str(each) if isinstance(each, Command) else ""
)
def test_a_documented_command_does_what_it_is_for(
    command: Command, make: Make | None, tmp_path: Path, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if why_parsed(command):
        check_parses([word for word in command.words if word != "…"])
        return
    known = (
        {"ID": json.loads(reshard("doctor", "--list", "--json").out)[0]["id"]}
        if "ID" in command.words
        else {}
    )
    words = [known.get(word, local(word)) for word in command.words]
    words = Place(tmp_path, made).prepare(words, make)
    done = reshard(*words)
    expected = (0, 1) if words[0] == "doctor" else (0,)  # a log of a failure has one
    assert done.code in expected, done.err
