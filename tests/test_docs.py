"""The documentation is correct: commands parse, tables are true, links have targets, code runs."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import shutil
import types
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import reshard
from demo.__main__ import stations
from reshard import families
from reshard.cli import COMMANDS, cli
from reshard.cli.support import support
from reshard.formats import FORMATS
from reshard.formats.contract import Format, Target
from reshard.formats.gguf.hyperparameters import ARCHITECTURES
from reshard.formats.tables import paddle, vllm
from reshard.runs.train.methods import TRAINING_METHODS
from tests.commandline import reshard as reshard_command
from tests.tables import TABLES

REPOSITORY = Path(__file__).parents[1]
ENGLISH, CHINESE = REPOSITORY / "README.md", REPOSITORY / "README.zh-CN.md"
MADE = {"failures.md"}
"""Pages made from data that has its own tests, full of names of other programs."""


PAGES = [*sorted(REPOSITORY.glob("*.md")), *sorted((REPOSITORY / "docs").rglob("*.md"))]
PAGES = [page for page in PAGES if page.name not in MADE]
# Of other programs; everything else that looks like a flag in the text is one of reshard's.
FOREIGN_FLAGS = {
    "--ckpt-format",
    "--dequantize",
    "--dist-ckpt-optim-fully-reshardable",
    "--enable-lora",
    "--load",
    "--lora-modules",
    "--load-format",
    "--model-checksum",
    "--model-loader-extra-config",
    "--model-path",
    "--make-vocab-size-divisible-by",
    "--no-load-optim",
    "--no-load-rng",
    "--override-opt_param-scheduler",
    "--swiglu",
    "--use-megatron-fsdp",
    "--use-distributed-optimizer",
    "--save",
    "--tensor-parallel-size",
    "--use-checkpoint-args",
    "--use-tp-pp-dp-mapping",
}
FOREIGN_FUNCTIONS = {"help", "sharded_state_dict", "tie_weights"}
FOREIGN_MODULES = {"numpy", "torch"}
FOREIGN_FILES = {
    "arguments.py",  # of Megatron-LM
    "training/arguments.py",
    "training/checkpointing.py",
    "fsdp_dtensor_checkpoint.py",  # of megatron-core
    "megatron/core/models/gpt/gpt_layer_specs.py",
    "serialization.py",  # of torch
    "distributed/checkpoint/metadata.py",
    "filesystem.py",
    "checkpoint/components.py",  # of InternEvo
    "rewards.py",  # of whoever trains with GRPO
    "src/reshard/families/architectures/cobalt.py",  # the reader of docs/add-a-family.md writes it
}
READ_AND_WRITTEN = {True: "yes", False: "no"}


class Fence(NamedTuple):
    """A fenced block of code."""

    language: str
    text: str


def fences(page: Path) -> list[Fence]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)
    return [Fence(*block) for block in found]


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def tables(page: Path) -> list[list[list[str]]]:
    """The tables of a page as rows of cells, without the line below the heading."""
    blocks = re.findall(r"(?:^\|.*\|\n)+", prose(page), re.M)
    rows = [[line.strip("|").split("|") for line in block.splitlines()] for block in blocks]
    return [[[cell.strip() for cell in row] for row in (table[0], *table[2:])] for table in rows]


def commands(page: Path) -> Iterator[list[str]]:
    """The shell commands of a page as words: lines after `$ `, those of bash blocks, and those in tables."""
    for cell in (cell for table in tables(page) for row in table for cell in row):
        if typed := re.fullmatch(r"`(reshard [^`]+)`", cell):
            yield shlex.split(typed[1])
    for language, text in fences(page):
        if language == "console":
            lines = [line[2:] for line in text.splitlines() if line.startswith("$ ")]
        else:
            lines = text.replace("\\\n", " ").splitlines() if language == "bash" else []
        for line in lines:
            words: list[str] = []
            for word in shlex.split(line, comments=True):
                if word in ("|", "&&", ";"):
                    yield words
                    words = []
                else:
                    words.append(word)
            yield words


@cache
def flags() -> set[str]:
    names: set[str] = set()
    for command in map(command_named, COMMANDS):
        inner = command.commands.values() if isinstance(command, click.Group) else ()
        for parameter in (parameter for each in (command, *inner) for parameter in each.params):
            if isinstance(parameter, click.Option):
                names.update([*parameter.opts, *parameter.secondary_opts])
    return names | {f"--{name}" for name in trl_options()} | {"--help", "--version"}


@cache
def trl_options() -> set[str]:
    """The fields of TRL's configs, which recipes take as options."""
    import trl

    configs = [getattr(trl, f"{method.name}Config") for method in TRAINING_METHODS.values()]
    return {field.name for config in (*configs, trl.ModelConfig) for field in dataclasses.fields(config)}


def check_parses(words: list[str]) -> None:
    """Raise for words that `reshard` would refuse, and for options that their engine does not have."""
    given = command_named(words[0]).make_context(words[0], words[1:]).params
    if words[0] == "train" and given.get("engine") != "ms-swift":
        options = {word[2:].replace("-", "_") for word in given["rest"] if word.startswith("--")}
        assert options <= trl_options(), words


def command_named(name: str) -> click.Command:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None, f"there is no command {name!r}"
    return command


def name(page: Path) -> str:
    return page.relative_to(REPOSITORY).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_can_be_typed(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (REPOSITORY / "Makefile").read_text(), re.M))
    for words in commands(page):
        if words[:1] == ["reshard"]:
            check_parses(words[1:])
        if words[:1] == ["make"]:
            assert {word for word in words[1:] if "=" not in word} <= targets, words


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", prose(page))
    missing = [
        link
        for link in links
        if "://" not in link and not (page.parent / link.partition("#")[0]).resolve().exists()
    ]
    assert not missing


@cache
def definitions() -> set[str]:
    """The functions and classes of the repository."""
    files = (
        path for folder in ("src", "tests", "demo", "bench") for path in (REPOSITORY / folder).rglob("*.py")
    )
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    return set(re.findall(r"^\s*(?:def|class) (\w+)", text, re.M))


def exists(span: str, defined: set[str]) -> bool:
    """Whether the file, function or flag in a piece of inline code exists."""
    if re.fullmatch(r"(?:src|tests|docs|demo|bench|\.ci)/[\w./-]*", span):
        return (REPOSITORY / span).exists() or span in FOREIGN_FILES
    if re.fullmatch(r"[\w.*-]+\.(safetensors|json|bin|pt|txt|yaml|jinja|distcp|html|sh|jsonl)", span):
        return True  # a file of a checkpoint or a run, not of the project
    if span.endswith((".weight", ".bias")):
        return True  # a tensor
    if re.fullmatch(r"[\w/]+\.py", span):
        return any(REPOSITORY.glob(f"src/**/{span}")) or span in FOREIGN_FILES
    if attribute := re.fullmatch(r"reshard\.(?!json)(\w+)", span):
        return hasattr(reshard, attribute[1])
    member = re.fullmatch(r"(\w+)\.(\w+)", span)
    if member and member[1] in defined and member[1] not in FOREIGN_MODULES:
        return member[2] in defined
    if function := re.fullmatch(r"(?:\w+\.)*(\w+)\(.*\)", span):
        return function[1] in defined or function[1] in FOREIGN_FUNCTIONS
    if flag := re.match(r"--[a-z][\w-]+", span):
        return flag[0] in flags() | FOREIGN_FLAGS
    return True


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_names_in_the_text_exist(page: Path) -> None:
    defined = definitions()
    assert [span for span in re.findall(r"`([^`\n]+)`", prose(page)) if not exists(span, defined)] == []


def test_the_table_of_formats_is_that_of_reshard_support() -> None:
    (formats,) = (table for table in tables(REPOSITORY / "docs" / "formats.md") if "On disk" in table[0])
    for row, cells in zip(support()["formats"], formats[1:], strict=True):
        ways = [READ_AND_WRITTEN[row[way]] for way in ("read", "written")]
        assert cells == [f"`{row['name']}`", row["what"], *ways, ", ".join(row["judged"])]


@pytest.mark.parametrize("title", TABLES)
def test_tables_of_models_are_those_of_reshard_support(title: str) -> None:
    page, rows = TABLES[title]
    (table,) = (table for table in tables(page) if table[0][0] == title)
    assert table[1:] == rows(), "python -m tests.tables writes them"


def section_of(format: str) -> str:
    """The section of a format in docs/formats.md, on one line."""
    text = (REPOSITORY / "docs" / "formats.md").read_text(encoding="utf-8")
    return " ".join(text.partition(f"\n## `{format}`\n")[2].partition("\n## ")[0].split())


MODELS = {"gguf": ARCHITECTURES, "paddle": paddle.KNOWN_TYPES, "vllm-sharded-state": vllm.KNOWN_TYPES}


@pytest.mark.parametrize("format", MODELS)
def test_models_of_a_format_are_those_declared(format: str) -> None:
    *others, last = sorted(MODELS[format])
    assert f": {', '.join(others)} and {last}." in section_of(format)


@pytest.mark.parametrize("format", ("huggingface", "gguf"))
def test_every_way_to_quantize_is_explained(format: str) -> None:
    target = FORMATS[format].target
    assert target
    assert [kind for kind in target.dtypes.quantizes if f"`{kind}`" not in section_of(format)] == []


def test_the_speed_and_memory_of_the_readme_are_those_measured() -> None:
    text = (REPOSITORY / "docs" / "performance.md").read_text(encoding="utf-8")
    section = text.partition("\n## Compared with the usual tools\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if re.match(r"\|.*\|.*\d \|$", line)]
    tools = [(float(ratio), int(peak)) for _, who, _, ratio, _, peak in rows if "reshard" not in who]
    ours = [int(peak) for _, who, *_, peak in rows if "reshard" in who]
    ratios, peaks = zip(*tools, strict=True)
    factor = f"{min(ratios):.1f} to {max(ratios):.1f} times"
    memory = (
        f"{min(ours)} to {max(ours)} MiB instead of {min(peaks) / 1024:.1f} to {max(peaks) / 1024:.1f} GiB"
    )
    claim = " ".join(ENGLISH.read_text(encoding="utf-8").split())
    assert len(tools) == 7 and factor in claim and memory in claim
    figures = re.findall(r"\d+\.?\d*", f"{factor} {memory}")
    told = re.findall(r"\d+\.?\d*", CHINESE.read_text(encoding="utf-8").partition("速度是常用工具的")[2])
    assert told[: len(figures)] == figures


def test_the_first_run_of_the_readme_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = (fence.text for fence in fences(ENGLISH) if "examples/" in fence.text)
    shutil.copytree(REPOSITORY / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    for line in block.splitlines():
        done = reshard_command(*shlex.split(line)[1:])
        assert done.code == 0, done.err
    assert (tmp_path / "model" / "tokenizer.json").exists() and "bit for bit" in done.out


def without_comments(fence: Fence) -> Fence:
    return Fence(fence.language, re.sub(r" *# .*", "", fence.text))


def test_both_readmes_say_the_same() -> None:
    ours, theirs = ([without_comments(fence) for fence in fences(page)] for page in (ENGLISH, CHINESE))
    assert ours == theirs

    def shape(page: Path) -> list[tuple[int, int]]:
        return [(len(table), len(table[0])) for table in tables(page)]

    def headings(page: Path) -> list[str]:
        return re.findall(r"^(#+) ", prose(page), re.M)

    def links(page: Path) -> list[str]:
        found = re.findall(r"\]\(([^)]+)\)", prose(page))
        return [link for link in found if not link.startswith(("README", "#"))]  # headings are translated

    assert shape(ENGLISH) == shape(CHINESE)
    assert headings(ENGLISH) == headings(CHINESE)
    assert links(ENGLISH) == links(CHINESE)


PRIVATE_WORDS = (
    *(
        "and no idea which",
        "to have the symptom in one explained",
        "beside what people use",
        "nothing at this path",
    ),
    *(
        "do not divide over",
        "judged by",
        "not judged",
        "the same under another name",
        "every distributed-training",
    ),
    *(
        "goes before",
        "as they came",
        "for want of",
        "pip install 'reshard[",
        "该输入什么",
        "验证者",
        "被杀死",
    ),
)
"""Fragments and riddles that were in texts for users, and an install command that needs an index."""


def test_texts_for_users_are_plain() -> None:
    source = (REPOSITORY / "src").rglob("*")
    files = [*PAGES, *(path for path in source if path.suffix in (".py", ".yaml", ".html"))]
    texts = ((path, " ".join(path.read_text(encoding="utf-8").split()).lower()) for path in files)
    assert [(name(path), word) for path, text in texts for word in PRIVATE_WORDS if word in text] == []


def test_the_recorded_run_is_that_of_the_demo() -> None:
    recorded = fences(REPOSITORY / "docs" / "demo.md")[0].text.splitlines()
    titles = [line for line in recorded if re.match(r"\d+\. ", line)]
    expected = list(stations(Path("demo-output"), steps=60))
    assert titles == [f"{number}. {station.title}" for number, station in enumerate(expected, 1)]
    assert recorded[0] == "$ make demo"


def test_contributing_explains_all_that_a_format_declares() -> None:
    told = {
        field
        for rows in tables(REPOSITORY / "CONTRIBUTING.md")
        for row in rows
        for field in re.findall(r"`(\w+)", row[0])
    }
    assert told == {field.name for kind in (Format, Target) for field in dataclasses.fields(kind)}


@pytest.fixture
def cobalt(monkeypatch: pytest.MonkeyPatch) -> Iterator[families.Family]:
    """The families of docs/add-a-family.md, declared by the code on that page."""
    page = REPOSITORY / "docs" / "add-a-family.md"
    in_module, _, larger = (fence.text for fence in fences(page) if fence.language == "python")
    module = types.ModuleType("cobalt")
    exec(compile(in_module, str(page), "exec"), vars(module))
    exec(compile(larger, str(page), "exec"), vars(module))
    monkeypatch.setitem(families.FAMILIES, "cobalt", module.COBALT)
    monkeypatch.setitem(families.FAMILIES, "cobalt_vl", module.COBALT_VL)
    yield module.COBALT


def as_cobalt(qwen3: Path, folder: Path) -> Path:
    """The model in `qwen3` as one of the fictitious family: the same weights under its names."""
    folder.mkdir()
    hub = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}

    def renamed(tensor: str) -> str:
        return re.sub(r"\.mlp\.(\w+)\.", lambda match: f".feed_forward.{hub[match[1]]}.", tensor)

    tensors = {renamed(key): value for key, value in load_file(qwen3 / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((qwen3 / "config.json").read_text())
    config.update(model_type="cobalt", architectures=["CobaltForCausalLM"])
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_bytes((qwen3 / "tokenizer.json").read_bytes())
    return folder


def test_the_family_that_the_guide_declares_works(
    cobalt: families.Family, hf_model: Callable[..., Path], tmp_path: Path
) -> None:
    pytest.importorskip("megatron.core")
    from reshard.oracle.transformers import transformers_logits
    from tests.genuine.mcore.models import megatron_logits

    qwen3 = hf_model("qwen3")
    source = as_cobalt(qwen3, tmp_path / "cobalt")
    reshard.convert(source, tmp_path / "megatron", to="megatron", tp=2, pp=2)
    reshard.convert(tmp_path / "megatron", tmp_path / "back")
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "back"))
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[key], after[key]) for key in before)

    tokens = np.random.default_rng(0).integers(0, 283, (1, 16))
    checkpoint = reshard.open(tmp_path / "megatron").checkpoint
    assert checkpoint.description.args
    found = megatron_logits(checkpoint.path, tokens, args=checkpoint.description.args).logits
    expected = transformers_logits(qwen3, tokens)
    assert np.abs(found[..., :283] - expected).max() <= 1e-5 * np.abs(expected).max()


def test_the_larger_family_that_the_guide_declares_works(cobalt: families.Family, tmp_path: Path) -> None:
    from tests.genuine.model_types import make_model_type
    from tests.judges import assert_same_tensors, tensors_of

    source = make_model_type("qwen3_vl", tmp_path / "hub")
    file = source / "config.json"
    file.write_text(file.read_text().replace('"qwen3_vl"', '"cobalt_vl"'))
    result = reshard.convert(source, tmp_path / "megatron", to="megatron", tp=2, pp=2)
    assert [warning.found for warning in result.plan.warnings] == ["cobalt_vl"]  # nobody judged it
    reshard.convert(tmp_path / "megatron", tmp_path / "back")
    assert_same_tensors(tensors_of(tmp_path / "back"), tensors_of(source))


def test_the_mlp_that_the_guide_spells_out_is_the_real_one() -> None:
    from reshard.families.dims import Dims
    from reshard.families.rules import native, same

    text = fences(REPOSITORY / "docs" / "add-a-family.md")[1].text
    names = {"native": native, "same": same, "Rule": families.rules.Rule, "ffn": 6, "hidden": 4}
    exec(compile(text, "add-a-family.md", "exec"), names)
    args = {"num_attention_heads": 2, "hidden_size": 4, "num_layers": 1, "ffn_hidden_size": 6}
    real = families.rules.mlp(Dims.from_args(args, vocab=8))
    assert [(rule.hf, rule.view) for rule in names["block"]] == [(rule.hf, rule.view) for rule in real]


def named_in(heading: str) -> list[str]:
    """The names in the list of a section of docs/stability.md."""
    text = (REPOSITORY / "docs" / "stability.md").read_text(encoding="utf-8")
    section = re.split(r"^## ", text.partition(f"\n## {heading}\n")[2], maxsplit=1, flags=re.M)[0]
    (names,) = re.findall(r"^(?:`\w[\w-]*`,?\s)+", section, re.M)
    return re.findall(r"`([^`]+)`", names)


def test_what_is_stable_is_what_there_is() -> None:
    assert named_in("Command line") == [*COMMANDS]
    assert named_in("Python") == reshard.__all__


def test_only_one_page_tells_what_is_stable() -> None:
    promises = re.compile(r"(?i)\bnever (?:changes?|removed)\b|semantic versioning|may add keys")
    telling = {name(page) for page in PAGES if promises.search(prose(page))}
    assert telling == {"docs/stability.md"}
